#include "csrc/linear_attention/based/sums_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_sums<DType::fp16>(const BasedParams&, const SumsParams&, Stream);
}  // namespace thunderkittens::linear_attention
