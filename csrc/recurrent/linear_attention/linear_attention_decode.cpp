// The op linear_attention_decode for CUDA.
#include "csrc/common/apart.h"
#include "csrc/common/tensor.h"
#include "csrc/recurrent/linear_attention/linear_attention_decode_body.h"

namespace thunderkittens::recurrent {

Tensor linear_attention_decode(const Tensor& q, const Tensor& k, const Tensor& v, Tensor state,
                               std::optional<Tensor> decay, std::optional<Tensor> g,
                               std::optional<Tensor> state_indices, std::optional<double> scale,
                               bool state_v_first, bool apart) {
    if (apart)
        require_surely_apart("tk.linear_attention_decode", state,
                             {q, k, v, decay, g, state_indices});
    return linear_attention_decode_body<Tensor>(gpu, {q, k, v, decay, g, state_indices}, state,
                                                scale, state_v_first);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("linear_attention_decode", TORCH_BOX(&linear_attention_decode));
}

}  // namespace thunderkittens::recurrent
