#include "csrc/attention/backward_wide_launch_sm90.cuh"

namespace thunderkittens::attention {
template void launch_wide_backward<BackwardConfig{192, 64, 3, DType::fp16, false, 128}>(
    const BackwardParams&, Stream);
}  // namespace thunderkittens::attention
