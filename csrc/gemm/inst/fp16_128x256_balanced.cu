// fp16 operands, a's rows along k, balanced tiling of up to 128 x 256, both orders of b.
#include "csrc/gemm/dense/balanced_sm90.cuh"

namespace thunderkittens::gemm {
TK_LAUNCH_BALANCED(DType::fp16, true)
TK_LAUNCH_BALANCED(DType::fp16, false)
}  // namespace thunderkittens::gemm
