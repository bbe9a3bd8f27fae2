// Grouped products of bf16 operands, 64 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(16)>(const Params&, Stream);
template void launch<config_at(17)>(const Params&, Stream);
template void launch<config_at(18)>(const Params&, Stream);
template void launch<config_at(19)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
