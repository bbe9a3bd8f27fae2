#include "csrc/attention/backward_wide_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_wide_backward<BackwardConfig{192, 64, 2, DType::fp16, true, 192}>(
    const BackwardParams&, Stream);
}  // namespace thunderkittens::attention
