// bf16 operands, rows of both along k, 128 x 128 tiles, with a tile mask.
#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
template void launch<masked_config()>(const Params&, Stream);
}  // namespace thunderkittens::gemm
