// thunderkittens::mxfp8_dequantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/mxfp8_dequantize_body.h"

namespace thunderkittens::block_scaled {
namespace {

Tensor mxfp8_dequantize(const Tensor& data, const Tensor& scale, ScalarType type, bool swizzle) {
    return mxfp8_dequantize_body(gpu, data, scale, type, swizzle);
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("mxfp8_dequantize", TORCH_BOX(&thunderkittens::block_scaled::mxfp8_dequantize));
}
