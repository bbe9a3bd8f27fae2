// fp16 operands, rows of both along k, 128 x 176 tiles.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(NT_SHAPES[1], DType::fp16, false, false)>(const Params&, Stream);
}  // namespace thunderkittens::gemm
