// Passes over MXFP8 operands before a product.
#include "csrc/gemm/mxfp8/passes_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
template void run_pass(const RescaleParams&, Stream);
template void run_pass(const DequantizePassParams&, Stream);
}  // namespace thunderkittens::mxfp8_gemm
