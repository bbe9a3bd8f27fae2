// What a block of the gated delta rule's gradient works on and with: tiles, shared memory, chunks,
// and how a thread brings what the roles of backward_gradients_sm90.cuh read.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_rows_sm90.cuh"

namespace thunderkittens::recurrent::delta_gradient {

// Rows that are sums, in two buffers.
enum DeltaRowSum { QUERY_ROWS, KEY_ROWS, STATE_ROWS, BETA_ROWS, DELTA_ROW_SUMS };

template <class K, int _slices>
struct DeltaGradientsKernel {
    using Tiles = K;
    using T = typename K::T;
    static constexpr int key_dim = K::key_dim, slices = _slices;
    static constexpr int stages = 2;  // of the values of a step
    using token_tile = typename K::token_tile;
    using square_tile = typename K::square_tile;
    using sum_tile = rt_fl<16, key_dim>;
    using operand = rt<T, 16, 64>;
};
constexpr int DELTA_GRADIENT_THREADS = 3 * WARPGROUP_THREADS;
constexpr int DELTA_QUERIES = 0, DELTA_KEYS = 1, DELTA_SUM_WARPS = 3;
// The roles have 504 together.
constexpr int DELTA_QUERY_REGISTERS = 200, DELTA_KEY_REGISTERS = 240, DELTA_PRODUCER_REGISTERS = 64;

template <class G>
struct DeltaGradientsGlobals {
    using K = typename G::Tiles;
    using T = typename K::T;
    DeltaTokens<typename K::token_tile> q, k;
    DeltaTokens<typename K::square_tile> grad_out;
    tile_rows<typename K::token_tile> states, grad_states;
    tile_rows<typename K::square_tile> values, grad_values;
    vector_rows<typename K::vectors> vectors;
    TokenRows<T> dq, dk, dv;
    TokenNumbers<T> g, beta, dg, dbeta;
    DeltaGate gate;
    DeltaSequences sequences;
    const float* norms;  // null without l2_norm
    float* gates;
    int batch, heads, ratio, parts;  // parts of a value head: 1 or 2
    int64_t tokens;
    float scale;

    __device__ __forceinline__ int items() const { return batch * heads * sequences.slots; }
    __device__ __forceinline__ int steps() const { return ratio * parts; }
    __device__ __forceinline__ int head_of(int step) const { return step >> (parts - 1); }
    __device__ __forceinline__ int part_of(int step) const { return step & (parts - 1); }
};

template <class G>
struct DeltaGradientsShared {
    struct Values {
        typename G::square_tile values[G::slices], grad_values[G::slices], grad_out[G::slices];
        typename G::Tiles::vectors vectors;
    };
    typename G::token_tile q, k;
    // The states before the chunk, and the gradients of those behind it.
    typename G::token_tile states[G::slices], grad_states[G::slices];
    typename G::square_tile scores, erased;  // dPG, W
    Values values[G::stages];
    sv<float, DELTA_CHUNK> rows[2][DELTA_ROW_SUMS];
    sv<float, 4> products[2];  // <S, dS>
    semaphore tokens_full, tokens_empty, values_full[G::stages], values_empty[G::stages],
        states_full[G::slices], states_empty[G::slices], grad_states_full[G::slices],
        grad_states_empty[G::slices], scores_full, scores_empty, rows_full[2], rows_empty[2];

    __device__ __forceinline__ void init() {
        init_semaphore(tokens_full, 1);
        init_semaphore(tokens_empty, 2 * WARPGROUP_WARPS);
        for (int s = 0; s < G::stages; ++s) {
            init_semaphore(values_full[s], 1);
            init_semaphore(values_empty[s], 2 * WARPGROUP_WARPS);
        }
        for (int s = 0; s < G::slices; ++s) {
            init_semaphore(states_full[s], 1);
            init_semaphore(states_empty[s], 2 * WARPGROUP_WARPS + DELTA_SUM_WARPS);
            init_semaphore(grad_states_full[s], 1);
            init_semaphore(grad_states_empty[s], WARPGROUP_WARPS + DELTA_SUM_WARPS);
        }
        init_semaphore(scores_full, WARPGROUP_WARPS);
        init_semaphore(scores_empty, WARPGROUP_WARPS);
        for (int s = 0; s < 2; ++s) {
            init_semaphore(rows_full[s], 2 * WARPGROUP_WARPS + DELTA_SUM_WARPS);
            init_semaphore(rows_empty[s], 1);
        }
        arch::mbarrier_init_fence();
    }
};

// Calls f(chunk, head) for each of the block's chunks that exists, and rest(chunk, head) for those
// of tokens that no sequence has.
template <class G, class F, class Rest>
__device__ __forceinline__ void for_each_chunk(const DeltaGradientsGlobals<G>& g, F f, Rest rest) {
#pragma unroll 1
    for (int item = int(blockIdx.x); item < g.items(); item += int(gridDim.x)) {
        const int slot = item % g.sequences.slots, b_head = item / g.sequences.slots;
        const DeltaChunk chunk = g.sequences.chunk(b_head / g.heads, slot);
        if (chunk.exists && !chunk.is_rest)
            f(chunk, b_head % g.heads);
        else
            rest(chunk, b_head % g.heads);
    }
}
template <class G>
__device__ __forceinline__ int chunk_at(const DeltaGradientsGlobals<G>& g, const DeltaChunk& chunk,
                                        int value_head) {
    return (chunk.b * g.heads * g.ratio + value_head) * g.sequences.slots + chunk.slot;
}

// By one thread. Queries and keys, whose place is free last, come behind the states.
template <class G>
__device__ __forceinline__ void produce_delta(const DeltaGradientsGlobals<G>& g,
                                              DeltaGradientsShared<G>& shared) {
    int n = 0, count = 0;
    const auto load_states = [&](const auto& from, auto& to, semaphore* full, semaphore* empty,
                                 int tile) {
        for (int s = 0; s < G::slices; ++s) {
            wait(empty[s], n % 2 ^ 1);
            tma::expect(full[s], to[s]);
            tma::load_async(to[s], from, {tile + s, 0}, full[s]);
        }
    };
    for_each_chunk(
        g,
        [&](const DeltaChunk& chunk, int head) {
            for (int step = 0; step < g.steps(); ++step, ++n) {
                const int value_head = head * g.ratio + g.head_of(step), part = g.part_of(step);
                const int at = chunk_at(g, chunk, value_head);
                const int first = (at * g.parts + part) * G::slices;
                auto& to = shared.values[n % G::stages];
                semaphore& full = shared.values_full[n % G::stages];
                wait(shared.values_empty[n % G::stages], n / G::stages % 2 ^ 1);
                tma::expect(full, to.values, to.grad_values, to.grad_out, to.vectors);
                tma::load_async(to.vectors, g.vectors, {at, 0}, full);
                for (int s = 0; s < G::slices; ++s) {
                    tma::load_async(to.values[s], g.values, {first + s, 0}, full);
                    tma::load_async(to.grad_values[s], g.grad_values, {first + s, 0}, full);
                    g.grad_out.load(to.grad_out[s], chunk, value_head, chunk.row(),
                                    (part * G::slices + s) * DELTA_VALUES, full);
                }
                load_states(g.grad_states, shared.grad_states, shared.grad_states_full,
                            shared.grad_states_empty, first);
                load_states(g.states, shared.states, shared.states_full, shared.states_empty,
                            first);
                if (step > 0) continue;
                wait(shared.tokens_empty, count % 2 ^ 1);
                tma::expect(shared.tokens_full, shared.q, shared.k);
                g.q.load(shared.q, chunk, head, chunk.row(), 0, shared.tokens_full);
                g.k.load(shared.k, chunk, head, chunk.row(), 0, shared.tokens_full);
                ++count;
            }
        },
        [](const DeltaChunk&, int) {});
}

}  // namespace thunderkittens::recurrent::delta_gradient
