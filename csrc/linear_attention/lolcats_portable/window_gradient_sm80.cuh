// The window's part of LoLCATS's gradient for every GPU from compute capability 8.0 on, and what
// the linear part (linear_gradient_sm80.cuh) has left is added. With w_ij the window's weights over
// the denominator, delta_i = dO_i . O_i:
//   rows     delta, and alpha / denominator
//   queries  dA_ij = w_ij (dO_i . v_j - delta_i); of the score that is the row's maximum, which the
//            forward subtracts, also minus the row's sum of dA; dQ = dA K / sqrt(D) + dz W^T
//   keys     dV = w^T dO + the linear part's; dK = dA^T Q / sqrt(D) + dz W^T
// Chunks do not depend on each other: a block has one, each of its four warps 16 of its rows.
// Scores of the kernel for the keys are the other's transposed, with the same bits: what is a row's
// maximum is found by comparison.
#pragma once

#include "csrc/linear_attention/lolcats_portable/forward_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int ROWS_THREADS = 256;

template <class K>
struct RowsGlobals {
    using T = typename K::T;
    StridedRows<T> out, grad_out;
    const float *denominators, *alpha;
    const int* lengths;
    float* weights;  // (batch_heads, chunks * 64, 2)
    int heads, length, chunks;
};

// Four lanes share a row.
template <class K>
__global__ __launch_bounds__(ROWS_THREADS) void lolcats_portable_rows_kernel(
    const __grid_constant__ RowsGlobals<K> g) {
    using T = typename K::T;
    constexpr int lanes = ROWS_THREADS / CHUNK;
    const int chunk = int(blockIdx.x) % g.chunks, batch_head = int(blockIdx.x) / g.chunks;
    const int head = batch_head % g.heads, b = batch_head / g.heads;
    const int token = int(threadIdx.x) / lanes, lane = int(threadIdx.x) % lanes;
    const int row = Terrace(g.lengths, b, g.length).row(chunk) + token;
    const bool exists = row >= 0 && row < g.length;
    float sum = 0.0f;
    if (exists) {
#pragma unroll
        for (int i = 0; i < K::head_dim / (8 * lanes); ++i) {
            const int column = 8 * (lanes * i + lane);
            const uint4 x =
                arch::load_global(reinterpret_cast<const uint4*>(g.out.at(b, head, row, column)));
            const uint4 y = arch::load_global(
                reinterpret_cast<const uint4*>(g.grad_out.at(b, head, row, column)));
            const operand_a<T> xs = {{x.x, x.y, x.z, x.w}}, ys = {{y.x, y.y, y.z, y.w}};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 p = pair_of(xs, n), q = pair_of(ys, n);
                sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
            }
        }
    }
    sum = quad_sum(sum);
    if (lane != 0) return;
    float2 result = {0.0f, 0.0f};
    if (exists) {
        const float denominator =
            arch::load_global(g.denominators + int64_t(batch_head) * g.length + row);
        result = {arch::load_global(g.alpha + head) / denominator, sum};
    }
    arch::store_global(reinterpret_cast<float2*>(g.weights) + int64_t(blockIdx.x) * CHUNK + token,
                       result);
}

template <class K>
struct WindowGradientGlobals {
    using T = typename K::T;
    QueryRowsOf<T> q, grad_out;
    KeyRowsOf<T> k, v;
    StridedRows<T> map;  // of the queries, or of the keys
    const T* projected;
    const float *weights, *denominators, *beta, *linear_dv;
    const int* lengths;
    float *rows, *beta_partials;  // (batch_heads, chunks * 64, 4), (batch_heads, chunks)
    StridedRows<T> results[2];    // dq; or dk and dv
    float* partials[2];           // in place of dk and dv, (batch_heads, length, head_dim)
    int heads, length, chunks;
    bool wanted;
};

template <class K>
struct WindowGradientShared {
    // q, dO, k, v; or k, v, q, dO. The first tile of all later has the map.
    typename K::token_tile own[2], others[2][2];
    sv<float, 2 * 4 * CHUNK> rows;
    sv<float, 16> scratch;
};

// Adds dz W^T, from the map in the memory of a tile.
template <class K>
__device__ __forceinline__ void add_projected(rt_fl<16, K::head_dim>& sum,
                                              const typename K::token_tile& place,
                                              const typename K::T* projected) {
    using T = typename K::T;
    static_assert(sizeof(typename K::map_tile) <= sizeof(place));
    const auto& map = reinterpret_cast<const typename K::map_tile&>(place);
    const b_walker<typename K::map_tile> columns(map, 0, 0);
    const T* from = projected + (warp_row() + laneid() / 4) * K::features + 2 * (laneid() % 4);
#pragma unroll
    for (int k = 0; k < K::features / 16; ++k) {
        operand_a<T> a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a.words[i] = arch::load_global(reinterpret_cast<const uint32_t*>(
                from + i % 2 * 8 * K::features + 16 * k + 8 * (i / 2)));
#pragma unroll
        for (int j = 0; j < K::head_dim / 16; ++j) {
            operand_b<T> b;
            columns.load(b, 16 * j, 16 * k, 0);
            mma_operands(block_of(sum, j), a, b);
        }
    }
}
template <class K>
__device__ __forceinline__ void load_map(const typename K::token_tile& place,
                                         const StridedRows<typename K::T>& map, int head) {
    copy_rows<PORTABLE_THREADS>(reinterpret_cast<const typename K::map_tile&>(place),
                                map.at(0, head, 0, 0), map.row_stride, 0, K::head_dim);
    arch::cp_async_commit();
}
// sum += weights times rows of a tile, 16 of them from `row` on.
template <class K>
__device__ __forceinline__ void add_rows(rt_fl<16, K::head_dim>& sum,
                                         const operand_a<typename K::T>& weights,
                                         const b_walker_of_rows<typename K::token_tile>& walker,
                                         int row) {
#pragma unroll
    for (int j = 0; j < K::head_dim / 16; ++j) {
        operand_b<typename K::T> b;
        walker.load(b, row, 16 * j, 0);
        mma_operands(block_of(sum, j), weights, b);
    }
}

template <class K>
__global__ __launch_bounds__(PORTABLE_THREADS) void lolcats_portable_query_gradient_kernel(
    const __grid_constant__ WindowGradientGlobals<K> g) {
    using T = typename K::T;
    constexpr int threads = PORTABLE_THREADS;
    constexpr float scale = score_scale<K>, unit = scale * LOG2_E;
    auto& shared = *reinterpret_cast<WindowGradientShared<K>*>(shared_memory());
    const int chunk = int(blockIdx.x) % g.chunks, batch_head = int(blockIdx.x) / g.chunks;
    const LolcatsWorkTile work(batch_head, 0, g.heads, 1, g.lengths, g.length);
    if (chunk >= work.end) {
        if (threadIdx.x == 0) arch::store_global(g.beta_partials + blockIdx.x, 0.0f);
        return;
    }
    const bool has_prior = chunk > 0;
    const int warp = own_warp();
    g.q.template copy<threads>(shared.own[0], work, chunk);
    g.k.template copy<threads>(shared.others[1][0], work, chunk);
    if (has_prior) g.k.template copy<threads>(shared.others[0][0], work, chunk - 1);
    arch::cp_async_commit();
    g.grad_out.template copy<threads>(shared.own[1], work, chunk);
    g.v.template copy<threads>(shared.others[1][1], work, chunk);
    if (has_prior) g.v.template copy<threads>(shared.others[0][1], work, chunk - 1);
    arch::cp_async_commit();
    arch::cp_async_wait<1>();
    arch::sync_block();
    rt_fl<16, CHUNK> scores[2], products[2];
    window_scores<K>(scores[0], scores[1], shared.own[0], shared.others[0][0], shared.others[1][0],
                     has_prior);
    arch::cp_async_wait<0>();
    arch::sync_block();  // all are done with the queries
    load_map<K>(shared.own[0], g.map, work.head);
    zero(products[0]);
    zero(products[1]);
    if (has_prior)
        add_products<K::head_dim>(products[0], shared.own[1], 16 * warp, shared.others[0][1]);
    add_products<K::head_dim>(products[1], shared.own[1], 16 * warp, shared.others[1][1]);

    const int64_t token = int64_t(blockIdx.x) * CHUNK + 16 * warp + laneid() / 4;
    const int at = work.terrace.row(chunk) + 16 * warp + laneid() / 4;
    const auto reciprocal = [&](int row) {
        if (row < 0 || row >= g.length) return 1.0f;
        return arch::reciprocal_approx(
            arch::load_global(g.denominators + int64_t(batch_head) * g.length + row));
    };
    const auto delta_of = [&](int64_t row) {
        return scale * arch::load_global(reinterpret_cast<const float2*>(g.weights) + row).y;
    };
    const float2 delta = {delta_of(token), delta_of(token + 8)};
    float2 top = {-INFINITY, -INFINITY};
    const int blocks[2] = {has_prior ? TOKEN_BLOCKS : 0, warp + 1};
    const auto for_each = [&](auto f) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < TOKEN_BLOCKS; ++j) {
                if (j >= blocks[n]) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    f(scores[n].tiles[0][j].data[i], products[n].tiles[0][j].data[i], i % 2 == 1);
            }
        }
    };
    for_each([&](float2& s, float2&, bool low) {
        float& t = low ? top.y : top.x;
        t = fmaxf(t, fmaxf(s.x, s.y));
    });
    top = {quad_maximum(top.x), quad_maximum(top.y)};
    const float2 shift = {fmaf(top.x, unit, -arch::log2_approx(reciprocal(at))),
                          fmaf(top.y, unit, -arch::log2_approx(reciprocal(at + 8)))};
    float2 sum = {0.0f, 0.0f}, ties = {0.0f, 0.0f};
    // Without beta; the products become 1 where the score is the maximum.
    for_each([&](float2& s, float2& p, bool low) {
        const float t = low ? top.y : top.x, h = low ? shift.y : shift.x,
                    d = low ? delta.y : delta.x;
        const float2 y = {arch::exp2_approx(fmaf(s.x, unit, -h)) * fmaf(p.x, scale, -d),
                          arch::exp2_approx(fmaf(s.y, unit, -h)) * fmaf(p.y, scale, -d)};
        p = {s.x == t ? 1.0f : 0.0f, s.y == t ? 1.0f : 0.0f};
        s = y;
        (low ? sum.y : sum.x) += y.x + y.y;
        (low ? ties.y : ties.x) += p.x + p.y;
    });
    sum = {quad_sum(sum.x), quad_sum(sum.y)};
    ties = {quad_sum(ties.x), quad_sum(ties.y)};
    const float beta = arch::load_global(g.beta + work.head);
    const float2 of_top = {beta * sum.x / ties.x, beta * sum.y / ties.y};
    const float beta_exponent = arch::log2_approx(beta);
    if (laneid() % 4 == 0) {
        auto* rows = reinterpret_cast<float4*>(g.rows) + token;
        arch::store_global(rows, float4{top.x, shift.x - beta_exponent, delta.x, of_top.x});
        arch::store_global(rows + 8, float4{top.y, shift.y - beta_exponent, delta.y, of_top.y});
    }
    rt_fl<16, K::head_dim> dq;
    zero(dq);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const b_walker_of_rows<typename K::token_tile> keys(shared.others[n][0], 0, 0);
#pragma unroll
        for (int j = 0; j < TOKEN_BLOCKS; ++j) {
            if (j >= blocks[n]) continue;
            rt_fl<16, 16>& gradient = block_of(scores[n], j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? of_top.y : of_top.x;
                const float2 is_top = products[n].tiles[0][j].data[i];
                float2& x = gradient.tiles[0][0].data[i];
                x = {fmaf(beta, x.x, -t * is_top.x), fmaf(beta, x.y, -t * is_top.y)};
            }
            add_rows<K>(dq, to_operand_a<T>(gradient), keys, 16 * j);
        }
    }
    // Of beta; all lanes of a quad have the rows' sums.
    float partial = laneid() % 4 == 0 ? (sum.x + sum.y) / scale : 0.0f;
    partial = warp_sum(partial);
    if (laneid() == 0) shared.scratch.set(warp, partial);
    arch::cp_async_wait<0>();
    arch::sync_block();  // the map is there, and the sums
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int w = 0; w < threads / WARP_THREADS; ++w) total += shared.scratch.get(w);
        arch::store_global(g.beta_partials + blockIdx.x, total);
    }
    if (!g.wanted) return;
    add_projected<K>(dq, shared.own[0], g.projected + int64_t(blockIdx.x) * CHUNK * K::features);
    store_warp_rows(g.results[0].at(work.b, work.head, 0, 0), g.results[0].row_stride,
                    work.terrace.row(chunk) + 16 * warp, g.length, dq);
}

template <class K>
__global__ __launch_bounds__(PORTABLE_THREADS) void lolcats_portable_key_gradient_kernel(
    const __grid_constant__ WindowGradientGlobals<K> g) {
    using T = typename K::T;
    constexpr int threads = PORTABLE_THREADS;
    constexpr float scale = score_scale<K>, unit = scale * LOG2_E;
    auto& shared = *reinterpret_cast<WindowGradientShared<K>*>(shared_memory());
    const int chunk = int(blockIdx.x) % g.chunks, batch_head = int(blockIdx.x) / g.chunks;
    const LolcatsWorkTile work(batch_head, 0, g.heads, 1, g.lengths, g.length);
    if (chunk >= work.end) return;
    const int queries = ::min(work.end - chunk, 2);  // chunks of them: the keys' own, that behind
    const int warp = own_warp();
    g.k.template copy<threads>(shared.own[0], work, chunk);
    g.v.template copy<threads>(shared.own[1], work, chunk);
    for (int n = 0; n < queries; ++n) {
        g.q.template copy<threads>(shared.others[n][0], work, chunk + n);
        g.grad_out.template copy<threads>(shared.others[n][1], work, chunk + n);
        const int query = int(threadIdx.x) - n * CHUNK;
        if (query >= 0 && query < CHUNK) {
            const auto* from =
                reinterpret_cast<const float4*>(g.rows) + int64_t(blockIdx.x) * CHUNK + threadIdx.x;
            arch::cp_async<16>(shared.rows.address_of(4 * int(threadIdx.x)), from);
        }
    }
    arch::cp_async_commit();
    arch::cp_async_wait<0>();
    arch::sync_block();
    rt_fl<16, K::head_dim> dk, dv;
    zero(dk);
    zero(dv);
    const a_walker<typename K::token_tile> own_keys(shared.own[0], 16 * warp, 0),
        own_values(shared.own[1], 16 * warp, 0);
#pragma unroll 1
    for (int n = 0; n < queries; ++n) {
        const b_walker<typename K::token_tile> q(shared.others[n][0], 0, 0),
            grad_out(shared.others[n][1], 0, 0);
        const b_walker_of_rows<typename K::token_tile> q_rows(shared.others[n][0], 0, 0),
            grad_rows(shared.others[n][1], 0, 0);
#pragma unroll 1
        for (int j = n == 0 ? warp : 0; j < TOKEN_BLOCKS; ++j) {
            rt_fl<16, 16> scores, products;  // transposed: keys are rows
            zero(scores);
            zero(products);
#pragma unroll
            for (int step = 0; step < K::head_dim / 16; ++step) {
                operand_a<T> a;
                operand_b<T> b;
                own_keys.load(a, 0, 16 * step, 0);
                q.load(b, 16 * j, 16 * step, 0);
                mma_operands(scores, a, b);
                own_values.load(a, 0, 16 * step, 0);
                grad_out.load(b, 16 * j, 16 * step, 0);
                mma_operands(products, a, b);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = laneid() / 4 + 8 * (i % 2),
                          column = 8 * (i / 2) + 2 * (laneid() % 4);
                const uint32_t place = shared.rows.address_of(4 * (CHUNK * n + 16 * j + column));
                float2 &s = scores.tiles[0][0].data[i], &p = products.tiles[0][0].data[i];
                const auto weigh = [&](float& score, float& product, const float4& r, bool hidden) {
                    const float w = arch::exp2_approx(fmaf(score, unit, -r.y));
                    const float y = w * fmaf(product, scale, -r.z) - (score == r.x ? r.w : 0.0f);
                    score = hidden ? 0.0f : w;
                    product = hidden ? 0.0f : y;
                };
                const bool diagonal = n == 0 && j == warp;
                weigh(s.x, p.x, arch::load_shared<float4>(place), diagonal && row > column);
                weigh(s.y, p.y, arch::load_shared<float4>(place + 16),
                      diagonal && row > column + 1);
            }
            add_rows<K>(dv, to_operand_a<T>(scores), grad_rows, 16 * j);
            add_rows<K>(dk, to_operand_a<T>(products), q_rows, 16 * j);
        }
    }
    arch::sync_block();  // all are done with the keys
    load_map<K>(shared.own[0], g.map, work.head);
    const int row = work.terrace.row(chunk) + 16 * warp;
    {
        const float* linear = g.linear_dv + (int64_t(blockIdx.x) * CHUNK + 16 * warp) * K::head_dim;
#pragma unroll
        for (int j = 0; j < K::head_dim / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2& pair = dv.tiles[0][j].data[i];
                const float2 x = arch::load_global(reinterpret_cast<const float2*>(
                    linear + (laneid() / 4 + 8 * (i % 2)) * K::head_dim + 16 * j + 8 * (i / 2) +
                    2 * (laneid() % 4)));
                pair = {pair.x + x.x, pair.y + x.y};
            }
        }
    }
    const auto store = [&](int which, const rt_fl<16, K::head_dim>& x) {
        if (g.partials[which] != nullptr) {
            store_warp_rows(g.partials[which] + int64_t(batch_head) * g.length * K::head_dim,
                            K::head_dim, row, g.length, x);
        } else {
            const StridedRows<T>& to = g.results[which];
            store_warp_rows(to.at(work.b, work.head, 0, 0), to.row_stride, row, g.length, x);
        }
    };
    store(1, dv);
    arch::cp_async_wait<0>();
    arch::sync_block();
    add_projected<K>(dk, shared.own[0], g.projected + int64_t(blockIdx.x) * CHUNK * K::features);
    store(0, dk);
}

}  // namespace sm80

template <class K>
sm80::WindowGradientGlobals<K> portable_window_globals(const LolcatsBackwardParams& params,
                                                       const LolcatsBackwardWorkspace& w,
                                                       bool keys) {
    using T = typename K::T;
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    return {.q = sm80::query_rows<T>(call.q, p),
            .grad_out = sm80::query_rows<T>(params.grad_out, p),
            .k = sm80::key_rows<T>(call.k, w.forward.first_keys, p),
            .v = sm80::key_rows<T>(call.v, w.forward.first_values, p),
            .map = keys ? call.k_map : call.q_map,
            .projected = static_cast<const T*>(keys ? w.dk_projected : w.dq_projected),
            .weights = w.weights,
            .denominators = params.denominators,
            .beta = call.beta,
            .linear_dv = w.linear_dv,
            .lengths = call.initial.lengths,
            .rows = w.rows,
            .beta_partials = w.beta_partials,
            .results = {keys ? params.dk : params.dq, params.dv},
            .partials = {keys ? w.dk_partials : nullptr, keys ? w.dv_partials : nullptr},
            .heads = int(p.heads),
            .length = int(p.length),
            .chunks = int(chunks_of(p)),
            .wanted = params.dq.data != nullptr};
}
template <class K>
void launch_portable_window(void (*kernel)(sm80::WindowGradientGlobals<K>), bool keys,
                            const LolcatsBackwardParams& params, const LolcatsBackwardWorkspace& w,
                            Stream stream) {
    const LolcatsProblem& p = params.forward.problem;
    constexpr int bytes = portable_window_gradient_bytes(K::head_dim);
    static_assert(sizeof(sm80::WindowGradientShared<K>) <= bytes);
    kittens::launch(kernel, dim3(unsigned(p.batch * p.heads * chunks_of(p))),
                    dim3(sm80::PORTABLE_THREADS), dim3(1), bytes, stream,
                    portable_window_globals<K>(params, w, keys));
}

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_rows(const LolcatsBackwardParams& params,
                                  const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    const sm80::RowsGlobals<K> globals{.out = call.out,
                                       .grad_out = params.grad_out,
                                       .denominators = params.denominators,
                                       .alpha = call.alpha,
                                       .lengths = call.initial.lengths,
                                       .weights = w.weights,
                                       .heads = int(p.heads),
                                       .length = int(p.length),
                                       .chunks = int(chunks_of(p))};
    kittens::launch(sm80::lolcats_portable_rows_kernel<K>,
                    dim3(unsigned(p.batch * p.heads * chunks_of(p))), dim3(sm80::ROWS_THREADS),
                    dim3(1), 0, stream, globals);
}
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_query_gradient(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    launch_portable_window<K>(sm80::lolcats_portable_query_gradient_kernel<K>, false, params, w,
                              stream);
}
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_key_gradient(const LolcatsBackwardParams& params,
                                          const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    launch_portable_window<K>(sm80::lolcats_portable_key_gradient_kernel<K>, true, params, w,
                              stream);
}

}  // namespace thunderkittens::linear_attention
