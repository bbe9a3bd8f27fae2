// The body of the op ssd_backward, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/gradient/gradient_call.h"
#include "csrc/recurrent/ssd/ssd_body.h"

namespace thunderkittens::recurrent {

// Of x, dt, A, B, C, D, z, dt_bias, initial_state; what is not wanted, or not there, is empty.
template <class Tensor>
std::vector<Tensor> ssd_backward_body(const Backend<Tensor>& on, const Tensor& grad_out,
                                      const std::optional<Tensor>& grad_state,
                                      const SsdTensors<Tensor>& given, const StepOptions& options,
                                      const std::vector<bool>& needs) {
    constexpr const char* OP = "tk.ssd";
    TK_CHECK(needs.size() == 9, OP, ": needs must have 9 elements, got ", needs.size());
    const RecurrentTensors<Tensor> tensors{
        "C", "B", "x", given.C, given.B, given.x, given.z, given.initial_state, given.cu_seqlens};
    RecurrentParams params;
    RecurrentProblem& p = params.problem;
    p = checked_problem(OP, tensors);
    const std::optional<Tensor> dt = given.dt, A = given.A;
    params.gates = step_gates<Tensor>(OP, dt, A, given.dt_bias, options,
                                      {p.batch, p.heads, p.length}, given.x, p.dtype);
    params.skip = head_operand(OP, "D", given.D, p.heads, p.value_dim, given.x, p.dtype);
    const GradientResults<Tensor> r = run_recurrent_gradient<Tensor>(
        on, OP, params, tensors, {{"dt", dt}, {"A", A}, {"dt_bias", given.dt_bias}, {"D", given.D}},
        {grad_out, grad_state}, false,
        {.q = needs[4],
         .k = needs[3],
         .v = needs[0],
         .z = needs[6],
         .token = needs[1],
         .head = needs[2],
         .bias = needs[7],
         .skip = needs[5],
         .initial = needs[8]});
    return {r.v, r.token, r.head, r.k, r.q, r.skip, r.z, r.bias, r.initial};
}

}  // namespace thunderkittens::recurrent
