// thunderkittens::mxfp8_quantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/mxfp8_quantize_body.h"

namespace thunderkittens::block_scaled {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> mxfp8_quantize(const Tensor& x, ScalarType type,
                                                          bool floor, bool swizzle,
                                                          bool transpose) {
    return mxfp8_quantize_body(gpu, x, type, floor, swizzle, transpose);
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("mxfp8_quantize", TORCH_BOX(&thunderkittens::block_scaled::mxfp8_quantize));
}
