// Grouped products of fp16 operands, 128 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/grouped/persistent_sm90.cuh"

namespace thunderkittens::grouped_gemm {
template void launch<config_at(12)>(const Params&, Stream);
template void launch<config_at(13)>(const Params&, Stream);
template void launch<config_at(14)>(const Params&, Stream);
template void launch<config_at(15)>(const Params&, Stream);
}  // namespace thunderkittens::grouped_gemm
