// Between the two passes over the states where sequences have several segments: turns the sums of
// the segments into the state before each (into the gradient behind each, backwards), in place. A
// thread has four neighbouring elements of a state.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int GRADIENT_SCAN_THREADS = 128;

struct GradientScanGlobals {
    float *states, *decays;  // (2, runs, segments, 64, padded keys), (2, runs, segments)
    StateOperand initial, grad_final;
    int heads, slices, segments, runs, key_dim, value_dim, padded_keys, blocks;
};

template <bool portable>
__global__ __launch_bounds__(GRADIENT_SCAN_THREADS) void gradient_scan_kernel(
    const __grid_constant__ GradientScanGlobals g) {
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int part = int(blockIdx.x) / g.blocks;  // (2, runs)
    const int at = 4 * (int(blockIdx.x) % g.blocks * GRADIENT_SCAN_THREADS + int(threadIdx.x));
    const bool backwards = part >= g.runs;
    const int run = backwards ? part - g.runs : part, slice = run % g.slices;
    const int head = run / g.slices % g.heads, sequence = run / g.slices / g.heads;
    const StateOperand& from = backwards ? g.grad_final : g.initial;
    const int value = slice * VALUES + at / g.padded_keys, key = at % g.padded_keys;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (from.data != nullptr && value < g.value_dim) {
        const float* data = from.data + (sequence * from.sequence_stride + head * from.head_stride +
                                         value * from.value_stride);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (key + i < g.key_dim) sum[i] = arch::load_global(data + (key + i) * from.key_stride);
        }
    }
    const int64_t first = int64_t(part) * g.segments, state = int64_t(VALUES) * g.padded_keys;
    for (int n = 0; n < g.segments; ++n) {
        const int64_t segment = first + (backwards ? g.segments - 1 - n : n);
        auto* place = reinterpret_cast<float4*>(g.states + segment * state + at);
        const float4 added = arch::load_global(place);
        const float decay = arch::exp2_approx(arch::load_global(g.decays + segment));
        arch::store_global(place, float4{sum[0], sum[1], sum[2], sum[3]});
        sum[0] = ::fmaf(decay, sum[0], added.x);
        sum[1] = ::fmaf(decay, sum[1], added.y);
        sum[2] = ::fmaf(decay, sum[2], added.z);
        sum[3] = ::fmaf(decay, sum[3], added.w);
    }
}

template <bool portable>
void launch_gradient_scan(const GradientParams& params, const GradientWorkspace& w, Stream stream) {
    const RecurrentProblem& p = params.forward.problem;
    const int64_t runs = states_of(p) * p.heads * slices_of(p);
    const int blocks = VALUES * params.key_dim / (4 * GRADIENT_SCAN_THREADS);
    const GradientScanGlobals globals{.states = w.segment_states,
                                      .decays = w.segment_decays,
                                      .initial = params.forward.initial,
                                      .grad_final = params.grad_final,
                                      .heads = int(p.heads),
                                      .slices = int(slices_of(p)),
                                      .segments = params.segments,
                                      .runs = int(runs),
                                      .key_dim = int(p.key_dim),
                                      .value_dim = int(p.value_dim),
                                      .padded_keys = params.key_dim,
                                      .blocks = blocks};
    kittens::launch({.dependent = !portable}, gradient_scan_kernel<portable>,
                    dim3(unsigned(2 * runs * blocks)), dim3(GRADIENT_SCAN_THREADS), dim3(1), 0,
                    stream, globals);
}

}  // namespace thunderkittens::recurrent
