// fp16 operands, tiles of 128 x 128 and 128 x 192, split-K and stream-K, both orders of b.
#include "csrc/gemm/dense/split_k_sm90.cuh"

namespace thunderkittens::gemm {
template bool launch_split_k<DType::fp16>(const Config&, const Params&, const Workspace&, Stream);
}  // namespace thunderkittens::gemm
