// The gradient of the gated delta rule for CUDA.
#include <tuple>
#include <vector>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/gated_delta_rule_backward/gated_delta_rule_backward_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
gated_delta_rule_backward(const Tensor& grad_out, std::optional<Tensor> grad_state, const Tensor& q,
                          const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                          std::optional<Tensor> initial_state, std::optional<Tensor> A_log,
                          std::optional<Tensor> dt_bias, std::optional<Tensor> cu_seqlens,
                          std::optional<double> scale, bool qk_l2norm, bool beta_sigmoid,
                          bool allow_neg_eigval, bool state_v_first, std::vector<bool> needs) {
    return std::tuple_cat(gated_delta_rule_backward_body<Tensor>(
        gpu, grad_out, grad_state, {q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens},
        {delta_scale(scale, q), qk_l2norm, beta_sigmoid, allow_neg_eigval, state_v_first}, needs));
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward));
}

}  // namespace thunderkittens::recurrent
