// MXFP8 weights, up to 16 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_dequant_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_few<few_at(0)>(const FewParams&, Stream);
template void launch_few<few_at(1)>(const FewParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
