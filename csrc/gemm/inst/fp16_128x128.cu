// fp16 operands, 128 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(TILE_SHAPES[1], DType::fp16, false, true)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[1], DType::fp16, false, false)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[1], DType::fp16, true, true)>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[1], DType::fp16, true, false)>(const Params&, Stream);
}  // namespace thunderkittens::gemm
