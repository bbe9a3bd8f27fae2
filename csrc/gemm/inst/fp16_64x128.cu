// fp16 operands, 64 x 128 tiles, the four layouts of the operands.
#include "csrc/gemm/dense/one_consumer_sm90.cuh"

namespace thunderkittens::gemm {
TK_LAUNCH_ONE_CONSUMER(make_config(TILE_SHAPES[2], DType::fp16, false, true))
TK_LAUNCH_ONE_CONSUMER(make_config(TILE_SHAPES[2], DType::fp16, false, false))
TK_LAUNCH_ONE_CONSUMER(make_config(TILE_SHAPES[2], DType::fp16, true, true))
TK_LAUNCH_ONE_CONSUMER(make_config(TILE_SHAPES[2], DType::fp16, true, false))
}  // namespace thunderkittens::gemm
