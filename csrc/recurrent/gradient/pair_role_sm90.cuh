// The role of pairs of tokens in the chunks' gradient: keys are rows, queries columns. Of each
// head, with c_j the cumulative decays, dS the gradient of the state behind, and for j <= i
//   W_ij = (dO_i . v_j) w_j e^(c_i - c_j)        P_ij = scale q_i . k_j e^(c_i - c_j)
// it makes the gradient dU of w_j v_j, and what is from that,
//   dU = P^T dO + e^(c_64 - c_j) k_j dS       dV_j = w_j dU_j + skip dO_j       dw_j = v_j . dU_j
// the sum of W^T over the heads, which the other role multiplies by q and k
// (state_role_sm90.cuh), and parts of the decays' gradient: with X_ij = scale W_ij q_i . k_j the
// sums over j < i and over i > j, and w_j e^(c_64 - c_j) v_j . k_j dS.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
struct PairRole {
    using T = typename K::T;
    const ChunkGlobals<K>& g;
    ChunkShared<K>& all;

    // Of the lane: parts of the sums of X over its two rows, and over the warp's rows for its
    // columns of each block of 16.
    struct Sums {
        float2 keys;
        float2 queries[CHUNK / 16][2];
    };

    // Pairs of a block of 16 queries and the warp's 16 keys, of which e^(c_i - c_j) is known.
    template <class Factor>
    static __device__ __forceinline__ void add_block(int j, typename K::square& sum,
                                                     typename K::operand& weights,
                                                     const typename K::square& products,
                                                     const typename K::square& scores, float2 w,
                                                     Sums& sums, Factor factor) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            arch::sync_warp();  // else numbers of all columns are loaded before
            const int column = 8 * half + 2 * (laneid() % 4);
            const auto e_of = factor(column);
            float2 queries = {0.0f, 0.0f};
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const int i = 2 * half + low;
                const float wj = low ? w.y : w.x;
                const float2 p = products.tiles[0][j].data[i], s = scores.tiles[0][j].data[i];
                const auto [e, inside] = e_of(low);
                const float2 x = {p.x * (wj * e.x), p.y * (wj * e.y)};
                float2& to = sum.tiles[0][j].data[i];
                to = {to.x + x.x, to.y + x.y};
                // A token's own decay is not between it and itself.
                const float2 y = {inside.x ? x.x : 0.0f, inside.y ? x.y : 0.0f};
                float& r = low ? sums.keys.y : sums.keys.x;
                r = fmaf(y.x, s.x, fmaf(y.y, s.y, r));
                queries = {fmaf(y.x, s.x, queries.x), fmaf(y.y, s.y, queries.y)};
                weights.tiles[0][j].data[i] = pack_pair<T>(s.x * e.x, s.y * e.y);
            }
            sums.queries[j][half] = queries;
        }
    }
    struct Decays {
        float2 e;
        struct {
            bool x, y;
        } inside;
    };

    // Adds W^T to its sum and makes P^T. Behind the warp's own block the decay between two tokens
    // is that to the block's last token times that from it: none of them overflows.
    static __device__ __forceinline__ Sums add_weights(typename K::square& sum,
                                                       typename K::operand& weights,
                                                       const typename K::square& products,
                                                       const typename K::square& scores,
                                                       const TokenVector& gates) {
        const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
        const int warp = warpgroup::warpid(), row = laneid() / 4;
        const float edge = gates.get(16 * warp + 15);
        const float2 rest = {arch::exp2_approx(edge - c.x), arch::exp2_approx(edge - c.y)};
        Sums sums;
        sums.keys = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            const auto decays = [&](int column) {
                return arch::load_shared<float2>(gates.address_of(16 * j + column));
            };
            if (j < warp) {
#pragma unroll
                for (int i = 0; i < 4; ++i) weights.tiles[0][j].data[i] = pack_pair<T>(0.0f, 0.0f);
                sums.queries[j][0] = sums.queries[j][1] = {0.0f, 0.0f};
            } else if (j == warp) {
                add_block(j, sum, weights, products, scores, w, sums, [&](int column) {
                    const float2 ci = decays(column);
                    return [=](int low) {
                        const float cj = low ? c.y : c.x;
                        const int behind = column - row - 8 * low;  // i - j
                        return Decays{{arch::exp2_approx(behind >= 0 ? ci.x - cj : -INFINITY),
                                       arch::exp2_approx(behind >= -1 ? ci.y - cj : -INFINITY)},
                                      {behind > 0, behind > -1}};
                    };
                });
            } else {
                add_block(j, sum, weights, products, scores, w, sums, [&](int column) {
                    const float2 ci = decays(column);
                    const float2 from = {arch::exp2_approx(ci.x - edge),
                                         arch::exp2_approx(ci.y - edge)};
                    return [=](int low) {
                        const float r = low ? rest.y : rest.x;
                        return Decays{{r * from.x, r * from.y}, {true, true}};
                    };
                });
            }
        }
        return sums;
    }

    // The sums of the queries over the warp's keys: each lane hands over the half of its columns
    // that is not its own, until those of tokens 2 lane and 2 lane + 1 are left.
    static __device__ __forceinline__ float2 sum_queries(const Sums& sums) {
        const auto exchange = [](float2 mine, float2 other, int distance) {
            return float2{mine.x + arch::shuffle_xor(other.x, distance),
                          mine.y + arch::shuffle_xor(other.y, distance)};
        };
        const auto select = [](bool second, float2 a, float2 b) { return second ? b : a; };
        const bool far = laneid() & 16, odd = laneid() & 8, upper = laneid() & 4;
        float2 half[2][2], quarter[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 a = sums.queries[j][i], b = sums.queries[j + 2][i];
                half[j][i] = exchange(select(far, a, b), select(far, b, a), 16);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 a = half[0][i], b = half[1][i];
            quarter[i] = exchange(select(odd, a, b), select(odd, b, a), 8);
        }
        return exchange(select(upper, quarter[0], quarter[1]),
                        select(upper, quarter[1], quarter[0]), 4);
    }

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
        warpgroup::sync(PAIR_BARRIER);
        if (warpgroup::laneid() == 0)
            store_rows(g.dv, shared.dv[turn], tile.at, head, slice * VALUES);
    }

    __device__ __forceinline__ void run() {
        pipeline_state<ChunkShared<K>::key_stages> key_at;
        pipeline_state<ChunkShared<K>::stages> at;
        int phase = 0, turn = 0;
        for_each_tile(g, [&](const ChunkTile& tile) {
            auto& keys = all.keys[key_at.stage];
            typename K::square scores, sum;
            wait(all.keys_full[key_at.stage], key_at.phase);
            discard(scores);
            warpgroup::mm_ABt(scores, keys.k, keys.q);
            zero(sum);
            warpgroup::mma_async_wait<0>(scores);
            scale_tile(scores, g.scale);
            for_each_step(g, tile, [&](int head, int slice) {
                auto& shared = rematerialized(all);
                auto& step = shared.steps[at.stage];
                auto& gates = shared.gates[at.stage];
                typename K::operand v, weights;
                typename K::square products;
                typename K::values du;
                wait(shared.full[at.stage], at.phase);
                discard(products, du);
                warpgroup::mm_ABt(products, step.v, step.grad_out);
                warpgroup::mm_ABt(du, shared.keys[key_at.stage].k, step.after);
                warpgroup::mma_async_wait<1>(products);
                const Sums pairs = add_weights(sum, weights, products, scores, gates);
                warpgroup::load(v, step.v);
                const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
                const float last = gates.get(CHUNK - 1), unit = unit_of(shared, at.stage, true);
                warpgroup::mma_async_wait<0>(du);
                scale_rows(du, {unit * arch::exp2_approx(last - c.x),
                                unit * arch::exp2_approx(last - c.y)});
                const float2 behind = quad_sums(row_products<T>(v, du));
                warpgroup::mma_AB(du, weights, step.grad_out);
                auto& sums = shared.sums[at.stage];
                arch::store_shared(
                    sums.queries.address_of(CHUNK * warpgroup::warpid() + 2 * laneid()),
                    sum_queries(pairs));
                write_rows(sums.keys, quad_sums(pairs.keys));
                write_rows(sums.behind, {w.x * behind.x, w.y * behind.y});
                warpgroup::mma_async_wait<0>(du);
                write_rows(sums.weight, quad_sums(row_products<T>(v, du)));
                signal_by_warp(shared.sums_full[at.stage]);
                store_values(shared, du, step.grad_out, w, shared.skips.get(at.stage), tile, head,
                             slice, turn);
                turn ^= 1;
                signal_by_warp(shared.empty[at.stage]);
                at.advance();
            });
            // The other role adds it to the gradients of q and k, and gives the keys back.
            scale_tile(sum, g.scale);
            wait(all.pairs_empty, phase ^ 1);
            warpgroup::store(all.pairs, sum);
            arch::fence_async_shared();
            warpgroup::sync(PAIR_BARRIER);
            signal(all.pairs_full);
            phase ^= 1;
            key_at.advance();
        });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

}  // namespace thunderkittens::recurrent
