#include "csrc/linear_attention/based/decode_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_decode<DType::bf16>(const BasedDecodeParams&, Stream);
template void launch_based_decode<DType::fp16>(const BasedDecodeParams&, Stream);
}  // namespace thunderkittens::linear_attention
