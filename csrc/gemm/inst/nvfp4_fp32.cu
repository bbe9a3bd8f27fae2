// NVFP4 from and to fp32.
#include "csrc/gemm/quantize/nvfp4_quantize_sm90.cuh"

namespace thunderkittens::block_scaled {
template void quantize<Nvfp4Quantize{DType::fp32, false, false}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp32, false, true}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp32, true, false}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp32, true, true}>(const Nvfp4Params&, Stream);
template void find_maxima<DType::fp32>(const Nvfp4Params&, Stream);
template void dequantize<Nvfp4Dequantize{DType::fp32}>(const DequantizeParams&, Stream);
}  // namespace thunderkittens::block_scaled
