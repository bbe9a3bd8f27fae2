// fp8 operands, 128 x 128 tiles, promoted sums with 1D1D scales, the three pairs of dtypes.
#include "csrc/gemm/fp8/persistent_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch<make_config(TILE_SHAPES[8], DTYPES[0])>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[8], DTYPES[1])>(const Params&, Stream);
template void launch<make_config(TILE_SHAPES[8], DTYPES[2])>(const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
