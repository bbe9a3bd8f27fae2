// fp16 operands, tiles of 128 x 128 and 128 x 192 whose k is divided, both orders of b.
#include "csrc/gemm/dense/split_k_sm90.cuh"

namespace thunderkittens::gemm {
template bool launch_divided<DType::fp16>(const Config&, const Params&, const Scratch&, Stream);
}  // namespace thunderkittens::gemm
