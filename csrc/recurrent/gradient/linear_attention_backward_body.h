// The body of the op linear_attention_backward, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/gradient/gradient_call.h"
#include "csrc/recurrent/linear_attention/linear_attention_body.h"

namespace thunderkittens::recurrent {

// Of q, k, v, decay, g, initial_state; what is not wanted, or not there, is empty.
template <class Tensor>
std::vector<Tensor> linear_attention_backward_body(const Backend<Tensor>& on,
                                                   const Tensor& grad_out,
                                                   const std::optional<Tensor>& grad_state,
                                                   const LinearAttentionTensors<Tensor>& given,
                                                   double scale, bool state_v_first,
                                                   const std::vector<bool>& needs) {
    constexpr const char* OP = "tk.linear_attention";
    TK_CHECK(needs.size() == 6, OP, ": needs must have 6 elements, got ", needs.size());
    const std::optional<Tensor> none;
    const RecurrentTensors<Tensor> tensors{
        "q", "k", "v", given.q, given.k, given.v, none, given.initial_state, given.cu_seqlens};
    RecurrentParams params;
    RecurrentProblem& p = params.problem;
    p = checked_problem(OP, tensors);
    params.gates.g =
        token_operand(OP, "g", given.g, {p.batch, p.heads, p.length}, given.v, p.dtype);
    params.gates.decay = head_operand(OP, "decay", given.decay, p.heads, 0, given.v, p.dtype);
    params.scale = static_cast<float>(scale);
    const GradientResults<Tensor> r = run_recurrent_gradient<Tensor>(
        on, OP, params, tensors,
        {{"g", given.g}, {"decay", given.decay}, {"dt_bias", none}, {"D", none}},
        {grad_out, grad_state}, !state_v_first,
        {.q = needs[0],
         .k = needs[1],
         .v = needs[2],
         .z = false,
         .token = needs[4],
         .head = needs[3],
         .bias = false,
         .skip = false,
         .initial = needs[5]});
    return {r.q, r.k, r.v, r.head, r.token, r.initial};
}

}  // namespace thunderkittens::recurrent
