// bf16 operands, 64 x 64 tiles, the four layouts of the operands.
#include "csrc/gemm/gemm_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(TILE_SHAPES[3], DType::bf16, false, true)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[3], DType::bf16, false, false)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[3], DType::bf16, true, true)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[3], DType::bf16, true, false)>(const Params&, Stream);
}  // namespace thunderkittens::gemm
