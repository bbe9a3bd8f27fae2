// MXFP8 from and to fp32.
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"

namespace thunderkittens::block_scaled {
template void quantize<Mxfp8Quantize{DType::fp32, DType::e4m3, false}>(const Mxfp8Params&, Stream);
template void quantize<Mxfp8Quantize{DType::fp32, DType::e4m3, true}>(const Mxfp8Params&, Stream);
template void quantize<Mxfp8Quantize{DType::fp32, DType::e5m2, false}>(const Mxfp8Params&, Stream);
template void quantize<Mxfp8Quantize{DType::fp32, DType::e5m2, true}>(const Mxfp8Params&, Stream);
template void dequantize<Mxfp8Dequantize{DType::fp32, DType::e4m3}>(const DequantizeParams&,
                                                                    Stream);
template void dequantize<Mxfp8Dequantize{DType::fp32, DType::e5m2}>(const DequantizeParams&,
                                                                    Stream);
}  // namespace thunderkittens::block_scaled
