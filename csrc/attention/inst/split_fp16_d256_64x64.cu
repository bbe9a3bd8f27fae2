#include "csrc/attention/split_sm90.cuh"

namespace thunderkittens::attention {
template void launch_split<Config{256, 256, 1, 64, 3, true, DType::fp16}>(const ForwardParams&,
                                                                          Stream);
}  // namespace thunderkittens::attention
