// fp16 operands, 64 x 64 tiles, the four layouts of the operands.
#include "csrc/gemm/dense/single_wave_64x64_sm90.cuh"

namespace thunderkittens::gemm {
TK_LAUNCH_SINGLE_WAVE_64X64(make_config(TILE_SHAPES[3], DType::fp16, false, true))
TK_LAUNCH_SINGLE_WAVE_64X64(make_config(TILE_SHAPES[3], DType::fp16, false, false))
TK_LAUNCH_SINGLE_WAVE_64X64(make_config(TILE_SHAPES[3], DType::fp16, true, true))
TK_LAUNCH_SINGLE_WAVE_64X64(make_config(TILE_SHAPES[3], DType::fp16, true, false))
}  // namespace thunderkittens::gemm
