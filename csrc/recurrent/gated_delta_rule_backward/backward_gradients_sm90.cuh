// The third kernel of the gated delta rule's gradient: with the states that the second has left,
// the chunks know nothing of each other. A block takes one chunk of one head of the keys after
// another and walks over the value heads of each, so that dQ and dK are summed in registers in a
// fixed order; the values' columns come in slices of 64. A step is a value head, or one of two
// parts of its columns: all products are sums over them. Per step (the formulas: backward.h)
//   query warpgroup  dO U'^T, of which dPG, to shared memory; dQ += dPG K + scale exp(c) dO S^T;
//                    dV = beta Y to memory meanwhile
//   key warpgroup    Y U'^T, of which W, to shared memory, and Y . U';
//                    dK += W K - exp(c) dV S^T + exp(c_last - c) U dS^T + W^T K + dPG^T Q
//   producer         one warp loads by TMA (backward_work_sm90.cuh); three sum <S, dS>, and the
//                    first makes dg and dbeta of all sums of the rows (backward_gates_sm90.cuh)
// All operands of products but dPG are tiles in shared memory as they have come, whose factors are
// given to the sums. The parts of dK that enter dg with different signs are sums of their own until
// their products with K are read off.
//
// An arrival does not wait for loads from shared memory that are still on their way, and stores to
// memory hold these up. So what is read of a stage last is read well before it is handed back.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_gates_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_gradient {

// sums = tiles . states, over all slices; tiles of values lie transposed.
template <class G, bool transposed>
__device__ __forceinline__ void multiply_slices(typename G::sum_tile& sums,
                                                const typename G::square_tile (&tiles)[G::slices],
                                                typename G::token_tile (&states)[G::slices],
                                                semaphore (&full)[G::slices], int n) {
#pragma unroll
    for (int s = 0; s < G::slices; ++s) {
        wait(full[s], n % 2);
        warpgroup::template product<transposed, false>(sums, tiles[s], states[s], s > 0);
    }
}
template <class G>
__device__ __forceinline__ void release_states(semaphore (&empty)[G::slices]) {
#pragma unroll
    for (int s = 0; s < G::slices; ++s) signal_by_warp(empty[s]);
}
// tiles . values^T, over all slices.
template <class G, bool transposed>
__device__ __forceinline__ void multiply_values(
    rt_fl<16, 64>& products, const typename G::square_tile (&tiles)[G::slices],
    const typename G::square_tile (&values)[G::slices]) {
#pragma unroll
    for (int s = 0; s < G::slices; ++s)
        warpgroup::template product<transposed, false>(products, tiles[s], values[s], s > 0);
}
// sums += factors . products, by rows.
template <any_register_tile Tile>
__device__ __forceinline__ void add_scaled(Tile& sums, const Tile& products, float2 factors, int j,
                                           int i) {
    const float f = i % 2 ? factors.y : factors.x;
    const float2 x = products.tiles[0][j].data[i];
    float2& sum = sums.tiles[0][j].data[i];
    sum = {fmaf(f, x.x, sum.x), fmaf(f, x.y, sum.y)};
}

template <class G>
struct DeltaQueryRole {
    using sum_tile = typename G::sum_tile;
    const DeltaGradientsGlobals<G>& g;
    DeltaGradientsShared<G>& shared;

    __device__ __forceinline__ void run() {
        int n = 0, count = 0;
        for_each_chunk(
            g,
            [&](const DeltaChunk& chunk, int head) {
                sum_tile dq;
                zero(dq);
                float2 total = {0.0f, 0.0f};  // the lane's part of Q . dQ
#pragma unroll 1
                for (int step = 0; step < g.steps(); ++step, ++n) {
                    add_step(dq, total, chunk, head * g.ratio + g.head_of(step), g.part_of(step), n,
                             step == 0 ? count : -1);
                }
                finish_rows<G>(g.dq, g.norms, g, dq, quad_sums(total), shared.q, chunk, head);
                signal_by_warp(shared.tokens_empty);
                ++count;
            },
            [&](const DeltaChunk& chunk, int head) {
                clear_rows<G>(g.dq, chunk, head);
                for (int r = 0; r < g.ratio; ++r) clear_rows<G>(g.dv, chunk, head * g.ratio + r);
            });
    }

    // `tokens` counts the queries and keys to wait for; negative where they are here.
    __device__ __forceinline__ void add_step(sum_tile& dq, float2& total, const DeltaChunk& chunk,
                                             int value_head, int part, int n, int tokens) {
        auto& values = shared.values[n % G::stages];
        const auto& vectors = values.vectors;
        const int row = pinned(lane_row());
        wait(shared.values_full[n % G::stages], n / G::stages % 2);
        rt_fl<16, 64> products;
        multiply_values<G, false>(products, values.grad_out, values.values);
        sum_tile with_states;
        multiply_slices<G, false>(with_states, values.grad_out, shared.states, shared.states_full,
                                  n);
        warpgroup::mma_async_wait<G::slices>(products);
        typename G::operand scores;
        decayed<true>(scores, products, vectors, {g.scale, g.scale});
        const float2 factors = {g.scale * vector_at(vectors, EXP_C, row),
                                g.scale * vector_at(vectors, EXP_C, row + 8)};
        wait(shared.scores_empty, n % 2 ^ 1);
        warpgroup::store(shared.scores, scores);
        arch::fence_async_shared();
        signal_by_warp(shared.scores_full);
        if (tokens >= 0) wait(shared.tokens_full, tokens % 2);
        warpgroup::mma_AB(dq, scores, shared.k);
        warpgroup::mma_async_wait<1>(with_states);
        release_states<G>(shared.states_empty);
        const float2 beta = {vector_at(vectors, BETA, row), vector_at(vectors, BETA, row + 8)};
        finish_values<G>(g.dv, values.grad_values, beta, chunk, value_head, part);
        warpgroup::mma_async_wait<0>(dq);
        signal_by_warp(shared.values_empty[n % G::stages]);
        float2 now = {0.0f, 0.0f};
        for_each_pair<G>(shared.q, [&](float2 q, int j, int i) {
            add_scaled(dq, with_states, factors, j, i);
            add_dot(now, i, q, dq.tiles[0][j].data[i]);
        });
        wait(shared.rows_empty[n % 2], n / 2 % 2 ^ 1);
        store_row_sums(shared.rows[n % 2][QUERY_ROWS],
                       quad_sums(float2{now.x - total.x, now.y - total.y}));
        signal_by_warp(shared.rows_full[n % 2]);
        total = now;
    }
};

template <class G>
struct DeltaKeyRole {
    static constexpr int barrier = 2;
    using sum_tile = typename G::sum_tile;
    const DeltaGradientsGlobals<G>& g;
    DeltaGradientsShared<G>& shared;

    __device__ __forceinline__ void run() {
        int n = 0, count = 0;
        for_each_chunk(
            g,
            [&](const DeltaChunk& chunk, int head) {
                sum_tile dk;
                zero(dk);
                float2 total = {0.0f, 0.0f};  // the lane's part of K . dK
#pragma unroll 1
                for (int step = 0; step < g.steps(); ++step, ++n)
                    add_step(dk, total, n, step == 0 ? count : -1);
                finish_rows<G>(g.dk, g.norms == nullptr ? nullptr : g.norms + g.tokens, g, dk,
                               quad_sums(total), shared.k, chunk, head);
                signal_by_warp(shared.tokens_empty);
                ++count;
            },
            [&](const DeltaChunk& chunk, int head) { clear_rows<G>(g.dk, chunk, head); });
    }

    // Products with factors of their rows are sums of their own until they are done.
    __device__ __forceinline__ void add_step(sum_tile& dk, float2& total, int n, int tokens) {
        auto& values = shared.values[n % G::stages];
        const auto& vectors = values.vectors;
        const int row = pinned(lane_row());
        const float2 none = {0.0f, 0.0f};
        wait(shared.values_full[n % G::stages], n / G::stages % 2);
        rt_fl<16, 64> products;
        multiply_values<G, true>(products, values.grad_values, values.values);
        sum_tile sums;  // U' dS^T
        multiply_slices<G, true>(sums, values.values, shared.grad_states, shared.grad_states_full,
                                 n);
        wait(shared.rows_empty[n % 2], n / 2 % 2 ^ 1);
        auto& rows = shared.rows[n % 2];
        warpgroup::mma_async_wait<G::slices>(products);
        store_diagonal(rows[BETA_ROWS], products);
        const float2 beta = {vector_at(vectors, BETA, row), vector_at(vectors, BETA, row + 8)};
        typename G::operand erased;
        decayed<false>(erased, products, vectors, {-beta.x, -beta.y});
        warpgroup::sync(barrier);  // all have read W of the head before
        warpgroup::store(shared.erased, erased);
        arch::fence_async_shared();
        if (tokens >= 0) wait(shared.tokens_full, tokens % 2);
        warpgroup::sync(barrier);

        // dK += W K + exp(c_last - c) U dS^T
        warpgroup::mma_AB(dk, shared.erased, shared.k);
        sum_tile before;  // Y S^T
        multiply_slices<G, true>(before, values.grad_values, shared.states, shared.states_full, n);
        warpgroup::mma_async_wait<G::slices>(dk);
        warpgroup::mma_async_wait<G::slices>(sums);
        release_states<G>(shared.grad_states_empty);
        const float2 rest = weights_of(vectors, EXP_REST, row),
                     decay = weights_of(vectors, EXP_C, row);
        float2 with_states = none;
        for_each_pair<G>(shared.k, [&](float2 k, int j, int i) {
            add_dot(with_states, i, k, sums.tiles[0][j].data[i]);
            add_scaled(dk, sums, rest, j, i);
        });
        with_states = {rest.x * with_states.x, rest.y * with_states.y};
        store_row_sums(rows[STATE_ROWS], quad_sums(with_states));
        const float2 known = {total.x + with_states.x, total.y + with_states.y};

        // W^T K + dPG^T Q, and dK -= exp(c) dV S^T meanwhile
        warpgroup::mm_AtB(sums, shared.erased, shared.k);
        wait(shared.scores_full, n % 2);
        warpgroup::mma_AtB(sums, shared.scores, shared.q);
        warpgroup::mma_async_wait<2>(before);
        release_states<G>(shared.states_empty);
        signal_by_warp(shared.values_empty[n % G::stages]);
        total = none;
        for_each_pair<G>(shared.k, [&](float2 k, int j, int i) {
            add_scaled(dk, before, {-decay.x, -decay.y}, j, i);
            add_dot(total, i, k, dk.tiles[0][j].data[i]);
        });
        warpgroup::mma_async_wait<0>(sums);
        signal_by_warp(shared.scores_empty);
        float2 with_scores = none;
        for_each_pair<G>(shared.k, [&](float2 k, int j, int i) {
            add_dot(with_scores, i, k, sums.tiles[0][j].data[i]);
            add_scaled(dk, sums, {1.0f, 1.0f}, j, i);
        });
        store_row_sums(rows[KEY_ROWS], quad_sums(float2{total.x - known.x - with_scores.x,
                                                        total.y - known.y - with_scores.y}));
        signal_by_warp(shared.rows_full[n % 2]);
        total = {total.x + with_scores.x, total.y + with_scores.y};
    }

    // beta and a decay, multiplied, of the lane's two rows.
    template <class Vectors>
    static __device__ __forceinline__ float2 weights_of(const Vectors& vectors, DeltaVector decay,
                                                        int row) {
        return {vector_at(vectors, BETA, row) * vector_at(vectors, decay, row),
                vector_at(vectors, BETA, row + 8) * vector_at(vectors, decay, row + 8)};
    }
};

template <class G>
__global__ __launch_bounds__(DELTA_GRADIENT_THREADS, 1) void delta_gradients_kernel(
    const __grid_constant__ DeltaGradientsGlobals<G> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DeltaGradientsShared<G>>();
    if (first_thread()) shared.init();
    arch::wait_for_dependencies();
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == DELTA_QUERIES) {
        warpgroup::increase_registers<DELTA_QUERY_REGISTERS>();
        DeltaQueryRole<G>{g, shared}.run();
    } else if (role == DELTA_KEYS) {
        warpgroup::increase_registers<DELTA_KEY_REGISTERS>();
        DeltaKeyRole<G>{g, shared}.run();
    } else {
        warpgroup::decrease_registers<DELTA_PRODUCER_REGISTERS>();
        const int warp = arch::warp_uniform(warpgroup::warpid());
        static_assert(1 + DELTA_SUM_WARPS == WARPGROUP_WARPS);
        if (warp == 0 && laneid() == 0) produce_delta(g, shared);
        if (warp > 0) sum_gates(g, shared, warp - 1);
    }
}

}  // namespace delta_gradient

template <DType dtype, int key_dim, int slices>
void launch_delta_gradients(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_gradient;
    using K = DeltaTiles<dtype, key_dim>;
    using G = DeltaGradientsKernel<K, slices>;
    constexpr int bytes = delta_gradients_bytes(key_dim, slices);
    static_assert(sizeof(DeltaGradientsShared<G>) + 1024 <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int64_t chunks = delta_chunks(p), tiles = chunks * params.config.slices;
    const bool sums = params.grad_A_log != nullptr || params.grad_dt_bias != nullptr;
    using square = typename K::square_tile;
    using token = typename K::token_tile;
    const DeltaGradientsGlobals<G> globals{
        .q = {delta_operand(params, call.q, w.q), p, p.heads, p.key_dim},
        .k = {delta_operand(params, call.k, w.k), p, p.heads, p.key_dim},
        .grad_out = {params.grad_out, p, p.value_heads, p.value_dim},
        .states = tile_rows_of<token>(params, w.states, tiles),
        .grad_states = tile_rows_of<token>(params, w.grad_states, tiles),
        .values = tile_rows_of<square>(params, w.values, tiles),
        .grad_values = tile_rows_of<square>(params, w.grad_values, tiles),
        .vectors = vector_rows_of<typename K::vectors>(params, w.vectors, chunks),
        .dq = {params.dq, p.key_dim},
        .dk = {params.dk, p.key_dim},
        .dv = {params.dv, p.value_dim},
        .g = call.g,
        .beta = call.beta,
        .dg = params.dg,
        .dbeta = params.dbeta,
        .gate = call.gate,
        .sequences = call,
        .norms =
            call.l2_norm ? reinterpret_cast<const float*>(params.workspace + w.norms) : nullptr,
        .gates = sums ? reinterpret_cast<float*>(params.workspace + w.gates) : nullptr,
        .batch = int(delta_batch(p)),
        .heads = int(p.heads),
        .ratio = int(p.value_heads / p.heads),
        .parts = params.config.slices / slices,
        .tokens = delta_batch(p) * p.heads * p.length,
        .scale = call.scale};
    const int64_t items = delta_batch(p) * p.heads * delta_slots(p);
    const int64_t blocks = std::min<int64_t>(items, params.sm_count);
    kittens::launch({.dependent = true}, delta_gradients_kernel<G>, dim3(unsigned(blocks)),
                    dim3(DELTA_GRADIENT_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
