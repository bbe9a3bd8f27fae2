// thunderkittens::nvfp4_dequantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/nvfp4_dequantize_body.h"

namespace thunderkittens::block_scaled {
namespace {

Tensor nvfp4_dequantize(const Tensor& data, const Tensor& block_scale, const Tensor& global_scale,
                        ScalarType type, bool swizzle) {
    return nvfp4_dequantize_body(gpu, data, block_scale, global_scale, type, swizzle);
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_dequantize", TORCH_BOX(&thunderkittens::block_scaled::nvfp4_dequantize));
}
