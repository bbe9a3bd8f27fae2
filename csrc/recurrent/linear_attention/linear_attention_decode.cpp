// The op linear_attention_decode for CUDA.
#include <cmath>

#include "csrc/common/tensor.h"
#include "csrc/recurrent/linear_attention/linear_attention_decode_body.h"

namespace thunderkittens::recurrent {

Tensor linear_attention_decode(const Tensor& q, const Tensor& k, const Tensor& v, Tensor state,
                               std::optional<Tensor> decay, std::optional<Tensor> g,
                               std::optional<Tensor> state_indices, std::optional<double> scale,
                               bool state_v_first) {
    check_dims("tk.linear_attention_decode", "q", q, {4});
    return linear_attention_decode_body<Tensor>(gpu, {q, k, v, decay, g, state_indices}, state,
                                                scale.value_or(1.0 / std::sqrt(double(q.size(3)))),
                                                state_v_first);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("linear_attention_decode", TORCH_BOX(&linear_attention_decode));
}

}  // namespace thunderkittens::recurrent
