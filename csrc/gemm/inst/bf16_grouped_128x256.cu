// Grouped products of bf16 operands, 128 x 256 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(0)>(const Params&, Stream);
template void launch<config_at(1)>(const Params&, Stream);
template void launch<config_at(2)>(const Params&, Stream);
template void launch<config_at(3)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
