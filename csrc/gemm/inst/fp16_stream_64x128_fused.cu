// fp16 operands, up to 64 rows at a time, 128 columns, a fused epilogue, the two layouts of b.
#include "csrc/gemm/swap_ab/dense_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_streamed<make_config(STREAM_SHAPES[3], DType::fp16, false)>(const Params&,
                                                                                 Stream);
template void launch_streamed<make_config(STREAM_SHAPES[3], DType::fp16, true)>(const Params&,
                                                                                Stream);
}  // namespace thunderkittens::gemm
