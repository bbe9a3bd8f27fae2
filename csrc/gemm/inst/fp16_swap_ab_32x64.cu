// fp16 operands, swap-AB, up to 32 rows at a time, 64 columns, both orders of b.
#include "csrc/gemm/swap_ab/dense_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_swap_ab<make_config(SWAP_AB_SHAPES[1], DType::fp16, false)>(const Params&,
                                                                                 Stream);
template void launch_swap_ab<make_config(SWAP_AB_SHAPES[1], DType::fp16, true)>(const Params&,
                                                                                Stream);
}  // namespace thunderkittens::gemm
