// The launches that make up one call, for the ops and for the emulator. Host C++ only.
#pragma once

#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

// States of all segments, in a workspace that starts there.
inline StatePointers segment_states(const BasedParams& params, float* workspace) {
    const BasedProblem& p = params.problem;
    const int64_t states = p.batch * p.heads * params.segments;
    return {workspace, workspace + states * FEATURES * p.value_dim};
}

// The kernels for Hopper, or the portable ones.
struct BasedLaunches {
    void (*forward)(const BasedParams&, Stream);
    void (*segment_states)(const BasedParams&, const SegmentStatesParams&, Stream);
    void (*scan_numerators)(const BasedParams&, const ScanParams&, Stream);
    void (*scan_denominators)(const BasedParams&, const ScanParams&, Stream);
    void (*preprocess)(const BasedBackwardParams&, float*, Stream);
    void (*query_gradient)(const BasedBackwardParams&, const BackwardKernelParams&, Stream);
    void (*key_gradient)(const BasedBackwardParams&, const BackwardKernelParams&, Stream);
    void (*reduce_partials)(const BasedBackwardParams&, const BackwardKernelParams&, Stream);

    void scan(const BasedParams& params, const ScanParams& call, Stream stream) const {
        if (params.problem.denominator) scan_denominators(params, call, stream);
        scan_numerators(params, call, stream);
    }
};
template <DType dtype>
BasedLaunches launches_of(bool portable) {
    if constexpr (BUILDS_PORTABLE) {
        if (portable) {
            return {&launch_portable_based_forward<dtype>,
                    &launch_portable_based_segment_states<dtype>,
                    &launch_portable_based_scan<false>,
                    &launch_portable_based_scan<true>,
                    &launch_portable_based_preprocess<dtype>,
                    &launch_portable_based_query_gradient<dtype>,
                    &launch_portable_based_key_gradient<dtype>,
                    &launch_portable_based_reduce_partials<dtype>};
        }
    }
    return {&launch_based_forward<dtype>,      &launch_based_segment_states<dtype>,
            &launch_based_scan<false>,         &launch_based_scan<true>,
            &launch_based_preprocess<dtype>,   &launch_based_query_gradient<dtype>,
            &launch_based_key_gradient<dtype>, &launch_based_reduce_partials<dtype>};
}
inline BasedLaunches launches_of(const BasedParams& params) {
    return params.problem.dtype == DType::bf16 ? launches_of<DType::bf16>(params.portable)
                                               : launches_of<DType::fp16>(params.portable);
}

inline void run_forward(BasedParams params, Stream stream) {
    const BasedLaunches launch = launches_of(params);
    if (params.segments > 1) {
        const StatePointers states = segment_states(params, params.workspace);
        launch.segment_states(params, {.x = params.k, .v = params.v, .states = states}, stream);
        launch.scan(params, {states, params.initial, params.final}, stream);
        params.initial = states;
        params.final = {};
    }
    launch.forward(params, stream);
}

// The gradients that are wanted have a target.
inline void run_backward(const BasedBackwardParams& params, Stream stream) {
    const BasedParams& forward = params.forward;
    const BasedProblem& p = forward.problem;
    const BasedLaunches launch = launches_of(forward);
    float* workspace = forward.workspace;
    const auto take = [&](int64_t floats) {
        float* part = floats > 0 ? workspace : nullptr;
        workspace += floats;
        return part;
    };
    BackwardKernelParams kernel{
        .before = forward.initial, .after = forward.final, .grad_initial = params.grad_initial};
    const bool queries = params.dq.data != nullptr;
    const bool keys =
        params.dk.data != nullptr || params.dv.data != nullptr || params.grad_initial.numerator;
    const bool split = forward.segments > 1;
    const int64_t states = split ? state_floats(p, forward.segments) : 0;
    float *before = take(states), *after = take(states);
    kernel.weights = take(token_weight_floats(p));
    kernel.partial_dq = take(partial_floats(p));
    kernel.partial_dk = take(partial_floats(p));
    if (p.denominator) launch.preprocess(params, kernel.weights, stream);
    if (split && queries) {
        kernel.before = segment_states(forward, before);
        launch.segment_states(forward, {forward.k, forward.v, nullptr, kernel.before}, stream);
        launch.scan(forward, {kernel.before, forward.initial, {}, false}, stream);
    }
    if (queries) launch.query_gradient(params, kernel, stream);
    if (split && keys) {
        kernel.after = segment_states(forward, after);
        kernel.grad_initial = {};
        launch.segment_states(forward, {forward.q, params.grad_out, kernel.weights, kernel.after},
                              stream);
        launch.scan(forward, {kernel.after, forward.final, params.grad_initial, true}, stream);
    }
    if (keys) launch.key_gradient(params, kernel, stream);
    if (kernel.partial_dq != nullptr) launch.reduce_partials(params, kernel, stream);
}

}  // namespace thunderkittens::linear_attention
