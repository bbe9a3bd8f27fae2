// The op ssd_backward for CUDA.
#include <limits>
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/gradient/ssd_backward_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> ssd_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_state, const Tensor& x, const Tensor& dt,
    const Tensor& A, const Tensor& B, const Tensor& C, std::optional<Tensor> D,
    std::optional<Tensor> z, std::optional<Tensor> dt_bias, std::optional<Tensor> initial_state,
    std::optional<Tensor> cu_seqlens, bool dt_softplus, double dt_min, std::optional<double> dt_max,
    std::vector<bool> needs) {
    const std::vector<Tensor> r = ssd_backward_body<Tensor>(
        gpu, grad_out, grad_state, {x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens},
        {dt_softplus, dt_min, dt_max.value_or(std::numeric_limits<double>::infinity())}, needs);
    return {r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8]};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("ssd_backward", TORCH_BOX(&ssd_backward));
}

}  // namespace thunderkittens::recurrent
