// The transpose of matrices of bytes.
#include "csrc/gemm/quantize/fp8_quantize_sm90.cuh"

namespace thunderkittens::fp8_quantize {
template void launch<TRANSPOSE>(const Params&, Stream);
}  // namespace thunderkittens::fp8_quantize
