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
    static constexpr int stages = slices <= 2 ? 2 : 1;  // of a value head's values
    static constexpr int ring = 2;                      // of slices of states, and of gradients
    // Whether the rings hold a head's states and all of their gradients at once.
    static constexpr bool rings_hold_all = slices <= ring;
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
    int batch, heads, ratio;
    int64_t tokens;
    float scale;

    __device__ __forceinline__ int items() const { return batch * heads * sequences.slots; }
};

template <class G>
struct DeltaGradientsShared {
    struct Values {
        typename G::square_tile values[G::slices], grad_values[G::slices], grad_out[G::slices];
        typename G::Tiles::vectors vectors;
    };
    typename G::token_tile q, k;
    // The states before the chunk, and the gradients of those behind it. Rings of their own: who
    // waits for states alone could not tell the phases of a common one apart.
    struct States {
        typename G::token_tile tiles[G::ring];
    } states, grad_states;
    typename G::square_tile scores, erased;  // dPG, W
    Values values[G::stages];
    sv<float, DELTA_CHUNK> rows[2][DELTA_ROW_SUMS];
    sv<float, 4> products[2];  // <S, dS>
    semaphore tokens_full, tokens_empty, values_full[G::stages], values_empty[G::stages],
        states_full[G::ring], states_empty[G::ring], grad_states_full[G::ring],
        grad_states_empty[G::ring], scores_full, scores_empty, rows_full[2], rows_empty[2];

    __device__ __forceinline__ void init() {
        init_semaphore(tokens_full, 1);
        init_semaphore(tokens_empty, 2);
        for (int s = 0; s < G::stages; ++s) {
            init_semaphore(values_full[s], 1);
            init_semaphore(values_empty[s], 2);
        }
        for (int s = 0; s < G::ring; ++s) {
            init_semaphore(states_full[s], 1);
            constexpr uint32_t sums = G::rings_hold_all ? DELTA_SUM_WARPS : 0;
            init_semaphore(states_empty[s], 2 + sums);
            init_semaphore(grad_states_full[s], 1);
            init_semaphore(grad_states_empty[s], 1 + sums);
        }
        init_semaphore(scores_full, 1);
        init_semaphore(scores_empty, 1);
        for (int s = 0; s < 2; ++s) {
            init_semaphore(rows_full[s], 2 + DELTA_SUM_WARPS);
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

// By one thread. Queries and keys are wanted after the values and the gradients of the states.
template <class G>
__device__ __forceinline__ void produce_delta(const DeltaGradientsGlobals<G>& g,
                                              DeltaGradientsShared<G>& shared) {
    int n = 0, item = 0;
    const auto load_state = [&](const auto& from, auto& to, semaphore& full, semaphore& empty,
                                int slot, int tile) {
        wait(empty, slot / G::ring % 2 ^ 1);
        tma::expect(full, to);
        tma::load_async(to, from, {tile, 0}, full);
    };
    for_each_chunk(
        g,
        [&](const DeltaChunk& chunk, int head) {
            for (int r = 0; r < g.ratio; ++r, ++n) {
                const int value_head = head * g.ratio + r, at = chunk_at(g, chunk, value_head);
                auto& to = shared.values[n % G::stages];
                semaphore& full = shared.values_full[n % G::stages];
                wait(shared.values_empty[n % G::stages], n / G::stages % 2 ^ 1);
                tma::expect(full, to.values, to.grad_values, to.grad_out, to.vectors);
                tma::load_async(to.vectors, g.vectors, {at, 0}, full);
                for (int s = 0; s < G::slices; ++s) {
                    const int tile = at * G::slices + s;
                    tma::load_async(to.values[s], g.values, {tile, 0}, full);
                    tma::load_async(to.grad_values[s], g.grad_values, {tile, 0}, full);
                    g.grad_out.load(to.grad_out[s], chunk, value_head, chunk.row(),
                                    s * DELTA_VALUES, full);
                }
                for (int s = 0; s < G::slices; ++s) {
                    const int slot = n * G::slices + s, i = slot % G::ring;
                    load_state(g.grad_states, shared.grad_states.tiles[i],
                               shared.grad_states_full[i], shared.grad_states_empty[i], slot,
                               at * G::slices + s);
                }
                if (r == 0) {
                    wait(shared.tokens_empty, item % 2 ^ 1);
                    tma::expect(shared.tokens_full, shared.q, shared.k);
                    g.q.load(shared.q, chunk, head, chunk.row(), 0, shared.tokens_full);
                    g.k.load(shared.k, chunk, head, chunk.row(), 0, shared.tokens_full);
                    ++item;
                }
                for (int s = 0; s < G::slices; ++s) {
                    const int slot = n * G::slices + s, i = slot % G::ring;
                    load_state(g.states, shared.states.tiles[i], shared.states_full[i],
                               shared.states_empty[i], slot, at * G::slices + s);
                }
            }
        },
        [](const DeltaChunk&, int) {});
}

}  // namespace thunderkittens::recurrent::delta_gradient
