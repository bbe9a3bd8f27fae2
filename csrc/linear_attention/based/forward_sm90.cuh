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

template <class To, class From>
__device__ __forceinline__ void to_operand(To& to, const From& from) {
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = from.tiles[0][j].data[i];
            to.tiles[0][j].data[i] = pack_pair<typename To::T>(pair.x, pair.y);
        }
    }
}

// Multiplies the rows' halves, x the upper's.
template <any_register_tile Tile>
__device__ __forceinline__ void scale_rows(Tile& tile, float2 factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float f = i % 2 ? factor.y : factor.x;
            float2& pair = tile.tiles[0][j].data[i];
            pair = {pair.x * f, pair.y * f};
        }
    }
}
template <any_register_tile Tile>
__device__ __forceinline__ float2 sum_rows(const Tile& tile) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = tile.tiles[0][j].data[i];
            (i % 2 ? sum.y : sum.x) += pair.x + pair.y;
        }
    }
    return sum;
}
__device__ __forceinline__ float over_quad(float x) {
    x += arch::shuffle_xor(x, 1);
    return x + arch::shuffle_xor(x, 2);
}

template <class T, bool denominator>
__global__ __launch_bounds__(WARPGROUP_THREADS, BLOCKS_PER_SM) void based_forward_kernel(
    const __grid_constant__ ForwardGlobals<T> g) {
    shared_allocator<> allocator(shared_memory());
    auto& block = allocator.template allocate<ForwardShared<T>>();
    const Segments::Item item = g.segments.item();
    const auto load_chunk = [&](int i) {
        auto& stage = block.stages[i % FORWARD_STAGES];
        semaphore& full = block.full[i % FORWARD_STAGES];
        const int row = (item.begin + i) * CHUNK;
        tma::expect(full, stage.q, stage.k, stage.v);
        tma::load_async(stage.k, g.k, elements(item.b, item.head, row, 0), full);
        tma::load_async(stage.q, g.q, elements(item.b, item.head, row, 0), full);
        tma::load_async(stage.v, g.v, elements(item.b, item.head, row, item.first_column()), full);
    };
    if (first_thread()) {
        for (int s = 0; s < FORWARD_STAGES; ++s) init_semaphore(block.full[s], 1);
        arch::mbarrier_init_fence();
    }
    block.transposed.fill_constants();
    arch::wait_for_dependencies();
    if (first_thread()) {
        for (int i = 0; i < FORWARD_STAGES - 1 && i < item.chunks(); ++i) load_chunk(i);
    }
    RunningState<T, false> state;
    RunningDenominator<T> sums;
    const StateView initial = g.initial.at(g.segments.state(item));
    state.load(initial, item.first_column());
    if constexpr (denominator) sums.template load<false>(initial);
    arch::sync_block();
    const FeatureRows<T> feature_rows(block.transposed, block.transposed);

#pragma unroll 1
    for (int i = 0; i < item.chunks(); ++i) {
        auto& shared = fresh_addresses(block);
        auto& stage = shared.stages[i % FORWARD_STAGES];
        wait(shared.full[i % FORWARD_STAGES], i / FORWARD_STAGES % 2);
        rt_fl<16, CHUNK> scores;
        transpose_chunk(shared.transposed, stage.k);
        const float before_scale = state.publish(shared.state, shared.scratch);
        // Not before, when registers of the state are read: ptxas would wait for the product.
        if constexpr (!denominator) warpgroup::mm_ABt(scores, stage.q, stage.k);
        arch::fence_async_shared();
        if (first_thread()) tma::store_async_read_wait();
        warpgroup::sync(1);
        // All are done with the previous chunk.
        if (first_thread() && i + FORWARD_STAGES - 1 < item.chunks())
            load_chunk(i + FORWARD_STAGES - 1);

        float2 row_sum = {0.0f, 0.0f};
        if constexpr (denominator) {
            warpgroup::mm_ABt(scores, stage.q, stage.k);
            rt<T, 16, 16> q;
            warpgroup::load(q, stage.q);
            row_sum = sums.dot(q);
            arch::pin_register(row_sum.x);  // not later, when registers are short
            arch::pin_register(row_sum.y);
        }
        rt<T, 16, FEATURE_ROWS> features;
        rt<T, 16, CHUNK> weights;
        rt_fl<16, VALUES> out;
        const auto weigh = [&] {
            weigh_scores<false>(scores);
            if constexpr (denominator) {
                const float2 within = sum_rows(scores);
                row_sum = {over_quad(within.x + row_sum.x) + sums.count,
                           over_quad(within.y + row_sum.y) + sums.count};
            }
            to_operand(weights, scores);
            if constexpr (denominator) {
                arch::pin_register(row_sum.x);
                arch::pin_register(row_sum.y);
            }
        };
        warpgroup::mma_async_wait<0>(scores);
        weigh();
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
            const int row = (item.begin + i) * CHUNK + 16 * warpgroup::warpid() + laneid() / 4;
            if (g.row_denominators != nullptr && item.slice == 0 && laneid() % 4 == 0) {
                float* to = g.row_denominators + int64_t(item.line) * g.segments.length + row;
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
                elements(item.b, item.head, (item.begin + i) * CHUNK, item.first_column()));
        }
        if constexpr (denominator) sums.add(stage.k, g.segments.tokens(item.begin + i));
        state.wait();
    }
    const StateView final = g.final.at(item.line);
    state.store(final, item.first_column());
    if constexpr (denominator) {
        if (item.slice == 0 && warpgroup::warpid() == 0) sums.template store<false>(final);
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
