// fp8 operands, 128 x 192 tiles, promoted sums, block-wise scales alone.
#include "csrc/gemm/fp8/persistent_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch<make_config(BLOCKWISE_SHAPES[1], DTYPES[0], true)>(const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
