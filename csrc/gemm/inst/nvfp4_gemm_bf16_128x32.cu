// bf16 activations, up to 32 rows at a time, 128 rows of an NVFP4 weight.
#include "csrc/gemm/swap_ab/nvfp4_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
template void launch<make_config(TILE_SHAPES[2], DType::bf16)>(const Params&, Stream);
}  // namespace thunderkittens::nvfp4_gemm
