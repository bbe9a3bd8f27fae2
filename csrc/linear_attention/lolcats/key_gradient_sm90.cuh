// LoLCATS's gradient for the keys and values, on Hopper. With w_ij and dA_ij as in
// query_gradient_sm90.cuh, R and r the sums of alpha phi(q_i) / denominator_i times dO_i^T
// and delta_i over the queries whose window is behind the key:
//   window   dV = w^T dO, dK = dA^T Q / sqrt(D)
//   linear   dV += phi(K) R; dphi_j = R v_j - r; back through both softmaxes to dz; dK += dz W^T
// A block walks backwards over the chunks of one head, with four warpgroups: linear, one for each
// sign of the feature map (key_gradient_linear.cuh; leave phi(K), R and dz in shared memory),
// window (dV, then dK, keys as rows), and one of which a thread brings the operands and another
// stores dV and dK. Scores are the other kernel's transposed, with the same bits: what is a row's
// maximum is found by comparison.
#pragma once

#include "csrc/linear_attention/lolcats/key_gradient_linear.cuh"

namespace thunderkittens::linear_attention {

// The roles have 512 together.
constexpr int KEY_LINEAR_REGISTERS = 160, KEY_WINDOW_REGISTERS = 168, KEY_PRODUCER_REGISTERS = 24;

template <class K>
struct KeyGradientGlobals {
    using G = LolcatsGradient<K>;
    typename K::token_layout q, grad_out, dk, dv;
    KeysAndValues<K> kv;
    typename K::map_layout q_map, k_map;
    typename G::projected_layout projected;
    RowsLayout rows;
    WeightsLayout weights;
    const int* lengths;
    const float* segment_states;  // behind each segment; null: there is one
    float *dk_partials, *dv_partials;
    const int* queries_done;
    int* done;  // of each head; null, both: the kernels before have to be
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
    typename K::feature_tile q_features[2], k_features[2];  // of each sign
    typename K::state_tile state[2];
    typename G::projected_tile projected;
    typename K::token_tile result;
    sv<float, 2 * K::features> denominator;  // r
    sv<float, 32> scratch;
    sv<float, 4> unit;  // of R, by step, in half
    semaphore maps, queries_full[stages], queries_empty[stages], keys_full, keys_empty,
        features_full, features_empty, projected_half, projected_full, projected_empty, dv_full,
        dv_empty, dk_full;

    __device__ __forceinline__ void init() {
        init_semaphore(maps, 1);
        for (int s = 0; s < stages; ++s) {
            init_semaphore(queries_full[s], 1);
            init_semaphore(queries_empty[s], 3);
        }
        init_semaphore(keys_full, 1);
        init_semaphore(keys_empty, 3);
        init_semaphore(features_full, 2);
        init_semaphore(features_empty, 1);
        init_semaphore(projected_half, WARPGROUP_WARPS);
        init_semaphore(projected_full, 1);
        init_semaphore(projected_empty, 2);
        init_semaphore(dv_full, WARPGROUP_WARPS);
        init_semaphore(dv_empty, 1);
        init_semaphore(dk_full, WARPGROUP_WARPS);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk end - 1 - n; the n-th queries are those of the chunk behind it.
template <class K>
__device__ __forceinline__ void produce_for_keys(const KeyGradientGlobals<K>& g,
                                                 KeyGradientShared<K>& shared,
                                                 const LolcatsWorkTile& work) {
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, work.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, work.head, 0, 0), shared.maps);
    const auto load_queries = [&](int n) {
        const int stage = n % 2, chunk = work.end - n, row = work.terrace.row(chunk);
        wait(shared.queries_empty[stage], n / 2 % 2 ^ 1);
        auto& to = shared.queries[stage];
        semaphore& full = shared.queries_full[stage];
        tma::expect(full, to.q, to.grad_out, to.rows, to.weights);
        tma::load_async(to.q, g.q, elements(work.b, work.head, row, 0), full);
        tma::load_async(to.grad_out, g.grad_out, elements(work.b, work.head, row, 0), full);
        tma::load_async(to.rows, g.rows, {0, 0, work.batch_head, chunk}, full);
        tma::load_async(to.weights, g.weights, {0, 0, work.batch_head, chunk}, full);
    };
    if (g.queries_done != nullptr) wait_for_flag(g.queries_done + work.batch_head);
    load_queries(0);
    for (int n = 0; n < work.end - work.begin; ++n) {
        // Keys become free before queries do.
        wait(shared.keys_empty, n % 2 ^ 1);
        g.kv.load(shared.k, shared.v, work, work.end - 1 - n, g.continued, shared.keys_full);
        load_queries(n + 1);
    }
}

// By one thread: dV leaves from its tile, dK from the slot of the queries behind. Waits for that
// would hold up the window's role.
template <class K>
__device__ __forceinline__ void store_key_gradients(const KeyGradientGlobals<K>& g,
                                                    KeyGradientShared<K>& shared,
                                                    const LolcatsWorkTile& work) {
    for (int n = 0; n < work.end - work.begin; ++n) {
        const int row = work.terrace.row(work.end - 1 - n);
        const bool stores = g.want_keys && g.dk_partials == nullptr && row >= 0;
        const auto at = elements(work.b, work.head, row, 0);
        wait(shared.dv_full, n % 2);
        if (stores) {
            tma::store_async(g.dv, shared.result, at);
            tma::store_async_read_wait();
        }
        arrive(shared.dv_empty);
        wait(shared.dk_full, n % 2);
        if (stores) {
            tma::store_async(g.dk, shared.queries[n % 2].q, at);
            tma::store_async_read_wait();
        }
        arrive(shared.queries_empty[n % 2]);
    }
    tma::store_async_wait();
    // This kernel does not end before the one for the queries.
    arch::wait_for_dependencies();
}

template <class K, int sign>
struct KeyLinearRole : SignRole<K, sign> {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    using Base = SignRole<K, sign>;
    using Base::sums;

    __device__ __forceinline__ void run(const KeyGradientGlobals<K>& g, KeyGradientShared<K>& all,
                                        const LolcatsWorkTile& work) {
        constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
        sums.clear();
        if (g.segment_states != nullptr) {
            const float* behind =
                g.segment_states +
                (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
            sums.add(behind, behind + floats);
        }
        // In bf16 the denominator stays in shared memory. In half its terms are out of range for
        // the tensor cores.
        if constexpr (!G::is_half) sums.store_denominator(all.denominator);
        Base::clear_padding(all.q_features[sign]);
        Base::clear_padding(all.k_features[sign]);
        wait(all.maps, 0);
        const int count = work.end - work.begin;
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = rematerialized(all);
            const int stage = n % 2;
            auto& behind = shared.queries[stage];
            typename K::projection z, gradient;
            const float range = Base::range_factor(shared.scratch, n);
            if (n > 0) wait(shared.features_empty, (n - 1) % 2);
            sums.store_operand(shared.state[sign], range);
            if constexpr (G::is_half) {
                sums.store_denominator(shared.denominator);
                if (sign == 0 && warpgroup::laneid() == 0)
                    shared.unit.set(n % 2, range * G::weight_unit);
            }
            wait(shared.queries_full[stage], n / 2 % 2);
            discard(z);
            warpgroup::mm_AB(z, behind.q, shared.q_map);
            warpgroup::mma_async_wait<0>(z);
            make_features_of<K, sign>(z);
            const int row = lane_row();
            typename Base::Features features;
            Base::store_features(shared.q_features[sign], features, z,
                                 {G::weight_unit * behind.weights.get(2 * row),
                                  G::weight_unit * behind.weights.get(2 * row + 16)});
            if (sign == 1 && n > 0 && warpgroup::laneid() == 0) {
                tma::store_async_read_wait();  // of the last dz
                arrive(shared.projected_empty);
            }
            arch::fence_async_shared();
            Base::sync();
            wait(shared.keys_full, n % 2);
            discard(z);
            warpgroup::mm_AB(z, shared.k, shared.k_map);
            warpgroup::mma_AtB(sums.numerator, shared.q_features[sign], behind.grad_out);
            const int own = 16 * warpgroup::warpid();
            FeatureSums<typename K::feature_tile, 16> deltas;
            if constexpr (G::is_half)
                sums.add_denominator(shared.q_features[sign],
                                     [&](int token) { return behind.weights.get(2 * token + 1); });
            else if (own < K::features)
                deltas.add(shared.q_features[sign], own, DeltaParts<T>{behind.weights});
            warpgroup::mma_async_wait<1>(z);
            make_features_of<K, sign>(z);
            Base::store_features(shared.k_features[sign], features, z, {1.0f, 1.0f});
            discard(gradient);
            Base::issue_gradient(gradient, shared.v, shared.state[sign]);
            arch::fence_async_shared();
            Base::sync();
            signal(shared.features_full);
            warpgroup::mma_async_wait<0>(gradient);
            pin(sums.numerator);
            signal(shared.queries_empty[stage]);
            signal(shared.keys_empty);
            constexpr float b = 1.0f / G::weight_unit;
            const float a = b / range;
            sign_gradient<K, sign>(gradient, features, shared.denominator, {a, a}, {b, b});
            if (sign == 0 && n > 0) wait(shared.projected_empty, (n - 1) % 2);
            Base::add_projected(shared.projected, shared.projected_half, n % 2, gradient);
            arch::fence_async_shared();
            Base::sync();
            if constexpr (!G::is_half) {
                if (own < K::features) deltas.add_to(shared.denominator, sign * K::features + own);
            }
            if constexpr (sign == 1) {
                signal(shared.projected_full);
                if (g.want_projected && warpgroup::laneid() == 0) {
                    tma::store_async(g.projected, shared.projected,
                                     elements(0, work.batch_head, (work.end - 1 - n) * CHUNK, 0));
                }
            }
        }
        if (sign == 1 && warpgroup::laneid() == 0) {
            tma::store_async_wait();
            if (g.done != nullptr) set_flag(g.done + work.batch_head);
        }
    }
};

template <class K>
struct KeyWindowRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = KEY_WINDOW_BARRIER;
    const KeyGradientGlobals<K>& g;
    KeyGradientShared<K>& shared;
    const LolcatsWorkTile& work;

    // The transposed weights and gradients of scores, of a chunk of queries.
    template <bool diagonal>
    static __device__ __forceinline__ void differentiate(typename G::weights& weights,
                                                         typename G::weights& gradient,
                                                         const typename G::scores& s,
                                                         const typename G::scores& products,
                                                         const RowVector& rows) {
        const int ahead = lane_row() - 2 * (laneid() % 4);  // of the lane's columns
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                arch::sync_warp();  // else the rows' numbers are all loaded before
                const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
                const auto r0 = arch::load_shared<float4>(rows.address_of(4 * column));
                const auto r1 = arch::load_shared<float4>(rows.address_of(4 * column + 4));
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int n = 2 * half + low, row = ahead + 8 * low;
                    const float2 x = s.tiles[0][j].data[n], p = products.tiles[0][j].data[n];
                    const auto weigh = [&](float score, float product, const float4& r, int query,
                                           float& w, float& y) {
                        w = arch::exp2_approx(fmaf(score, G::unit, -r.y));
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

    // From a tile that is free; the storing thread brings it on.
    __device__ __forceinline__ void store(const typename K::token_layout& to, float* partial,
                                          typename K::token_tile& tile, semaphore& full,
                                          const typename G::output& result, int chunk) {
        const int row = work.terrace.row(chunk);
        if (g.want_keys) {
            if (partial != nullptr) {
                store_rows(partial + int64_t(work.batch_head) * g.length * K::head_dim, g.length,
                           row, result);
            } else if (row < 0) {
                store_rows(to.raw_ptr + int64_t(work.batch_head) * g.length * K::head_dim, g.length,
                           row, result);
            } else {
                const MatrixRows<typename K::token_tile> rows(tile, 16 * warpgroup::warpid());
#pragma unroll
                for (int j = 0; j < K::head_dim / 16; ++j) {
                    packed_type<T> part_of[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 pair = result.tiles[0][j].data[i];
                        part_of[i] = pack_pair<T>(pair.x, pair.y);
                    }
                    rows.store(j, part_of);
                }
                arch::fence_async_shared();
            }
        }
        arch::sync_warp();
        if (laneid() == 0) arrive(full);
    }

    __device__ __forceinline__ void run() {
        const int count = work.end - work.begin;
        wait(shared.maps, 0);
        wait(shared.queries_full[0], 0);
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            const int stage = n % 2, chunk = work.end - 1 - n;
            // Of the queries of the chunk behind, then of the keys' own. A loop: unrolled, the
            // exponentials of the first sink below the scores of the second, for which there are
            // too few registers.
            typename G::weights weights, gradient, behind_weights, behind_gradient;
#pragma unroll 1
            for (int block = 0; block < 2; ++block) {
                auto& shared = rematerialized(this->shared);
                auto& queries = shared.queries[stage ^ block];
                typename G::scores scores, products;
                behind_weights = weights;
                behind_gradient = gradient;
                discard(scores, products);
                if (block == 0)
                    wait(shared.keys_full, n % 2);
                else
                    wait(shared.queries_full[stage ^ 1], (n + 1) / 2 % 2);
                warpgroup::mm_ABt(scores, shared.k, queries.q);
                warpgroup::mm_ABt(products, shared.v, queries.grad_out);
                warpgroup::mma_async_wait<0>(scores);
                pin(products);
                if (block == 0) {
                    differentiate<false>(weights, gradient, scores, products, queries.rows);
                } else {
                    signal(shared.keys_empty);
                    differentiate<true>(weights, gradient, scores, products, queries.rows);
                }
            }
            typename G::output result;
            discard(result);
            {
                auto& shared = rematerialized(this->shared);
                warpgroup::mm_AB(result, behind_weights, shared.queries[stage].grad_out);
                warpgroup::mma_AB(result, weights, shared.queries[stage ^ 1].grad_out);
            }
            auto& shared = rematerialized(this->shared);
            wait(shared.features_full, n % 2);
            float unit = 1.0f;
            if constexpr (G::is_half) {
                unit = shared.unit.get(n % 2);
                warpgroup::mma_async_wait<0>(result);
                scale_tile(result, unit);
            }
#pragma unroll
            for (int sign = 0; sign < 2; ++sign)
                warpgroup::mma_AB(result, shared.k_features[sign], shared.state[sign]);
            warpgroup::mma_async_wait<0>(result);
            if constexpr (G::is_half) scale_tile(result, 1.0f / unit);
            signal(shared.features_empty);
            if (n > 0) wait(shared.dv_empty, (n - 1) % 2);
            store(g.dv, g.dv_partials, shared.result, shared.dv_full, result, chunk);
            discard(result);
            auto& last = rematerialized(this->shared);
            auto &behind = last.queries[stage], &own = last.queries[stage ^ 1];
            warpgroup::mm_AB(result, behind_gradient, behind.q);
            warpgroup::mma_AB(result, gradient, own.q);
            wait(shared.projected_full, n % 2);
            warpgroup::mma_ABt(result, shared.projected, shared.k_map);
            warpgroup::mma_async_wait<0>(result);
            // All have read the queries behind: their slot takes dK.
            warpgroup::sync(barrier);
            signal(shared.projected_empty);
            store(g.dk, g.dk_partials, behind.q, shared.dk_full, result, chunk);
        }
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_KEY_THREADS, 1) void lolcats_key_gradient_kernel(
    const __grid_constant__ KeyGradientGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<KeyGradientShared<K>>();
    if (threadIdx.x == 0) shared.init();
    if (g.queries_done == nullptr) {
        arch::wait_for_dependencies();
    } else {
        arch::skip_dependencies();
        if (threadIdx.x == 0) clear_flag(g.done + blockIdx.x);
    }
    arch::sync_block();
    arch::launch_dependents();
    const LolcatsWorkTile work(int(blockIdx.x), g.heads, g.segments, g.lengths, g.length);
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == KEY_PRODUCER_ROLE) {
        warpgroup::decrease_registers<KEY_PRODUCER_REGISTERS>();
        if (work.begin >= work.end) return;
        if (warpgroup::elect_leader()) produce_for_keys(g, shared, work);
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 1 && laneid() == 0) store_key_gradients(g, shared, work);
    } else if (role == KEY_WINDOW_ROLE) {
        warpgroup::increase_registers<KEY_WINDOW_REGISTERS>();
        if (work.begin < work.end) KeyWindowRole<K>{g, shared, work}.run();
    } else {
        warpgroup::increase_registers<KEY_LINEAR_REGISTERS>();
        if (work.begin >= work.end) return;
        if (role == 0)
            KeyLinearRole<K, 0>().run(g, shared, work);
        else
            KeyLinearRole<K, 1>().run(g, shared, work);
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
    const bool partials = w.dk_partials != nullptr;
    const bool want = params.dk.data != nullptr || params.dv.data != nullptr;
    const int64_t batch_heads = p.batch * p.heads, chunks = chunks_of(p);
    const KeyGradientGlobals<K> globals{
        .q = tokens(call.q),
        .grad_out = tokens(params.grad_out),
        // A tensor map needs an address, also where nothing goes through it.
        .dk = tokens(want && !partials ? params.dk : call.q),
        .dv = tokens(want && !partials ? params.dv : call.q),
        .kv = KeysAndValues<K>(call, w.forward),
        .q_map = map_layout_of<typename K::map_layout>(call.q_map, p.heads),
        .k_map = map_layout_of<typename K::map_layout>(call.k_map, p.heads),
        .projected = projected_layout_of<K>(w.dk_projected, p),
        .rows = RowsLayout(w.rows, nullptr, nullptr, batch_heads, chunks * CHUNK * 4),
        .weights = WeightsLayout(w.weights, nullptr, nullptr, batch_heads, chunks * CHUNK * 2),
        .lengths = call.initial.lengths,
        .segment_states = w.segment_states,
        .dk_partials = w.dk_partials,
        .dv_partials = w.dv_partials,
        .queries_done = w.queries_done,
        .done = w.keys_done,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments,
        .continued = p.continued,
        .want_keys = want,
        .want_projected = params.dk_map != nullptr};
    kittens::launch({.dependent = true}, lolcats_key_gradient_kernel<K>,
                    dim3(unsigned(batch_heads * call.segments)), dim3(LOLCATS_KEY_THREADS), dim3(1),
                    LOLCATS_KEY_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
