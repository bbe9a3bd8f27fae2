// fp8 operands, tiles of all widths for few of them, promoted sums.
#include "csrc/gemm/fp8/split_k_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch_fitted<Sums::promoted>(const Config&, const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
