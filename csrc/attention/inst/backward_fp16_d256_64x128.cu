#include "csrc/attention/backward_wide_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_wide_backward<BackwardConfig{256, 64, 2, DType::fp16, false, 256}>(
    const BackwardParams&, Stream);
}  // namespace thunderkittens::attention
