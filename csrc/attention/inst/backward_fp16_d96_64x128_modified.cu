#include "csrc/attention/backward_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_backward<BackwardConfig{96, 64, 2, DType::fp16, true}>(const BackwardParams&,
                                                                            Stream);
}  // namespace thunderkittens::attention
