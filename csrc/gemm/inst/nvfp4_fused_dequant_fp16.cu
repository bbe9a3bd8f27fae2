// NVFP4 weights, fused dequantization, fp16 activations, 128 x 256 tiles.
#include "csrc/gemm/nvfp4/source_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_fused_dequant<fused_dequant_config(DType::fp16)>(
    const FusedDequantParams<Nvfp4Source>&, Stream);
}  // namespace thunderkittens::gemm
