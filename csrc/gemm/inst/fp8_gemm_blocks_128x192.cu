// fp8 operands, 128 x 192 tiles, promoted sums with scales of blocks, plain outputs.
#include "csrc/gemm/fp8/persistent_sm90.cuh"

namespace thunderkittens::fp8_gemm {
template void launch<make_config(PLAIN_SHAPES[1], DTYPES[0], true)>(const Params&, Stream);
}  // namespace thunderkittens::fp8_gemm
