// The role of the states in the chunks' gradient: it has the gradients of q and k in registers. Of
// each head, with c_j the cumulative decays and S and dS the states before and behind,
//   dQ_i += scale e^(c_i) dO_i S        dK_j += w_j e^(c_64 - c_j) v_j dS
// and the part of the decays' gradient that a query has from the state, scale e^(c_i) q_i S dO_i.
// Rows are queries and keys at once, those of the chunk. At the end of a tile it adds what is from
// pairs of tokens, W K and W^T Q, with the sum of W^T over the heads from the other role
// (pair_role_sm90.cuh).
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
struct StateRole {
    using T = typename K::T;
    const ChunkGlobals<K>& g;
    ChunkShared<K>& all;

    // Multiplies an operand's rows by their factors.
    static __device__ __forceinline__ void weigh(typename K::operand& rows, float2 factor) {
#pragma unroll
        for (int j = 0; j < VALUES / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float f = i % 2 ? factor.y : factor.x;
                auto& pair = rows.tiles[0][j].data[i];
                const float2 x = unpack_pair<T>(pair);
                pair = pack_pair<T>(f * x.x, f * x.y);
            }
        }
    }

    __device__ __forceinline__ void run() {
        pipeline_state<ChunkShared<K>::key_stages> key_at;
        pipeline_state<ChunkShared<K>::stages> at;
        int phase = 0;
        for_each_tile(g, [&](const ChunkTile& tile) {
            auto& keys = all.keys[key_at.stage];
            typename K::state dq, dk;
            wait(all.keys_full[key_at.stage], key_at.phase);
            zero(dq);
            zero(dk);
            for_each_step(g, tile, [&](int, int) {
                auto& shared = rematerialized(all);
                auto& step = shared.steps[at.stage];
                auto& gates = shared.gates[at.stage];
                typename K::values from_state;
                typename K::operand queries, values, grad_out;
                wait(shared.full[at.stage], at.phase);
                discard(from_state);
                warpgroup::mm_ABt(from_state, shared.keys[key_at.stage].q, step.before);
                const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
                const float last = gates.get(CHUNK - 1);
                const float scale = g.scale * unit_of(shared, at.stage, false);
                const float unit = unit_of(shared, at.stage, true);
                const float2 e = {scale * arch::exp2_approx(c.x), scale * arch::exp2_approx(c.y)};
                warpgroup::load(queries, step.grad_out);
                weigh(queries, e);
                warpgroup::mma_AB(dq, queries, step.before);
                warpgroup::load(values, step.v);
                weigh(values, {w.x * unit * arch::exp2_approx(last - c.x),
                               w.y * unit * arch::exp2_approx(last - c.y)});
                warpgroup::mma_AB(dk, values, step.after);
                warpgroup::load(grad_out, step.grad_out);  // again: it would take registers
                warpgroup::mma_async_wait<2>(from_state);
                const float2 rows = quad_sums(row_products<T>(grad_out, from_state));
                write_rows(shared.sums[at.stage].state, {e.x * rows.x, e.y * rows.y});
                signal_by_warp(shared.sums_full[at.stage]);
                warpgroup::mma_async_wait<0>(dq);
                pin(dk);
                signal_by_warp(shared.empty[at.stage]);
                at.advance();
            });
            wait(all.pairs_full, phase);
            warpgroup::mma_AtB(dq, all.pairs, keys.k);
            warpgroup::mma_AB(dk, all.pairs, keys.q);
            warpgroup::mma_async_wait<0>(dq);
            pin(dk);
            phase ^= 1;
            warpgroup::sync(STATE_BARRIER);
            signal(all.pairs_empty);
            store_key_gradients(g, keys, dq, dk, tile);
            signal(all.keys_empty[key_at.stage]);
            key_at.advance();
        });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

}  // namespace thunderkittens::recurrent
