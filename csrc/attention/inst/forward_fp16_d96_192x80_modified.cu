#include "csrc/attention/forward_sm90.cuh"

namespace thunderkittens::attention {
template void launch_forward<Config{96, 96, 3, 80, 3, true, DType::fp16}>(const ForwardParams&,
                                                                          Stream);
}  // namespace thunderkittens::attention
