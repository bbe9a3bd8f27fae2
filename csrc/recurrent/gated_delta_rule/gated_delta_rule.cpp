// The op gated_delta_rule for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor> gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
    std::optional<Tensor> initial_state, std::optional<Tensor> A_log, std::optional<Tensor> dt_bias,
    std::optional<Tensor> cu_seqlens, std::optional<double> scale, bool qk_l2norm,
    bool beta_sigmoid, bool allow_neg_eigval, bool state_v_first, bool return_state) {
    const auto r = gated_delta_rule_body<Tensor>(
        gpu, {q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens},
        {delta_scale(scale, q), qk_l2norm, beta_sigmoid, allow_neg_eigval, state_v_first},
        return_state);
    return {r.out, r.state};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gated_delta_rule_forward", TORCH_BOX(&gated_delta_rule));
    m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
}

}  // namespace thunderkittens::recurrent
