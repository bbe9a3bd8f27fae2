// What LoLCATS's gradient for queries does beside its two working roles: its operands in shared
// memory, the thread that brings them, the warp that makes delta, the thread that stores dQ.
#pragma once

#include "csrc/linear_attention/lolcats/gradient_common.cuh"

namespace thunderkittens::linear_attention {

constexpr int LOLCATS_QUERY_THREADS = 3 * WARPGROUP_THREADS;
constexpr int QUERY_LINEAR_ROLE = 0, QUERY_PRODUCER_ROLE = 2;  // 1: window
constexpr int QUERY_END_BARRIER = 3;                           // named, of both working roles
// Of 504 together.
constexpr int QUERY_LINEAR_REGISTERS = 256, QUERY_WINDOW_REGISTERS = 200,
              QUERY_PRODUCER_REGISTERS = 48;

template <class K>
struct QueryGradientGlobals {
    using G = LolcatsGradient<K>;
    using out_tile = st<typename K::T, CHUNK / 2, K::head_dim>;
    using out_layout = gl<typename K::T, -1, -1, -1, K::head_dim, out_tile>;
    typename K::token_layout q, grad_out, dq;
    out_layout out;
    KeysAndValues<K> kv;
    typename K::map_layout q_map, k_map;
    typename G::projected_layout projected;
    const float *alpha, *beta;
    LolcatsStatePointers initial;
    const float* segment_states;  // before each segment; null: there is one
    const float* denominators;
    float *rows, *weights, *factor_partials;
    int* done;  // of each head; null: there are sums
    int heads, length, segments, chunks;
    int64_t batch_heads;
    bool want_dq, want_projected;

    __device__ __forceinline__ LolcatsWorkTile work_tile() const {
        return LolcatsWorkTile(int(blockIdx.x), heads, segments, initial.lengths, length);
    }
};

template <class K>
struct QueryGradientShared {
    static constexpr int stages = 2;
    typename K::map_tile q_map, k_map;
    struct Queries {
        typename K::token_tile q, grad_out;  // q: later the chunk's dq
    } queries[stages];
    struct Keys {
        typename K::token_tile k, v;
    } keys[stages];
    typename K::feature_tile features[K::groups];
    typename K::state_tile state[K::groups];
    typename LolcatsGradient<K>::projected_tile projected;
    typename QueryGradientGlobals<K>::out_tile out;  // half a chunk's
    sv<float, 2 * CHUNK> rows[stages];               // 1 / denominator and delta of each query
    sv<float, 2 * K::features> denominator;          // of the state
    sv<float, 16> scratch;
    sv<float, WARPGROUP_THREADS / 4> alpha_sums;     // of each quad's rows
    sv<float, 2 * WARPGROUP_WARPS> factor_partials;  // of alpha, of beta
    semaphore maps, queries_full[stages], queries_empty[stages], keys_full[stages],
        keys_empty[stages], out_full, rows_full[stages], projected_full, projected_empty, dq_full;

    __device__ __forceinline__ void init() {
        init_semaphore(maps, 1);
        for (int s = 0; s < stages; ++s) {
            init_semaphore(queries_full[s], 1);
            init_semaphore(queries_empty[s], 2);
            init_semaphore(keys_full[s], 1);
            init_semaphore(keys_empty[s], 2);
            init_semaphore(rows_full[s], 1);
        }
        init_semaphore(out_full, 1);
        init_semaphore(dq_full, WARPGROUP_WARPS);
        init_semaphore(projected_full, 1);
        init_semaphore(projected_empty, 1);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk begin + n. The n-th keys are those of the chunk before it.
template <class K>
__device__ __forceinline__ void produce_for_queries(const QueryGradientGlobals<K>& g,
                                                    QueryGradientShared<K>& shared,
                                                    const LolcatsWorkTile& work) {
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, work.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, work.head, 0, 0), shared.maps);
    for (int n = 0; n <= work.end - work.begin; ++n) {
        if (n > 0) {
            const int stage = (n - 1) % 2, row = work.terrace.row(work.begin + n - 1);
            wait(shared.queries_empty[stage], (n - 1) / 2 % 2 ^ 1);
            auto& to = shared.queries[stage];
            semaphore& full = shared.queries_full[stage];
            tma::expect(full, to.q, to.grad_out);
            tma::load_async(to.q, g.q, elements(work.b, work.head, row, 0), full);
            tma::load_async(to.grad_out, g.grad_out, elements(work.b, work.head, row, 0), full);
        }
        // Before the first chunk there is none; any will do, with a weight of zero.
        const int stage = n % 2;
        wait(shared.keys_empty[stage], n / 2 % 2 ^ 1);
        auto& to = shared.keys[stage];
        g.kv.load(to.k, to.v, work, ::max(work.begin + n - 1, 0), g.initial.keys != nullptr,
                  shared.keys_full[stage]);
    }
}

// By one warp: delta, which is a diagonal of dO O^T, and 1 / denominator of each query; 0 and 1
// where there is none. O is brought in halves of a chunk.
template <class K>
__device__ __forceinline__ void make_query_rows(const QueryGradientGlobals<K>& g,
                                                QueryGradientShared<K>& shared,
                                                const LolcatsWorkTile& work) {
    using T = typename K::T;
    const int count = work.end - work.begin;
    const auto load_half = [&](int n) {
        if (n >= 2 * count || laneid() != 0) return;
        const int row = work.terrace.row(work.begin) + CHUNK / 2 * n;
        tma::expect(shared.out_full, shared.out);
        tma::load_async(shared.out, g.out, elements(work.b, work.head, row, 0), shared.out_full);
    };
    // Of a block of 16 x 16, where this lane has an element of the diagonal: in column 0 or 1 of
    // its two, or nowhere.
    const int own = laneid() / 4 - 2 * (laneid() % 4);
    load_half(0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        const int stage = n % 2;
        auto& queries = shared.queries[stage];
        wait(shared.queries_full[stage], n / 2 % 2);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const int row = CHUNK / 2 * half + laneid();
            const int at = work.terrace.row(work.begin + n) + row;
            float denominator = 1.0f;
            if (at >= 0 && at < g.length)
                denominator = arch::load_global_readonly(g.denominators +
                                                         int64_t(work.batch_head) * g.length + at);
            wait(shared.out_full, half);
#pragma unroll 1
            for (int block = 0; block < CHUNK / 2; block += 16) {
                const int first = CHUNK / 2 * half + block;
                const MatrixRows<typename K::token_tile> grads(queries.grad_out, first);
                const MatrixRows<typename QueryGradientGlobals<K>::out_tile> outs(shared.out,
                                                                                  block);
                float upper[4] = {}, lower[4] = {};
#pragma unroll
                for (int j = 0; j < K::head_dim / 16; ++j) {
                    uint32_t x[4], y[4];
                    arch::load_matrix_x4(x[0], x[1], x[2], x[3], grads.at(j, 0));
                    arch::load_matrix_x4(y[0], y[1], y[2], y[3], outs.at(j, 0));
                    const uint32_t above[2] = {y[0], y[2]}, below[2] = {y[1], y[3]};
                    const float u[4] = {upper[0], upper[1], upper[2], upper[3]};
                    const float l[4] = {lower[0], lower[1], lower[2], lower[3]};
                    arch::mma_sync<T, T>::fma(upper, x, above, u);
                    arch::mma_sync<T, T>::fma(lower, x, below, l);
                }
                if (own == 0 || own == 1) {
                    const int query = first + laneid() / 4;
                    shared.rows[stage].set(2 * query + 1, own == 0 ? upper[0] : upper[1]);
                    shared.rows[stage].set(2 * query + 17, own == 0 ? lower[2] : lower[3]);
                }
            }
            shared.rows[stage].set(2 * row, arch::reciprocal_approx(denominator));
            arch::sync_warp();
            load_half(2 * n + half + 1);
        }
        if (laneid() == 0) arrive(shared.rows_full[stage]);
    }
}

// By one thread: dQ leaves from its query's slot, which then is free. A wait for that would hold up
// the window's role.
template <class K>
__device__ __forceinline__ void store_query_gradients(const QueryGradientGlobals<K>& g,
                                                      QueryGradientShared<K>& shared,
                                                      const LolcatsWorkTile& work) {
    for (int n = 0; n < work.end - work.begin; ++n) {
        const int stage = n % 2, row = work.terrace.row(work.begin + n);
        wait(shared.dq_full, n % 2);
        if (g.want_dq && row >= 0) {
            tma::store_async(g.dq, shared.queries[stage].q, elements(work.b, work.head, row, 0));
            tma::store_async_read_wait();
        }
        arrive(shared.queries_empty[stage]);
    }
    tma::store_async_wait();
}

}  // namespace thunderkittens::linear_attention
