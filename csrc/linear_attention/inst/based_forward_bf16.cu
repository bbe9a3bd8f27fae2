#include "csrc/linear_attention/based/forward_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_forward<DType::bf16>(const BasedParams&, Stream);
}  // namespace thunderkittens::linear_attention
