// The op gated_delta_rule_decode for CUDA.
#include "csrc/common/apart.h"
#include "csrc/common/tensor.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode_body.h"

namespace thunderkittens::recurrent {

Tensor gated_delta_rule_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                               const Tensor& beta, Tensor state,
                               std::optional<Tensor> state_indices, std::optional<Tensor> A_log,
                               std::optional<Tensor> dt_bias, std::optional<double> scale,
                               bool qk_l2norm, bool beta_sigmoid, bool allow_neg_eigval,
                               bool state_v_first, bool apart) {
    if (apart) require_surely_apart("tk.gated_delta_rule_decode", state, {q, k, v, g, beta});
    const std::optional<Tensor> none;
    return gated_delta_rule_decode_body<Tensor>(
        gpu, {q, k, v, g, beta, none, A_log, dt_bias, none}, state, state_indices,
        {delta_scale(scale, q), qk_l2norm, beta_sigmoid, allow_neg_eigval, state_v_first});
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gated_delta_rule_decode", TORCH_BOX(&gated_delta_rule_decode));
}

}  // namespace thunderkittens::recurrent
