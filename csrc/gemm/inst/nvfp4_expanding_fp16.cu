// NVFP4 weights that the kernel expands, fp16 activations, 128 x 256 tiles.
#include "csrc/gemm/nvfp4/source_sm90.cuh"

namespace thunderkittens::gemm {
template void launch_expanding<expanding_config(DType::fp16)>(const ExpandingParams<Nvfp4Source>&,
                                                              Stream);
}  // namespace thunderkittens::gemm
