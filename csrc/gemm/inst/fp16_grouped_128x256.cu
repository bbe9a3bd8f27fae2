// Grouped products of fp16 operands, 128 x 256 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(4)>(const Params&, Stream);
template void launch<config_at(5)>(const Params&, Stream);
template void launch<config_at(6)>(const Params&, Stream);
template void launch<config_at(7)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
