// fp8 operands, swap-AB, up to 16 rows of a, the three pairs of dtypes.
#include "csrc/gemm/swap_ab/fp8_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch_swap_ab<make_config(SWAP_AB_SHAPES[0], DTYPES[0])>(const Params&, Stream);
template void launch_swap_ab<make_config(SWAP_AB_SHAPES[0], DTYPES[1])>(const Params&, Stream);
template void launch_swap_ab<make_config(SWAP_AB_SHAPES[0], DTYPES[2])>(const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
