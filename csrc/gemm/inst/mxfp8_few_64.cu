// MXFP8 weights, up to 64 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_dequant_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_few<few_at(4)>(const FewParams&, Stream);
template void launch_few<few_at(5)>(const FewParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
