// LoLCATS forward for every GPU from compute capability 8.0 on: what lolcats/forward_sm90.cuh
// computes, by cp.async, ldmatrix and mma.sync, from features that another kernel has made
// (features_sm80.cuh). A block has four warps without roles, one head, a segment of its chunks and
// 64 columns of the values; each warp has 16 of a chunk's tokens, and 32 features' sums in
// registers. With head dimension 128 two blocks make the same scores, which costs less than shared
// memory for all columns.
//
// Of a chunk the scores come first, those with the chunk before and with its own, and of both the
// maximum; then alpha phi(Q) times the sums, then the weights times the values, whose fragments
// also make what the chunk before adds to the sums.
#pragma once

#include "csrc/linear_attention/lolcats_portable/types_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class K>
struct LolcatsForwardGlobals {
    using T = typename K::T;
    QueryRowsOf<T> q;
    KeyRowsOf<T> k, v;
    StridedRows<T> out;
    FeatureArray<K> q_features, k_features;
    const float *alpha, *beta;
    LolcatsStatePointers initial, final;
    const float* segment_states;  // before each segment; null: there is one
    float *maxima, *denominators;
    int heads, length, segments;
};

template <class K>
using value_slice = st<typename K::T, CHUNK, VALUES>;
template <class K>
using SliceSums = FeatureSumsOf<K, 4, VALUES>;

template <class K>
struct LolcatsForwardShared {
    typename K::token_tile q, k[2];
    value_slice<K> v[2];
    typename SliceSums<K>::tile state;
    sv<float, 2 * K::features> denominator;
    sv<float, 16> scratch;
};

// The weights of a row of scores; a query's own chunk has none behind it.
template <class K>
struct WindowWeights {
    using T = typename K::T;
    using scores = rt_fl<16, CHUNK>;
    operand_a<T> prior[TOKEN_BLOCKS], own[TOKEN_BLOCKS];
    float2 top = {-INFINITY, -INFINITY}, sum = {0.0f, 0.0f};

    __device__ __forceinline__ void find_maximum(const scores& s, int blocks) {
#pragma unroll
        for (int j = 0; j < TOKEN_BLOCKS; ++j) {
            if (j >= blocks) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = s.tiles[0][j].data[i];
                float& t = i % 2 ? top.y : top.x;
                t = fmaxf(t, fmaxf(pair.x, pair.y));
            }
        }
    }
    __device__ __forceinline__ void weigh(operand_a<T> (&weights)[TOKEN_BLOCKS], const scores& s,
                                          int blocks, float2 shift) {
        constexpr float unit = score_scale<K> * LOG2_E;
#pragma unroll
        for (int j = 0; j < TOKEN_BLOCKS; ++j) {
            weights[j] = {};
            if (j >= blocks) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = s.tiles[0][j].data[i];
                const float h = i % 2 ? shift.y : shift.x;
                const float2 e = {arch::exp2_approx(fmaf(pair.x, unit, -h)),
                                  arch::exp2_approx(fmaf(pair.y, unit, -h))};
                (i % 2 ? sum.y : sum.x) += e.x + e.y;
                weights[j].words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(e.x, e.y));
            }
        }
    }
};

// Scores of this warp's queries, with all keys of the chunk before, if there is one, and with those
// of its own chunk that its queries see.
template <class K>
__device__ __forceinline__ void window_scores(rt_fl<16, CHUNK>& prior, rt_fl<16, CHUNK>& own,
                                              const typename K::token_tile& q,
                                              const typename K::token_tile& k_before,
                                              const typename K::token_tile& k, bool has_prior) {
    using T = typename K::T;
    using Tile = typename K::token_tile;
    const int warp = own_warp();
    const a_walker<Tile> queries(q, 16 * warp, 0);
    const b_walker<Tile> before(k_before, 0, 0), keys(k, 0, 0);
    zero(prior);
    zero(own);
#pragma unroll
    for (int step = 0; step < K::head_dim / 16; ++step) {
        operand_a<T> a;
        queries.load(a, 0, 16 * step, 0);
#pragma unroll
        for (int j = 0; j < TOKEN_BLOCKS; ++j) {
            operand_b<T> b;
            if (has_prior) {
                before.load(b, 16 * j, 16 * step, 0);
                mma_operands(block_of(prior, j), a, b);
            }
            if (j <= warp) {
                keys.load(b, 16 * j, 16 * step, 0);
                mma_operands(block_of(own, j), a, b);
            }
        }
    }
    // Keys behind the query, in the block of the diagonal.
#pragma unroll
    for (int j = 0; j < TOKEN_BLOCKS; ++j) {
        if (j != warp) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& x = own.tiles[0][j].data[i];
            const int row = laneid() / 4 + 8 * (i % 2), column = 8 * (i / 2) + 2 * (laneid() % 4);
            x = {column <= row ? x.x : -INFINITY, column + 1 <= row ? x.y : -INFINITY};
        }
    }
}

// Whether the sums of the chunk before `chunk` are needed: by the next chunk, before whose window
// it is, or by the state after the last token.
__device__ __forceinline__ bool adds_before(const LolcatsWorkTile& work, int chunk,
                                            bool has_final) {
    const int before = chunk - 1;
    if (before < 0) return false;
    return before + 2 < work.end || (work.last() && has_final && before < work.terrace.folded());
}

template <class K>
__global__
__launch_bounds__(PORTABLE_THREADS, PORTABLE_BLOCKS_PER_SM) void lolcats_portable_forward_kernel(
    const __grid_constant__ LolcatsForwardGlobals<K> g) {
    using T = typename K::T;
    constexpr int threads = PORTABLE_THREADS;
    constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
    auto& shared = *reinterpret_cast<LolcatsForwardShared<K>*>(shared_memory());
    constexpr int slices = K::head_dim / VALUES;
    const int first_column = int(blockIdx.x) % slices * VALUES;
    const LolcatsWorkTile work(int(blockIdx.x) / slices, g.heads, g.segments, g.initial.lengths,
                               g.length);
    if (work.begin >= work.end) return;
    const auto load_scores = [&](int chunk) {
        g.q.template copy<threads>(shared.q, work, chunk);
        g.k.template copy<threads>(shared.k[chunk % 2], work, chunk);
        arch::cp_async_commit();
    };
    if (work.begin > 0) {
        g.k.template copy<threads>(shared.k[(work.begin - 1) % 2], work, work.begin - 1);
        g.v.template copy<threads>(shared.v[(work.begin - 1) % 2], work, work.begin - 1,
                                   first_column);
    }
    load_scores(work.begin);
    const float alpha = arch::load_global_readonly(g.alpha + work.head);
    const float beta = arch::load_global_readonly(g.beta + work.head);
    SliceSums<K> sums;
    sums.clear();
    if (g.initial.numerator != nullptr) {
        sums.add(g.initial.numerator + work.batch_head * floats,
                 g.initial.denominator + int64_t(work.batch_head) * 2 * K::features, first_column);
    }
    if (g.segment_states != nullptr) {
        const float* before =
            g.segment_states +
            (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
        sums.add(before, before + floats, first_column);
    }
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        const int now = chunk % 2, last = 1 - now, warp = own_warp();
        const bool has_prior = chunk > 0;
        arch::cp_async_wait<0>();
        arch::sync_block();  // queries and keys are there, and all are done with the last chunk
        g.v.template copy<threads>(shared.v[now], work, chunk, first_column);
        arch::cp_async_commit();
        const float scale = sums.publish(shared.state, shared.denominator, shared.scratch);
        WindowWeights<K> weights;
        {
            rt_fl<16, CHUNK> prior, own;
            window_scores<K>(prior, own, shared.q, shared.k[last], shared.k[now], has_prior);
            const int priors = has_prior ? TOKEN_BLOCKS : 0;
            weights.find_maximum(prior, priors);
            weights.find_maximum(own, warp + 1);
            weights.top = {quad_maximum(weights.top.x), quad_maximum(weights.top.y)};
            constexpr float unit = score_scale<K> * LOG2_E;
            const float log_factor = arch::log2_approx(beta);
            const float2 shift = {fmaf(weights.top.x, unit, -log_factor),
                                  fmaf(weights.top.y, unit, -log_factor)};
            weights.weigh(weights.prior, prior, priors, shift);
            weights.weigh(weights.own, own, warp + 1, shift);
        }
        arch::sync_block();  // the sums are there, queries and the keys before are free
        if (chunk + 1 < work.end) load_scores(chunk + 1);

        rt_fl<16, VALUES> out;
        zero(out);
        float2 linear = {0.0f, 0.0f};
        const b_walker_of_rows<typename SliceSums<K>::tile> state(shared.state, 0, 0);
#pragma unroll
        for (int block = 0; block < feature_blocks<K>; ++block) {
            const operand_a<T> a = g.q_features.load(work.batch_head, chunk, warp, block);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 x = pair_of(a, i);
                const float2 s = arch::load_shared<float2>(
                    shared.denominator.address_of(16 * block + 8 * (i / 2) + 2 * (laneid() % 4)));
                float& sum = i % 2 ? linear.y : linear.x;
                sum = fmaf(x.x, s.x, fmaf(x.y, s.y, sum));
            }
#pragma unroll
            for (int j = 0; j < VALUES / 16; ++j) {
                operand_b<T> b;
                state.load(b, 16 * block, 16 * j, 0);
                mma_operands(block_of(out, j), a, b);
            }
        }
        scale_tile(out, alpha / scale);
        const float2 total = {quad_sum(fmaf(alpha, linear.x, weights.sum.x)),
                              quad_sum(fmaf(alpha, linear.y, weights.sum.y))};
        if (chunk + 1 < work.end)
            arch::cp_async_wait<1>();
        else
            arch::cp_async_wait<0>();
        arch::sync_block();  // the values are there
        const auto add_window = [&](const operand_a<T>(&of)[TOKEN_BLOCKS],
                                    const value_slice<K>& values, int blocks) {
            const b_walker_of_rows<value_slice<K>> walker(values, 0, 0);
#pragma unroll
            for (int k = 0; k < TOKEN_BLOCKS; ++k) {
                if (k >= blocks) continue;
#pragma unroll
                for (int j = 0; j < VALUES / 16; ++j) {
                    operand_b<T> b;
                    walker.load(b, 16 * k, 16 * j, 0);
                    mma_operands(block_of(out, j), of[k], b);
                }
            }
        };
        if (has_prior) add_window(weights.prior, shared.v[last], TOKEN_BLOCKS);
        add_window(weights.own, shared.v[now], warp + 1);
        scale_rows(out, {1.0f / total.x, 1.0f / total.y});
        const int row = work.terrace.row(chunk) + 16 * warp;
        store_warp_rows(g.out.at(work.b, work.head, 0, first_column), g.out.row_stride, row,
                        g.length, out);
        if (g.denominators != nullptr && first_column == 0 && laneid() % 4 == 0) {
            const int64_t first = int64_t(work.batch_head) * g.length;
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const int at = row + laneid() / 4 + 8 * low;
                if (at < 0 || at >= g.length) continue;
                arch::store_global(g.maxima + first + at,
                                   score_scale<K> * (low ? weights.top.y : weights.top.x));
                arch::store_global(g.denominators + first + at, low ? total.y : total.x);
            }
        }
        if (adds_before(work, chunk, g.final.numerator != nullptr)) {
            sums.add_chunk(
                typename SliceSums<K>::Features(g.k_features, work.batch_head, chunk - 1),
                shared.v[last]);
        }
    }
    if (work.last() && g.final.numerator != nullptr) {
        sums.store(g.final.numerator + work.batch_head * floats,
                   g.final.denominator + int64_t(work.batch_head) * 2 * K::features, first_column);
    }
}

}  // namespace sm80

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_forward(const LolcatsParams& params, const LolcatsWorkspace& w,
                                     Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    using T = typename K::T;
    const LolcatsProblem& p = params.problem;
    constexpr int bytes = portable_lolcats_forward_bytes(head_dim, features);
    static_assert(sizeof(sm80::LolcatsForwardShared<K>) <= bytes);
    const sm80::LolcatsForwardGlobals<K> globals{
        .q = sm80::query_rows<T>(params.q, p),
        .k = sm80::key_rows<T>(params.k, w.first_keys, p),
        .v = sm80::key_rows<T>(params.v, w.first_values, p),
        .out = params.out,
        .q_features = sm80::feature_array<K>(w.q_features, p),
        .k_features = sm80::feature_array<K>(w.k_features, p),
        .alpha = params.alpha,
        .beta = params.beta,
        .initial = params.initial,
        .final = params.final,
        .segment_states = w.segment_states,
        .maxima = params.maxima,
        .denominators = params.denominators,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = params.segments};
    kittens::launch({.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM},
                    sm80::lolcats_portable_forward_kernel<K>,
                    dim3(unsigned(p.batch * p.heads * params.segments * (head_dim / VALUES))),
                    dim3(sm80::PORTABLE_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::linear_attention
