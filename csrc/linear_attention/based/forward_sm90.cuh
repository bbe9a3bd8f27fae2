// Based forward for Hopper: o_i = sum over j <= i of (1 + s + s^2 / 2) v_j with s = q_i . k_j / 4,
// optionally over the sum of the weights, in linear time (Arora et al., "Simple linear attention
// language models balance the recall-throughput tradeoff", 2024).
//
// A warpgroup walks over chunks of 64 tokens of one head and 64 columns of values, loads ahead by
// TMA, and adds to each chunk's output
//   within the chunk   the polynomial on the masked scores Q K^T, times V
//   before the chunk   phi(Q) times the state, in which phi(K)^T V is summed in fp32 registers; a
//                      copy rounded to 16 bits in shared memory is the operand
// Features are made in registers, as operands of both products. Two blocks share a multiprocessor
// and fill each other's waits. Where there are too few heads to fill the GPU, the chunks are split
// into segments: a first kernel sums each segment's state, a second makes prefix sums of these.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int FORWARD_STAGES = 3, BLOCKS_PER_SM = 2;

template <class T>
struct ForwardGlobals {
    ElementLayout<T> q, k;
    ValueLayout<T> v, out;
    Segments segments;
    StateView initial, final;  // of each segment; final: where there is one segment alone
    float* row_denominators;   // (batch * heads, length); may be null
    bool normalize;
    float eps;
};

template <class T>
struct ForwardShared {
    struct Stage {
        value_tile<T> v;
        element_tile<T> q, k;
    } stages[FORWARD_STAGES];
    state_tile<T> state;
    value_tile<T> out;
    Transposed<T> transposed;
    sv<float, 16> scratch;
    semaphore full[FORWARD_STAGES];
};

// The polynomial of the scores q . k, zero where the key is after the query.
template <bool keys_are_rows, any_register_tile Tile>
__device__ __forceinline__ void weigh_scores(Tile& scores) {
    warpgroup::apply(scores, scores, [](int row, int col, float x) {
        const bool seen = keys_are_rows ? row <= col : col <= row;
        return seen ? fmaf(x, fmaf(x, 1.0f / 32, 0.25f), 1.0f) : 0.0f;
    });
}

template <class T>
__device__ __forceinline__ void load_chunk(const ForwardGlobals<T>& g, ForwardShared<T>& shared,
                                           const Segments::WorkTile& work, int i) {
    auto& stage = shared.stages[i % FORWARD_STAGES];
    semaphore& full = shared.full[i % FORWARD_STAGES];
    const int row = (work.begin + i) * CHUNK;
    tma::expect(full, stage.q, stage.k, stage.v);
    tma::load_async(stage.k, g.k, elements(work.b, work.head, row, 0), full);
    tma::load_async(stage.q, g.q, elements(work.b, work.head, row, 0), full);
    tma::load_async(stage.v, g.v, elements(work.b, work.head, row, work.first_column()), full);
}

// Semaphores, constants, and the first chunks on their way.
template <class T>
__device__ __forceinline__ void start_loads(const ForwardGlobals<T>& g, ForwardShared<T>& shared,
                                            const Segments::WorkTile& work) {
    if (first_thread()) {
        for (int s = 0; s < FORWARD_STAGES; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    shared.transposed.fill_constants();
    arch::wait_for_dependencies();
    if (first_thread()) {
        for (int i = 0; i < FORWARD_STAGES - 1 && i < work.chunks(); ++i)
            load_chunk(g, shared, work, i);
    }
}

// Scores become weights, as an operand; with a denominator their rows' sums are added to row_sum.
template <class T, bool denominator>
__device__ __forceinline__ void weigh(rt<T, 16, CHUNK>& weights, rt_fl<16, CHUNK>& scores,
                                      float2& row_sum, float count) {
    weigh_scores<false>(scores);
    if constexpr (denominator) {
        const float2 within = sum_rows(scores);
        row_sum = {quad_sum(within.x + row_sum.x) + count, quad_sum(within.y + row_sum.y) + count};
    }
    to_operand(weights, scores);
    if constexpr (denominator) {
        arch::pin_register(row_sum.x);
        arch::pin_register(row_sum.y);
    }
}

template <class T, bool denominator>
__global__ __launch_bounds__(WARPGROUP_THREADS, BLOCKS_PER_SM) void based_forward_kernel(
    const __grid_constant__ ForwardGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& block = allocator.template allocate<ForwardShared<T>>();
    const Segments::WorkTile work = g.segments.work_tile();
    start_loads(g, block, work);
    RunningState<T, false> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (denominator) running_denominator.template load<false>(initial);
    arch::sync_block();
    const FeatureRows<T> feature_rows(block.transposed, block.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& shared = rematerialized(block);
        auto& stage = shared.stages[i % FORWARD_STAGES];
        wait(shared.full[i % FORWARD_STAGES], i / FORWARD_STAGES % 2);
        rt_fl<16, CHUNK> scores;
        transpose_chunk(shared.transposed, stage.k);
        const float before_scale = state.store_operand(shared.state, shared.scratch);
        // Not before, when registers of the state are read: ptxas would wait for the product.
        if constexpr (!denominator) warpgroup::mm_ABt(scores, stage.q, stage.k);
        arch::fence_async_shared();
        if (first_thread()) tma::store_async_read_wait();
        warpgroup::sync(1);
        // All are done with the previous chunk.
        if (first_thread() && i + FORWARD_STAGES - 1 < work.chunks())
            load_chunk(g, block, work, i + FORWARD_STAGES - 1);

        float2 row_sum = {0.0f, 0.0f};
        if constexpr (denominator) {
            warpgroup::mm_ABt(scores, stage.q, stage.k);
            rt<T, 16, 16> q;
            warpgroup::load(q, stage.q);
            row_sum = running_denominator.dot(q);
            arch::pin_register(row_sum.x);  // not later, when registers are short
            arch::pin_register(row_sum.y);
        }
        rt<T, 16, FEATURE_ROWS> features;
        rt<T, 16, CHUNK> weights;
        rt_fl<16, VALUES> out;
        warpgroup::mma_async_wait<0>(scores);
        weigh<T, denominator>(weights, scores, row_sum, running_denominator.count);
        {
            RotatedRows<T> rows;
            rows.load(stage.q);
            rows.make(features);
        }
        warpgroup::mm_AB(out, features, shared.state);
        warpgroup::mma_async_wait<0>(out);  // also frees the features' registers
        if constexpr (std::is_same_v<T, half>) scale_rows(out, {before_scale, before_scale});
        warpgroup::mma_AB(out, weights, stage.v);
        typename RunningState<T, false>::Operands key_features;
        state.add_most(key_features, feature_rows, stage.v);
        warpgroup::mma_async_wait<2>(out);
        if constexpr (!denominator) state.add_rest(key_features, feature_rows, stage.v);

        if constexpr (denominator) {
            row_sum = {row_sum.x + g.eps, row_sum.y + g.eps};
            if (g.normalize) scale_rows(out, {1.0f / row_sum.x, 1.0f / row_sum.y});
            const int row = (work.begin + i) * CHUNK + 16 * warpgroup::warpid() + laneid() / 4;
            if (g.row_denominators != nullptr && work.slice == 0 && laneid() % 4 == 0) {
                float* to = g.row_denominators + int64_t(work.batch_head) * g.segments.length + row;
                if (row < g.segments.length) arch::store_global(to, row_sum.x);
                if (row + 8 < g.segments.length) arch::store_global(to + 8, row_sum.y);
            }
        }
        warpgroup::store(shared.out, out);
        if constexpr (denominator) state.add_rest(key_features, feature_rows, stage.v);
        arch::fence_async_shared();
        warpgroup::sync(1);
        if (first_thread()) {
            tma::store_async(
                g.out, shared.out,
                elements(work.b, work.head, (work.begin + i) * CHUNK, work.first_column()));
        }
        if constexpr (denominator)
            running_denominator.add(stage.k, g.segments.tokens(work.begin + i));
        state.wait();
    }
    const StateView final = g.final.at(work.batch_head);
    state.store(final, work.first_column());
    if constexpr (denominator) {
        if (work.slice == 0 && warpgroup::warpid() == 0)
            running_denominator.template store<false>(final);
    }
    if (first_thread()) tma::store_async_wait();
}

template <DType dtype>
void launch_based_forward(const BasedParams& params, Stream stream) {
    using T = type_of<dtype>;
    const BasedProblem& p = params.problem;
    static_assert(sizeof(ForwardShared<T>) + 1024 <= FORWARD_BYTES);
    const ForwardGlobals<T> globals{
        .q = layout_of<ElementLayout<T>>(params.q, p, ELEMENTS),
        .k = layout_of<ElementLayout<T>>(params.k, p, ELEMENTS),
        .v = layout_of<ValueLayout<T>>(params.v, p, p.value_dim),
        .out = layout_of<ValueLayout<T>>(params.out, p, p.value_dim),
        .segments = Segments(p, params.segments),
        .initial = {params.initial.numerator, params.initial.denominator, int(p.value_dim)},
        .final = {params.final.numerator, params.final.denominator, int(p.value_dim)},
        .row_denominators = params.row_denominators,
        .normalize = p.normalize,
        .eps = params.eps};
    const auto kernel =
        p.denominator ? based_forward_kernel<T, true> : based_forward_kernel<T, false>;
    kittens::launch({.dependent = params.segments > 1}, kernel,
                    dim3(unsigned(globals.segments.blocks(p.batch))), dim3(WARPGROUP_THREADS),
                    dim3(1), FORWARD_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
