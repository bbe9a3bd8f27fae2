// The state that each segment of the chunks adds, as in segment_states_sm90.cuh, for every GPU from
// compute capability 8.0 on. The form is that of forward_sm80.cuh.
#pragma once

#include "csrc/linear_attention/based/products_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int SEGMENT_STATES_STAGES = 2;

template <class T>
struct SegmentStatesGlobals {
    StridedRows<T> x, v;
    const float* weights;
    Segments segments;
    StateView segment_states;
};

template <class T>
struct SegmentStatesShared {
    struct Stage {
        value_tile<T> v;
        element_tile<T> x;
    } stages[SEGMENT_STATES_STAGES];
    TokenWeights weights[SEGMENT_STATES_STAGES];
    Transposed<T> transposed, scaled;
};

template <class T, bool denominator, bool weighted>
__global__ __launch_bounds__(
    PORTABLE_THREADS,
    PORTABLE_BLOCKS_PER_SM) void based_portable_segment_states_kernel(const __grid_constant__
                                                                          SegmentStatesGlobals<T>
                                                                              g) {
    auto& shared = *reinterpret_cast<SegmentStatesShared<T>*>(shared_memory());
    const Segments::WorkTile work = g.segments.work_tile();
    const ChunkCopies<T> copies{g.segments, work};
    const auto load_chunk = [&](int i) {
        auto& stage = shared.stages[i % SEGMENT_STATES_STAGES];
        copies.elements(stage.x, g.x, work.begin + i);
        copies.values(stage.v, g.v, work.begin + i);
        if constexpr (weighted)
            copies.weights(shared.weights[i % SEGMENT_STATES_STAGES], g.weights, work.begin + i);
        arch::cp_async_commit();
    };
    if (work.chunks() > 0) load_chunk(0);
    shared.transposed.fill_constants();
    if constexpr (weighted) shared.scaled.fill_constants();
    RunningState<T, weighted> state;
    RunningDenominator<T> running_denominator;
    state.load({}, 0);
    if constexpr (denominator) running_denominator.template load<weighted>({});
    const FeatureRows<T> feature_rows(shared.transposed,
                                      weighted ? shared.scaled : shared.transposed);
#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& stage = shared.stages[i % SEGMENT_STATES_STAGES];
        auto& weights = shared.weights[i % SEGMENT_STATES_STAGES];
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the one before
        if (i + 1 < work.chunks()) load_chunk(i + 1);
        transpose<T, weighted>(shared.transposed, shared.scaled, stage.x, &weights);
        arch::sync_block();
        accumulate(state, feature_rows, stage.v, [](int, const auto&) {});
        if constexpr (denominator) {
            if constexpr (weighted)
                running_denominator.add(stage.x, weights);
            else
                running_denominator.add(stage.x, g.segments.tokens(work.begin + i));
        }
    }
    const StateView to = g.segment_states.at(g.segments.state(work));
    state.store(to, work.first_column());
    if constexpr (denominator) {
        if (work.slice == 0 && own_warp() == 0) running_denominator.template store<weighted>(to);
    }
}

}  // namespace sm80

template <DType dtype>
void launch_portable_based_segment_states(const BasedParams& params,
                                          const SegmentStatesParams& call, Stream stream) {
    using T = type_of<dtype>;
    const BasedProblem& p = params.problem;
    static_assert(sizeof(sm80::SegmentStatesShared<T>) <= PORTABLE_SEGMENT_STATES_BYTES);
    const bool weighted = call.weights != nullptr;
    const sm80::SegmentStatesGlobals<T> globals{
        .x = call.x,
        .v = call.v,
        .weights = call.weights,
        .segments = Segments(p, params.segments),
        .segment_states = {call.states.numerator, call.states.denominator, int(p.value_dim)}};
    const auto kernel = weighted ? sm80::based_portable_segment_states_kernel<T, true, true>
                        : p.denominator
                            ? sm80::based_portable_segment_states_kernel<T, true, false>
                            : sm80::based_portable_segment_states_kernel<T, false, false>;
    kittens::launch({.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM}, kernel,
                    dim3(unsigned(globals.segments.blocks(p.batch))), dim3(sm80::PORTABLE_THREADS),
                    dim3(1), PORTABLE_SEGMENT_STATES_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
