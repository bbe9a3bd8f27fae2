#include "csrc/attention/forward_sm90.cuh"

namespace thunderkittens::attention {
template void launch_forward<Config{64, 64, 1, 64, 3, false, DType::bf16}>(const ForwardParams&,
                                                                           Stream);
}  // namespace thunderkittens::attention
