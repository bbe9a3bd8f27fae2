// thunderkittens::fp8_gemm on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/fp8/fp8_gemm_body.h"

namespace thunderkittens::fp8_gemm {
namespace {

Tensor fp8_gemm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                const std::optional<Tensor>& bias, int64_t activation,
                std::optional<ScalarType> out_type, bool accurate,
                const std::optional<Tensor>& offs) {
    return fp8_gemm_body(gpu, a, b, scale_a, scale_b,
                         Options<Tensor>{bias, activation, out_type, accurate, offs});
}

}  // namespace
}  // namespace thunderkittens::fp8_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("fp8_gemm", TORCH_BOX(&thunderkittens::fp8_gemm::fp8_gemm));
}
