// The body of the op gated_delta_rule, on any back end: it checks what memory safety needs,
// allocates, chooses and launches. Host C++ without torch.
#pragma once

#include <optional>

#include "csrc/common/remembered.h"
#include "csrc/recurrent/gated_delta_rule/operands.h"
#include "csrc/recurrent/gated_delta_rule/walk.h"

namespace thunderkittens::recurrent {

template <DType dtype, int key_dim>
void run_portable_gated_delta_rule(const DeltaRuleParams& params, Stream stream) {
    launch_portable_delta_prepare<dtype, key_dim>(params, stream);
    if (params.segments > 1) {
        launch_portable_gated_delta_rule<dtype, key_dim>(params, DeltaWalk::summaries, {}, stream);
        launch_delta_scan<DELTA_SCAN_COLUMNS, true>(params, stream);
    }
    launch_portable_gated_delta_rule<dtype, key_dim>(params, DeltaWalk::outputs, {}, stream);
}

// All chunks first, then the walk over them.
template <DType dtype, int key_dim>
void run_delta_walk(const DeltaRuleConfig& c, const DeltaRuleParams& params, Stream stream) {
    launch_delta_prepass<dtype, key_dim>(params, stream);
    if (params.segments > 1) {
        launch_delta_walk_segments<dtype, key_dim>(params, stream);
        launch_delta_scan<DELTA_SCAN_COLUMNS, false>(params, stream);
    }
    (c.consumers == 1 ? &launch_delta_walk<dtype, key_dim, 1>
                      : &launch_delta_walk<dtype, key_dim, 2>)(params, stream);
}

template <DType dtype>
void run_gated_delta_rule(const DeltaRuleConfig& c, const DeltaRuleParams& params, Stream stream) {
    if constexpr (BUILDS_PORTABLE) {
        if (c.portable) {
            (c.key_dim == 64 ? &run_portable_gated_delta_rule<dtype, 64>
                             : &run_portable_gated_delta_rule<dtype, 128>)(params, stream);
            return;
        }
    }
    if (is_walk(c)) {
        (c.key_dim == 64 ? &run_delta_walk<dtype, 64> : &run_delta_walk<dtype, 128>)(c, params,
                                                                                     stream);
        return;
    }
    const auto launch = c.key_dim == 64
                            ? (c.consumers == 1 ? &launch_gated_delta_rule<dtype, 64, 1>
                                                : &launch_gated_delta_rule<dtype, 64, 2>)
                            : (c.consumers == 1 ? &launch_gated_delta_rule<dtype, 128, 1>
                                                : &launch_gated_delta_rule<dtype, 128, 2>);
    if (params.segments > 1) {
        const auto summarise = c.key_dim == 64 ? &launch_delta_segments<dtype, 64>
                                               : &launch_delta_segments<dtype, 128>;
        summarise(params, stream);
        launch_delta_scan<DELTA_SCAN_COLUMNS, false>(params, stream);
    }
    launch(params, stream);
}

// States of the dtype of the initial ones.
template <class Tensor>
Tensor empty_delta_states(const DeltaRuleTensors<Tensor>& given, const DeltaRuleProblem& p,
                          int64_t count, bool v_first) {
    const bool wide = !given.initial || is_fp32(*given.initial);
    return empty(delta_state_shape(p, count, v_first), wide ? DType::fp32 : DType::bf16, given.q);
}

template <class Tensor>
struct DeltaRuleResults {
    Tensor out;
    std::optional<Tensor> state;  // where it is asked for
};

template <class Tensor>
DeltaRuleResults<Tensor> gated_delta_rule_body(const Backend<Tensor>& on,
                                               const DeltaRuleTensors<Tensor>& given,
                                               const DeltaRuleOptions& options, bool return_state) {
    constexpr const char* OP = "tk.gated_delta_rule";
    DeltaRuleParams params;
    DeltaRuleProblem& p = params.problem;
    p = checked_delta_problem(OP, given);
    check_delta_options(OP, options);
    if (given.initial) {
        check_delta_state(OP, "initial_state", *given.initial, p, p.sequences, options.v_first,
                          given.q);
    }
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    check_supported(OP, remembered(p, device, [](const auto& problem, const auto& of) {
                        return unsupported(problem, of);
                    }));
    DeltaRuleResults<Tensor> r{.out = empty({given.q.size(0), p.value_heads, p.length, p.value_dim},
                                            given.q.scalar_type(), given.q),
                               .state = {}};
    if (return_state) r.state = empty_delta_states(given, p, p.sequences, options.v_first);
    if (r.out.numel() == 0) {
        if (return_state && r.state->numel() > 0) {
            if (given.initial)
                copy_(*r.state, *given.initial);
            else
                zero_(*r.state);
        }
        return r;
    }
    const Tensor q = delta_rows_for_kernel(given.q, p.packed),
                 k = delta_rows_for_kernel(given.k, p.packed),
                 v = delta_rows_for_kernel(given.v, p.packed);
    const std::optional<Tensor> A_log = packed(given.A_log), dt_bias = packed(given.dt_bias),
                                edges = packed(given.cu_seqlens);
    params.q = delta_rows(q);
    params.k = delta_rows(k);
    params.v = delta_rows(v);
    params.out = delta_rows(r.out);
    params.g = delta_numbers(given.g);
    params.beta = delta_numbers(given.beta);
    params.gate = {data_as<float>(A_log), data_as<float>(dt_bias), options.beta_sigmoid,
                   options.allow_neg_eigval};
    if (given.initial) params.initial = delta_states(*given.initial, options.v_first);
    if (return_state) params.final = delta_states(*r.state, options.v_first);
    params.cu_seqlens = data_as<int32_t>(edges);
    params.scale = static_cast<float>(options.scale);
    params.l2_norm = options.l2_norm;
    const DeltaRuleConfig config = on.chosen(
        "gated_delta_rule", remembered(p, device, [](const auto& problem, const auto& of) {
            return choose(problem, of);
        }));
    const int64_t of_segments = delta_workspace(p, config.segments);
    const int64_t needed = of_segments + delta_prepared_of(config, p);
    std::optional<Tensor> workspace;
    if (needed > 0) workspace = empty({needed}, DType::fp32, q);
    params.segments = config.segments;
    if (config.segments > 1) params.workspace = data_as<float>(workspace);
    params.consumers = config.consumers;
    if (needed > of_segments) {
        params.prepared = delta_prepared_at(data_as<float>(workspace) + of_segments, p);
    }
    auto launch = on.launch("gated_delta_rule", config, q);
    launch.may_read("q", q);
    launch.may_read("k", k);
    launch.may_read("v", v);
    launch.may_read("g", given.g);
    launch.may_read("beta", given.beta);
    launch.may_read("initial_state", given.initial);
    launch.may_read("A_log", A_log);
    launch.may_read("dt_bias", dt_bias);
    launch.may_read("cu_seqlens", edges);
    launch.may_write("out", r.out);
    launch.may_write("state", r.state);
    launch.may_write("workspace", workspace);
    if (p.dtype == DType::bf16)
        run_gated_delta_rule<DType::bf16>(config, params, launch.stream);
    else
        run_gated_delta_rule<DType::fp16>(config, params, launch.stream);
    return r;
}

}  // namespace thunderkittens::recurrent
