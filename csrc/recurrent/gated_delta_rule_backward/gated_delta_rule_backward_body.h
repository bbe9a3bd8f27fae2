// The body of the gated delta rule's gradient, on any back end: it checks what memory safety needs,
// allocates, chooses and launches. Host C++ without torch.
#pragma once

#include <array>

#include "csrc/recurrent/gated_delta_rule/operands.h"
#include "csrc/recurrent/gated_delta_rule_backward/backward.h"

namespace thunderkittens::recurrent {

template <DType dtype, int key_dim>
void run_portable_delta_backward(DeltaBackwardParams params, Stream stream) {
    DeltaRuleParams& call = params.forward;
    const DeltaBackwardWorkspace w(call.problem, params.config, call.l2_norm);
    const auto at = [&](int64_t offset) { return params.workspace + offset; };
    call.consumers = params.config.slices == 1 ? 1 : 2;
    call.prepared = {.solved = at(w.solved),
                     .scores = at(w.scores),
                     .vectors = reinterpret_cast<float*>(at(w.vectors)),
                     .for_gradient = true};
    if (call.l2_norm) {
        call.prepared.q = at(w.q);
        call.prepared.k = at(w.k);
        call.prepared.norms = reinterpret_cast<float*>(at(w.norms));
    }
    launch_portable_delta_prepare<dtype, key_dim>(call, stream);
    launch_portable_gated_delta_rule<dtype, key_dim>(
        call, DeltaWalk::kept, {at(w.states), at(w.values), params.config.slices}, stream);
    launch_portable_delta_states<dtype, key_dim>(params, stream);
    launch_portable_delta_gradients<dtype, key_dim>(params, stream);
    if (params.grad_A_log != nullptr || params.grad_dt_bias != nullptr)
        launch_delta_gate_sums<128, true>(params, stream);
}

// Both directions are sequences of their own, whose first state is that behind the first segment.
inline void scan_delta_segments(const DeltaBackwardParams& params, Stream stream) {
    const DeltaRuleProblem& p = params.forward.problem;
    const DeltaBackwardWorkspace w(p, params.config, params.forward.l2_norm);
    const int64_t state = p.key_dim * p.value_dim;
    DeltaRuleParams scan;
    scan.problem = p;
    scan.problem.sequences = 2 * p.sequences;
    scan.initial = {
        params.workspace + w.first_states, true, p.value_heads * state, state, p.value_dim, 1};
    scan.segments = params.config.segments - 1;
    scan.workspace = reinterpret_cast<float*>(params.workspace + w.segment_states);
    launch_delta_scan<DELTA_SCAN_COLUMNS, false>(scan, stream);
}

template <DType dtype, int key_dim>
void run_delta_backward(const DeltaBackwardParams& params, Stream stream) {
    if constexpr (BUILDS_PORTABLE) {
        if (params.config.portable) {
            run_portable_delta_backward<dtype, key_dim>(params, stream);
            return;
        }
    }
    launch_delta_prepare<dtype, key_dim>(params, stream);
    if (params.config.segments > 1) {
        launch_delta_states<dtype, key_dim>(params, true, stream);
        if (params.config.segments > 2) scan_delta_segments(params, stream);
    }
    launch_delta_states<dtype, key_dim>(params, false, stream);
    (params.config.slices == 1
         ? &launch_delta_gradients<dtype, key_dim, 1>
         : &launch_delta_gradients<dtype, key_dim, DELTA_STEP_SLICES>)(params, stream);
    if (params.grad_A_log != nullptr || params.grad_dt_bias != nullptr)
        launch_delta_gate_sums<128, false>(params, stream);
}

// In the order of the results, and of `needs`.
enum DeltaGradient { DQ, DK, DV, DG, DBETA, DINITIAL, DA_LOG, DDT_BIAS, DELTA_GRADIENTS };

template <class Tensor>
std::array<Tensor, DELTA_GRADIENTS> gated_delta_rule_backward_body(
    const Backend<Tensor>& on, const Tensor& grad_out_in, const std::optional<Tensor>& grad_state,
    const DeltaRuleTensors<Tensor>& given, const DeltaRuleOptions& options,
    const std::vector<bool>& needs) {
    constexpr const char* OP = "tk.gated_delta_rule";
    DeltaBackwardParams params;
    DeltaRuleParams& call = params.forward;
    DeltaRuleProblem& p = call.problem;
    p = checked_delta_problem(OP, given);
    check_delta_tensor(OP, "grad_out", grad_out_in,
                       {given.q.size(0), p.value_heads, p.length, p.value_dim}, {p.dtype}, given.q);
    for (const auto& [name, state] :
         {std::pair{"initial_state", &given.initial}, {"grad_state", &grad_state}}) {
        if (*state) check_delta_state(OP, name, **state, p, p.sequences, options.v_first, given.q);
    }
    TK_CHECK(needs.size() == DELTA_GRADIENTS, OP, ": needs must have ", int(DELTA_GRADIENTS),
             " elements, got ", needs.size());
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    check_supported(OP, unsupported_delta_backward(p, device));

    const auto gradient = [&](DeltaGradient i, const Tensor* like) {
        return like != nullptr && needs[std::size_t(i)]
                   ? empty(like->sizes(), like->scalar_type(), *like)
                   : empty({0}, given.q.scalar_type(), given.q);
    };
    const auto if_given = [](const std::optional<Tensor>& x) { return x ? &*x : nullptr; };
    std::array<Tensor, DELTA_GRADIENTS> grads = {gradient(DQ, &given.q),
                                                 gradient(DK, &given.k),
                                                 gradient(DV, &given.v),
                                                 gradient(DG, &given.g),
                                                 gradient(DBETA, &given.beta),
                                                 gradient(DINITIAL, if_given(given.initial)),
                                                 gradient(DA_LOG, if_given(given.A_log)),
                                                 gradient(DDT_BIAS, if_given(given.dt_bias))};
    const auto wanted = [&](DeltaGradient i) { return grads[i].numel() > 0; };
    if (grad_out_in.numel() == 0) {
        for (Tensor& x : grads) zero_(x);
        if (wanted(DINITIAL) && grad_state) copy_(grads[DINITIAL], *grad_state);
        return grads;
    }
    const Tensor q = delta_rows_for_kernel(given.q, p.packed),
                 k = delta_rows_for_kernel(given.k, p.packed),
                 v = delta_rows_for_kernel(given.v, p.packed),
                 grad_out = delta_rows_for_kernel(grad_out_in, p.packed);
    const std::optional<Tensor> A_log = packed(given.A_log), dt_bias = packed(given.dt_bias),
                                edges = packed(given.cu_seqlens);
    params.config = on.chosen("gated_delta_rule_backward", choose_delta_backward(p, device));
    const Tensor workspace = empty(
        {DeltaBackwardWorkspace(p, params.config, options.l2_norm).bytes / 4}, DType::fp32, q);
    call.q = delta_rows(q);
    call.k = delta_rows(k);
    call.v = delta_rows(v);
    call.g = delta_numbers(given.g);
    call.beta = delta_numbers(given.beta);
    call.gate = {data_as<float>(A_log), data_as<float>(dt_bias), options.beta_sigmoid,
                 options.allow_neg_eigval};
    if (given.initial) call.initial = delta_states(*given.initial, options.v_first);
    if (grad_state) call.final = delta_states(*grad_state, options.v_first);
    call.cu_seqlens = data_as<int32_t>(edges);
    call.scale = static_cast<float>(options.scale);
    call.l2_norm = options.l2_norm;
    params.grad_out = delta_rows(grad_out);
    if (wanted(DQ)) params.dq = delta_rows(grads[DQ]);
    if (wanted(DK)) params.dk = delta_rows(grads[DK]);
    if (wanted(DV)) params.dv = delta_rows(grads[DV]);
    if (wanted(DG)) params.dg = delta_numbers(grads[DG]);
    if (wanted(DBETA)) params.dbeta = delta_numbers(grads[DBETA]);
    if (wanted(DINITIAL)) params.grad_initial = delta_states(grads[DINITIAL], options.v_first);
    if (wanted(DA_LOG)) params.grad_A_log = data_as<float>(grads[DA_LOG]);
    if (wanted(DDT_BIAS)) params.grad_dt_bias = data_as<float>(grads[DDT_BIAS]);
    params.sm_count = on.sms_of_pass(q);
    params.workspace = static_cast<uint8_t*>(workspace.data_ptr());
    auto launch = on.launch("gated_delta_rule_backward", params.config, q);
    launch.may_read("q", q);
    launch.may_read("k", k);
    launch.may_read("v", v);
    launch.may_read("g", given.g);
    launch.may_read("beta", given.beta);
    launch.may_read("grad_out", grad_out);
    launch.may_read("initial_state", given.initial);
    launch.may_read("grad_state", grad_state);
    launch.may_read("A_log", A_log);
    launch.may_read("dt_bias", dt_bias);
    launch.may_read("cu_seqlens", edges);
    constexpr std::array<const char*, DELTA_GRADIENTS> names = {
        "dq", "dk", "dv", "dg", "dbeta", "dinitial", "dA_log", "ddt_bias"};
    for (std::size_t i = 0; i < grads.size(); ++i) launch.may_write(names[i], grads[i]);
    launch.may_write("workspace", workspace);
    if (p.dtype == DType::bf16)
        (params.config.key_dim == 64
             ? &run_delta_backward<DType::bf16, 64>
             : &run_delta_backward<DType::bf16, 128>)(params, launch.stream);
    else
        (params.config.key_dim == 64
             ? &run_delta_backward<DType::fp16, 64>
             : &run_delta_backward<DType::fp16, 128>)(params, launch.stream);
    return grads;
}

}  // namespace thunderkittens::recurrent
