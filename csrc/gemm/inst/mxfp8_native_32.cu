// MXFP8 operands, native swap-AB, up to 32 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_native_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_native<NATIVE_SHAPES[1]>(const NativeParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
