// fp8 operands, up to 32 rows of a, the three pairs of dtypes.
#include "csrc/gemm/swap_ab/fp8_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch_streamed<make_config(STREAM_SHAPES[1], DTYPES[0])>(const Params&, Stream);
template void launch_streamed<make_config(STREAM_SHAPES[1], DTYPES[1])>(const Params&, Stream);
template void launch_streamed<make_config(STREAM_SHAPES[1], DTYPES[2])>(const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
