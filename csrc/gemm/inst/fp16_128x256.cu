// fp16 operands, 128 x 256 tiles, the four layouts of the operands.
#include "csrc/gemm/dense/single_wave_sm90.cuh"

namespace thunderkittens::gemm {
TK_LAUNCH_SINGLE_WAVE(make_config(TILE_SHAPES[0], DType::fp16, false, true))
TK_LAUNCH_SINGLE_WAVE(make_config(TILE_SHAPES[0], DType::fp16, false, false))
TK_LAUNCH_SINGLE_WAVE(make_config(TILE_SHAPES[0], DType::fp16, true, true))
TK_LAUNCH_SINGLE_WAVE(make_config(TILE_SHAPES[0], DType::fp16, true, false))
}  // namespace thunderkittens::gemm
