// bf16 operands, up to 32 rows at a time, 64 columns, the two layouts of b.
#include "csrc/gemm/swap_ab/dense_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_streamed<make_config(STREAM_SHAPES[1], DType::bf16, false)>(const Params&,
                                                                                 Stream);
template void launch_streamed<make_config(STREAM_SHAPES[1], DType::bf16, true)>(const Params&,
                                                                                Stream);
}  // namespace thunderkittens::gemm
