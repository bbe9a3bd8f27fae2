// bf16 activations, up to 64 rows at a time, 256 rows of an NVFP4 weight, split-K over four blocks.
#include "csrc/gemm/swap_ab/nvfp4_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
template void launch<make_config(TILE_SHAPES[5], DType::bf16)>(const Params&, Stream);
}  // namespace thunderkittens::nvfp4_gemm
