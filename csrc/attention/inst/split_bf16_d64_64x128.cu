#include "csrc/attention/split_sm90.cuh"

namespace thunderkittens::attention {
template void launch_split<Config{64, 64, 1, 128, 6, true, DType::bf16}>(const ForwardParams&,
                                                                         Stream);
}  // namespace thunderkittens::attention
