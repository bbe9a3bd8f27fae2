// MXFP8 operands that the kernel expands, 128 x 256 tiles.
#include "csrc/gemm/expanding_gemm_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_expanding<expanding_config(DType::bf16)>(const ExpandingParams<Mxfp8Sources>&,
                                                              Stream);
}  // namespace thunderkittens::gemm
