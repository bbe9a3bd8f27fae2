// MXFP8 weights, swap-AB with dequantization, up to 32 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_dequant_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_dequant<dequant_config_at(2)>(const DequantParams&, Stream);
template void launch_dequant<dequant_config_at(3)>(const DequantParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
