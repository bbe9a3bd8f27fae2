#include "csrc/attention/backward_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_backward<BackwardConfig{64, 64, 2, DType::bf16, true}>(const BackwardParams&,
                                                                            Stream);
}  // namespace thunderkittens::attention
