#include "csrc/attention/backward_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_backward<BackwardConfig{128, 64, 2, DType::bf16}>(const BackwardParams&,
                                                                       Stream);
}  // namespace thunderkittens::attention
