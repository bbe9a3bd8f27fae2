// MXFP8 weights, up to 32 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_dequant_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_few<few_at(2)>(const FewParams&, Stream);
template void launch_few<few_at(3)>(const FewParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
