// fp16 activations, GEMV, up to 16 rows at a time, strips of an NVFP4 weight.
#include "csrc/gemm/swap_ab/nvfp4_gemv_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
template void launch_gemv<make_config(TILE_SHAPES[1], DType::fp16)>(const Params&, Stream);
}  // namespace thunderkittens::nvfp4_gemm
