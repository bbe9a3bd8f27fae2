// The op linear_attention_backward for CUDA.
#include <cmath>
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/gradient/linear_attention_backward_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_attention_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_state, const Tensor& q, const Tensor& k,
    const Tensor& v, std::optional<Tensor> decay, std::optional<Tensor> g,
    std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens,
    std::optional<double> scale, bool state_v_first, std::vector<bool> needs) {
    check_dims("tk.linear_attention", "q", q, {4});
    const std::vector<Tensor> r = linear_attention_backward_body<Tensor>(
        gpu, grad_out, grad_state, {q, k, v, decay, g, initial_state, cu_seqlens},
        scale.value_or(1.0 / std::sqrt(double(q.size(3)))), state_v_first, needs);
    return {r[0], r[1], r[2], r[3], r[4], r[5]};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("linear_attention_backward", TORCH_BOX(&linear_attention_backward));
}

}  // namespace thunderkittens::recurrent
