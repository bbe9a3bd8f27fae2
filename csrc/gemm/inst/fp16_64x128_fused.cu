// fp16 operands, 64 x 128 tiles, a fused epilogue, the four layouts of the operands.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(TILE_SHAPES[2], DType::fp16, false, true, true)>(const Params&,
                                                                                  Stream);
template void launch<make_config(TILE_SHAPES[2], DType::fp16, false, false, true)>(const Params&,
                                                                                   Stream);
template void launch<make_config(TILE_SHAPES[2], DType::fp16, true, true, true)>(const Params&,
                                                                                 Stream);
template void launch<make_config(TILE_SHAPES[2], DType::fp16, true, false, true)>(const Params&,
                                                                                  Stream);
}  // namespace thunderkittens::gemm
