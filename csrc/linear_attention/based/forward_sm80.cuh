// Based forward for every GPU from compute capability 8.0 on: what forward_sm90.cuh computes, chunk
// by chunk, by cp.async, ldmatrix and mma.sync. A block has four warps without roles, one head, one
// segment and 64 columns of the values; each warp has 16 of a chunk's tokens, and 48 of the state's
// features in registers.
//
// The copy of the state in 16 bits, which every warp reads whole, is what shared memory takes most
// time for; so a fragment of values, once loaded, serves both the output and the state, and keys
// that a warp's tokens do not see cost nothing. Two stages and the state take 48 KB: two blocks
// share a multiprocessor of any GPU.
#pragma once

#include "csrc/linear_attention/based/products_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int FORWARD_STAGES = 2;

template <class T>
struct ForwardGlobals {
    StridedRows<T> q, k, v, out;
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
    Transposed<T> transposed;
    sv<float, 16> scratch;
};

// The weights of the chunk's keys for this warp's queries, as operands; the lane's parts of the
// rows' sums are added up.
template <class T>
__device__ __forceinline__ void weigh_keys(operand_a<T> (&weights)[CHUNK_BLOCKS],
                                           const element_tile<T>& q, const element_tile<T>& k,
                                           float2& row_sum) {
    const int warp = own_warp();
    const operand_a<T> query = ElementRows<T>(q).a(warp);
    const ElementRows<T> keys(k);
#pragma unroll
    for (int j = 0; j < CHUNK_BLOCKS; ++j) {
        weights[j] = {};
        if (j > warp) continue;
        rt_fl<16, 16> scores;
        zero(scores);
        mma_operands(scores, query, keys.columns(j));
        for_each_pair(scores, [&](float2& x, int row, int column) {
            const bool whole = j < warp;
            x = {whole || column <= row ? polynomial(x.x) : 0.0f,
                 whole || column + 1 <= row ? polynomial(x.y) : 0.0f};
        });
        const float2 sum = sum_rows(scores);
        row_sum = {row_sum.x + sum.x, row_sum.y + sum.y};
        weights[j] = to_operand_a<T>(scores);
    }
}

template <class T, bool denominator>
__global__
__launch_bounds__(PORTABLE_THREADS, PORTABLE_BLOCKS_PER_SM) void based_portable_forward_kernel(
    const __grid_constant__ ForwardGlobals<T> g) {
    auto& shared = *reinterpret_cast<ForwardShared<T>*>(shared_memory());
    const Segments::WorkTile work = g.segments.work_tile();
    const ChunkCopies<T> copies{g.segments, work};
    const auto load_chunk = [&](int i) {
        auto& stage = shared.stages[i % FORWARD_STAGES];
        copies.elements(stage.q, g.q, work.begin + i);
        copies.elements(stage.k, g.k, work.begin + i);
        copies.values(stage.v, g.v, work.begin + i);
        arch::cp_async_commit();
    };
    if (work.chunks() > 0) load_chunk(0);
    shared.transposed.fill_constants();
    RunningState<T, false> state;
    RunningDenominator<T> running_denominator;
    const StateView initial = g.initial.at(g.segments.state(work));
    state.load(initial, work.first_column());
    if constexpr (denominator) running_denominator.template load<false>(initial);
    const FeatureRows<T> feature_rows(shared.transposed, shared.transposed);

#pragma unroll 1
    for (int i = 0; i < work.chunks(); ++i) {
        auto& stage = shared.stages[i % FORWARD_STAGES];
        const int chunk = work.begin + i;
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the one before
        if (i + 1 < work.chunks()) load_chunk(i + 1);
        transpose<T, false>(shared.transposed, shared.transposed, stage.k, nullptr);
        const float before_scale = store_operand(state, shared.state, shared.scratch);
        float2 row_sum = {0.0f, 0.0f};
        if constexpr (denominator) {
            rt<T, 16, 16> q;
            warp::load(q, stage.q.template subtile<16, 16>({own_warp(), 0}));
            row_sum = running_denominator.dot(q);
        }
        operand_a<T> weights[CHUNK_BLOCKS];
        weigh_keys(weights, stage.q, stage.k, row_sum);
        arch::sync_block();  // the state and the transposed keys are there

        rt_fl<16, VALUES> out;
        zero(out);
        {
            RotatedRows<T> rows;
            rows.load(stage.q);
            add_state(out, rows, shared.state);
        }
        if constexpr (std::is_same_v<T, half>) scale_rows(out, {before_scale, before_scale});
        accumulate(state, feature_rows, stage.v, [&](int k, const operand_b<T>(&values)[4]) {
            if (k > own_warp()) return;
#pragma unroll
            for (int j = 0; j < VALUE_BLOCKS; ++j)
                mma_operands(block_of(out, j), weights[k], values[j]);
        });
        if constexpr (denominator) {
            const float count = running_denominator.count + g.eps;
            row_sum = {quad_sum(row_sum.x) + count, quad_sum(row_sum.y) + count};
            if (g.normalize) scale_rows(out, {1.0f / row_sum.x, 1.0f / row_sum.y});
            const int row = chunk * CHUNK + warp_row() + laneid() / 4;
            if (g.row_denominators != nullptr && work.slice == 0 && laneid() % 4 == 0) {
                float* to = g.row_denominators + int64_t(work.batch_head) * g.segments.length + row;
                if (row < g.segments.length) arch::store_global(to, row_sum.x);
                if (row + 8 < g.segments.length) arch::store_global(to + 8, row_sum.y);
            }
            running_denominator.add(stage.k, g.segments.tokens(chunk));
        }
        copies.store_values(g.out, chunk, out);
    }
    const StateView final = g.final.at(work.batch_head);
    state.store(final, work.first_column());
    if constexpr (denominator) {
        if (work.slice == 0 && own_warp() == 0) running_denominator.template store<false>(final);
    }
}

}  // namespace sm80

template <DType dtype>
void launch_portable_based_forward(const BasedParams& params, Stream stream) {
    using T = type_of<dtype>;
    const BasedProblem& p = params.problem;
    static_assert(sizeof(sm80::ForwardShared<T>) <= PORTABLE_FORWARD_BYTES);
    const sm80::ForwardGlobals<T> globals{
        .q = params.q,
        .k = params.k,
        .v = params.v,
        .out = params.out,
        .segments = Segments(p, params.segments),
        .initial = {params.initial.numerator, params.initial.denominator, int(p.value_dim)},
        .final = {params.final.numerator, params.final.denominator, int(p.value_dim)},
        .row_denominators = params.row_denominators,
        .normalize = p.normalize,
        .eps = params.eps};
    const auto kernel = p.denominator ? sm80::based_portable_forward_kernel<T, true>
                                      : sm80::based_portable_forward_kernel<T, false>;
    kittens::launch({.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM}, kernel,
                    dim3(unsigned(globals.segments.blocks(p.batch))), dim3(sm80::PORTABLE_THREADS),
                    dim3(1), PORTABLE_FORWARD_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
