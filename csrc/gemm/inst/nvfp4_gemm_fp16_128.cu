// fp16 activations, up to 128 rows at a time, NVFP4 weights.
#include "csrc/gemm/mixed_sm90.cuh"

namespace thunderkittens::mixed_gemm {
template void launch<make_config(Format::nvfp4, TILE_SHAPES[3], DType::fp16)>(const Params&,
                                                                              Stream);
}  // namespace thunderkittens::mixed_gemm
