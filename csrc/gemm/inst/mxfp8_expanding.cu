// MXFP8 operands that the kernel expands, tiles of 128 x 256 and 128 x 176.
#include "csrc/gemm/fused_dequant/fused_dequant_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_expanding<expanding_config(DType::bf16)>(const ExpandingParams<Mxfp8Sources>&,
                                                              Stream);
template void launch_expanding<narrow_expanding_config(DType::bf16)>(
    const ExpandingParams<Mxfp8Sources>&, Stream);
}  // namespace thunderkittens::gemm
