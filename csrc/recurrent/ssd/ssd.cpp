// The ops ssd and ssd_forward for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/ssd/ssd_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor> ssd(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                               const Tensor& C, std::optional<Tensor> D, std::optional<Tensor> z,
                               std::optional<Tensor> dt_bias, std::optional<Tensor> initial_state,
                               std::optional<Tensor> cu_seqlens, bool dt_softplus, double dt_min,
                               std::optional<double> dt_max, bool return_state) {
    auto r = ssd_body<Tensor>(gpu, {x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens},
                              step_options(dt_softplus, dt_min, dt_max), return_state);
    return with_state(std::move(r), x.size(3), B.size(3));
}

Tensor ssd_forward(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                   const Tensor& C, std::optional<Tensor> D, std::optional<Tensor> z,
                   std::optional<Tensor> dt_bias, std::optional<Tensor> initial_state,
                   std::optional<Tensor> cu_seqlens, bool dt_softplus, double dt_min,
                   std::optional<double> dt_max) {
    return ssd_body<Tensor>(gpu, {x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens},
                            step_options(dt_softplus, dt_min, dt_max), false)
        .out;
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("ssd", TORCH_BOX(&ssd));
    m.impl("ssd_forward", TORCH_BOX(&ssd_forward));
}

}  // namespace thunderkittens::recurrent
