// Grouped products of fp16 operands, 64 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(20)>(const Params&, Stream);
template void launch<config_at(21)>(const Params&, Stream);
template void launch<config_at(22)>(const Params&, Stream);
template void launch<config_at(23)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
