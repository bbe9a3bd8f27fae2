// The third kernel of the gated delta rule's gradient: with the states that the second has left,
// the chunks know nothing of each other. A block takes one chunk of one head of the keys after
// another and walks over the value heads of each, so that dQ and dK are summed in registers in a
// fixed order; the values' columns come in slices of 64. Per value head (the formulas: backward.h)
//   query warpgroup  dO U^T; dQ += scale exp(c) dO S^T; dV = beta Y to memory and Y . U' meanwhile;
//                    dPG to shared memory; dQ += dPG K
//   key warpgroup    dV U^T; dK += exp(c_last - c) U dS^T, of which z; W;
//                    dK += W K - exp(c) dV S^T; dK += W^T K + dPG^T Q
//   producer         one warp loads by TMA (backward_work_sm90.cuh); three sum <S, dS>, and the
//                    first makes dg and dbeta of all sums of the rows (backward_gates_sm90.cuh)
// The parts of dK that enter dg with different signs are added one after the other, and what each
// adds to K . dK is read off in between.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_gates_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_gradient {

// sums += operands . states, for all slices. The slots of all but the last ring's are handed back
// on the way; release_states() does it for these, after a wait for the products.
template <class G>
__device__ __forceinline__ void add_slices(typename G::sum_tile& sums,
                                           const typename G::operand (&operands)[G::slices],
                                           typename DeltaGradientsShared<G>::States& states,
                                           semaphore (&full)[G::ring], semaphore (&empty)[G::ring],
                                           int n) {
#pragma unroll
    for (int s = 0; s < G::slices; ++s) {
        const int slot = n * G::slices + s;
        wait(full[slot % G::ring], slot / G::ring % 2);
        warpgroup::mma_AB(sums, operands[s], states.tiles[slot % G::ring]);
        if (s > 0 && s <= G::slices - G::ring) {
            warpgroup::mma_async_wait<1>();
            signal(empty[(slot - 1) % G::ring]);
        }
    }
}
template <class G>
__device__ __forceinline__ void release_states(semaphore (&empty)[G::ring], int n) {
    constexpr int handed_back = G::slices > G::ring ? G::slices - G::ring : 0;
#pragma unroll
    for (int s = handed_back; s < G::slices; ++s) signal(empty[(n * G::slices + s) % G::ring]);
}

template <class G>
struct DeltaQueryRole {
    using T = typename G::T;
    static constexpr int barrier = 1;
    const DeltaGradientsGlobals<G>& g;
    DeltaGradientsShared<G>& shared;

    __device__ __forceinline__ void run() {
        int n = 0, item = 0;
        for_each_chunk(
            g,
            [&](const DeltaChunk& chunk, int head) {
                typename G::sum_tile dq;
                zero(dq);
                float2 total = {0.0f, 0.0f};
#pragma unroll 1
                for (int r = 0; r < g.ratio; ++r, ++n) {
                    const float2 of_beta =
                        add_head(dq, chunk, head * g.ratio + r, n, r == 0 ? item : -1);
                    const float2 now = dot_rows<G>(shared.q, dq);
                    wait(shared.rows_empty[n % 2], n / 2 % 2 ^ 1);
                    store_row_sums(shared.rows[n % 2][QUERY_ROWS],
                                   {now.x - total.x, now.y - total.y});
                    store_row_sums(shared.rows[n % 2][BETA_ROWS], of_beta);
                    warpgroup::sync(barrier);
                    signal(shared.rows_full[n % 2]);
                    total = now;
                }
                finish_rows<G>(g.dq, g.norms, g, dq, total, shared.q, chunk, head);
                warpgroup::sync(barrier);
                signal(shared.tokens_empty);
                ++item;
            },
            [&](const DeltaChunk& chunk, int head) {
                clear_rows<G>(g.dq, chunk, head);
                for (int r = 0; r < g.ratio; ++r) clear_rows<G>(g.dv, chunk, head * g.ratio + r);
            });
    }

    // Returns the sums of Y U' over rows. `item` counts the queries and keys to wait for; negative
    // where they are here.
    __device__ __forceinline__ float2 add_head(typename G::sum_tile& dq, const DeltaChunk& chunk,
                                               int value_head, int n, int item) {
        auto& values = shared.values[n % G::stages];
        const auto& vectors = values.vectors;
        wait(shared.values_full[n % G::stages], n / G::stages % 2);
        rt_fl<16, 64> products;
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            if (s == 0)
                warpgroup::mm_AB(products, values.grad_out[s], values.values[s]);
            else
                warpgroup::mma_AB(products, values.grad_out[s], values.values[s]);
        }
        const int row = lane_row();
        // While states are on their way.
        const float2 beta = {vector_at(vectors, BETA, row), vector_at(vectors, BETA, row + 8)};
        const float2 of_beta =
            finish_values<G>(g.dv, values.values, values.grad_values, beta, chunk, value_head);
        const float2 factor = {g.scale * vector_at(vectors, EXP_C, row),
                               g.scale * vector_at(vectors, EXP_C, row + 8)};
        typename G::operand outputs[G::slices];
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            warpgroup::load(outputs[s], values.grad_out[s]);
            scale_into(outputs[s], outputs[s], [&](int, bool lower) {
                const float f = lower ? factor.y : factor.x;
                return float2{f, f};
            });
        }
        add_slices<G>(dq, outputs, shared.states, shared.states_full, shared.states_empty, n);
        warpgroup::mma_async_wait<G::slices>(products);
        typename G::operand scores;
        decayed<true>(scores, products, vectors, g.scale);
        wait(shared.scores_empty, n % 2 ^ 1);
        warpgroup::store(shared.scores, scores);
        arch::fence_async_shared();
        if (item >= 0) wait(shared.tokens_full, item % 2);
        warpgroup::mma_AB(dq, scores, shared.k);
        warpgroup::sync(barrier);
        signal(shared.scores_full);
        warpgroup::mma_async_wait<0>(dq);
        warpgroup::sync(barrier);
        signal(shared.values_empty[n % G::stages]);
        release_states<G>(shared.states_empty, n);
        return of_beta;
    }
};

template <class G>
struct DeltaKeyRole {
    using T = typename G::T;
    static constexpr int barrier = 2;
    const DeltaGradientsGlobals<G>& g;
    DeltaGradientsShared<G>& shared;

    __device__ __forceinline__ void run() {
        int n = 0, item = 0;
        for_each_chunk(
            g,
            [&](const DeltaChunk& chunk, int head) {
                typename G::sum_tile dk;
                zero(dk);
                float2 total = {0.0f, 0.0f};
#pragma unroll 1
                for (int r = 0; r < g.ratio; ++r, ++n) add_head(dk, total, n, r == 0 ? item : -1);
                finish_rows<G>(g.dk, g.norms == nullptr ? nullptr : g.norms + g.tokens, g, dk,
                               total, shared.k, chunk, head);
                warpgroup::sync(barrier);
                signal(shared.tokens_empty);
                ++item;
            },
            [&](const DeltaChunk& chunk, int head) { clear_rows<G>(g.dk, chunk, head); });
    }

    __device__ __forceinline__ void add_head(typename G::sum_tile& dk, float2& total, int n,
                                             int item) {
        auto& values = shared.values[n % G::stages];
        const auto& vectors = values.vectors;
        const int row = lane_row();
        wait(shared.values_full[n % G::stages], n / G::stages % 2);
        const float2 beta = {vector_at(vectors, BETA, row), vector_at(vectors, BETA, row + 8)};
        const auto by_rows = [](float2 f) {
            return [=](int, bool lower) { return lower ? float2{f.y, f.y} : float2{f.x, f.x}; };
        };
        typename G::operand operands[G::slices];
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            load_rows(operands[s], values.grad_values[s]);
            scale_into(operands[s], operands[s], by_rows(beta));
        }
        rt_fl<16, 64> products;
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            if (s == 0)
                warpgroup::mm_AB(products, operands[s], values.values[s]);
            else
                warpgroup::mma_AB(products, operands[s], values.values[s]);
        }
        warpgroup::mma_async_wait<0>(products);

        // dK += exp(c_last - c) U dS^T
        const float2 rest = {beta.x * vector_at(vectors, EXP_REST, row),
                             beta.y * vector_at(vectors, EXP_REST, row + 8)};
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            load_rows(operands[s], values.values[s]);
            scale_into(operands[s], operands[s], by_rows(rest));
        }
        add_slices<G>(dk, operands, shared.grad_states, shared.grad_states_full,
                      shared.grad_states_empty, n);
        typename G::operand erased;
        decayed<false>(erased, products, vectors, -1.0f);
        warpgroup::store(shared.erased, erased);
        arch::fence_async_shared();
        if (item >= 0) wait(shared.tokens_full, item % 2);
        warpgroup::mma_async_wait<0>(dk);
        warpgroup::sync(barrier);
        release_states<G>(shared.grad_states_empty, n);
        const float2 with_states = dot_rows<G>(shared.k, dk);

        // dK += W K - exp(c) dV S^T
        const float2 before = {-beta.x * vector_at(vectors, EXP_C, row),
                               -beta.y * vector_at(vectors, EXP_C, row + 8)};
        warpgroup::mma_AB(dk, erased, shared.k);
#pragma unroll
        for (int s = 0; s < G::slices; ++s) {
            load_rows(operands[s], values.grad_values[s]);
            scale_into(operands[s], operands[s], by_rows(before));
        }
        add_slices<G>(dk, operands, shared.states, shared.states_full, shared.states_empty, n);
        warpgroup::mma_async_wait<0>(dk);
        warpgroup::sync(barrier);
        release_states<G>(shared.states_empty, n);
        signal(shared.values_empty[n % G::stages]);
        const float2 with_erased = dot_rows<G>(shared.k, dk);

        // dK += W^T K + dPG^T Q
        warpgroup::mma_AtB(dk, shared.erased, shared.k);
        wait(shared.scores_full, n % 2);
        warpgroup::mma_AtB(dk, shared.scores, shared.q);
        warpgroup::mma_async_wait<0>(dk);
        signal(shared.scores_empty);
        const float2 now = dot_rows<G>(shared.k, dk);
        wait(shared.rows_empty[n % 2], n / 2 % 2 ^ 1);
        auto& rows = shared.rows[n % 2];
        store_row_sums(rows[STATE_ROWS], {with_states.x - total.x, with_states.y - total.y});
        store_row_sums(rows[KEY_ROWS], {2.0f * with_erased.x - with_states.x - now.x,
                                        2.0f * with_erased.y - with_states.y - now.y});
        total = now;
        warpgroup::sync(barrier);
        signal(shared.rows_full[n % 2]);
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
        if (warp == 0 && laneid() == 0) produce_delta(g, shared);
        if (warp > 0 && warp <= DELTA_SUM_WARPS) sum_gates(g, shared, warp - 1);
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
    const int64_t chunks = delta_chunks(p), tiles = chunks * slices;
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
        .tokens = delta_batch(p) * p.heads * p.length,
        .scale = call.scale};
    const int64_t items = delta_batch(p) * p.heads * delta_slots(p);
    const int64_t blocks = std::min<int64_t>(items, params.sm_count);
    kittens::launch({.dependent = true}, delta_gradients_kernel<G>, dim3(unsigned(blocks)),
                    dim3(DELTA_GRADIENT_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
