// The role of the queries in the chunks' gradient: queries are rows. Of each head, with
// W_ij = (dO_i . v_j) w_j e^(c_i - c_j) for j <= i,
//   dQ += scale (W K + e^(c_i) dO_i S)
// and the part of the decays' gradient that a query's row has: the sum over j < i of
// scale W_ij q_i . k_j, and scale e^(c_i) q_i S dO_i. W is summed over the heads of the group
// before it meets K.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
struct QueryRole {
    using T = typename K::T;
    const ChunkGlobals<K>& g;
    ChunkShared<K>& all;

    // Adds W to its sum; returns the lane's parts of the rows' sums.
    static __device__ __forceinline__ float2 add_weights(typename K::square& sum,
                                                         const typename K::square& products,
                                                         const typename K::square& scores,
                                                         const TokenVector& gates) {
        const float2 c = row_pair(gates);
        const int warp = warpgroup::warpid(), row = laneid() / 4;
        float2 rows = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j > warp) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                arch::sync_warp();  // else numbers of all columns are loaded before
                const int column = 8 * half + 2 * (laneid() % 4), token = 16 * j + column;
                const float2 cj = arch::load_shared<float2>(gates.address_of(token));
                const float2 w = arch::load_shared<float2>(gates.address_of(CHUNK + token));
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int i = 2 * half + low;
                    const float ci = low ? c.y : c.x;
                    const int ahead = 16 * (warp - j) + row + 8 * low - column;  // i - j
                    const float2 p = products.tiles[0][j].data[i], s = scores.tiles[0][j].data[i];
                    const float x =
                        p.x * (w.x * arch::exp2_approx(ahead >= 0 ? ci - cj.x : -INFINITY));
                    const float y =
                        p.y * (w.y * arch::exp2_approx(ahead >= 1 ? ci - cj.y : -INFINITY));
                    float2& to = sum.tiles[0][j].data[i];
                    to = {to.x + x, to.y + y};
                    // A token's own decay is not between it and itself.
                    float& r = low ? rows.y : rows.x;
                    r = fmaf(ahead > 0 ? x : 0.0f, s.x, fmaf(ahead > 1 ? y : 0.0f, s.y, r));
                }
            }
        }
        return rows;
    }

    __device__ __forceinline__ void run() {
        pipeline_state<ChunkShared<K>::key_stages> key_at;
        pipeline_state<ChunkShared<K>::stages> at;
        for_each_tile(g, [&](const ChunkTile& tile) {
            auto& keys = all.keys[key_at.stage];
            typename K::square scores, sum;
            typename K::state dq;
            wait(all.keys_full[key_at.stage], key_at.phase);
            discard(scores);
            warpgroup::mm_ABt(scores, keys.q, keys.k);
            zero(sum);
            zero(dq);
            warpgroup::mma_async_wait<0>(scores);
            scale_tile(scores, g.scale);
            for_each_step(g, tile, [&](int, int) {
                auto& shared = rematerialized(all);
                auto& step = shared.steps[at.stage];
                auto& gates = shared.gates[at.stage];
                typename K::square products;
                typename K::operand grad_out;
                rt<T, 16, VALUES / 2> weighted;
                wait(shared.full[at.stage], at.phase);
                discard(products);
                warpgroup::mm_ABt(products, step.grad_out, step.v);
                warpgroup::load(grad_out, step.grad_out);
                // Rows and factors are read twice: kept, they would not leave enough registers.
                const auto factors = [&] {
                    const float2 c = row_pair(gates);
                    const float scale = g.scale * unit_of(shared, at.stage, false);
                    return float2{scale * arch::exp2_approx(c.x), scale * arch::exp2_approx(c.y)};
                };
                add_from_state<K, 0>(dq, weighted, grad_out, factors(), step.before);
                warpgroup::mma_async_wait<0>(products);
                pin(dq);
                float2 rows = add_weights(sum, products, scores, gates);
                typename K::values from_state;
                discard(from_state);
                warpgroup::mm_ABt(from_state, shared.keys[key_at.stage].q, step.before);
                warpgroup::load(grad_out, step.grad_out);
                const float2 e = factors();
                add_from_state<K, 1>(dq, weighted, grad_out, e, step.before);
                warpgroup::mma_async_wait<0>(from_state);
                pin(dq);
                const float2 state = row_products<T>(grad_out, from_state);
                rows = quad_sums({fmaf(e.x, state.x, rows.x), fmaf(e.y, state.y, rows.y)});
                write_rows(shared.sums[at.stage].row, rows);
                signal_by_warp(shared.sums_full[at.stage]);
                signal_by_warp(shared.empty[at.stage]);
                at.advance();
            });
            typename K::operand weights;
            scale_tile(sum, g.scale);
            to_operand(weights, sum);
            warpgroup::mma_AB(dq, weights, keys.k);
            warpgroup::mma_async_wait<0>(dq);
            store_key_gradient(g, g.dq, keys.q, dq, tile, 0, QUERY_BARRIER,
                               all.keys_empty[key_at.stage]);
            key_at.advance();
        });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

}  // namespace thunderkittens::recurrent
