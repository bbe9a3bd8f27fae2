// The role of the keys and values in the portable gradient of chunks: they are rows. Of each head,
// with W as in query_role_sm80.cuh, P_ij = scale q_i . k_j e^(c_i - c_j) for j <= i, and dU the
// gradient of w_j v_j,
//   dU  = P^T dO + e^(c_64 - c_j) k_j dS       dV_j = w_j dU_j + skip dO_j      dw_j = v_j . dU_j
//   dK += scale W^T Q + w_j e^(c_64 - c_j) v_j dS
// and the parts of the decays' gradient that a key's column has: the sum over i > j of
// scale W_ij q_i . k_j, and w_j e^(c_64 - c_j) v_j . k_j dS. The product v_j dS, which dK has,
// gives v_j . k_j dS as well.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm80.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

template <class K>
struct KeyRole {
    using T = typename K::T;
    ChunkWork<K>& work;
    typename K::square sum;
    typename K::state dk;

    __device__ __forceinline__ explicit KeyRole(ChunkWork<K>& _work) : work(_work) {
        zero(sum);
        zero(dk);
    }
    __device__ __forceinline__ void begin() {
        operand_a<T> rows[K::key_dim / 16];
        load_own_rows(rows, work.shared.k);
        const b_walker<typename K::key_tile> queries(work.shared.q, 0, 0);
        const int warp = arch::warp_uniform(warpgroup::warpid());
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            if (j < warp) continue;
            rt_fl<16, 16> scores;
            multiply_rows(scores, rows, queries, j);
            scale_tile(scores, work.g.scale);
            const auto& pairs = scores.tiles[0][0].data;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 x = pairs[2 * half], y = pairs[2 * half + 1];
                arch::store_shared(score_address(work.shared, warp, j, half),
                                   float4{x.x, x.y, y.x, y.y});
            }
        }
    }
    // Of the lane's half of a block's scores: columns are halves.
    static __device__ __forceinline__ uint32_t score_address(const ChunkShared<K>& shared, int warp,
                                                             int block, int half) {
        const int first = CHUNK_BLOCKS * warp - warp * (warp - 1) / 2 - warp;  // of block 0
        return shared.scores.address_of(256 * (first + block) + 128 * half + 4 * laneid());
    }

    // Adds W^T to its sum, and P^T dO to the gradient of the weighted values; returns the lane's
    // parts of the columns' sums.
    __device__ __forceinline__ float2 add_weights(typename K::values& du,
                                                  const operand_a<T> (&rows)[VALUE_BLOCKS],
                                                  ChunkShared<K>& shared,
                                                  const typename ChunkShared<K>::Step& step,
                                                  const TokenVector& gates) {
        const b_walker<typename K::value_tile> gradients(step.grad_out, 0, 0);
        const b_walker_of_rows<typename K::value_tile> columns(step.grad_out, 0, 0);
        const float2 c = row_pair(gates), w = row_pair(gates, CHUNK);
        const int warp = arch::warp_uniform(warpgroup::warpid()), row = laneid() / 4;
        float2 sums = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            if (j < warp) continue;
            arch::sync_warp();  // else operands of later blocks are loaded before
            rt_fl<16, 16> products;
            operand_a<T> weights;
            multiply_rows(products, rows, gradients, j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 8 * half + 2 * (laneid() % 4);
                const float2 ci = arch::load_shared<float2>(gates.address_of(16 * j + column));
                const auto scores = arch::load_shared<float4>(score_address(shared, warp, j, half));
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int i = 2 * half + low;
                    const float cj = low ? c.y : c.x, wj = low ? w.y : w.x;
                    const int behind = 16 * (j - warp) + column - row - 8 * low;  // i - j
                    const float2 p = products.tiles[0][0].data[i];
                    const float2 s = low ? float2{scores.z, scores.w} : float2{scores.x, scores.y};
                    const float2 e = {arch::exp2_approx(behind >= 0 ? ci.x - cj : -INFINITY),
                                      arch::exp2_approx(behind >= -1 ? ci.y - cj : -INFINITY)};
                    const float x = p.x * (wj * e.x), y = p.y * (wj * e.y);
                    float2& to = sum.tiles[0][j].data[i];
                    to = {to.x + x, to.y + y};
                    float& r = low ? sums.y : sums.x;
                    r = fmaf(behind > 0 ? x : 0.0f, s.x, fmaf(behind > -1 ? y : 0.0f, s.y, r));
                    weights.words[i] = pack_word<T>({s.x * e.x, s.y * e.y});
                }
            }
            add_tokens(du, weights, columns, j);
        }
        return sums;
    }

    __device__ __forceinline__ void store_values(typename K::values& du, const ChunkGlobals& g,
                                                 const typename K::value_tile& grad_out, float2 w,
                                                 int head, int slice) const {
        scale_rows(du, w);
        if (g.skip.data != nullptr) {
            const float whole = g.skip.column_stride == 0 ? load_head(g.skip, head, 0, 0.0f) : 0.0f;
            const a_walker<typename K::value_tile> own(grad_out, 16 * warpgroup::warpid(), 0);
#pragma unroll
            for (int j = 0; j < VALUE_BLOCKS; ++j) {
                operand_a<T> part;
                own.load(part, 0, 16 * j, 0);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = slice * VALUES + 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                    float2 d = {whole, whole};
                    if (g.skip.column_stride != 0 && column < g.value_dim) {
                        d = {load_head(g.skip, head, column, 0.0f),
                             load_head(g.skip, head, column + 1, 0.0f)};
                    }
                    const float2 x = unpack_word<T>(part.words[i]);
                    float2& to = du.tiles[0][j].data[i];
                    to = {fmaf(d.x, x.x, to.x), fmaf(d.y, x.y, to.y)};
                }
            }
        }
        const int row = 16 * warpgroup::warpid(), column = slice * VALUES;
        attention::store_rows<T>(du, work.address_of(g.dv, head, row, column), g.dv.row_stride,
                                 work.tokens() - row, g.value_dim - column);
    }

    template <class F>
    __device__ __forceinline__ void step(ChunkShared<K>& shared, int stage, int head, int slice,
                                         F) {
        const auto& step = shared.steps[stage];
        const TokenVector& gates = shared.gates[stage];
        const float unit = work.units(head, slice).y;
        // Factors are made twice: kept, they would not leave enough registers.
        const auto rest_of_chunk = [&] {
            const float2 c = row_pair(gates);
            const float last = gates.get(CHUNK - 1);
            return float2{unit * arch::exp2_approx(last - c.x),
                          unit * arch::exp2_approx(last - c.y)};
        };
        const auto weights = [&] { return row_pair(gates, CHUNK); };
        operand_a<T> rows[VALUE_BLOCKS];
        load_own_rows(rows, step.v);
        {
            const float2 w = weights(), rest = rest_of_chunk();
            const float2 behind =
                add_from_state<K>(dk, rows, step.after, shared.k, {w.x * rest.x, w.y * rest.y});
            write_rows(shared.sums.behind, quad_sums(behind));
        }
        typename K::values du;
        zero(du);
        const a_walker<typename K::key_tile> own(shared.k, 16 * warpgroup::warpid(), 0);
        const b_walker<typename K::state_tile> state(step.after, 0, 0);
#pragma unroll
        for (int s = 0; s < K::key_dim / 16; ++s) {
            operand_a<T> a;
            own.load(a, 0, 16 * s, 0);
#pragma unroll
            for (int n = 0; n < VALUE_BLOCKS; ++n) {
                operand_b<T> b;
                state.load(b, 16 * n, 16 * s, 0);
                mma_operands(block_of(du, n), a, b);
            }
        }
        scale_rows(du, rest_of_chunk());
        write_rows(shared.sums.column, quad_sums(add_weights(du, rows, shared, step, gates)));
        float2 weight = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; ++n) add_row_products(weight, rows[n], block_of(du, n));
        write_rows(shared.sums.weight, quad_sums(weight));
        store_values(du, work.g, step.grad_out, weights(), head, slice);
    }

    __device__ __forceinline__ void finish() {
        finish_keys(work, dk, sum, work.shared.q, work.g.dk, 1,
                    arch::warp_uniform(warpgroup::warpid()), CHUNK_BLOCKS);
    }
};

}  // namespace sm80
}  // namespace thunderkittens::recurrent
