#include "csrc/attention/forward_sm90.cuh"

namespace thunderkittens::attention {
template void launch_forward<Config{128, 128, 2, 128, 2, false, DType::fp16, true}>(
    const ForwardParams&, Stream);
}  // namespace thunderkittens::attention
