// Quantisation of bf16 to fp8, every pass.
#include "csrc/gemm/quantize/fp8_quantize_sm90.cuh"

namespace thunderkittens::fp8_quantize {
template void launch<Config{DType::bf16, PASSES[0]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[1]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[2]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[3]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[4]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[5]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[6]}>(const Params&, Stream);
template void launch<Config{DType::bf16, PASSES[7]}>(const Params&, Stream);
}  // namespace thunderkittens::fp8_quantize
