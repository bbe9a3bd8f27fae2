// thunderkittens::mxfp8_gemm and mxfp8_prepare on CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm_body.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

std::tuple<Tensor, Tensor, Tensor> mxfp8_prepare(const Tensor& data, const Tensor& scale,
                                                 bool swizzle) {
    const Prepared<Tensor> prepared = mxfp8_prepare_body(gpu, data, scale, swizzle);
    return {prepared.codes, prepared.factor, prepared.mask};
}

Tensor mxfp8_gemm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                  const std::optional<Tensor>& bias, int64_t activation,
                  std::optional<ScalarType> out_type, bool rescaled, bool swizzle_a, bool swizzle_b,
                  const std::optional<Tensor>& codes_a, const std::optional<Tensor>& factor_a,
                  const std::optional<Tensor>& marks_a, const std::optional<Tensor>& codes_b,
                  const std::optional<Tensor>& factor_b, const std::optional<Tensor>& marks_b,
                  const std::optional<Tensor>& offs) {
    return mxfp8_gemm_body(gpu, a, b, scale_a, scale_b,
                           Options<Tensor>{.bias = bias,
                                           .activation = activation,
                                           .out_type = out_type,
                                           .rescaled = rescaled,
                                           .swizzle_a = swizzle_a,
                                           .swizzle_b = swizzle_b,
                                           .a = {codes_a, factor_a, marks_a},
                                           .b = {codes_b, factor_b, marks_b},
                                           .offs = offs});
}

}  // namespace
}  // namespace thunderkittens::mxfp8_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("mxfp8_gemm", TORCH_BOX(&thunderkittens::mxfp8_gemm::mxfp8_gemm));
    m.impl("mxfp8_prepare", TORCH_BOX(&thunderkittens::mxfp8_gemm::mxfp8_prepare));
}
