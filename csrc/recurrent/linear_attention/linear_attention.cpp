// The op linear_attention for CUDA.
#include <cmath>
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/linear_attention/linear_attention_body.h"

namespace thunderkittens::recurrent {

std::tuple<Tensor, Tensor> linear_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            std::optional<Tensor> decay, std::optional<Tensor> g,
                                            std::optional<Tensor> initial_state,
                                            std::optional<Tensor> cu_seqlens,
                                            std::optional<double> scale, bool state_v_first,
                                            bool return_state) {
    check_dims("tk.linear_attention", "q", q, {4});
    const auto r = linear_attention_body<Tensor>(
        gpu, {q, k, v, decay, g, initial_state, cu_seqlens},
        scale.value_or(1.0 / std::sqrt(double(q.size(3)))), state_v_first, return_state);
    return {r.out, r.final_state};
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("linear_attention", TORCH_BOX(&linear_attention));
    m.impl("linear_attention_forward", TORCH_BOX(&linear_attention));
}

}  // namespace thunderkittens::recurrent
