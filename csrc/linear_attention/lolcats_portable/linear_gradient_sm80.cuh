// The linear part of LoLCATS's gradient for every GPU from compute capability 8.0 on. With S and s
// the sums of phi(k) v^T and phi(k) before a query's window, w = alpha / denominator, and R and r
// the sums of w phi(q) dO^T and w delta phi(q) over the queries whose window is behind a key:
//   queries  dphi_i = w_i (S dO_i - delta_i s), forwards over the chunks
//   keys     dphi_j = R v_j - r, dV_j = phi(k_j) R, backwards
// and through both softmaxes, whose values are the features themselves, dz. The gradient of the
// window adds dz W^T and these dV.
//
// A block has eight warps: four times 16 tokens, and of these the features of one sign each; of the
// sums 16 features each.
#pragma once

#include "csrc/linear_attention/lolcats_portable/types_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int LINEAR_WARPS = 8, LINEAR_THREADS = LINEAR_WARPS * WARP_THREADS;

template <class K>
struct LinearGradientGlobals {
    using T = typename K::T;
    QueryRowsOf<T> grad_out;
    KeyRowsOf<T> v;
    FeatureArray<K> q_features, k_features;
    T* projected;  // dz, (batch_heads, chunks * 64, features)
    const float *weights, *denominators, *alpha;
    LolcatsStatePointers initial;
    const float* segment_states;
    float* factor_partials;  // of alpha, (batch_heads, segments)
    float* linear_dv;        // (batch_heads, chunks * 64, head_dim)
    int heads, length, segments;
};

template <class K>
using LinearSums = FeatureSumsOf<K, LINEAR_WARPS, K::head_dim>;

template <class K>
struct LinearGradientShared {
    // Rows that the sums are multiplied with, and values or gradients that are added to them.
    typename K::token_tile rows, values;
    typename LinearSums<K>::tile state;
    sv<float, CHUNK * K::features> parts;  // of dz, of the second sign
    sv<float, 2 * K::features> denominator;
    sv<float, 16> scratch;
};

// The warp's 16 tokens and its sign.
template <class K>
struct SignedRows {
    using T = typename K::T;
    static constexpr int blocks = K::features / 16;
    int band, sign;

    __device__ __forceinline__ SignedRows() : band(own_warp() % 4), sign(own_warp() / 4) {}
    __device__ __forceinline__ int row() const { return 16 * band; }

    // From the features' gradient a y - b s, with two numbers for each row, that of z, which is the
    // rows' factors times too small: y becomes it. Returns phi . gradient of the rows.
    __device__ __forceinline__ float2 softmax_gradient(typename K::projection& y,
                                                       const FeatureArray<K>& features,
                                                       int64_t batch_head, int chunk,
                                                       const sv<float, 2 * K::features>& sums,
                                                       float a, float2 b, float2 factor) const {
        operand_a<T> phi[blocks];
#pragma unroll
        for (int j = 0; j < blocks; ++j)
            phi[j] = features.load(batch_head, chunk, band, sign * blocks + j);
        float2 dot = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 s = arch::load_shared<float2>(sums.address_of(
                    sign * K::features + 16 * j + 8 * (i / 2) + 2 * (laneid() % 4)));
                const float2 p = pair_of(phi[j], i);
                const float br = i % 2 ? b.y : b.x;
                float2& x = y.tiles[0][j].data[i];
                x = {fmaf(a, x.x, -br * s.x), fmaf(a, x.y, -br * s.y)};
                float& d = i % 2 ? dot.y : dot.x;
                d = fmaf(p.x, x.x, fmaf(p.y, x.y, d));
            }
        }
        dot = {quad_sum(dot.x), quad_sum(dot.y)};
        const float2 f = {sign == 0 ? factor.x : -factor.x, sign == 0 ? factor.y : -factor.y};
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = pair_of(phi[j], i);
                const float fr = i % 2 ? f.y : f.x, d = i % 2 ? dot.y : dot.x;
                float2& x = y.tiles[0][j].data[i];
                x = {fr * p.x * (x.x - d), fr * p.y * (x.y - d)};
            }
        }
        return dot;
    }
    // The second sign's part, and after a barrier both signs' sum.
    __device__ __forceinline__ void share(const sv<float, CHUNK * K::features>& parts,
                                          const typename K::projection& y) const {
        if (sign == 0) return;
        for_each(parts,
                 [&](uint32_t at, int j, int i) { arch::store_shared(at, y.tiles[0][j].data[i]); });
    }
    __device__ __forceinline__ void store(const sv<float, CHUNK * K::features>& parts,
                                          typename K::projection& y, T* to) const {
        if (sign != 0) return;
        for_each(parts, [&](uint32_t at, int j, int i) {
            const float2 other = arch::load_shared<float2>(at);
            float2& x = y.tiles[0][j].data[i];
            x = {x.x + other.x, x.y + other.y};
        });
        store_warp_rows(to, K::features, row(), CHUNK, y);
    }

  private:
    template <class F>
    __device__ __forceinline__ void for_each(const sv<float, CHUNK * K::features>& parts,
                                             F f) const {
        const uint32_t first = parts.address_of(0) + 8 * (32 * band + laneid());
#pragma unroll
        for (int j = 0; j < blocks; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) f(first + uint32_t(1024 * (4 * j + i)), j, i);
        }
    }
};

template <class K>
__global__ __launch_bounds__(LINEAR_THREADS, 1) void lolcats_portable_linear_queries_kernel(
    const __grid_constant__ LinearGradientGlobals<K> g) {
    constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
    auto& shared = *reinterpret_cast<LinearGradientShared<K>*>(shared_memory());
    const LolcatsWorkTile work(int(blockIdx.x), g.heads, g.segments, g.initial.lengths, g.length);
    const auto load_rows = [&](int chunk) {
        g.grad_out.template copy<LINEAR_THREADS>(shared.rows, work, chunk);
    };
    const auto load_values = [&](int chunk) {
        if (chunk >= 0) g.v.template copy<LINEAR_THREADS>(shared.values, work, chunk);
    };
    if (work.begin < work.end) {
        load_rows(work.begin);
        load_values(work.begin - 1);
        arch::cp_async_commit();
    }
    LinearSums<K> sums;
    sums.clear();
    if (g.initial.numerator != nullptr) {
        sums.add(g.initial.numerator + work.batch_head * floats,
                 g.initial.denominator + int64_t(work.batch_head) * 2 * K::features, 0);
    }
    if (g.segment_states != nullptr) {
        const float* before =
            g.segment_states +
            (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
        sums.add(before, before + floats, 0);
    }
    const SignedRows<K> own;
    float alpha_sum = 0.0f;
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        arch::cp_async_wait<0>();
        arch::sync_block();  // operands are there, and all are done with the sums' copy
        const float scale = sums.publish(shared.state, shared.denominator, shared.scratch);
        arch::sync_block();
        typename K::projection y;
        zero(y);
        add_products<K::head_dim>(y, shared.rows, own.row(), shared.state, own.sign * K::features);
        const int64_t token = (int64_t(work.batch_head) * g.q_features.chunks + chunk) * CHUNK +
                              own.row() + laneid() / 4;
        const float2 upper = arch::load_global(reinterpret_cast<const float2*>(g.weights) + token);
        const float2 lower =
            arch::load_global(reinterpret_cast<const float2*>(g.weights) + token + 8);
        const float2 dot =
            own.softmax_gradient(y, g.q_features, work.batch_head, chunk, shared.denominator,
                                 1.0f / scale, {upper.y, lower.y}, {upper.x, lower.x});
        if (laneid() % 4 == 0) {
            const int row = work.terrace.row(chunk) + own.row() + laneid() / 4;
            const auto add = [&](int at, float x) {
                if (at < 0 || at >= g.length) return;
                alpha_sum += x / arch::load_global(g.denominators +
                                                   int64_t(work.batch_head) * g.length + at);
            };
            add(row, dot.x);
            add(row + 8, dot.y);
        }
        own.share(shared.parts, y);
        if (chunk > 0 && chunk + 1 < work.end) {
            sums.add_chunk(
                typename LinearSums<K>::Features(g.k_features, work.batch_head, chunk - 1),
                shared.values);
        }
        arch::sync_block();  // all are done with the operands, and parts are there
        if (chunk + 1 < work.end) {
            load_rows(chunk + 1);
            load_values(chunk);
            arch::cp_async_commit();
        }
        own.store(shared.parts, y,
                  g.projected + (int64_t(work.batch_head) * g.q_features.chunks + chunk) * CHUNK *
                                    K::features);
    }
    alpha_sum = warp_sum(alpha_sum);
    arch::sync_block();
    if (laneid() == 0) shared.scratch.set(kittens::warpid(), alpha_sum);
    arch::sync_block();
    if (threadIdx.x != 0) return;
    float total = 0.0f;
    for (int w = 0; w < LINEAR_WARPS; ++w) total += shared.scratch.get(w);
    arch::store_global(g.factor_partials + int64_t(work.batch_head) * g.segments + work.segment,
                       total);
}

template <class K>
__global__ __launch_bounds__(LINEAR_THREADS, 1) void lolcats_portable_linear_keys_kernel(
    const __grid_constant__ LinearGradientGlobals<K> g) {
    using T = typename K::T;
    constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
    constexpr float unit = std::is_same_v<T, half> ? HALF_WEIGHT_UNIT : 1.0f;
    auto& shared = *reinterpret_cast<LinearGradientShared<K>*>(shared_memory());
    const LolcatsWorkTile work(int(blockIdx.x), g.heads, g.segments, g.initial.lengths, g.length);
    const int chunks = work.terrace.chunks();
    const auto load_rows = [&](int chunk) {
        g.v.template copy<LINEAR_THREADS>(shared.rows, work, chunk);
    };
    const auto load_values = [&](int chunk) {
        if (chunk < chunks) g.grad_out.template copy<LINEAR_THREADS>(shared.values, work, chunk);
    };
    if (work.begin < work.end) {
        load_rows(work.end - 1);
        load_values(work.end);
        arch::cp_async_commit();
    }
    LinearSums<K> sums;
    sums.clear();
    if (g.segment_states != nullptr) {
        const float* behind =
            g.segment_states +
            (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
        sums.add(behind, behind + floats, 0);
        if constexpr (unit != 1.0f) {
#pragma unroll
            for (int i = 0; i < LinearSums<K>::groups; ++i) scale_tile(sums.sums[i], unit);
        }
    }
    const SignedRows<K> own;
#pragma unroll 1
    for (int chunk = work.end - 1; chunk >= work.begin; --chunk) {
        const int64_t first = (int64_t(work.batch_head) * g.q_features.chunks + chunk) * CHUNK;
        arch::cp_async_wait<0>();
        arch::sync_block();  // operands are there, and all are done with the sums' copy
        const float scale = sums.publish(shared.state, shared.denominator, shared.scratch);
        const float inverse = 1.0f / (scale * unit);
        arch::sync_block();
        {
            rt_fl<16, K::head_dim / 2> dv;
            zero(dv);
            const int column = own.sign * K::head_dim / 2;
            const b_walker_of_rows<typename LinearSums<K>::tile> state(shared.state, 0, 0);
#pragma unroll
            for (int block = 0; block < feature_blocks<K>; ++block) {
                const operand_a<T> a = g.k_features.load(work.batch_head, chunk, own.band, block);
#pragma unroll
                for (int j = 0; j < K::head_dim / 32; ++j) {
                    operand_b<T> b;
                    // Columns of a stripe of 64, or of half of one.
                    if (own.sign == 0)
                        state.load(b, 16 * block, 16 * j, 0);
                    else
                        state.load(b, 16 * block, K::head_dim / 2 + 16 * j, 0);
                    mma_operands(block_of(dv, j), a, b);
                }
            }
            scale_tile(dv, inverse);
            store_warp_rows(g.linear_dv + first * K::head_dim + column, K::head_dim, own.row(),
                            CHUNK, dv);
        }
        typename K::projection y;
        zero(y);
        add_products<K::head_dim>(y, shared.rows, own.row(), shared.state, own.sign * K::features);
        own.softmax_gradient(y, g.k_features, work.batch_head, chunk, shared.denominator, inverse,
                             {1.0f, 1.0f}, {1.0f, 1.0f});
        own.share(shared.parts, y);
        if (chunk + 1 < chunks && chunk > work.begin) {
            const float* weights = g.weights + (first + CHUNK) * 2;
            sums.add_chunk(
                typename LinearSums<K>::Features(g.q_features, work.batch_head, chunk + 1),
                shared.values, [&](int k, operand_a<T>& x, float2& sum) {
                    const TokenPairs pairs(weights, 16 * k);
                    const float2 d = pairs.deltas(x);
                    sum = {sum.x + d.x, sum.y + d.y};
                    x = pairs.weigh(x, unit);
                });
        }
        arch::sync_block();  // all are done with the operands, and parts are there
        if (chunk > work.begin) {
            load_rows(chunk - 1);
            load_values(chunk);
            arch::cp_async_commit();
        }
        own.store(shared.parts, y, g.projected + first * K::features);
    }
}

}  // namespace sm80

template <class K>
void launch_portable_linear(void (*kernel)(sm80::LinearGradientGlobals<K>), bool keys,
                            const LolcatsBackwardParams& params, const LolcatsBackwardWorkspace& w,
                            Stream stream) {
    using T = typename K::T;
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    constexpr int bytes = portable_linear_gradient_bytes(K::head_dim, K::features);
    static_assert(sizeof(sm80::LinearGradientShared<K>) <= bytes);
    const sm80::LinearGradientGlobals<K> globals{
        .grad_out = sm80::query_rows<T>(params.grad_out, p),
        .v = sm80::key_rows<T>(call.v, w.forward.first_values, p),
        .q_features = sm80::feature_array<K>(w.forward.q_features, p),
        .k_features = sm80::feature_array<K>(w.forward.k_features, p),
        .projected = static_cast<T*>(keys ? w.dk_projected : w.dq_projected),
        .weights = w.weights,
        .denominators = params.denominators,
        .alpha = call.alpha,
        .initial = call.initial,
        .segment_states = keys ? w.segment_states : w.forward.segment_states,
        .factor_partials = w.factor_partials,
        .linear_dv = w.linear_dv,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments};
    kittens::launch(kernel, dim3(unsigned(p.batch * p.heads * call.segments)),
                    dim3(sm80::LINEAR_THREADS), dim3(1), bytes, stream, globals);
}
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_linear_queries(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    launch_portable_linear<K>(sm80::lolcats_portable_linear_queries_kernel<K>, false, params, w,
                              stream);
}
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_linear_keys(const LolcatsBackwardParams& params,
                                         const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    launch_portable_linear<K>(sm80::lolcats_portable_linear_keys_kernel<K>, true, params, w,
                              stream);
}

}  // namespace thunderkittens::linear_attention
