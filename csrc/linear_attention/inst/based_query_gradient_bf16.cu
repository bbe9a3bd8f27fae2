#include "csrc/linear_attention/based/backward_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_query_gradient<DType::bf16>(const BasedBackwardParams&,
                                                       const BackwardKernelParams&, Stream);
}  // namespace thunderkittens::linear_attention
