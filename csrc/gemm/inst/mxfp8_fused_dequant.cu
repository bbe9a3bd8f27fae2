// MXFP8 operands, fused dequantization, tiles of 128 x 256 and 128 x 176.
#include "csrc/gemm/fused_dequant/fused_dequant_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_fused_dequant<fused_dequant_config(DType::bf16)>(
    const FusedDequantParams<Mxfp8Sources>&, Stream);
template void launch_fused_dequant<narrow_fused_dequant_config(DType::bf16)>(
    const FusedDequantParams<Mxfp8Sources>&, Stream);
}  // namespace thunderkittens::gemm
