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

inline void launch_scan(const BasedParams& params, const ScanParams& scan, Stream stream) {
    if (params.problem.denominator) launch_based_scan<true>(params, scan, stream);
    launch_based_scan<false>(params, scan, stream);
}

template <DType dtype>
void run_forward(BasedParams params, Stream stream) {
    if (params.segments > 1) {
        const StatePointers states = segment_states(params, params.workspace);
        launch_based_segment_states<dtype>(params, {.x = params.k, .v = params.v, .states = states},
                                           stream);
        launch_scan(params, {states, params.initial, params.final}, stream);
        params.initial = states;
        params.final = {};
    }
    launch_based_forward<dtype>(params, stream);
}
inline void run_forward(const BasedParams& params, Stream stream) {
    if (params.problem.dtype == DType::bf16)
        run_forward<DType::bf16>(params, stream);
    else
        run_forward<DType::fp16>(params, stream);
}

// The gradients that are wanted have a target.
template <DType dtype>
void run_backward(BasedBackwardParams params, Stream stream) {
    BasedParams& forward = params.forward;
    const BasedProblem& p = forward.problem;
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
    if (p.denominator) launch_based_preprocess<dtype>(params, kernel.weights, stream);
    if (split && queries) {
        kernel.before = segment_states(forward, before);
        launch_based_segment_states<dtype>(forward, {forward.k, forward.v, nullptr, kernel.before},
                                           stream);
        launch_scan(forward, {kernel.before, forward.initial, {}, false}, stream);
    }
    if (queries) launch_based_query_gradient<dtype>(params, kernel, stream);
    if (split && keys) {
        kernel.after = segment_states(forward, after);
        kernel.grad_initial = {};
        launch_based_segment_states<dtype>(
            forward, {forward.q, params.grad_out, kernel.weights, kernel.after}, stream);
        launch_scan(forward, {kernel.after, forward.final, params.grad_initial, true}, stream);
    }
    if (keys) launch_based_key_gradient<dtype>(params, kernel, stream);
    if (kernel.partial_dq != nullptr) launch_based_reduce_partials<dtype>(params, kernel, stream);
}
inline void run_backward(const BasedBackwardParams& params, Stream stream) {
    if (params.forward.problem.dtype == DType::bf16)
        run_backward<DType::bf16>(params, stream);
    else
        run_backward<DType::fp16>(params, stream);
}

}  // namespace thunderkittens::linear_attention
