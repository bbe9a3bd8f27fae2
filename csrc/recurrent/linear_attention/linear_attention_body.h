// The body of the op linear_attention, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/common/forward.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct LinearAttentionTensors {
    const Tensor &q, &k, &v;
    const std::optional<Tensor>&decay, &g, &initial_state, &cu_seqlens;
};

template <class Tensor>
RecurrentResults<Tensor> linear_attention_body(const Backend<Tensor>& on,
                                               const LinearAttentionTensors<Tensor>& given,
                                               std::optional<double> scale, bool state_v_first,
                                               bool return_state) {
    constexpr const char* OP = "tk.linear_attention";
    const std::optional<Tensor> no_gate;
    const RecurrentTensors<Tensor> tensors{
        "q", "k", "v", given.q, given.k, given.v, no_gate, given.initial_state, given.cu_seqlens};
    RecurrentParams params;
    RecurrentProblem& p = params.problem;
    p = checked_problem(OP, tensors);
    params.gates.g =
        token_operand(OP, "g", given.g, {p.batch, p.heads, p.length}, given.v, p.dtype);
    params.gates.decay = head_operand(OP, "decay", given.decay, p.heads, 0, given.v, p.dtype);
    params.scale = scale_of(scale, p.key_dim);
    return run_recurrent<Tensor>(on, OP, params, tensors, {{"decay", given.decay}, {"g", given.g}},
                                 !state_v_first, return_state);
}

}  // namespace thunderkittens::recurrent
