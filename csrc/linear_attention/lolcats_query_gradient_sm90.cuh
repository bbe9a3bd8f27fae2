// LoLCATS's gradient for the queries, on Hopper. With w_ij the forward's weights over their sum,
// delta_i = dO_i . O_i, S and s the sums of phi(k) v^T and phi(k) before the window:
//   window   dA_ij = w_ij (dO_i . v_j - delta_i); of the score that is the row's maximum, which the
//            forward subtracts, also minus the row's sum of dA; dQ = dA K / sqrt(D)
//   linear   dphi_i = alpha / denominator_i (S dO_i - delta_i s); through both softmaxes to dz;
//            dQ += dz W^T
// A block walks forwards over the chunks of one head, like the forward (lolcats_forward_sm90.cuh),
// and has four warpgroups: linear, one for each sign of the feature map (lolcats_gradient_signs.cuh;
// leave dz in shared memory and in global memory, for W's gradient), window (dQ), and one thread that
// brings Q, dO, K and V. It also leaves what the kernel for the keys needs of each row, and parts of
// alpha's and beta's gradient.
#pragma once

#include "csrc/linear_attention/lolcats_gradient_signs.cuh"

namespace thunderkittens::linear_attention {

// The roles have 512 together.
constexpr int QUERY_LINEAR_REGISTERS = 144, QUERY_WINDOW_REGISTERS = 192,
              QUERY_PRODUCER_REGISTERS = 32;

template <class K>
struct QueryGradientGlobals {
    using G = LolcatsGradient<K>;
    typename K::token_layout q, grad_out, dq;
    KeysAndValues<K> kv;
    typename K::map_layout q_map, k_map;
    typename G::projected_layout projected;
    const float *alpha, *beta;
    LolcatsStatePointers initial;
    const float* sums;  // before each segment; null: there is one
    const float *delta, *denominators;
    float *rows, *weights, *factor_parts;
    int heads, length, segments, chunks;
    int64_t lines;
    bool want_dq, want_projected;
};

// As many of each as are needed before the first of them is free again, which is at different times:
// of keys after dQ, of values and dO before the exponentials.
template <class K>
struct QueryGradientShared {
    using token_tile = typename K::token_tile;
    static constexpr int key_stages = 3, value_stages = 2, query_stages = 2;
    typename K::map_tile q_map, k_map;
    token_tile q[query_stages];  // later the chunk's dq
    token_tile grad_out, k[key_stages], v[value_stages];
    typename K::feature_tile features[2];  // of each sign
    typename K::state_tile state[2];
    typename LolcatsGradient<K>::projected_tile projected;
    sv<float, 2 * K::features> denominator;  // of the state
    sv<float, 32> scratch;
    sv<float, 8> alpha_parts, beta_parts;
    semaphore maps, q_full[query_stages], q_empty[query_stages], grad_out_full, grad_out_empty,
        k_full[key_stages], k_empty[key_stages], v_full[value_stages], v_empty[value_stages],
        projected_half, projected_full, projected_empty;

    __device__ __forceinline__ void init() {
        init_semaphore(maps, 1);
        const auto init_pair = [](semaphore& full, semaphore& empty) {
            init_semaphore(full, 1);
            init_semaphore(empty, 3);
        };
        for (int s = 0; s < query_stages; ++s) init_pair(q_full[s], q_empty[s]);
        for (int s = 0; s < key_stages; ++s) init_pair(k_full[s], k_empty[s]);
        for (int s = 0; s < value_stages; ++s) init_pair(v_full[s], v_empty[s]);
        init_pair(grad_out_full, grad_out_empty);
        init_semaphore(projected_half, WARPGROUP_WARPS);
        init_semaphore(projected_full, 1);
        init_semaphore(projected_empty, 2);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk begin + n. The n-th keys and values are those of the chunk before it.
template <class K>
__device__ __forceinline__ void produce_for_queries(const QueryGradientGlobals<K>& g,
                                                    QueryGradientShared<K>& shared,
                                                    const LolcatsItem& item) {
    const auto load = [&](auto& to, const auto& from, const auto& at, semaphore& full) {
        tma::expect(full, to);
        tma::load_async(to, from, at, full);
    };
    // Before the first chunk there is none; any will do, with a weight of zero.
    const auto load_keys = [&](auto& to, const auto& from, const auto& first, int n,
                               semaphore& full) {
        const int chunk = ::max(item.begin + n - 1, 0), head = item.head / g.kv.group;
        if (g.initial.keys != nullptr && chunk < CACHE / CHUNK)
            load(to, first, elements(item.b, head, chunk * CHUNK, 0), full);
        else
            load(to, from, elements(item.b, head, item.terrace.row(chunk), 0), full);
    };
    const auto load_k = [&](int n) {
        wait(shared.k_empty[n % 3], n / 3 % 2 ^ 1);
        load_keys(shared.k[n % 3], g.kv.k, g.kv.first_k, n, shared.k_full[n % 3]);
    };
    const auto load_v = [&](int n) {
        const int stage = n % 2;
        wait(shared.v_empty[stage], n / 2 % 2 ^ 1);
        load_keys(shared.v[stage], g.kv.v, g.kv.first_v, n, shared.v_full[stage]);
    };
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, item.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, item.head, 0, 0), shared.maps);
    load_k(0);
    load_v(0);
    // In the order in which their places become free.
    for (int n = 0; n < item.end - item.begin; ++n) {
        const int stage = n % 2;
        const auto at = elements(item.b, item.head, item.terrace.row(item.begin + n), 0);
        load_k(n + 1);
        wait(shared.q_empty[stage], n / 2 % 2 ^ 1);
        load(shared.q[stage], g.q, at, shared.q_full[stage]);
        load_v(n + 1);
        wait(shared.grad_out_empty, n % 2 ^ 1);
        load(shared.grad_out, g.grad_out, at, shared.grad_out_full);
    }
}

// 1 / denominator and delta of the lane's two rows; 1 and 0 where there is no such query.
struct QueryRows {
    float2 reciprocal, delta;

    template <class Globals>
    __device__ __forceinline__ QueryRows(const Globals& g, const LolcatsItem& item, int chunk) {
        const int row = item.terrace.row(chunk) + lane_row();
        const auto load = [&](int at, float& r, float& d) {
            r = 1.0f, d = 0.0f;
            if (at < 0 || at >= g.length) return;
            const int64_t i = int64_t(item.line) * g.length + at;
            r = arch::load_global_readonly(g.denominators + i);
            d = arch::load_global_readonly(g.delta + i);
        };
        load(row, reciprocal.x, delta.x);
        load(row + 8, reciprocal.y, delta.y);
        reciprocal = {1.0f / reciprocal.x, 1.0f / reciprocal.y};
    }
};

// The sum over the rows of `warpgroups`, which all lanes of a quad have; by one of them, whose thread
// `first` stores it.
template <int warpgroups, int barrier>
__device__ __forceinline__ void store_factor_part(sv<float, 8>& parts, float sum, int own,
                                                  float* to) {
#pragma unroll
    for (int distance = 4; distance < WARP_THREADS; distance *= 2)
        sum += arch::shuffle_xor(sum, distance);
    if (laneid() == 0) parts.set(WARPGROUP_WARPS * own + warpgroup::warpid(), sum);
    group<warpgroups * WARPGROUP_WARPS>::sync(barrier);
    if (own > 0 || warpgroup::laneid() != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < warpgroups * WARPGROUP_WARPS; ++w) total += parts.get(w);
    arch::store_global(to, total);
}

template <class K, int sign>
struct QueryLinearRole : SignRole<K, sign> {
    using G = LolcatsGradient<K>;
    using Base = SignRole<K, sign>;
    using Base::sums;

    __device__ __forceinline__ void run(const QueryGradientGlobals<K>& g,
                                        QueryGradientShared<K>& all, const LolcatsItem& item) {
        const float alpha = arch::load_global_readonly(g.alpha + item.head);
        constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
        sums.clear();
        if (g.initial.numerator != nullptr) {
            sums.add(g.initial.numerator + item.line * floats,
                     g.initial.denominator + int64_t(item.line) * 2 * K::features);
        }
        if (g.sums != nullptr) {
            const float* before = g.sums + (int64_t(item.line) * g.segments + item.segment) *
                                               (floats + 2 * K::features);
            sums.add(before, before + floats);
        }
        float alpha_sum = 0.0f;
        const int count = item.end - item.begin;
        Base::clear_padding(all.features[sign]);
        if (count > 0) wait(all.maps, 0);
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            const int stage = n % 2;
            auto& shared = recomputed(all);
            auto &k = shared.k[n % 3], &v = shared.v[stage];  // of the chunk before
            typename K::projection z, gradient;
            typename Base::Features features;
            // The sums before this chunk's window, as operands.
            const float range = Base::range_factor(shared.scratch, n);
            sums.publish(shared.state[sign], shared.denominator, range);
            // The chunk before is before the window of the next.
            const bool add = item.begin + n > 0 && n + 1 < count;
            if (add) {
                discard(z);
                wait(shared.k_full[n % 3], n / 3 % 2);
                warpgroup::mm_AB(z, k, shared.k_map);
                warpgroup::mma_async_wait<0>(z);
                make_features_of<K, sign>(z);
                Base::store_features(shared.features[sign], features, z, {1.0f, 1.0f});
            }
            if (sign == 1 && n > 0 && warpgroup::laneid() == 0) {
                tma::store_async_read_wait();  // of the last dz
                arrive(shared.projected_empty);
            }
            arch::fence_async_shared();
            Base::sync();
            signal(shared.k_empty[n % 3]);
            if (add) {
                wait(shared.v_full[stage], n / 2 % 2);
                warpgroup::mma_AtB(sums.numerator, shared.features[sign], v);
                sums.add_denominator(shared.features[sign], [](int) { return 1.0f; });
                warpgroup::mma_async_wait<0>(sums.numerator);
            }
            signal(shared.v_empty[stage]);
            wait(shared.q_full[stage], n / 2 % 2);
            discard(z);
            warpgroup::mm_AB(z, shared.q[stage], shared.q_map);
            const QueryRows rows(g, item, item.begin + n);
            warpgroup::mma_async_wait<0>(z);
            signal(shared.q_empty[stage]);
            make_features_of<K, sign>(z);
            round_tile(features, z);
            wait(shared.grad_out_full, n % 2);
            discard(gradient);
            Base::issue_gradient(gradient, shared.grad_out, shared.state[sign]);
            warpgroup::mma_async_wait<0>(gradient);
            signal(shared.grad_out_empty);
            const float inverse = 1.0f / range;
            const float2 dots = softmax_gradient<K, sign>(
                gradient, features, shared.denominator,
                {inverse * rows.reciprocal.x, inverse * rows.reciprocal.y},
                {rows.delta.x * rows.reciprocal.x, rows.delta.y * rows.reciprocal.y}, alpha);
            alpha_sum += dots.x + dots.y;
            if (sign == 0 && n > 0) wait(shared.projected_empty, (n - 1) % 2);
            Base::add_projected(shared.projected, shared.projected_half, n % 2, gradient);
            arch::fence_async_shared();
            Base::sync();
            if constexpr (sign == 1) {
                signal(shared.projected_full);
                if (g.want_projected && warpgroup::laneid() == 0) {
                    tma::store_async(g.projected, shared.projected,
                                     elements(0, item.line, (item.begin + n) * CHUNK, 0));
                }
            }
        }
        store_factor_part<2, LINEAR_BARRIER>(all.alpha_parts, alpha_sum, sign,
                                             g.factor_parts + blockIdx.x);
        if (sign == 1 && warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
struct QueryWindowRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = WINDOW_BARRIER;
    const QueryGradientGlobals<K>& g;
    QueryGradientShared<K>& shared;
    const LolcatsItem& item;

    // Of a lane's scores, for a word that says which are their row's maximum.
    static __device__ __forceinline__ uint32_t bit_of(int j, int i, int half) {
        return 1u << (8 * j + 2 * i + half);
    }
    // exp(s - maximum) / denominator, in place of s; counts those that are the maximum.
    static __device__ __forceinline__ void weigh(typename G::scores& s, uint32_t& is_top,
                                                 float2 top, float2 shift, float2& ties) {
        is_top = 0;
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? top.y : top.x, h = i % 2 ? shift.y : shift.x;
                float2& x = s.tiles[0][j].data[i];
                const bool first = x.x == t, second = x.y == t;
                is_top |= (first ? bit_of(j, i, 0) : 0u) | (second ? bit_of(j, i, 1) : 0u);
                (i % 2 ? ties.y : ties.x) += (first ? 1.0f : 0.0f) + (second ? 1.0f : 0.0f);
                x = {arch::exp2_approx(fmaf(x.x, G::unit, -h)),
                     arch::exp2_approx(fmaf(x.y, G::unit, -h))};
            }
        }
    }
    // Times (dO . v - delta) / sqrt(D); and their sums.
    static __device__ __forceinline__ void differentiate(typename G::scores& s,
                                                         const typename G::scores& products,
                                                         float2 delta, float2& sum) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float d = i % 2 ? delta.y : delta.x;
                const float2 p = products.tiles[0][j].data[i];
                float2& x = s.tiles[0][j].data[i];
                x = {x.x * fmaf(p.x, G::scale, -d), x.y * fmaf(p.y, G::scale, -d)};
                (i % 2 ? sum.y : sum.x) += x.x + x.y;
            }
        }
    }
    static __device__ __forceinline__ void finish(typename G::weights& to,
                                                  const typename G::scores& s, uint32_t is_top,
                                                  float beta, float2 of_top) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? of_top.y : of_top.x;
                const float2 x = s.tiles[0][j].data[i];
                const float2 y = {is_top & bit_of(j, i, 0) ? t : 0.0f,
                                  is_top & bit_of(j, i, 1) ? t : 0.0f};
                to.tiles[0][j].data[i] = pack_pair<T>(fmaf(beta, x.x, -y.x), fmaf(beta, x.y, -y.y));
            }
        }
    }

    __device__ __forceinline__ void store_row(int chunk, int row, const float4& x,
                                              const float2& w) const {
        const int64_t at = (int64_t(item.line) * g.chunks + chunk) * CHUNK + row;
        arch::store_global(reinterpret_cast<float4*>(g.rows) + at, x);
        arch::store_global(reinterpret_cast<float2*>(g.weights) + at, w);
    }

    __device__ __forceinline__ void run() {
        const float alpha = arch::load_global_readonly(g.alpha + item.head);
        const float beta = arch::load_global_readonly(g.beta + item.head);
        const float beta_exponent = arch::log2_approx(beta);  // of a weight's factor
        const int count = item.end - item.begin;
        if (item.last() && item.end < g.chunks && warpgroup::laneid() < CHUNK) {
            // The kernel for the keys reads one chunk more, as if it had no queries.
            store_row(item.end, warpgroup::laneid(), {0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f});
        }
        float beta_sum = 0.0f;
        if (count > 0) {
            wait(shared.maps, 0);
            wait(shared.k_full[0], 0);
            wait(shared.v_full[0], 0);
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = recomputed(this->shared);
            const int stage = n % 2, chunk = item.begin + n;
            auto &q = shared.q[stage], &before = shared.k[n % 3], &own = shared.k[(n + 1) % 3];
            typename G::scores prior, diagonal, products;
            discard(prior, diagonal, products);
            wait(shared.q_full[stage], n / 2 % 2);
            warpgroup::mm_ABt(prior, q, before);
            wait(shared.k_full[(n + 1) % 3], (n + 1) / 3 % 2);
            warpgroup::mm_ABt(diagonal, q, own);
            wait(shared.grad_out_full, n % 2);
            warpgroup::mm_ABt(products, shared.grad_out, shared.v[stage]);
            if (n > 0 && warpgroup::laneid() == 0) {
                // The results of the step before have left the other query's slot.
                tma::store_async_read_wait();
                arrive(shared.q_empty[stage ^ 1]);
            }
            const QueryRows rows(g, item, chunk);
            const int row = lane_row();
            warpgroup::mma_async_wait<1>(prior);
            pin_tile(diagonal);
            float2 top = {-INFINITY, -INFINITY};
            const bool first = chunk == 0;
            for_each_element(prior, [&](float& x, int, bool low) {
                x = first ? -INFINITY : x;
                float& t = low ? top.y : top.x;
                t = fmaxf(t, x);
            });
            for_each_element(diagonal, [&](float& x, int column, bool low) {
                if (column > row + (low ? 8 : 0)) x = -INFINITY;
                float& t = low ? top.y : top.x;
                t = fmaxf(t, x);
            });
            top = {quad_maximum(top.x), quad_maximum(top.y)};
            const float2 shift = {fmaf(top.x, G::unit, -arch::log2_approx(rows.reciprocal.x)),
                                  fmaf(top.y, G::unit, -arch::log2_approx(rows.reciprocal.y))};
            const float2 delta = {G::scale * rows.delta.x, G::scale * rows.delta.y};
            float2 sum = {0.0f, 0.0f}, ties = {0.0f, 0.0f};
            uint32_t prior_is_top, is_top;
            weigh(prior, prior_is_top, top, shift, ties);
            warpgroup::mma_async_wait<0>(products);
            differentiate(prior, products, delta, sum);
            wait(shared.v_full[stage ^ 1], (n + 1) / 2 % 2);
            discard(products);
            warpgroup::mm_ABt(products, shared.grad_out, shared.v[stage ^ 1]);
            weigh(diagonal, is_top, top, shift, ties);
            warpgroup::mma_async_wait<0>(products);
            signal(shared.v_empty[stage]);
            signal(shared.grad_out_empty);
            differentiate(diagonal, products, delta, sum);
            sum = {quad_sum(sum.x), quad_sum(sum.y)};
            ties = {quad_sum(ties.x), quad_sum(ties.y)};
            beta_sum += sum.x + sum.y;
            const float2 of_top = {beta * sum.x / ties.x, beta * sum.y / ties.y};
            typename G::weights prior_gradient, gradient;
            finish(prior_gradient, prior, prior_is_top, beta, of_top);
            finish(gradient, diagonal, is_top, beta, of_top);
            typename G::output dq;
            discard(dq);
            warpgroup::mm_AB(dq, prior_gradient, before);
            warpgroup::mma_AB(dq, gradient, own);
            if (laneid() % 4 == 0) {
                const int at = item.terrace.row(chunk) + row;
                const auto exists = [&](int i) { return i >= 0 && i < g.length; };
                const float2 w = {exists(at) ? alpha * rows.reciprocal.x : 0.0f,
                                  exists(at + 8) ? alpha * rows.reciprocal.y : 0.0f};
                store_row(chunk, row, {top.x, shift.x - beta_exponent, delta.x, of_top.x},
                          {w.x, rows.delta.x});
                store_row(chunk, row + 8, {top.y, shift.y - beta_exponent, delta.y, of_top.y},
                          {w.y, rows.delta.y});
            }
            warpgroup::mma_async_wait<1>();
            signal(shared.k_empty[n % 3]);
            wait(shared.projected_full, n % 2);
            warpgroup::mma_ABt(dq, shared.projected, shared.q_map);
            warpgroup::mma_async_wait<0>(dq);
            signal(shared.projected_empty);
            const int first_row = item.terrace.row(chunk);
            if (!g.want_dq) continue;
            if (first_row >= 0) {
                warpgroup::store(q, dq);
                arch::fence_async_shared();
                warpgroup::sync(barrier);
                if (warpgroup::laneid() == 0)
                    tma::store_async(g.dq, q, elements(item.b, item.head, first_row, 0));
            } else {
                store_rows(g.dq.raw_ptr + int64_t(item.line) * g.length * K::head_dim, g.length,
                           first_row, dq);
            }
        }
        store_factor_part<1, barrier>(shared.beta_parts, beta_sum / G::scale, 0,
                                      g.factor_parts + g.lines * g.segments + blockIdx.x);
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_GRADIENT_THREADS, 1) void lolcats_query_gradient_kernel(
    const __grid_constant__ QueryGradientGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<QueryGradientShared<K>>();
    if (threadIdx.x == 0) shared.init();
    arch::wait_for_dependencies();
    arch::sync_block();
    const LolcatsItem item(int(blockIdx.x), g.heads, g.segments, g.initial.lengths, g.length);
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == PRODUCER_ROLE) {
        warpgroup::decrease_registers<QUERY_PRODUCER_REGISTERS>();
        if (warpgroup::elect_leader() && item.begin < item.end)
            produce_for_queries(g, shared, item);
    } else if (role == WINDOW_ROLE) {
        warpgroup::increase_registers<QUERY_WINDOW_REGISTERS>();
        QueryWindowRole<K>{g, shared, item}.run();
    } else {
        warpgroup::increase_registers<QUERY_LINEAR_REGISTERS>();
        if (role == 0)
            QueryLinearRole<K, 0>().run(g, shared, item);
        else
            QueryLinearRole<K, 1>().run(g, shared, item);
    }
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_query_gradient(const LolcatsBackwardParams& params,
                                   const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(QueryGradientShared<K>) + 1024 <= LOLCATS_QUERY_BYTES);
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    const auto tokens = [&](const Operand& x) {
        return token_layout_of<typename K::token_layout>(x, p, p.heads, p.length);
    };
    const QueryGradientGlobals<K> globals{
        .q = tokens(call.q),
        .grad_out = tokens(params.grad_out),
        // A tensor map needs an address, also where nothing goes through it.
        .dq = tokens(params.dq.data ? params.dq : call.q),
        .kv = KeysAndValues<K>(call, w.forward),
        .q_map = map_layout_of<typename K::map_layout>(call.q_map, p.heads),
        .k_map = map_layout_of<typename K::map_layout>(call.k_map, p.heads),
        .projected = projected_layout_of<K>(w.dq_projected, p),
        .alpha = call.alpha,
        .beta = call.beta,
        .initial = call.initial,
        .sums = w.forward.sums,
        .delta = w.delta,
        .denominators = params.denominators,
        .rows = w.rows,
        .weights = w.weights,
        .factor_parts = w.factor_parts,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments,
        .chunks = int(chunks_of(p)),
        .lines = p.batch * p.heads,
        .want_dq = params.dq.data != nullptr,
        .want_projected = params.dq_map != nullptr};
    kittens::launch({.dependent = true}, lolcats_query_gradient_kernel<K>,
                    dim3(unsigned(globals.lines * call.segments)), dim3(LOLCATS_GRADIENT_THREADS),
                    dim3(1), LOLCATS_QUERY_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
