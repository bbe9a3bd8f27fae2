// Grouped products of bf16 operands, 128 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(8)>(const Params&, Stream);
template void launch<config_at(9)>(const Params&, Stream);
template void launch<config_at(10)>(const Params&, Stream);
template void launch<config_at(11)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
