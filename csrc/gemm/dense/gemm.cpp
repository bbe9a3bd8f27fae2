// thunderkittens::gemm and its twin without autograd, gemm_forward, on CUDA. The overloads `fused`
// and `out` have a longer epilogue.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/gemm/dense/gemm_body.h"

namespace thunderkittens::gemm {
namespace {

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
            std::optional<ScalarType> out_type) {
    return gemm_body<Tensor>(gpu, a, b, bias, out_type, {}).out;
}

Tensor gemm_forward_fused(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                          std::optional<ScalarType> out_type, const std::optional<Tensor>& residual,
                          int64_t activation, int64_t gate, double alpha, double beta) {
    return gemm_body<Tensor>(gpu, a, b, bias, out_type, {residual, activation, gate, alpha, beta})
        .out;
}

void gemm_forward_out(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                      std::optional<ScalarType>, const std::optional<Tensor>& residual,
                      int64_t activation, int64_t gate, double alpha, double beta,
                      const Tensor& out) {
    gemm_body<Tensor>(gpu, a, b, bias, out.scalar_type(),
                      {residual, activation, gate, alpha, beta, false, out});
}

// The gradient needs z where there is an activation.
std::tuple<Tensor, Tensor> gemm_fused(const Tensor& a, const Tensor& b,
                                      const std::optional<Tensor>& bias,
                                      std::optional<ScalarType> out_type,
                                      const std::optional<Tensor>& residual, int64_t activation,
                                      int64_t gate, double alpha, double beta) {
    const bool keep = activation != 0 || gate != 0;
    Outputs<Tensor> result = gemm_body<Tensor>(gpu, a, b, bias, out_type,
                                               {residual, activation, gate, alpha, beta, keep});
    if (!keep) result.aux = empty({0}, result.out.scalar_type(), a);
    return {result.out, *result.aux};
}

}  // namespace
}  // namespace thunderkittens::gemm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gemm", TORCH_BOX(&thunderkittens::gemm::gemm));
    m.impl("gemm_forward", TORCH_BOX(&thunderkittens::gemm::gemm));
    m.impl("gemm.fused", TORCH_BOX(&thunderkittens::gemm::gemm_fused));
    m.impl("gemm_forward.fused", TORCH_BOX(&thunderkittens::gemm::gemm_forward_fused));
    m.impl("gemm_forward.out", TORCH_BOX(&thunderkittens::gemm::gemm_forward_out));
}
