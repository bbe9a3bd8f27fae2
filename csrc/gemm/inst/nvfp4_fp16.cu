// NVFP4 from and to fp16.
#include "csrc/gemm/quantize/nvfp4_quantize_sm90.cuh"

namespace thunderkittens::block_scaled {
template void quantize<Nvfp4Quantize{DType::fp16, false, false}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp16, false, true}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp16, true, false}>(const Nvfp4Params&, Stream);
template void quantize<Nvfp4Quantize{DType::fp16, true, true}>(const Nvfp4Params&, Stream);
template void find_maxima<DType::fp16>(const Nvfp4Params&, Stream);
template void dequantize<Nvfp4Dequantize{DType::fp16}>(const DequantizeParams&, Stream);
}  // namespace thunderkittens::block_scaled
