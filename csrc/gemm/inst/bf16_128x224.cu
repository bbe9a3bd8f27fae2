// bf16 operands, rows of both along k, 128 x 224 tiles.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(NT_SHAPES[2], DType::bf16, false, false)>(const Params&, Stream);
}  // namespace thunderkittens::gemm
