// What the bodies of tk.ssd and tk.linear_attention have in common, on any back end: allocation,
// choice and launches. Host C++ without torch.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "csrc/common/remembered.h"
#include "csrc/recurrent/common/dispatch.h"
#include "csrc/recurrent/common/operands.h"

namespace thunderkittens::recurrent {

template <class Tensor>
struct RecurrentResults {
    Tensor out;
    std::optional<Tensor> final_state;  // where it is asked for
};
// What an op returns that always has a state: where it is not asked for, one of no sequences.
template <class Tensor>
std::tuple<Tensor, Tensor> with_state(RecurrentResults<Tensor> r, int64_t rows, int64_t columns) {
    if (!r.final_state)
        r.final_state = empty({0, r.out.size(1), rows, columns}, DType::fp32, r.out);
    return {std::move(r.out), std::move(*r.final_state)};
}
// By their names, for the emulator.
template <class Tensor>
std::map<std::string, Tensor> results_of(const RecurrentResults<Tensor>& r) {
    std::map<std::string, Tensor> results{{"out", r.out}};
    if (r.final_state) results.emplace("final_state", *r.final_state);
    return results;
}

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
    check_supported(op, remembered(p, device, [](const auto& problem, const auto& of) {
                        return unsupported(problem, of);
                    }));
    RecurrentResults<Tensor> r{
        empty({p.batch, p.heads, p.length, p.value_dim}, given.v.scalar_type(), given.v), {}};
    if (return_state) r.final_state = empty({states, p.heads, rows, columns}, DType::fp32, given.v);
    if (r.out.numel() == 0 || states == 0) {
        if (r.out.numel() > 0) zero_(r.out);
        if (return_state && r.final_state->numel() > 0) {
            if (given.initial)
                copy_(*r.final_state, *given.initial);
            else
                zero_(*r.final_state);
        }
        return r;
    }
    const Tensor q = for_tensor_map(given.q), k = for_tensor_map(given.k),
                 v = for_tensor_map(given.v);
    std::optional<Tensor> z;
    if (given.z) z = for_tensor_map(*given.z);
    const RecurrentConfig choice = on.chosen(
        "ssd", remembered(p, device,
                          [](const auto& problem, const auto& of) { return choose(problem, of); }));
    std::optional<Tensor> workspace;
    if (const int64_t floats = workspace_floats(p, choice); floats > 0)
        workspace = empty({floats}, DType::fp32, v);
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    if (z) params.z = operand(*z);
    params.out = operand(r.out);
    if (packed) params.cu_seqlens = data_as<int>(*given.cu_seqlens);
    if (given.initial) params.initial = state_operand(*given.initial, keys_first);
    if (return_state) params.final = state_operand(*r.final_state, keys_first);
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
