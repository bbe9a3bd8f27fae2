// The role of the values in the chunks' gradient: keys and values are rows. Of each head, with c_j
// the cumulative decays, dS the gradient of the state behind, and P from the role of the pairs
// (pair_role_sm90.cuh), it makes the gradient dU of w_j v_j, and what is from that:
//   dU = P^T dO + e^(c_64 - c_j) k_j dS       dV_j = w_j dU_j + skip dO_j       dw_j = v_j . dU_j
// The decays' gradient has from it w_j e^(c_64 - c_j) v_j . k_j dS.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
struct ValueRole {
    using T = typename K::T;
    const ChunkGlobals<K>& g;
    ChunkShared<K>& all;

    template <class Skip>
    static __device__ __forceinline__ void add_skip(typename K::values& dv,
                                                    typename K::value_tile& grad_out, Skip skip) {
#pragma unroll
        for (int j = 0; j < VALUES / 16; ++j) {
            rt<T, 16, 16> part;
            warpgroup::load(part, grad_out.template subtile<CHUNK, 16>({0, j}));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 d = skip(16 * j + 8 * (i / 2) + 2 * (laneid() % 4));
                const float2 x = unpack_pair<T>(part.tiles[0][0].data[i]);
                float2& to = dv.tiles[0][j].data[i];
                to = {fmaf(d.x, x.x, to.x), fmaf(d.y, x.y, to.y)};
            }
        }
    }
    // dV leaves through two tiles by turns. Behind the barrier all stores but the one to come have
    // read theirs.
    __device__ __forceinline__ void store_values(ChunkShared<K>& shared, typename K::values& du,
                                                 typename K::value_tile& grad_out, float2 w,
                                                 float skip, const ChunkTile& tile, int head,
                                                 int slice, int turn) {
        scale_rows(du, w);
        if (g.skip.data != nullptr) {
            if (g.skip.column_stride == 0) {
                add_skip(du, grad_out, [&](int) { return float2{skip, skip}; });
            } else {
                add_skip(du, grad_out, [&](int column) {
                    const int at = slice * VALUES + column;
                    return float2{
                        at < g.value_dim ? load_head(g.skip, head, at, 0.0f) : 0.0f,
                        at + 1 < g.value_dim ? load_head(g.skip, head, at + 1, 0.0f) : 0.0f};
                });
            }
        }
        warpgroup::store(shared.dv[turn], du);
        arch::fence_async_shared();
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
        warpgroup::sync(VALUE_BARRIER);
        if (warpgroup::laneid() == 0)
            store_rows(g.dv, shared.dv[turn], tile.at, head, slice * VALUES);
    }

    __device__ __forceinline__ void run() {
        pipeline_state<ChunkShared<K>::key_stages> key_at;
        pipeline_state<ChunkShared<K>::stages> at;
        pipeline_state<2> weights_at;
        for_each_tile(g, [&](const ChunkTile& tile) {
            wait(all.keys_full[key_at.stage], key_at.phase);
            for_each_step(g, tile, [&](int head, int slice) {
                auto& shared = rematerialized(all);
                auto& step = shared.steps[at.stage];
                auto& gates = shared.gates[at.stage];
                auto& sums = shared.sums[at.stage];
                typename K::operand v;
                typename K::values du;
                wait(shared.full[at.stage], at.phase);
                discard(du);
                warpgroup::mm_ABt(du, shared.keys[key_at.stage].k, step.after);
                warpgroup::load(v, step.v);
                const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
                const float last = gates.get(CHUNK - 1), unit = unit_of(shared, at.stage, true);
                const float2 rest = {unit * arch::exp2_approx(last - c.x),
                                     unit * arch::exp2_approx(last - c.y)};
                warpgroup::mma_async_wait<0>(du);
                if (head + 1 == tile.end_head && slice + 1 == g.slices)
                    signal_by_warp(shared.keys_read[key_at.stage]);
                scale_rows(du, rest);
                const float2 behind = quad_sums(row_products<T>(v, du));
                write_rows(sums.behind, {w.x * behind.x, w.y * behind.y});
                const int turn = weights_at.stage;
                wait(shared.weights_full[turn], weights_at.phase);
                warpgroup::mma_AB(du, shared.weights[turn], step.grad_out);
                warpgroup::load(v, step.v);  // again: kept, it would take registers, as numbers
                warpgroup::mma_async_wait<0>(du);
                signal_by_warp(shared.weights_empty[turn]);
                weights_at.advance();
                write_rows(sums.weight, quad_sums(row_products<T>(v, du)));
                signal_by_warp(shared.sums_full[at.stage]);
                store_values(shared, du, step.grad_out, w, shared.skips.get(at.stage), tile, head,
                             slice, turn);
                signal_by_warp(shared.empty[at.stage]);
                at.advance();
            });
            key_at.advance();
        });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

}  // namespace thunderkittens::recurrent
