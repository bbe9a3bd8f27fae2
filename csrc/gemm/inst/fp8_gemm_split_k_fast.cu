// fp8 operands, split-K, all widths, fast sums.
#include "csrc/gemm/fp8/split_k_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch_split_k<Sums::fast>(const Config&, const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
