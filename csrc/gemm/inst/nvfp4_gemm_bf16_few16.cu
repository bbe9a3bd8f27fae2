// bf16 activations, up to 16 rows at a time, strips of an NVFP4 weight.
#include "csrc/gemm/swap_ab/nvfp4_gemv_sm90.cuh"

namespace thunderkittens::mixed_gemm {
template void launch_few<make_config(Format::nvfp4, TILE_SHAPES[1], DType::bf16)>(const Params&,
                                                                                  Stream);
}  // namespace thunderkittens::mixed_gemm
