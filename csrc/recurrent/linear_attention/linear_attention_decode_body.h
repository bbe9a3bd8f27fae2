// The body of the op linear_attention_decode, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/common/decode_dispatch.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct LinearAttentionDecodeTensors {
    const Tensor &q, &k, &v;
    const std::optional<Tensor>&decay, &g, &state_indices;
};

template <class Tensor>
Tensor linear_attention_decode_body(const Backend<Tensor>& on,
                                    const LinearAttentionDecodeTensors<Tensor>& given,
                                    Tensor& state, std::optional<double> scale,
                                    bool state_v_first) {
    constexpr const char* OP = "tk.linear_attention_decode";
    const std::optional<Tensor> none;
    const RecurrentTensors<Tensor> tensors{"q",     "k",  "v",  given.q, given.k,
                                           given.v, none, none, none};
    const RecurrentProblem p = checked_problem(OP, tensors);
    DecodeParams params;
    params.problem.keys_first = !state_v_first;
    params.gates.g =
        token_operand(OP, "g", given.g, {p.batch, p.heads, p.length}, given.v, p.dtype);
    params.gates.decay = head_operand(OP, "decay", given.decay, p.heads, 0, given.v, p.dtype);
    params.scale = scale_of(scale, p.key_dim);
    return run_recurrent_decode<Tensor>(on, OP, params, tensors, state, given.state_indices, p,
                                        {{"decay", given.decay}, {"g", given.g}});
}

}  // namespace thunderkittens::recurrent
