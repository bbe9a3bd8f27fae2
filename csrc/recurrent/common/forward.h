// What the bodies of tk.ssd and tk.linear_attention have in common, on any back end: allocation,
// choice and launches. Host C++ without torch.
#pragma once

#include <utility>

#include "csrc/recurrent/common/dispatch.h"
#include "csrc/recurrent/common/operands.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct RecurrentResults {
    Tensor out, final_state;
};

// `params` has the gates and the scale; `numbers` are the tensors that these are made of. States
// are (K, V) with keys_first.
template <class Tensor>
RecurrentResults<Tensor> run_recurrent(const Backend<Tensor>& on, const char* op,
                                       RecurrentParams params,
                                       const RecurrentTensors<Tensor>& given,
                                       std::initializer_list<Read<Tensor>> numbers, bool keys_first,
                                       bool return_state) {
    const RecurrentProblem& p = params.problem;
    const bool packed = given.cu_seqlens.has_value();
    const int64_t states = packed ? p.sequences : p.batch;
    const int64_t rows = keys_first ? p.key_dim : p.value_dim,
                  columns = keys_first ? p.value_dim : p.key_dim;
    if (given.initial) {
        check_same_device(op, "initial_state", *given.initial, given.v_name, given.v);
        check_dtype(op, "initial_state", *given.initial, {DType::fp32});
        check_shape(op, "initial_state", *given.initial, {states, p.heads, rows, columns});
    }
    const auto guard = on.guard(given.v);
    const DeviceProperties& device = on.device(given.v);
    check_supported(op, unsupported(p, device));
    RecurrentResults<Tensor> r{
        empty({p.batch, p.heads, p.length, p.value_dim}, given.v.scalar_type(), given.v),
        empty({return_state ? states : 0, p.heads, rows, columns}, DType::fp32, given.v)};
    if (r.out.numel() == 0 || states == 0) {
        if (r.out.numel() > 0) zero_(r.out);
        if (return_state && r.final_state.numel() > 0) {
            if (given.initial)
                copy_(r.final_state, *given.initial);
            else
                zero_(r.final_state);
        }
        return r;
    }
    const Tensor q = for_tensor_map(given.q), k = for_tensor_map(given.k),
                 v = for_tensor_map(given.v);
    std::optional<Tensor> z;
    if (given.z) z = for_tensor_map(*given.z);
    const RecurrentConfig choice = on.chosen("ssd", choose(p, device));
    const Tensor workspace = empty({workspace_floats(p, choice)}, DType::fp32, v);
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    if (z) params.z = operand(*z);
    params.out = operand(r.out);
    if (packed) params.cu_seqlens = data_as<int>(*given.cu_seqlens);
    if (given.initial) params.initial = state_operand(*given.initial, keys_first);
    if (return_state) params.final = state_operand(r.final_state, keys_first);
    auto launch = on.launch("ssd", choice, v);
    launch.may_read(given.q_name, q);
    launch.may_read(given.k_name, k);
    launch.may_read(given.v_name, v);
    launch.may_read("z", z);
    launch.may_read("initial_state", given.initial);
    launch.may_read("cu_seqlens", given.cu_seqlens);
    for (const Read<Tensor>& x : numbers) launch.may_read(x.name, x.tensor);
    launch.may_write("out", r.out);
    launch.may_write("final_state", r.final_state);
    launch.may_write("workspace", workspace);
    run_forward(params, choice, data_as<float>(workspace), launch.stream);
    return r;
}

}  // namespace thunderkittens::recurrent
