// thunderkittens::nvfp4_quantize on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/nvfp4_quantize_body.h"

namespace thunderkittens::block_scaled {
namespace {

std::tuple<Tensor, Tensor, Tensor> nvfp4_quantize(const Tensor& x,
                                                  const std::optional<Tensor>& global_scale,
                                                  bool square, bool swizzle,
                                                  const std::optional<Tensor>& seed) {
    return nvfp4_quantize_body(gpu, x, global_scale, square, swizzle, seed);
}

}  // namespace
}  // namespace thunderkittens::block_scaled

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_quantize", TORCH_BOX(&thunderkittens::block_scaled::nvfp4_quantize));
}
