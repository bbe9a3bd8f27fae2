// MXFP8 operands as they are, up to 16 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_native_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_codes<CODES_SHAPES[0]>(const CodesParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
