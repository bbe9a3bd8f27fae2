// The ops gated_delta_rule and gated_delta_rule_forward for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor> gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
    std::optional<Tensor> initial_state, std::optional<Tensor> A_log, std::optional<Tensor> dt_bias,
    std::optional<Tensor> cu_seqlens, std::optional<double> scale, bool qk_l2norm,
    bool beta_sigmoid, bool allow_neg_eigval, bool state_v_first, bool return_state) {
    const DeltaRuleTensors<Tensor> given{q,     k,       v,         g, beta, initial_state,
                                         A_log, dt_bias, cu_seqlens};
    auto r = gated_delta_rule_body<Tensor>(
        gpu, given,
        {delta_scale(scale, q), qk_l2norm, beta_sigmoid, allow_neg_eigval, state_v_first},
        return_state);
    if (!r.state) {
        DeltaRuleProblem p;
        p.value_heads = v.size(1), p.key_dim = q.size(3), p.value_dim = v.size(3);
        r.state = empty_delta_states(given, p, 0, state_v_first);
    }
    return {std::move(r.out), std::move(*r.state)};
}

Tensor gated_delta_rule_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                const Tensor& beta, std::optional<Tensor> initial_state,
                                std::optional<Tensor> A_log, std::optional<Tensor> dt_bias,
                                std::optional<Tensor> cu_seqlens, std::optional<double> scale,
                                bool qk_l2norm, bool beta_sigmoid, bool allow_neg_eigval,
                                bool state_v_first) {
    return gated_delta_rule_body<Tensor>(
               gpu, {q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens},
               {delta_scale(scale, q), qk_l2norm, beta_sigmoid, allow_neg_eigval, state_v_first},
               false)
        .out;
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gated_delta_rule_forward", TORCH_BOX(&gated_delta_rule_forward));
    m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
}

}  // namespace thunderkittens::recurrent
