// LoLCATS's gradient for the queries, on Hopper. With w_ij the forward's weights over their sum,
// delta_i = dO_i . O_i, S and s the sums of phi(k) v^T and phi(k) before the window:
//   window   dA_ij = w_ij (dO_i . v_j - delta_i); of the score that is the row's maximum, which the
//            forward subtracts, also minus the row's sum of dA; dQ = dA K / sqrt(D)
//   linear   dphi_i = alpha / denominator_i (S dO_i - delta_i s); through both softmaxes to dz;
//            dQ += dz W^T
// A block walks forwards over the chunks of one head, like the forward (forward_sm90.cuh),
// and has three warpgroups: linear (sums in fp32 registers; leaves dz in shared memory and in
// global memory, for W's gradient), window (dQ), and one of which a thread brings Q, dO, K and V,
// a warp makes delta, and a thread stores dQ. It also leaves what the kernel for the keys needs
// of each row, and parts of alpha's and beta's gradient.
#pragma once

#include "csrc/linear_attention/lolcats/query_gradient_producer.cuh"

namespace thunderkittens::linear_attention {

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
    const LolcatsWorkTile& work;

    static constexpr int ALPHA = 15;  // its place in the scratch

    // The state before the segment. Its denominator and alpha are kept in shared memory, because
    // there are no registers left; a barrier is before the first use.
    __device__ __forceinline__ void load_state(LolcatsRunningState<K>& sums) const {
        constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
        sums.clear();
        if (g.initial.numerator != nullptr) {
            sums.add(g.initial.numerator + work.batch_head * floats,
                     g.initial.denominator + int64_t(work.batch_head) * 2 * K::features);
        }
        if (g.segment_states != nullptr) {
            add_segments_before(sums, g.segment_states, work, g.segments,
                                arch::shared_address(&shared.state[0]));
            warpgroup::sync(barrier);
        }
        if (laneid() < LolcatsRunningState<K>::warp_pairs)
            arch::store_shared(shared.denominator.address_of(LolcatsRunningState<K>::own_feature()),
                               sums.denominator);
        if (laneid() % 4 == 0) shared.alpha_sums.set(warpgroup::laneid() / 4, 0.0f);
        if (warpgroup::laneid() == 0)
            shared.scratch.set(ALPHA, arch::load_global_readonly(g.alpha + work.head));
    }

    __device__ __forceinline__ void run() {
        LolcatsRunningState<K> sums;
        load_state(sums);
        const int count = work.end - work.begin;
        if (count > 0) wait(shared.maps, 0);
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = rematerialized(this->shared);
            const int stage = n % 2;
            auto& queries = shared.queries[stage];
            auto& before = shared.keys[stage];  // the n-th
            typename K::projection z, gradient;
            discard(z);
            wait(shared.keys_full[stage], n / 2 % 2);
            warpgroup::mm_AB(z, before.k, shared.k_map);
            // The sums before this chunk's window, as operands.
            const float range = range_factor<K>(sums, shared.scratch, barrier);
            sums.store_operand(shared.state, range);
            warpgroup::mma_async_wait<0>(z);
            {
                // The chunk before is before the window of the next; before the first is none.
                typename K::Features features;
                make_scaled_features<K>(features, z, work.begin + n > 0 ? 1.0f : 0.0f);
                store_feature_rows<K>(shared.features, features);
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
            pin(gradient);
            const auto& rows = shared.rows[stage];
            const auto factor = [&] { return shared.scratch.get(ALPHA) / range; };
            const bool harmless = plain_exponentials_suffice<K>(z);
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
            for (int t = 0; t < K::groups; ++t) pin(sums.numerator[t]);
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
                                 elements(0, work.batch_head, (work.begin + n) * CHUNK, 0));
            }
        }
        arch::sync_warp();
        store_factor_part<barrier>(
            shared.factor_partials, 0, shared.alpha_sums.get(warpgroup::laneid() / 4),
            g.factor_partials + int64_t(work.batch_head) * g.segments + work.segment);
        if (warpgroup::laneid() == 0) tma::store_async_wait();
        group<2 * WARPGROUP_WARPS>::sync(QUERY_END_BARRIER);
        if (g.done != nullptr && warpgroup::laneid() == 0) set_flag(g.done + work.batch_head);
    }
};

template <class K>
struct QueryWindowRole {
    using G = LolcatsGradient<K>;
    using T = typename K::T;
    static constexpr int barrier = 2;
    const QueryGradientGlobals<K>& g;
    QueryGradientShared<K>& shared;
    const LolcatsWorkTile& work;

    // exp(s - maximum) / denominator (dO . v - delta) / sqrt(D), in place of s; their sums, and how
    // many scores are the maximum. The tile of products becomes 1 where the score is it.
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
                                                  const typename G::scores& is_top, float beta,
                                                  float2 of_top) {
#pragma unroll
        for (int j = 0; j < G::scores::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float t = i % 2 ? of_top.y : of_top.x;
                const float2 x = s.tiles[0][j].data[i], y = is_top.tiles[0][j].data[i];
                to.tiles[0][j].data[i] =
                    pack_pair<T>(fmaf(beta, x.x, -t * y.x), fmaf(beta, x.y, -t * y.y));
            }
        }
    }

    __device__ __forceinline__ void store_row(int chunk, int row, const float4& x,
                                              const float2& w) const {
        const int64_t at = (int64_t(work.batch_head) * g.chunks + chunk) * CHUNK + row;
        arch::store_global(reinterpret_cast<float4*>(g.rows) + at, x);
        arch::store_global(reinterpret_cast<float2*>(g.weights) + at, w);
    }

    __device__ __forceinline__ void run() {
        const float alpha = arch::load_global_readonly(g.alpha + work.head);
        const float beta = arch::load_global_readonly(g.beta + work.head);
        const int count = work.end - work.begin;
        float beta_sum = 0.0f;
        if (count > 0) {
            wait(shared.maps, 0);
            wait(shared.keys_full[0], 0);
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            auto& shared = this->shared;
            const int stage = n % 2, chunk = work.begin + n;
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
            wait(shared.rows_full[stage], n / 2 % 2);
            const QueryRows rows(shared.rows[stage]);
            const int row = lane_row();
            warpgroup::mma_async_wait<2>(prior);
            pin(diagonal);
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
            warpgroup::mma_async_wait<0>(prior_products);
            pin(products);
            differentiate(prior, prior_products, top, shift, delta, sum, ties);
            differentiate(diagonal, products, top, shift, delta, sum, ties);
            sum = {quad_sum(sum.x), quad_sum(sum.y)};
            ties = {quad_sum(ties.x), quad_sum(ties.y)};
            beta_sum += sum.x + sum.y;
            const float2 of_top = {beta * sum.x / ties.x, beta * sum.y / ties.y};
            typename G::weights prior_gradient, gradient;
            finish(prior_gradient, prior, prior_products, beta, of_top);
            finish(gradient, diagonal, products, beta, of_top);
            typename G::output dq;
            discard(dq);
            warpgroup::mm_AB(dq, prior_gradient, before.k);
            warpgroup::mma_AB(dq, gradient, own.k);
            if (laneid() % 4 == 0) {
                const float beta_exponent = arch::log2_approx(beta);  // beta is a weight's factor
                const int at = work.terrace.row(chunk) + row;
                const auto exists = [&](int i) { return i >= 0 && i < g.length; };
                const float2 w = {exists(at) ? alpha * rows.reciprocal.x : 0.0f,
                                  exists(at + 8) ? alpha * rows.reciprocal.y : 0.0f};
                store_row(chunk, row, {top.x, shift.x - beta_exponent, delta.x, of_top.x},
                          {w.x, rows.delta.x});
                store_row(chunk, row + 8, {top.y, shift.y - beta_exponent, delta.y, of_top.y},
                          {w.y, rows.delta.y});
            }
            warpgroup::mma_async_wait<1>();
            signal(shared.keys_empty[stage]);
            wait(shared.projected_full, n % 2);
            warpgroup::mma_ABt(dq, shared.projected, shared.q_map);
            warpgroup::mma_async_wait<0>(dq);
            signal(shared.projected_empty);
            const int first_row = work.terrace.row(chunk);
            if (g.want_dq) {
                if (first_row >= 0) {
                    warpgroup::store(queries.q, dq);
                    arch::fence_async_shared();
                } else {
                    store_rows(g.dq.raw_ptr + int64_t(work.batch_head) * g.length * K::head_dim,
                               g.length, first_row, dq);
                }
            }
            arch::sync_warp();
            if (laneid() == 0) arrive(shared.dq_full);
        }
        if (work.last() && work.end < g.chunks && warpgroup::laneid() < CHUNK) {
            // The kernel for the keys reads one chunk more, as if it had no queries.
            store_row(work.end, warpgroup::laneid(), {0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f});
        }
        store_factor_part<barrier>(
            shared.factor_partials, WARPGROUP_WARPS, beta_sum / G::scale,
            g.factor_partials + (g.batch_heads + work.batch_head) * g.segments + work.segment);
        group<2 * WARPGROUP_WARPS>::sync(QUERY_END_BARRIER);
    }
};

template <class K>
__global__ __launch_bounds__(LOLCATS_QUERY_THREADS, 1) void lolcats_query_gradient_kernel(
    const __grid_constant__ QueryGradientGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<QueryGradientShared<K>>();
    if (threadIdx.x == 0) shared.init();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (g.segment_states == nullptr) {
        arch::wait_for_dependencies();
        if (threadIdx.x == 0) clear_flag(g.done + blockIdx.x);
    } else if (role != QUERY_LINEAR_ROLE) {
        // Only that role uses what the kernels before this one make, but for first rows, for which
        // the kernel that sums segments has waited.
        arch::skip_dependencies();
    }
    arch::sync_block();
    // Not for what sums segments: its small blocks would crowd where the first blocks end.
    if (g.segment_states == nullptr) arch::launch_dependents();
    if (role == QUERY_PRODUCER_ROLE) {
        warpgroup::decrease_registers<QUERY_PRODUCER_REGISTERS>();
        const LolcatsWorkTile work = g.work_tile();
        if (work.begin >= work.end) return;
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0) {
            if (warpgroup::elect_leader()) produce_for_queries(g, shared, work);
        } else if (warp == 1) {
            make_query_rows(g, shared, work);
        } else if (warp == 2 && laneid() == 0) {
            store_query_gradients(g, shared, work);
        }
    } else {
        if (role == QUERY_LINEAR_ROLE) {
            warpgroup::increase_registers<QUERY_LINEAR_REGISTERS>();
            if (g.segment_states != nullptr) arch::wait_for_dependencies();
            const LolcatsWorkTile work = g.work_tile();
            QueryLinearRole<K>{g, shared, work}.run();
        } else {
            warpgroup::increase_registers<QUERY_WINDOW_REGISTERS>();
            const LolcatsWorkTile work = g.work_tile();
            QueryWindowRole<K>{g, shared, work}.run();
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
        .segment_states = w.forward.segment_states,
        .denominators = params.denominators,
        .rows = w.rows,
        .weights = w.weights,
        .factor_partials = w.factor_partials,
        .done = w.queries_done,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments,
        .chunks = int(chunks_of(p)),
        .batch_heads = p.batch * p.heads,
        .want_dq = params.dq.data != nullptr,
        .want_projected = params.dq_map != nullptr};
    // Alone in its call so far, or not.
    const bool dependent = call.segments > 1 || p.continued;
    kittens::launch({.dependent = dependent}, lolcats_query_gradient_kernel<K>,
                    dim3(unsigned(globals.batch_heads * call.segments)),
                    dim3(LOLCATS_QUERY_THREADS), dim3(1), LOLCATS_QUERY_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
