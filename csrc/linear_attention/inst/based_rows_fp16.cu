#include "csrc/linear_attention/based/rows_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_weights<DType::fp16>(const BasedBackwardParams&, float*, Stream);
template void launch_based_combine<DType::fp16>(const BasedBackwardParams&,
                                                const BackwardKernelParams&, Stream);
}  // namespace thunderkittens::linear_attention
