// MXFP8 weights, swap-AB with dequantization, up to 16 rows at a time.
#include "csrc/gemm/swap_ab/mxfp8_dequant_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void launch_dequant<dequant_config_at(0)>(const DequantParams&, Stream);
template void launch_dequant<dequant_config_at(1)>(const DequantParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
