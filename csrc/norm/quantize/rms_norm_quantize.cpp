// The op rms_norm_quantize for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/norm/quantize/rms_norm_quantize_body.h"

namespace thunderkittens::norm {
namespace {

using Given = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize(const Tensor& x, const Given& weight,
                                                     const Given& residual, const Given& scale,
                                                     int64_t output, bool swizzle, double eps,
                                                     double weight_offset) {
    auto result = rms_norm_quantize_body<Tensor>(
        gpu, x, {.weight = weight, .residual = residual, .eps = eps, .offset = weight_offset},
        scale, output, swizzle);
    return {std::move(result.data), std::move(result.scale), std::move(result.sum)};
}

}  // namespace
}  // namespace thunderkittens::norm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("rms_norm_quantize", TORCH_BOX(&thunderkittens::norm::rms_norm_quantize));
}
