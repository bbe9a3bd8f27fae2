// thunderkittens::fp8_quantize on CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/gemm/quantize/fp8_quantize_body.h"

namespace thunderkittens::fp8_quantize {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_quantize(const Tensor& x, int64_t granularity,
                                                        std::optional<ScalarType> out_type,
                                                        const std::optional<Tensor>& given,
                                                        bool transposed) {
    auto result = fp8_quantize_body(gpu, x, granularity, out_type, given, transposed);
    return {std::move(result.out), std::move(result.scale), std::move(result.out_t),
            std::move(result.scale_t)};
}

}  // namespace
}  // namespace thunderkittens::fp8_quantize

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("fp8_quantize", TORCH_BOX(&thunderkittens::fp8_quantize::fp8_quantize));
}
