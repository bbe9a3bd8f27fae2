// The role of the keys and values in the chunks' gradient: they are rows. Of each head, with W as
// in query_role_sm90.cuh, P_ij = scale q_i . k_j e^(c_i - c_j) for j <= i, and dU the gradient of
// w_j v_j,
//   dU  = P^T dO + e^(c_64 - c_j) k_j dS       dV_j = w_j dU_j + skip dO_j      dw_j = v_j . dU_j
//   dK += scale W^T Q + w_j e^(c_64 - c_j) v_j dS
// and the parts of the decays' gradient that a key's column has: the sum over i > j of
// scale W_ij q_i . k_j, and w_j e^(c_64 - c_j) v_j . k_j dS.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
struct KeyRole {
    using T = typename K::T;
    const ChunkGlobals<K>& g;
    ChunkShared<K>& all;

    // Adds W^T to its sum and makes P^T; returns the lane's parts of the columns' sums.
    static __device__ __forceinline__ float2 add_weights(typename K::square& sum,
                                                         typename K::operand& weights,
                                                         const typename K::square& products,
                                                         const typename K::square& scores,
                                                         const TokenVector& gates) {
        const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
        const int warp = warpgroup::warpid(), row = laneid() / 4;
        float2 rows = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j < warp) {
#pragma unroll
                for (int i = 0; i < 4; ++i) weights.tiles[0][j].data[i] = pack_pair<T>(0.0f, 0.0f);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                arch::sync_warp();  // else numbers of all columns are loaded before
                const int column = 8 * half + 2 * (laneid() % 4);
                const float2 ci = arch::load_shared<float2>(gates.address_of(16 * j + column));
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int i = 2 * half + low;
                    const float cj = low ? c.y : c.x, wj = low ? w.y : w.x;
                    const int behind = 16 * (j - warp) + column - row - 8 * low;  // i - j
                    const float2 p = products.tiles[0][j].data[i], s = scores.tiles[0][j].data[i];
                    const float2 e = {arch::exp2_approx(behind >= 0 ? ci.x - cj : -INFINITY),
                                      arch::exp2_approx(behind >= -1 ? ci.y - cj : -INFINITY)};
                    const float x = p.x * (wj * e.x), y = p.y * (wj * e.y);
                    float2& to = sum.tiles[0][j].data[i];
                    to = {to.x + x, to.y + y};
                    float& r = low ? rows.y : rows.x;
                    r = fmaf(behind > 0 ? x : 0.0f, s.x, fmaf(behind > -1 ? y : 0.0f, s.y, r));
                    weights.tiles[0][j].data[i] = pack_pair<T>(s.x * e.x, s.y * e.y);
                }
            }
        }
        return rows;
    }

    // dV leaves through a tile of its own.
    __device__ __forceinline__ void store_values(ChunkShared<K>& shared, typename K::values& du,
                                                 typename K::value_tile& grad_out, float2 w,
                                                 float skip, const ChunkTile& tile, int head,
                                                 int slice) {
        scale_rows(du, w);
        if (g.skip.data != nullptr) {
#pragma unroll
            for (int j = 0; j < VALUES / 16; ++j) {
                rt<T, 16, 16> part;
                warpgroup::load(part, grad_out.template subtile<CHUNK, 16>({0, j}));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                    float2 d = {skip, skip};
                    if (g.skip.column_stride != 0) {
                        const int at = slice * VALUES + column;
                        d = {at < g.value_dim ? load_head(g.skip, head, at, 0.0f) : 0.0f,
                             at + 1 < g.value_dim ? load_head(g.skip, head, at + 1, 0.0f) : 0.0f};
                    }
                    const float2 x = unpack_pair<T>(part.tiles[0][0].data[i]);
                    float2& to = du.tiles[0][j].data[i];
                    to = {fmaf(d.x, x.x, to.x), fmaf(d.y, x.y, to.y)};
                }
            }
        }
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
        warpgroup::sync(KEY_BARRIER);
        warpgroup::store(shared.dv, du);
        arch::fence_async_shared();
        warpgroup::sync(KEY_BARRIER);
        if (warpgroup::laneid() == 0) store_rows(g.dv, shared.dv, tile.at, head, slice * VALUES);
    }

    __device__ __forceinline__ void run() {
        pipeline_state<ChunkShared<K>::key_stages> key_at;
        pipeline_state<ChunkShared<K>::stages> at;
        for_each_tile(g, [&](const ChunkTile& tile) {
            auto& keys = all.keys[key_at.stage];
            typename K::square scores, sum;
            typename K::state dk;
            wait(all.keys_full[key_at.stage], key_at.phase);
            discard(scores);
            warpgroup::mm_ABt(scores, keys.k, keys.q);
            zero(sum);
            zero(dk);
            warpgroup::mma_async_wait<0>(scores);
            scale_tile(scores, g.scale);
            for_each_step(g, tile, [&](int head, int slice) {
                auto& shared = rematerialized(all);
                auto& step = shared.steps[at.stage];
                auto& gates = shared.gates[at.stage];
                typename K::operand v, weights;
                rt<T, 16, VALUES / 2> weighted;
                typename K::square products;
                wait(shared.full[at.stage], at.phase);
                discard(products);
                warpgroup::mm_ABt(products, step.v, step.grad_out);
                warpgroup::load(v, step.v);
                // Rows and factors are read twice: kept, they would not leave enough registers.
                const auto rest_of_chunk = [&] {
                    const float2 c = row_pair(gates);
                    const float last = gates.get(CHUNK - 1);
                    const float unit = unit_of(shared, at.stage, true);
                    return float2{unit * arch::exp2_approx(last - c.x),
                                  unit * arch::exp2_approx(last - c.y)};
                };
                const auto weights_of = [&] { return row_pair(gates, CHUNK); };
                const auto product = [](float2 a, float2 b) {
                    return float2{a.x * b.x, a.y * b.y};
                };
                add_from_state<K, 0>(dk, weighted, v, product(weights_of(), rest_of_chunk()),
                                     step.after);
                warpgroup::mma_async_wait<0>(products);
                pin(dk);
                const float2 columns =
                    quad_sums(add_weights(sum, weights, products, scores, gates));
                typename K::values du;
                discard(du);
                warpgroup::mm_ABt(du, shared.keys[key_at.stage].k, step.after);
                warpgroup::load(v, step.v);
                const float2 w = weights_of(), rest = rest_of_chunk();
                add_from_state<K, 1>(dk, weighted, v, product(w, rest), step.after);
                warpgroup::mma_async_wait<1>(du);
                scale_rows(du, rest);
                const float2 behind = quad_sums(row_products<T>(v, du));
                warpgroup::mma_AB(du, weights, step.grad_out);
                warpgroup::mma_async_wait<0>(du);
                pin(dk);
                const float2 weight = quad_sums(row_products<T>(v, du));
                auto& sums = shared.sums[at.stage];
                write_rows(sums.column, columns);
                write_rows(sums.behind, {w.x * behind.x, w.y * behind.y});
                write_rows(sums.weight, weight);
                signal_by_warp(shared.sums_full[at.stage]);
                store_values(shared, du, step.grad_out, w, shared.skips.get(at.stage), tile, head,
                             slice);
                signal_by_warp(shared.empty[at.stage]);
                at.advance();
            });
            typename K::operand weights;
            scale_tile(sum, g.scale);
            to_operand(weights, sum);
            warpgroup::mma_AB(dk, weights, keys.q);
            warpgroup::mma_async_wait<0>(dk);
            store_key_gradient(g, g.dk, keys.k, dk, tile, 1, KEY_BARRIER,
                               all.keys_empty[key_at.stage]);
            key_at.advance();
        });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

}  // namespace thunderkittens::recurrent
