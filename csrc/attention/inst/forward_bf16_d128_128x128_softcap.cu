#include "csrc/attention/forward_sm90.cuh"

namespace thunderkittens::attention {
template void launch_forward<Config{128, 128, 2, 128, 2, false, DType::bf16, true}>(
    const ForwardParams&, Stream);
}  // namespace thunderkittens::attention
