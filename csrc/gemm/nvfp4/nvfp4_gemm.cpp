// thunderkittens::nvfp4_gemm on CUDA.
#include "csrc/common/tensor.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm_body.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

Tensor nvfp4_gemm(const Tensor& a, const Tensor& b, const Tensor& global_scale, int64_t n,
                  const std::optional<Tensor>& bias, int64_t activation,
                  std::optional<ScalarType> out_type, const std::optional<Tensor>& offs) {
    return nvfp4_gemm_body(gpu, a, b, global_scale, n,
                           Options<Tensor>{bias, activation, out_type, offs});
}

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("nvfp4_gemm", TORCH_BOX(&thunderkittens::nvfp4_gemm::nvfp4_gemm));
}
