// The body of the op ssd, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/common/forward.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct SsdTensors {
    const Tensor &x, &dt, &A, &B, &C;
    const std::optional<Tensor>&D, &z, &dt_bias, &initial_state, &cu_seqlens;
};

template <class Tensor>
RecurrentResults<Tensor> ssd_body(const Backend<Tensor>& on, const SsdTensors<Tensor>& given,
                                  const StepOptions& options, bool return_state) {
    constexpr const char* OP = "tk.ssd";
    const RecurrentTensors<Tensor> tensors{
        "C", "B", "x", given.C, given.B, given.x, given.z, given.initial_state, given.cu_seqlens};
    RecurrentParams params;
    RecurrentProblem& p = params.problem;
    p = checked_problem(OP, tensors);
    const std::optional<Tensor> dt = given.dt, A = given.A;
    params.gates = step_gates<Tensor>(OP, dt, A, given.dt_bias, options,
                                      {p.batch, p.heads, p.length}, given.x, p.dtype);
    params.skip = head_operand(OP, "D", given.D, p.heads, p.value_dim, given.x, p.dtype);
    return run_recurrent<Tensor>(on, OP, params, tensors,
                                 {{"dt", dt}, {"A", A}, {"dt_bias", given.dt_bias}, {"D", given.D}},
                                 false, return_state);
}

}  // namespace thunderkittens::recurrent
