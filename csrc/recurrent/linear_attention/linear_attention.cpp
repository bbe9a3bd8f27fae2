// The ops linear_attention and linear_attention_forward for CUDA.
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
    auto r = linear_attention_body<Tensor>(gpu, {q, k, v, decay, g, initial_state, cu_seqlens},
                                           scale, state_v_first, return_state);
    const int64_t keys = q.size(3), values = v.size(3);
    return with_state(std::move(r), state_v_first ? values : keys, state_v_first ? keys : values);
}

Tensor linear_attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                std::optional<Tensor> decay, std::optional<Tensor> g,
                                std::optional<Tensor> initial_state,
                                std::optional<Tensor> cu_seqlens, std::optional<double> scale,
                                bool state_v_first) {
    return linear_attention_body<Tensor>(gpu, {q, k, v, decay, g, initial_state, cu_seqlens}, scale,
                                         state_v_first, false)
        .out;
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("linear_attention", TORCH_BOX(&linear_attention));
    m.impl("linear_attention_forward", TORCH_BOX(&linear_attention_forward));
}

}  // namespace thunderkittens::recurrent
