// The state that each segment of the chunks adds, phi(x)^T v summed over its tokens, with weights
// of the tokens or without; and prefix sums of these. A warpgroup has one head, one segment and 64
// columns of the values, as in forward_sm90.cuh.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int SUMS_STAGES = 4;

template <class T>
struct SumsGlobals {
    ElementLayout<T> x;
    ValueLayout<T> v;
    WeightLayout weights;
    Segments segments;
    StateView sums;
};

template <class T>
struct SumsShared {
    struct Stage {
        value_tile<T> v;
        element_tile<T> x;
        TokenWeights weights;
    } stages[SUMS_STAGES];
    Transposed<T> transposed, scaled;
    semaphore full[SUMS_STAGES];
};

template <class T, bool denominator, bool weighted>
__global__ __launch_bounds__(WARPGROUP_THREADS,
                             2) void based_sums_kernel(const __grid_constant__ SumsGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<SumsShared<T>>();
    const Segments::Item item = g.segments.item();
    const auto load_chunk = [&](int i) {
        auto& stage = shared.stages[i % SUMS_STAGES];
        semaphore& full = shared.full[i % SUMS_STAGES];
        const int chunk = item.begin + i, row = chunk * CHUNK;
        if constexpr (weighted)
            tma::expect(full, stage.x, stage.v, stage.weights);
        else
            tma::expect(full, stage.x, stage.v);
        tma::load_async(stage.x, g.x, elements(item.b, item.head, row, 0), full);
        tma::load_async(stage.v, g.v, elements(item.b, item.head, row, item.first_column()), full);
        if constexpr (weighted) {
            tma::load_async(stage.weights.values, g.weights, {0, 0, item.line, chunk}, full);
            tma::load_async(stage.weights.denominator, g.weights, {0, 1, item.line, chunk}, full);
        }
    };
    if (first_thread()) {
        for (int s = 0; s < SUMS_STAGES; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    arch::wait_for_dependencies();
    if (first_thread()) {
        for (int i = 0; i < SUMS_STAGES - 1 && i < item.chunks(); ++i) load_chunk(i);
    }
    shared.transposed.fill_constants();
    if constexpr (weighted) shared.scaled.fill_constants();
    RunningState<T, weighted> state;
    RunningDenominator<T> sums;
    state.load({}, 0);
    if constexpr (denominator) sums.template load<weighted>({});
    arch::sync_block();
    const FeatureRows<T> feature_rows(shared.transposed,
                                      weighted ? shared.scaled : shared.transposed);
#pragma unroll 1
    for (int i = 0; i < item.chunks(); ++i) {
        auto& stage = shared.stages[i % SUMS_STAGES];
        wait(shared.full[i % SUMS_STAGES], i / SUMS_STAGES % 2);
        if constexpr (weighted)
            transpose_chunk(shared.transposed, shared.scaled, stage.x, stage.weights);
        else
            transpose_chunk(shared.transposed, stage.x);
        warpgroup::sync(1);
        if (first_thread() && i + SUMS_STAGES - 1 < item.chunks()) load_chunk(i + SUMS_STAGES - 1);
        typename RunningState<T, weighted>::Operands key_features;
        state.add_most(key_features, feature_rows, stage.v);
        state.add_rest(key_features, feature_rows, stage.v);
        if constexpr (denominator) {
            if constexpr (weighted)
                sums.add(stage.x, stage.weights);
            else
                sums.add(stage.x, g.segments.tokens(item.begin + i));
        }
        state.wait();
        warpgroup::sync(1);  // the transposed tile is free
    }
    const StateView to = g.sums.at(g.segments.state(item));
    state.store(to, item.first_column());
    if constexpr (denominator) {
        if (item.slice == 0 && warpgroup::warpid() == 0) sums.template store<weighted>(to);
    }
}

template <DType dtype>
void launch_based_sums(const BasedParams& params, const SumsParams& sums, Stream stream) {
    using T = type_of<dtype>;
    const BasedProblem& p = params.problem;
    static_assert(sizeof(SumsShared<T>) + 1024 <= SUMS_BYTES);
    const bool weighted = sums.weights != nullptr;
    const SumsGlobals<T> globals{
        .x = layout_of<ElementLayout<T>>(sums.x, p, ELEMENTS),
        .v = layout_of<ValueLayout<T>>(sums.v, p, p.value_dim),
        // A tensor map needs an address, also where nothing is read through it.
        .weights = weight_layout(
            weighted ? sums.weights : static_cast<float*>(const_cast<void*>(sums.x.data)), p),
        .segments = Segments(p, params.segments),
        .sums = {sums.states.numerator, sums.states.denominator, int(p.value_dim)}};
    const auto kernel = weighted        ? based_sums_kernel<T, true, true>
                        : p.denominator ? based_sums_kernel<T, true, false>
                                        : based_sums_kernel<T, false, false>;
    kittens::launch({.dependent = weighted}, kernel,
                    dim3(unsigned(globals.segments.blocks(p.batch))), dim3(WARPGROUP_THREADS),
                    dim3(1), SUMS_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
