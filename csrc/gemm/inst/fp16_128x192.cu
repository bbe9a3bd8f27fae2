// fp16 operands, a's rows along k and b's along n, 128 x 192 tiles.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<make_config(NN_SHAPE, DType::fp16, false, true)>(const Params&, Stream);
}  // namespace thunderkittens::gemm
