// The state that each segment of the chunks adds, phi(x)^T v summed over its tokens, with weights
// of the tokens or without; and prefix sums of these. A warpgroup has one head, one segment and 64
// columns of the values, as in forward_sm90.cuh.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int SEGMENT_STATES_STAGES = 4;

template <class T>
struct SegmentStatesGlobals {
    ElementLayout<T> x;
    ValueLayout<T> v;
    WeightLayout weights;
    Segments segments;
    StateView segment_states;
};

template <class T>
struct SegmentStatesShared {
    struct Stage {
        value_tile<T> v;
        element_tile<T> x;
        TokenWeights weights;
    } stages[SEGMENT_STATES_STAGES];
    Transposed<T> transposed, scaled;
    semaphore full[SEGMENT_STATES_STAGES];
};

template <class T, bool denominator, bool weighted>
__global__ __launch_bounds__(WARPGROUP_THREADS, 2) void based_segment_states_kernel(
    const __grid_constant__ SegmentStatesGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<SegmentStatesShared<T>>();
    const Segments::WorkTile work = g.segments.work_tile();
    const auto load_chunk = [&](int i) {
        auto& stage = shared.stages[i % SEGMENT_STATES_STAGES];
        semaphore& full = shared.full[i % SEGMENT_STATES_STAGES];
        const int chunk = work.begin + i, row = chunk * CHUNK;
        if constexpr (weighted)
            tma::expect(full, stage.x, stage.v, stage.weights);
        else
            tma::expect(full, stage.x, stage.v);
        tma::load_async(stage.x, g.x, elements(work.b, work.head, row, 0), full);
        tma::load_async(stage.v, g.v, elements(work.b, work.head, row, work.first_column()), full);
        if constexpr (weighted) {
            tma::load_async(stage.weights.values, g.weights, {0, 0, work.batch_head, chunk}, full);
            tma::load_async(stage.weights.denominator, g.weights, {0, 1, work.batch_head, chunk},
                            full);
        }
    };
    if (first_thread()) {
        for (int s = 0; s < SEGMENT_STATES_STAGES; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    arch::wait_for_dependencies();
    if (first_thread()) {
        for (int i = 0; i < SEGMENT_STATES_STAGES - 1 && i < work.chunks(); ++i) load_chunk(i);
    }
    shared.transposed.fill_constants();
    if constexpr (weighted) shared.scaled.fill_constants();
    RunningState<T, weighted> state;
    RunningDenominator<T> running_denominator;
    state.load({}, 0);
    if constexpr (denominator) running_denominator.template load<weighted>({});
    arch::sync_block();
    const FeatureRows<T> feature_rows(shared.transposed,
                                      weighted ? shared.scaled : shared.transposed);
#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& stage = shared.stages[i % SEGMENT_STATES_STAGES];
        wait(shared.full[i % SEGMENT_STATES_STAGES], i / SEGMENT_STATES_STAGES % 2);
        if constexpr (weighted)
            transpose_chunk(shared.transposed, shared.scaled, stage.x, stage.weights);
        else
            transpose_chunk(shared.transposed, stage.x);
        warpgroup::sync(1);
        if (first_thread() && i + SEGMENT_STATES_STAGES - 1 < work.chunks())
            load_chunk(i + SEGMENT_STATES_STAGES - 1);
        typename RunningState<T, weighted>::Operands key_features;
        state.add_most(key_features, feature_rows, stage.v);
        state.add_rest(key_features, feature_rows, stage.v);
        if constexpr (denominator) {
            if constexpr (weighted)
                running_denominator.add(stage.x, stage.weights);
            else
                running_denominator.add(stage.x, g.segments.tokens(work.begin + i));
        }
        state.wait();
        warpgroup::sync(1);  // the transposed tile is free
    }
    const StateView to = g.segment_states.at(g.segments.state(work));
    state.store(to, work.first_column());
    if constexpr (denominator) {
        if (work.slice == 0 && warpgroup::warpid() == 0)
            running_denominator.template store<weighted>(to);
    }
}

template <DType dtype>
void launch_based_segment_states(const BasedParams& params, const SegmentStatesParams& call,
                                 Stream stream) {
    using T = type_of<dtype>;
    const BasedProblem& p = params.problem;
    static_assert(sizeof(SegmentStatesShared<T>) + 1024 <= SEGMENT_STATES_BYTES);
    const bool weighted = call.weights != nullptr;
    const SegmentStatesGlobals<T> globals{
        .x = layout_of<ElementLayout<T>>(call.x, p, ELEMENTS),
        .v = layout_of<ValueLayout<T>>(call.v, p, p.value_dim),
        // A tensor map needs an address, also where nothing is read through it.
        .weights = weight_layout(
            weighted ? call.weights : static_cast<float*>(const_cast<void*>(call.x.data)), p),
        .segments = Segments(p, params.segments),
        .segment_states = {call.states.numerator, call.states.denominator, int(p.value_dim)}};
    const auto kernel = weighted        ? based_segment_states_kernel<T, true, true>
                        : p.denominator ? based_segment_states_kernel<T, true, false>
                                        : based_segment_states_kernel<T, false, false>;
    kittens::launch({.dependent = weighted}, kernel,
                    dim3(unsigned(globals.segments.blocks(p.batch))), dim3(WARPGROUP_THREADS),
                    dim3(1), SEGMENT_STATES_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
