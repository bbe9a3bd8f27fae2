// The body of the op ssd_decode, on any back end. Host C++ without torch.
#pragma once

#include "csrc/recurrent/common/decode_dispatch.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct SsdDecodeTensors {
    const Tensor &x, &dt, &A, &B, &C;
    const std::optional<Tensor>&D, &z, &dt_bias, &state_indices;
};

template <class Tensor>
Tensor ssd_decode_body(const Backend<Tensor>& on, const SsdDecodeTensors<Tensor>& given,
                       Tensor& state, const StepOptions& options) {
    constexpr const char* OP = "tk.ssd_decode";
    const std::optional<Tensor> none;
    const RecurrentTensors<Tensor> tensors{"C",     "B",     "x",  given.C, given.B,
                                           given.x, given.z, none, none};
    const RecurrentProblem p = checked_problem(OP, tensors);
    DecodeParams params;
    const std::optional<Tensor> dt = given.dt, A = given.A;
    params.gates = step_gates<Tensor>(OP, dt, A, given.dt_bias, options,
                                      {p.batch, p.heads, p.length}, given.x, p.dtype);
    params.skip = head_operand(OP, "D", given.D, p.heads, p.value_dim, given.x, p.dtype);
    return run_recurrent_decode<Tensor>(
        on, OP, params, tensors, state, given.state_indices, p,
        {{"dt", dt}, {"A", A}, {"dt_bias", given.dt_bias}, {"D", given.D}});
}

}  // namespace thunderkittens::recurrent
