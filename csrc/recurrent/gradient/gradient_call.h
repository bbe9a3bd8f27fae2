// The bodies of the gradients of tk.ssd and tk.linear_attention, on any back end: they check what
// memory safety needs, allocate, choose and launch. Host C++ without torch.
#pragma once

#include <vector>

#include "csrc/recurrent/common/forward.h"
#include "csrc/recurrent/gradient/dispatch.h"

namespace thunderkittens::recurrent {

// What gates and skip are made of, by name: dt or g, A or decay, dt_bias, D.
template <class Tensor>
struct GateTensors {
    Read<Tensor> token, head, bias, skip;
};
template <class Tensor>
struct GradientTensors {
    const Tensor& grad_out;
    const std::optional<Tensor>& grad_final;
};
struct GradientNeeds {
    bool q, k, v, z, token, head, bias, skip, initial;
};
template <class Tensor>
struct GradientResults {
    Tensor q, k, v, z, token, head, bias, skip, initial;
};

// The output before the gate, and the gradients of both of its factors.
template <class Tensor>
struct Ungated {
    Tensor grad_before, grad_z;
};
template <class Tensor>
Ungated<Tensor> gradient_of_gate(const Backend<Tensor>& on, const char* op, RecurrentParams params,
                                 const RecurrentTensors<Tensor>& given,
                                 std::initializer_list<Read<Tensor>> numbers,
                                 const Tensor& grad_out) {
    const std::optional<Tensor> none;
    RecurrentTensors<Tensor> without{given.q_name, given.k_name,  given.v_name,
                                     given.q,      given.k,       given.v,
                                     none,         given.initial, given.cu_seqlens};
    params.problem.gate = false;
    const Tensor out = run_recurrent<Tensor>(on, op, params, without, numbers, false, false).out;
    const Tensor z = for_tensor_map(*given.z), gradient = for_tensor_map(grad_out);
    const std::vector<int64_t> shape = {params.problem.batch, params.problem.heads,
                                        params.problem.length, params.problem.value_dim};
    Ungated<Tensor> r{empty(shape, z.scalar_type(), z), empty(shape, z.scalar_type(), z)};
    const GateGradient call{operand(gradient), operand(out), operand(z), operand(r.grad_before),
                            operand(r.grad_z)};
    auto launch = on.launch("ssd_backward", z);
    launch.may_read("grad_out", gradient);
    launch.may_read("out", out);
    launch.may_read("z", z);
    launch.may_write("grad_before", r.grad_before);
    launch.may_write("grad_z", r.grad_z);
    run_gate_gradient(params.problem, call, !runs_native(on.device(z)), launch.stream);
    return r;
}

// `params` has the problem, the gates, the skip and the scale of the forward.
template <class Tensor>
GradientResults<Tensor> run_recurrent_gradient(const Backend<Tensor>& on, const char* op,
                                               const RecurrentParams& forward,
                                               const RecurrentTensors<Tensor>& given,
                                               const GateTensors<Tensor>& gates,
                                               const GradientTensors<Tensor>& gradients,
                                               bool keys_first, const GradientNeeds& needs) {
    GradientParams params{.forward = forward};
    RecurrentParams& call = params.forward;
    const RecurrentProblem& p = call.problem;
    const bool packed = given.cu_seqlens.has_value();
    const int64_t states = packed ? p.sequences : p.batch;
    const std::vector<int64_t> state_shape = {states, p.heads, keys_first ? p.key_dim : p.value_dim,
                                              keys_first ? p.value_dim : p.key_dim};
    for (const auto& [name, state] :
         {std::pair{"initial_state", &given.initial}, {"grad_state", &gradients.grad_final}}) {
        if (!*state) continue;
        check_same_device(op, name, **state, given.v_name, given.v);
        check_dtype(op, name, **state, {DType::fp32});
        check_shape(op, name, **state, state_shape);
    }
    check_same_device(op, "grad_out", gradients.grad_out, given.v_name, given.v);
    check_same_dtype(op, "grad_out", gradients.grad_out, given.v_name, given.v);
    check_shape(op, "grad_out", gradients.grad_out, {p.batch, p.heads, p.length, p.value_dim});
    const auto guard = on.guard(given.v);
    const DeviceProperties& device = on.device(given.v);
    check_supported(op, unsupported_backward(p, device));

    // As the fake of the op says: nothing of an operand that is not there has the values' dtype.
    const auto nothing_of = [&] { return empty({0}, given.v.scalar_type(), given.v); };
    const auto gradient_of = [&](const std::optional<Tensor>& x) {
        return x ? empty(x->sizes(), x->scalar_type(), *x) : nothing_of();
    };
    const auto like = [](const Tensor& x) { return empty(x.sizes(), x.scalar_type(), x); };
    GradientResults<Tensor> r{
        .q = like(given.q),
        .k = like(given.k),
        .v = like(given.v),
        .z = nothing_of(),
        .token = gradient_of(gates.token.tensor),
        .head = gradient_of(gates.head.tensor),
        .bias = gradient_of(gates.bias.tensor),
        .skip = gradient_of(gates.skip.tensor),
        .initial = !given.initial ? nothing_of()
                                  : empty(needs.initial ? state_shape : std::vector<int64_t>{0},
                                          DType::fp32, given.v)};
    const auto results = [&] {
        const auto drop = [](Tensor& x, bool need) {
            if (!need) x = empty({0}, x.scalar_type(), x);
        };
        drop(r.q, needs.q);
        drop(r.k, needs.k);
        drop(r.v, needs.v);
        drop(r.z, needs.z);
        drop(r.token, needs.token);
        drop(r.head, needs.head);
        drop(r.bias, needs.bias);
        drop(r.skip, needs.skip);
        return r;
    };
    if (given.z) r.z = like(*given.z);
    const bool nothing = r.v.numel() == 0 || states == 0;
    if (nothing || packed) {  // there, tokens of no sequence
        for (Tensor* x : {&r.q, &r.k, &r.v, &r.z, &r.token}) {
            if (x->numel() > 0) zero_(*x);
        }
    }
    if (nothing) {
        for (Tensor* x : {&r.head, &r.bias, &r.skip}) {
            if (x->numel() > 0) zero_(*x);
        }
        if (r.initial.numel() > 0) {
            if (gradients.grad_final)
                copy_(r.initial, *gradients.grad_final);
            else
                zero_(r.initial);
        }
        return results();
    }
    Tensor grad_out = gradients.grad_out;
    if (given.z) {
        Ungated<Tensor> ungated = gradient_of_gate<Tensor>(
            on, op, call, given, {gates.token, gates.head, gates.bias, gates.skip}, grad_out);
        r.z = ungated.grad_z;
        grad_out = ungated.grad_before;
    }
    grad_out = for_tensor_map(grad_out);
    const Tensor q = for_tensor_map(given.q), k = for_tensor_map(given.k),
                 v = for_tensor_map(given.v);
    const GradientChoice choice = on.chosen("ssd_backward", choose_backward(p, device));
    call.q = operand(q);
    call.k = operand(k);
    call.v = operand(v);
    if (packed) call.cu_seqlens = data_as<int>(*given.cu_seqlens);
    if (given.initial) call.initial = state_operand(*given.initial, keys_first);
    if (gradients.grad_final) params.grad_final = state_operand(*gradients.grad_final, keys_first);
    if (r.initial.numel() > 0) params.grad_initial = state_operand(r.initial, keys_first);
    params.grad_out = operand(grad_out);
    params.dq = operand(r.q);
    params.dk = operand(r.k);
    params.dv = operand(r.v);
    const std::optional<Tensor> token = r.token, head = r.head, bias = r.bias, skip = r.skip;
    if (needs.token && gates.token.tensor)
        params.grad_token =
            token_operand(op, "", token, {p.batch, p.heads, p.length}, given.v, p.dtype);
    if (needs.head && gates.head.tensor)
        params.grad_head = head_operand(op, "", head, p.heads, 0, given.v, p.dtype);
    if (needs.bias && gates.bias.tensor)
        params.grad_bias = head_operand(op, "", bias, p.heads, 0, given.v, p.dtype);
    if (needs.skip && gates.skip.tensor)
        params.grad_skip = head_operand(op, "", skip, p.heads, p.value_dim, given.v, p.dtype);
    params.key_dim = choice.key_dim;
    params.segments = choice.segments;
    params.splits = choice.splits;
    params.portable = choice.portable;
    GradientWorkspace workspace;
    const Tensor memory = empty({(workspace.place(params, nullptr) + 3) / 4}, DType::fp32, given.v);
    workspace.place(params, memory.data_ptr());

    auto launch = on.launch("ssd_backward", choice, v);
    launch.may_read(given.q_name, q);
    launch.may_read(given.k_name, k);
    launch.may_read(given.v_name, v);
    launch.may_read("grad_out", grad_out);
    launch.may_read("initial_state", given.initial);
    launch.may_read("grad_state", gradients.grad_final);
    launch.may_read("cu_seqlens", given.cu_seqlens);
    for (const Read<Tensor>& x : {gates.token, gates.head, gates.bias, gates.skip})
        launch.may_read(x.name, x.tensor);
    launch.may_write("grad_q", r.q);
    launch.may_write("grad_k", r.k);
    launch.may_write("grad_v", r.v);
    launch.may_write("grad_token", r.token);
    launch.may_write("grad_head", r.head);
    launch.may_write("grad_bias", r.bias);
    launch.may_write("grad_skip", r.skip);
    launch.may_write("grad_state", r.initial);
    launch.may_write("workspace", memory);
    run_gradient(params, workspace, device.sm_count, launch.stream);
    return results();
}

}  // namespace thunderkittens::recurrent
