#include "csrc/attention/forward_sm90.cuh"

namespace thunderkittens::attention {
template void launch_forward<Config{192, 192, 2, 112, 2, true, DType::fp16}>(const ForwardParams&,
                                                                             Stream);
}  // namespace thunderkittens::attention
