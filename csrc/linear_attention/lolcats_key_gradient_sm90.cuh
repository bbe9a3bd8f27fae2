// LoLCATS's gradient for the keys and values, on Hopper. With w_ij and dA_ij as in
// lolcats_query_gradient_sm90.cuh, R and r the sums of alpha phi(q_i) / denominator_i times dO_i^T
// and delta_i over the queries whose window is behind the key:
//   window   dV = w^T dO, dK = dA^T Q / sqrt(D)
//   linear   dV += phi(K) R; dphi_j = R v_j - r; back through both softmaxes to dz; dK += dz W^T
// A block walks backwards over the chunks of one head, with three warpgroups: linear (sums in fp32
// registers; leaves phi(K), R and dz in shared memory), window (dV and dK, keys as rows), and one
// thread that brings the operands. Scores are the other kernel's transposed, with the same bits:
// what is a row's maximum is found by comparison.
#pragma once

#include "csrc/linear_attention/lolcats_gradient.cuh"

namespace thunderkittens::linear_attention {

template <class K>
struct KeyGradientGlobals {
    using G = LolcatsGradient<K>;
    typename K::token_layout q, grad_out, dk, dv;
    KeysAndValues<K> kv;
    typename K::map_layout q_map, k_map;
    typename G::projected_layout projected;
    RowsLayout rows;
    WeightsLayout weights;
    const float* beta;
    const int* lengths;
    const float* sums;  // behind each segment; null: there is one
    float *dk_parts, *dv_parts;
    int heads, length, segments;
    bool continued, want_keys, want_projected;
};

template <class K>
struct KeyGradientShared {
    using G = LolcatsGradient<K>;
    static constexpr int stages = 2;
    typename K::map_tile q_map, k_map;
    struct Queries {
        typename K::token_tile q, grad_out;
        RowVector rows;
        WeightVector weights;
    } queries[stages];
    typename K::token_tile k, v;
    typename K::feature_tile q_features[K::groups], k_features[K::groups];
    typename K::state_tile state[K::groups];
    typename G::projected_tile projected;
    typename K::token_tile result;
    sv<float, 2 * K::features> denominator;  // r
    sv<float, 16> scratch;
    semaphore maps, queries_full[stages], queries_empty[stages], keys_full, keys_empty,
        features_full, projected_full, taken;

    __device__ __forceinline__ void init() {
        init_semaphore(maps, 1);
        for (int s = 0; s < stages; ++s) {
            init_semaphore(queries_full[s], 1);
            init_semaphore(queries_empty[s], 2);
        }
        init_semaphore(keys_full, 1);
        init_semaphore(keys_empty, 2);
        init_semaphore(features_full, 1);
        init_semaphore(projected_full, 1);
        init_semaphore(taken, 1);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk end - 1 - n; the n-th queries are those of the chunk behind it.
template <class K>
__device__ __forceinline__ void produce_for_keys(const KeyGradientGlobals<K>& g,
                                                 KeyGradientShared<K>& shared,
                                                 const LolcatsItem& item) {
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, item.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, item.head, 0, 0), shared.maps);
    const auto load_queries = [&](int n) {
        const int stage = n % 2, chunk = item.end - n, row = item.terrace.row(chunk);
        wait(shared.queries_empty[stage], n / 2 % 2 ^ 1);
        auto& to = shared.queries[stage];
        semaphore& full = shared.queries_full[stage];
        tma::expect(full, to.q, to.grad_out, to.rows, to.weights);
        tma::load_async(to.q, g.q, elements(item.b, item.head, row, 0), full);
        tma::load_async(to.grad_out, g.grad_out, elements(item.b, item.head, row, 0), full);
        tma::load_async(to.rows, g.rows, {0, 0, item.line, chunk}, full);
        tma::load_async(to.weights, g.weights, {0, 0, item.line, chunk}, full);
    };
    load_queries(0);
    for (int n = 0; n < item.end - item.begin; ++n) {
        // Queries become free before keys do.
        if (n > 0) load_queries(n + 1);
        wait(shared.keys_empty, n % 2 ^ 1);
        g.kv.load(shared.k, shared.v, item, item.end - 1 - n, g.continued, shared.keys_full);
        if (n == 0) load_queries(1);
    }
}

template <class K>
struct KeyLinearRole {
    using G = LolcatsGradient<K>;
    static constexpr int barrier = 1;
    const KeyGradientGlobals<K>& g;
    KeyGradientShared<K>& shared;
    const LolcatsItem& item;

    __device__ __forceinline__ void run() {
        constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
        LolcatsSums<K> sums;
        sums.clear();
        if (g.sums != nullptr) {
            const float* behind = g.sums + (int64_t(item.line) * g.segments + item.segment) *
                                               (floats + 2 * K::features);
            sums.add(behind, behind + floats);
        }
        wait(shared.maps, 0);
        const int count = item.end - item.begin;
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = recomputed(this->shared);
            const int stage = n % 2;
            auto& behind = shared.queries[stage];
            typename K::projection z, gradient;
            discard(z);
            const float range = range_factor<K>(sums, shared.scratch, barrier);
            wait(shared.queries_full[stage], n / 2 % 2);
            {
                typename K::Features features;
                warpgroup::mm_AB(z, behind.q, shared.q_map);
                warpgroup::mma_async_wait<0>(z);
                make_weighted_features<K>(features, z, behind.weights);
                store_features<K>(shared.q_features, features);
            }
            if (n > 0) wait(shared.taken, (n - 1) % 2);
            sums.publish(shared.state, range);
            store_sums_vector<K>(shared.denominator, sums);
            if constexpr (G::is_half) {
                if (warpgroup::laneid() == 0) shared.scratch.set(8, range * G::weight_unit);
            }
            if (warpgroup::laneid() == 0) tma::store_async_read_wait();  // of the last dz
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            wait(shared.keys_full, n % 2);
            discard(z);
            warpgroup::mm_AB(z, shared.k, shared.k_map);
            sums.issue(shared.q_features, behind.grad_out);
            add_delta<K>(sums, shared.q_features, behind.weights);
            warpgroup::mma_async_wait<K::groups>(z);
            store_features_of<K>(shared.k_features, z);
            sums.wait();
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            signal(shared.features_full);
            signal(shared.queries_empty[stage]);
            discard(gradient);
            issue_feature_gradient<K>(gradient, shared.v, shared.state, 0);
            warpgroup::mma_async_wait<0>(gradient);
            constexpr float b = 1.0f / G::weight_unit;
            const float a = G::is_half ? 1.0f / shared.scratch.get(8) : 1.0f;
            projection_gradient<K>(shared.projected, gradient, z, shared.denominator, {a, a},
                                   {b, b}, 1.0f, [&](typename K::projection& to) {
                                       issue_feature_gradient<K>(to, shared.v, shared.state, 1);
                                   });
            signal(shared.keys_empty);
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            signal(shared.projected_full);
            if (g.want_projected && warpgroup::laneid() == 0) {
                tma::store_async(g.projected, shared.projected,
                                 elements(0, item.line, (item.end - 1 - n) * CHUNK, 0));
            }
        }
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
struct KeyWindowRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = 2;
    const KeyGradientGlobals<K>& g;
    KeyGradientShared<K>& shared;
    const LolcatsItem& item;

    // The transposed weights and gradients of scores, of a chunk of queries.
    template <bool diagonal>
    static __device__ __forceinline__ void differentiate(typename G::weights& weights,
                                                         typename G::weights& gradient,
                                                         const typename G::scores& s,
                                                         const typename G::scores& products,
                                                         const RowVector& rows, float beta) {
        const int ahead = lane_row() - 2 * (laneid() % 4);  // of the lane's columns
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            arch::sync_warp();  // else the rows' numbers are all loaded before, into registers
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
                const auto r0 = arch::load_shared<float4>(rows.address_of(4 * column));
                const auto r1 = arch::load_shared<float4>(rows.address_of(4 * column + 4));
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int n = 2 * half + low, row = ahead + 8 * low;
                    const float2 x = s.tiles[0][j].data[n], p = products.tiles[0][j].data[n];
                    const auto weigh = [&](float score, float product, const float4& r, int query,
                                           float& w, float& y) {
                        w = beta * arch::exp2_approx(fmaf(score, G::unit, -r.y));
                        y = w * fmaf(product, G::scale, -r.z) - (score == r.x ? r.w : 0.0f);
                        if (diagonal && row > query) w = 0.0f, y = 0.0f;
                    };
                    float2 w, y;
                    weigh(x.x, p.x, r0, 16 * j + 8 * half, w.x, y.x);
                    weigh(x.y, p.y, r1, 16 * j + 8 * half + 1, w.y, y.y);
                    weights.tiles[0][j].data[n] = pack_pair<T>(w.x, w.y);
                    gradient.tiles[0][j].data[n] = pack_pair<T>(y.x, y.y);
                }
            }
        }
    }

    // The tile is free when the last result has left it.
    __device__ __forceinline__ void store(const typename K::token_layout& to, float* part,
                                          const typename G::output& result, int chunk) {
        const int row = item.terrace.row(chunk);
        if (part != nullptr) {
            store_rows(part + int64_t(item.line) * g.length * K::head_dim, g.length, row, result);
        } else if (row >= 0) {
            if (warpgroup::laneid() == 0) tma::store_async_read_wait();
            warpgroup::sync(barrier);
            warpgroup::store(shared.result, result);
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            if (warpgroup::laneid() == 0)
                tma::store_async(to, shared.result, elements(item.b, item.head, row, 0));
        } else {
            store_rows(to.raw_ptr + int64_t(item.line) * g.length * K::head_dim, g.length, row,
                       result);
        }
    }

    __device__ __forceinline__ void run() {
        const float beta = arch::load_global_readonly(g.beta + item.head);
        const int count = item.end - item.begin;
        wait(shared.maps, 0);
        wait(shared.queries_full[0], 0);
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = recomputed(this->shared);
            const int stage = n % 2;
            auto &behind = shared.queries[stage], &own = shared.queries[stage ^ 1];
            typename G::scores scores, products;
            typename G::weights weights, gradient;
            typename G::output dv, dk;
            discard(scores, products);
            wait(shared.keys_full, n % 2);
            warpgroup::mm_ABt(scores, shared.k, behind.q);
            warpgroup::mm_ABt(products, shared.v, behind.grad_out);
            warpgroup::mma_async_wait<0>(scores);
            pin_tile(products);
            differentiate<false>(weights, gradient, scores, products, behind.rows, beta);
            discard(dv, dk);
            warpgroup::mm_AB(dv, weights, behind.grad_out);
            warpgroup::mm_AB(dk, gradient, behind.q);
            wait(shared.queries_full[stage ^ 1], (n + 1) / 2 % 2);
            warpgroup::mma_async_wait<0>(dv);
            pin_tile(dk);
            warpgroup::sync(barrier);  // all have read the rows' numbers
            signal(shared.queries_empty[stage]);
            discard(scores, products);
            // Descriptors of k and v again, which would be kept beside dv and dk.
            auto& again = recomputed(this->shared);
            warpgroup::mm_ABt(scores, again.k, own.q);
            warpgroup::mm_ABt(products, again.v, own.grad_out);
            warpgroup::mma_async_wait<0>(scores);
            pin_tile(products);
            signal(shared.keys_empty);
            differentiate<true>(weights, gradient, scores, products, own.rows, beta);
            warpgroup::mma_AB(dv, weights, own.grad_out);
            warpgroup::mma_AB(dk, gradient, own.q);
            wait(shared.features_full, n % 2);
            float unit = 1.0f;
            if constexpr (G::is_half) {
                warpgroup::mma_async_wait<0>(dv);
                pin_tile(dk);
                unit = shared.scratch.get(8);
                scale_tile(dv, unit);
            }
#pragma unroll
            for (int t = 0; t < K::groups; ++t)
                warpgroup::mma_AB(dv, shared.k_features[t], shared.state[t]);
            wait(shared.projected_full, n % 2);
            warpgroup::mma_ABt(dk, shared.projected, shared.k_map);
            warpgroup::mma_async_wait<0>(dv);
            pin_tile(dk);
            if constexpr (G::is_half) {
                scale_tile(dv, 1.0f / unit);
                warpgroup::sync(barrier);  // all have read the unit
            }
            signal(shared.taken);
            if (!g.want_keys) continue;
            const int chunk = item.end - 1 - n;
            store(g.dv, g.dv_parts, dv, chunk);
            store(g.dk, g.dk_parts, dk, chunk);
        }
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_GRADIENT_THREADS, 1) void lolcats_key_gradient_kernel(
    const __grid_constant__ KeyGradientGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<KeyGradientShared<K>>();
    if (threadIdx.x == 0) shared.init();
    arch::wait_for_dependencies();
    arch::sync_block();
    const LolcatsItem item(int(blockIdx.x), g.heads, g.segments, g.lengths, g.length);
    // Most sums per thread. The launch gives the three roles 504 registers together.
    constexpr bool wide = K::head_dim == 128 && K::features == 64;
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == PRODUCER_ROLE) {
        warpgroup::decrease_registers<wide ? 24 : 32>();
        if (warpgroup::elect_leader() && item.begin < item.end) produce_for_keys(g, shared, item);
    } else if (role == LINEAR_ROLE) {
        warpgroup::increase_registers<wide ? 256 : 232>();
        if (item.begin < item.end) KeyLinearRole<K>{g, shared, item}.run();
    } else {
        warpgroup::increase_registers<wide ? 224 : 240>();
        if (item.begin < item.end) KeyWindowRole<K>{g, shared, item}.run();
    }
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_key_gradient(const LolcatsBackwardParams& params,
                                 const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(KeyGradientShared<K>) + 1024 <= LOLCATS_KEY_BYTES);
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    const auto tokens = [&](const Operand& x) {
        return token_layout_of<typename K::token_layout>(x, p, p.heads, p.length);
    };
    const bool parts = w.dk_parts != nullptr;
    const bool want = params.dk.data != nullptr || params.dv.data != nullptr;
    const int64_t lines = p.batch * p.heads, chunks = chunks_of(p);
    const KeyGradientGlobals<K> globals{
        .q = tokens(call.q),
        .grad_out = tokens(params.grad_out),
        // A tensor map needs an address, also where nothing goes through it.
        .dk = tokens(want && !parts ? params.dk : call.q),
        .dv = tokens(want && !parts ? params.dv : call.q),
        .kv = KeysAndValues<K>(call, w.forward),
        .q_map = map_layout_of<typename K::map_layout>(call.q_map, p.heads),
        .k_map = map_layout_of<typename K::map_layout>(call.k_map, p.heads),
        .projected = projected_layout_of<K>(w.dk_projected, p),
        .rows = RowsLayout(w.rows, nullptr, nullptr, lines, chunks * CHUNK * 4),
        .weights = WeightsLayout(w.weights, nullptr, nullptr, lines, chunks * CHUNK * 2),
        .beta = call.beta,
        .lengths = call.initial.lengths,
        .sums = w.sums,
        .dk_parts = w.dk_parts,
        .dv_parts = w.dv_parts,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments,
        .continued = p.continued,
        .want_keys = want,
        .want_projected = params.dk_map != nullptr};
    kittens::launch({.dependent = true}, lolcats_key_gradient_kernel<K>,
                    dim3(unsigned(lines * call.segments)), dim3(LOLCATS_GRADIENT_THREADS), dim3(1),
                    LOLCATS_KEY_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
