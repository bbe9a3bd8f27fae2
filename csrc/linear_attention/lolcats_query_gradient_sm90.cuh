// LoLCATS's gradient for the queries, on Hopper. With w_ij the forward's weights over their sum,
// delta_i = dO_i . O_i, S and s the sums of phi(k) v^T and phi(k) before the window:
//   window   dA_ij = w_ij (dO_i . v_j - delta_i); of the score that is the row's maximum, which the
//            forward subtracts, also minus the row's sum of dA; dQ = dA K / sqrt(D)
//   linear   dphi_i = alpha / denominator_i (S dO_i - delta_i s); through both softmaxes to dz;
//            dQ += dz W^T
// A block walks forwards over the chunks of one head, like the forward (lolcats_forward_sm90.cuh),
// and has three warpgroups: linear (sums in fp32 registers; leaves dz in shared memory and in global
// memory, for W's gradient), window (dQ), and one of which a thread brings Q, dO, K and V and a
// warp makes delta. It also leaves what the kernel for the keys needs of each row, and parts of
// alpha's and beta's gradient.
#pragma once

#include "csrc/linear_attention/lolcats_gradient.cuh"

namespace thunderkittens::linear_attention {

constexpr int LOLCATS_QUERY_THREADS = 3 * WARPGROUP_THREADS;
constexpr int QUERY_LINEAR_ROLE = 0, QUERY_PRODUCER_ROLE = 2;  // 1: window
// Of 504 together.
constexpr int QUERY_LINEAR_REGISTERS = 256, QUERY_WINDOW_REGISTERS = 208,
              QUERY_PRODUCER_REGISTERS = 40;

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
    const float* sums;  // before each segment; null: there is one
    const float* denominators;
    float *rows, *weights, *factor_parts;
    int heads, length, segments, chunks;
    int64_t lines;
    bool want_dq, want_projected;
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
    sv<float, 2 * CHUNK> rows[stages];       // 1 / denominator and delta of each query
    sv<float, 2 * K::features> denominator;  // of the state
    sv<float, 16> scratch;
    sv<float, WARPGROUP_THREADS / 4> alpha_sums;  // of each quad's rows
    sv<float, 2 * WARPGROUP_WARPS> factor_parts;  // of alpha, of beta
    semaphore maps, queries_full[stages], queries_empty[stages], keys_full[stages],
        keys_empty[stages], out_full, rows_full[stages], projected_full, projected_empty;

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
        init_semaphore(projected_full, 1);
        init_semaphore(projected_empty, 1);
        arch::mbarrier_init_fence();
    }
};

// Step n is chunk begin + n. The n-th keys are those of the chunk before it.
template <class K>
__device__ __forceinline__ void produce_for_queries(const QueryGradientGlobals<K>& g,
                                                    QueryGradientShared<K>& shared,
                                                    const LolcatsItem& item) {
    tma::expect(shared.maps, shared.q_map, shared.k_map);
    tma::load_async(shared.q_map, g.q_map, elements(0, item.head, 0, 0), shared.maps);
    tma::load_async(shared.k_map, g.k_map, elements(0, item.head, 0, 0), shared.maps);
    for (int n = 0; n <= item.end - item.begin; ++n) {
        if (n > 0) {
            const int stage = (n - 1) % 2, row = item.terrace.row(item.begin + n - 1);
            wait(shared.queries_empty[stage], (n - 1) / 2 % 2 ^ 1);
            auto& to = shared.queries[stage];
            semaphore& full = shared.queries_full[stage];
            tma::expect(full, to.q, to.grad_out);
            tma::load_async(to.q, g.q, elements(item.b, item.head, row, 0), full);
            tma::load_async(to.grad_out, g.grad_out, elements(item.b, item.head, row, 0), full);
        }
        // Before the first chunk there is none; any will do, with a weight of zero.
        const int stage = n % 2;
        wait(shared.keys_empty[stage], n / 2 % 2 ^ 1);
        auto& to = shared.keys[stage];
        g.kv.load(to.k, to.v, item, ::max(item.begin + n - 1, 0), g.initial.keys != nullptr,
                  shared.keys_full[stage]);
    }
}

// By one warp: delta, which is a diagonal of dO O^T, and 1 / denominator of each query; 0 and 1
// where there is none. O is brought in halves of a chunk.
template <class K>
__device__ __forceinline__ void make_query_rows(const QueryGradientGlobals<K>& g,
                                                QueryGradientShared<K>& shared,
                                                const LolcatsItem& item) {
    using T = typename K::T;
    const int count = item.end - item.begin;
    const auto load_half = [&](int n) {
        if (n >= 2 * count || laneid() != 0) return;
        const int row = item.terrace.row(item.begin) + CHUNK / 2 * n;
        tma::expect(shared.out_full, shared.out);
        tma::load_async(shared.out, g.out, elements(item.b, item.head, row, 0), shared.out_full);
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
            const int at = item.terrace.row(item.begin + n) + row;
            float denominator = 1.0f;
            if (at >= 0 && at < g.length)
                denominator = arch::load_global_readonly(
                    g.denominators + int64_t(item.line) * g.length + at);
            wait(shared.out_full, half);
#pragma unroll 1
            for (int block = 0; block < CHUNK / 2; block += 16) {
                const int first = CHUNK / 2 * half + block;
                const TileParts<typename K::token_tile> grads(queries.grad_out, first);
                const TileParts<typename QueryGradientGlobals<K>::out_tile> outs(shared.out, block);
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

// The sum over the warpgroup's rows, which all lanes of a quad have.
template <int barrier>
__device__ __forceinline__ void store_factor_part(sv<float, 2 * WARPGROUP_WARPS>& parts, int first,
                                                  float sum, float* to) {
#pragma unroll
    for (int distance = 4; distance < WARP_THREADS; distance *= 2)
        sum += arch::shuffle_xor(sum, distance);
    if (laneid() == 0) parts.set(first + warpgroup::warpid(), sum);
    warpgroup::sync(barrier);
    if (warpgroup::laneid() != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPGROUP_WARPS; ++w) total += parts.get(first + w);
    arch::store_global(to, total);
}

template <class K>
struct QueryLinearRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = 1;
    const QueryGradientGlobals<K>& g;
    QueryGradientShared<K>& shared;
    const LolcatsItem& item;

    __device__ __forceinline__ void run() {
        constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
        LolcatsSums<K> sums;
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
        // Kept in shared memory, because there are no registers left; a barrier is before the first
        // use. Also alpha.
        if (laneid() < LolcatsSums<K>::warp_pairs)
            arch::store_shared(shared.denominator.address_of(LolcatsSums<K>::own_feature()),
                               sums.denominator);
        if (laneid() % 4 == 0) shared.alpha_sums.set(warpgroup::laneid() / 4, 0.0f);
        constexpr int alpha_place = 15;
        if (warpgroup::laneid() == 0)
            shared.scratch.set(alpha_place, arch::load_global_readonly(g.alpha + item.head));
        const int count = item.end - item.begin;
        if (count > 0) wait(shared.maps, 0);
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = recomputed(this->shared);
            const int stage = n % 2;
            auto& queries = shared.queries[stage];
            auto& before = shared.keys[stage];  // the n-th
            typename K::projection z, gradient;
            discard(z);
            wait(shared.keys_full[stage], n / 2 % 2);
            warpgroup::mm_AB(z, before.k, shared.k_map);
            // The sums before this chunk's window, as operands.
            const float range = range_factor<K>(sums, shared.scratch, barrier);
            publish_parts(sums, shared.state, range);
            warpgroup::mma_async_wait<0>(z);
            {
                // The chunk before is before the window of the next; before the first is none.
                typename K::Features features;
                make_scaled_features<K>(features, z, item.begin + n > 0 ? 1.0f : 0.0f);
                store_feature_parts<K>(shared.features, features);
            }
            if (warpgroup::laneid() == 0) tma::store_async_read_wait();  // of the last dz
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            wait(shared.queries_full[stage], n / 2 % 2);
            discard(z, gradient);
            warpgroup::mm_AB(z, queries.q, shared.q_map);
            issue_feature_gradient<K>(gradient, queries.grad_out, shared.state, 0);
            sums.issue(shared.features, before.v);
            wait(shared.rows_full[stage], n / 2 % 2);
            warpgroup::mma_async_wait<K::groups>(z);
            pin_tile(gradient);
            const auto& rows = shared.rows[stage];
            const auto factor = [&] { return shared.scratch.get(alpha_place) / range; };
            const bool harmless = all_harmless<K>(z);
            // One sign at a time, because there are not registers for both beside the sums.
            rt<T, 16, K::features> first;
            float dots = harmless ? softmax_gradient<K, 0, true>(gradient, z, shared.denominator,
                                                                 rows, range, factor, first)
                                  : softmax_gradient<K, 0, false>(gradient, z, shared.denominator,
                                                                  rows, range, factor, first);
#pragma unroll
            for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = gradient.tiles[0][j].data[i];
                    first.tiles[0][j].data[i] = pack_pair<T>(pair.x, pair.y);
                }
            }
            discard(gradient);
            issue_feature_gradient<K>(gradient, queries.grad_out, shared.state, 1);
            constexpr int own_features = K::features / 2;
            const int own = own_features * warpgroup::warpid();
            FeatureSums<typename K::feature_tile, own_features> counts;
            counts.add(shared.features[K::groups > 1 ? own / 64 : 0], own % 64, Ones<T>());
            warpgroup::mma_async_wait<0>(gradient);
#pragma unroll
            for (int t = 0; t < K::groups; ++t) pin_tile(sums.numerator[t]);
            signal(shared.queries_empty[stage]);
            signal(shared.keys_empty[stage]);
            dots += harmless ? softmax_gradient<K, 1, true>(gradient, z, shared.denominator, rows,
                                                            range, factor, first)
                             : softmax_gradient<K, 1, false>(gradient, z, shared.denominator, rows,
                                                             range, factor, first);
            if (laneid() % 4 == 0) {
                const int pair = warpgroup::laneid() / 4;
                shared.alpha_sums.set(pair, shared.alpha_sums.get(pair) + dots / range);
            }
            if (n > 0) wait(shared.projected_empty, (n - 1) % 2);
            warpgroup::store(shared.projected, gradient);
            arch::fence_async_shared();
            warpgroup::sync(barrier);
            counts.add_to(shared.denominator, own);
            signal(shared.projected_full);
            if (g.want_projected && warpgroup::laneid() == 0) {
                tma::store_async(g.projected, shared.projected,
                                 elements(0, item.line, (item.begin + n) * CHUNK, 0));
            }
        }
        arch::sync_warp();
        store_factor_part<barrier>(shared.factor_parts, 0, 
                                   shared.alpha_sums.get(warpgroup::laneid() / 4),
                                   g.factor_parts + int64_t(item.line) * g.segments + item.segment);
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
struct QueryWindowRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = 2;
    const QueryGradientGlobals<K>& g;
    QueryGradientShared<K>& shared;
    const LolcatsItem& item;

    // -inf for the tokens after a query, in its own chunk.
    static __device__ __forceinline__ void mask(typename G::scores& s) {
        const int band = arch::warp_uniform(warpgroup::warpid());
        const bool even = 2 * (laneid() % 4) > laneid() / 4;
        const bool odd = 2 * (laneid() % 4) + 1 > laneid() / 4;
        constexpr float2 nothing = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
            auto& block = s.tiles[0][j].data;
            if (j > band) {
#pragma unroll
                for (int i = 0; i < 4; ++i) block[i] = nothing;
            } else if (j == band) {
                block[0] = {even ? -INFINITY : block[0].x, odd ? -INFINITY : block[0].y};
                block[2] = nothing;
                block[3] = {even ? -INFINITY : block[3].x, odd ? -INFINITY : block[3].y};
            }
        }
    }
    static __device__ __forceinline__ void find_maximum(const typename G::scores& s, float2& top) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = s.tiles[0][j].data[i];
                float& t = i % 2 ? top.y : top.x;
                t = fmaxf(t, fmaxf(pair.x, pair.y));
            }
        }
    }
    // The weights, exp(s - maximum) beta / denominator, times (dO . v - delta) / sqrt(D), in place of
    // s; their sums, and how many scores are the maximum. The tile of products becomes 1 where the
    // score is it.
    static __device__ __forceinline__ void differentiate(typename G::scores& s,
                                                         typename G::scores& products, float2 top,
                                                         float2 shift, float2 delta, float2& sum,
                                                         float2& ties) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? top.y : top.x, h = i % 2 ? shift.y : shift.x,
                            d = i % 2 ? delta.y : delta.x;
                float2 &x = s.tiles[0][j].data[i], &p = products.tiles[0][j].data[i];
                const float2 e = {arch::exp2_approx(fmaf(x.x, G::unit, -h)),
                                  arch::exp2_approx(fmaf(x.y, G::unit, -h))};
                const float2 y = {e.x * fmaf(p.x, G::scale, -d), e.y * fmaf(p.y, G::scale, -d)};
                p = {x.x == t ? 1.0f : 0.0f, x.y == t ? 1.0f : 0.0f};
                x = y;
                (i % 2 ? sum.y : sum.x) += y.x + y.y;
                (i % 2 ? ties.y : ties.x) += p.x + p.y;
            }
        }
    }
    static __device__ __forceinline__ void finish(typename G::weights& to,
                                                  const typename G::scores& s,
                                                  const typename G::scores& is_top, float2 of_top) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? of_top.y : of_top.x;
                const float2 x = s.tiles[0][j].data[i], y = is_top.tiles[0][j].data[i];
                to.tiles[0][j].data[i] =
                    pack_pair<T>(fmaf(-t, y.x, x.x), fmaf(-t, y.y, x.y));
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
        const float factor = beta == 0.0f ? 1.0f : beta;  // beta's gradient is the sum over it
        const int count = item.end - item.begin;
        float beta_sum = 0.0f;
        if (count > 0) {
            wait(shared.maps, 0);
            wait(shared.keys_full[0], 0);
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = this->shared;
            const int stage = n % 2, chunk = item.begin + n;
            auto& queries = shared.queries[stage];
            auto &before = shared.keys[stage], &own = shared.keys[stage ^ 1];
            typename G::scores prior, diagonal, prior_products, products;
            discard(prior, diagonal, prior_products, products);
            wait(shared.queries_full[stage], n / 2 % 2);
            warpgroup::mm_ABt(prior, queries.q, before.k);
            wait(shared.keys_full[stage ^ 1], (n + 1) / 2 % 2);
            warpgroup::mm_ABt(diagonal, queries.q, own.k);
            warpgroup::mm_ABt(prior_products, queries.grad_out, before.v);
            warpgroup::mm_ABt(products, queries.grad_out, own.v);
            if (n > 0 && warpgroup::laneid() == 0) {
                // The results of the step before have left the other query's slot.
                tma::store_async_read_wait();
                arrive(shared.queries_empty[stage ^ 1]);
            }
            wait(shared.rows_full[stage], n / 2 % 2);
            const QueryRows rows(shared.rows[stage]);
            const int row = lane_row();
            warpgroup::mma_async_wait<2>(prior);
            pin_tile(diagonal);
            float2 top = {-INFINITY, -INFINITY};
            if (chunk == 0) for_each_element(prior, [](float& x, int, bool) { x = -INFINITY; });
            mask(diagonal);
            find_maximum(prior, top);
            find_maximum(diagonal, top);
            top = {quad_maximum(top.x), quad_maximum(top.y)};
            const float2 shift = {
                fmaf(top.x, G::unit, -arch::log2_approx(factor * rows.reciprocal.x)),
                fmaf(top.y, G::unit, -arch::log2_approx(factor * rows.reciprocal.y))};
            const float2 delta = {G::scale * rows.delta.x, G::scale * rows.delta.y};
            float2 sum = {0.0f, 0.0f}, ties = {0.0f, 0.0f};
            warpgroup::mma_async_wait<0>(prior_products);
            pin_tile(products);
            differentiate(prior, prior_products, top, shift, delta, sum, ties);
            differentiate(diagonal, products, top, shift, delta, sum, ties);
            sum = {quad_sum(sum.x), quad_sum(sum.y)};
            ties = {quad_sum(ties.x), quad_sum(ties.y)};
            beta_sum += sum.x + sum.y;
            float2 of_top = {sum.x * arch::reciprocal_approx(ties.x),
                             sum.y * arch::reciprocal_approx(ties.y)};
            if (beta == 0.0f) {
                of_top = {0.0f, 0.0f};
                zero(prior);
                zero(diagonal);
            }
            typename G::weights prior_gradient, gradient;
            finish(prior_gradient, prior, prior_products, of_top);
            finish(gradient, diagonal, products, of_top);
            typename G::output dq;
            discard(dq);
            warpgroup::mm_AB(dq, prior_gradient, before.k);
            warpgroup::mma_AB(dq, gradient, own.k);
            if (laneid() % 4 == 0) {
                const float nothing = beta == 0.0f ? INFINITY : 0.0f;  // as a weight's logarithm
                const int at = item.terrace.row(chunk) + row;
                const auto exists = [&](int i) { return i >= 0 && i < g.length; };
                const float2 w = {exists(at) ? alpha * rows.reciprocal.x : 0.0f,
                                  exists(at + 8) ? alpha * rows.reciprocal.y : 0.0f};
                store_row(chunk, row, {top.x, shift.x + nothing, delta.x, of_top.x},
                          {w.x, rows.delta.x});
                store_row(chunk, row + 8, {top.y, shift.y + nothing, delta.y, of_top.y},
                          {w.y, rows.delta.y});
            }
            warpgroup::mma_async_wait<1>();
            signal(shared.keys_empty[stage]);
            wait(shared.projected_full, n % 2);
            warpgroup::mma_ABt(dq, shared.projected, shared.q_map);
            warpgroup::mma_async_wait<0>(dq);
            signal(shared.projected_empty);
            const int first_row = item.terrace.row(chunk);
            if (!g.want_dq) continue;
            if (first_row >= 0) {
                store_tile<K>(queries.q, dq);
                arch::fence_async_shared();
                warpgroup::sync(barrier);
                if (warpgroup::laneid() == 0)
                    tma::store_async(g.dq, queries.q, elements(item.b, item.head, first_row, 0));
            } else {
                store_rows(g.dq.raw_ptr + int64_t(item.line) * g.length * K::head_dim, g.length,
                           first_row, dq);
            }
        }
        if (item.last() && item.end < g.chunks && warpgroup::laneid() < CHUNK) {
            // The kernel for the keys reads one chunk more, as if it had no queries.
            store_row(item.end, warpgroup::laneid(), {0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f});
        }
        store_factor_part<barrier>(
            shared.factor_parts, WARPGROUP_WARPS, beta_sum / (G::scale * factor),
            g.factor_parts + (g.lines + item.line) * g.segments + item.segment);
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_QUERY_THREADS, 1) void lolcats_query_gradient_kernel(
    const __grid_constant__ QueryGradientGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<QueryGradientShared<K>>();
    if (threadIdx.x == 0) shared.init();
    arch::wait_for_dependencies();
    arch::sync_block();
    const LolcatsItem item(int(blockIdx.x), g.heads, g.segments, g.initial.lengths, g.length);
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == QUERY_PRODUCER_ROLE) {
        warpgroup::decrease_registers<QUERY_PRODUCER_REGISTERS>();
        if (item.begin >= item.end) return;
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0) {
            if (warpgroup::elect_leader()) produce_for_queries(g, shared, item);
        } else if (warp == 1) {
            make_query_rows(g, shared, item);
        }
    } else {
        if (role == QUERY_LINEAR_ROLE) {
            warpgroup::increase_registers<QUERY_LINEAR_REGISTERS>();
            QueryLinearRole<K>{g, shared, item}.run();
        } else {
            warpgroup::increase_registers<QUERY_WINDOW_REGISTERS>();
            QueryWindowRole<K>{g, shared, item}.run();
        }
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
        .out = token_layout_of<typename QueryGradientGlobals<K>::out_layout>(call.out, p, p.heads,
                                                                             p.length),
        .kv = KeysAndValues<K>(call, w.forward),
        .q_map = map_layout_of<typename K::map_layout>(call.q_map, p.heads),
        .k_map = map_layout_of<typename K::map_layout>(call.k_map, p.heads),
        .projected = projected_layout_of<K>(w.dq_projected, p),
        .alpha = call.alpha,
        .beta = call.beta,
        .initial = call.initial,
        .sums = w.forward.sums,
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
    // Alone in its call so far, or not.
    const bool dependent = call.segments > 1 || p.continued;
    kittens::launch({.dependent = dependent}, lolcats_query_gradient_kernel<K>,
                    dim3(unsigned(globals.lines * call.segments)), dim3(LOLCATS_QUERY_THREADS),
                    dim3(1), LOLCATS_QUERY_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
