// bf16 activations, up to 128 rows at a time, 128 rows of an NVFP4 weight.
#include "csrc/gemm/swap_ab/nvfp4_sm90.cuh"

namespace thunderkittens::mixed_gemm {
template void launch<make_config(Format::nvfp4, TILE_SHAPES[6], DType::bf16)>(const Params&,
                                                                              Stream);
}  // namespace thunderkittens::mixed_gemm
