// The role of the queries in the portable gradient of chunks: queries are rows. Of each head, with
// W_ij = (dO_i . v_j) w_j e^(c_i - c_j) for j <= i,
//   dQ += scale (W K + e^(c_i) dO_i S)
// and the part of the decays' gradient that a query's row has: the sum over j < i of
// scale W_ij q_i . k_j, and scale e^(c_i) q_i S dO_i. W is summed over the heads of the group
// before it meets K. The product dO_i S, which dQ has, gives q_i S dO_i as well: it meets q_i in
// registers, where a second product with the state would take the tensor cores as long.
#pragma once

#include "csrc/recurrent/gradient/chunk_types_sm80.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

template <class K>
struct QueryRole {
    using T = typename K::T;
    ChunkWork<K>& work;
    typename K::square scores, sum;
    typename K::state dq;

    __device__ __forceinline__ explicit QueryRole(ChunkWork<K>& _work) : work(_work) {
        zero(sum);
        zero(dq);
    }
    __device__ __forceinline__ void begin() {
        operand_a<T> rows[K::key_dim / 16];
        load_own_rows(rows, work.shared.q);
        const b_walker<typename K::key_tile> keys(work.shared.k, 0, 0);
        const int warp = arch::warp_uniform(warpgroup::warpid());
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            if (j <= warp) multiply_rows(block_of(scores, j), rows, keys, j);
        }
        scale_tile(scores, work.g.scale);
    }

    // Adds W to its sum; returns the lane's parts of the rows' sums.
    __device__ __forceinline__ float2 add_weights(const operand_a<T> (&rows)[VALUE_BLOCKS],
                                                  const typename ChunkShared<K>::Step& step,
                                                  const TokenVector& gates) {
        const b_walker<typename K::value_tile> values(step.v, 0, 0);
        const float2 c = row_pair(gates);
        const int warp = arch::warp_uniform(warpgroup::warpid()), row = laneid() / 4;
        float2 sums = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            if (j > warp) break;
            rt_fl<16, 16> products;
            multiply_rows(products, rows, values, j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 8 * (i / 2) + 2 * (laneid() % 4), token = 16 * j + column;
                const float2 cj = arch::load_shared<float2>(gates.address_of(token));
                const float2 w = arch::load_shared<float2>(gates.address_of(CHUNK + token));
                const float ci = i % 2 ? c.y : c.x;
                const int ahead = 16 * (warp - j) + row + 8 * (i % 2) - column;  // i - j
                const float2 p = products.tiles[0][0].data[i], s = scores.tiles[0][j].data[i];
                const float x = p.x * (w.x * arch::exp2_approx(ahead >= 0 ? ci - cj.x : -INFINITY));
                const float y = p.y * (w.y * arch::exp2_approx(ahead >= 1 ? ci - cj.y : -INFINITY));
                float2& to = sum.tiles[0][j].data[i];
                to = {to.x + x, to.y + y};
                // A token's own decay is not between it and itself.
                float& r = i % 2 ? sums.y : sums.x;
                r = fmaf(ahead > 0 ? x : 0.0f, s.x, fmaf(ahead > 1 ? y : 0.0f, s.y, r));
            }
        }
        return sums;
    }

    // Sums of v dO over this warp's tokens; a lane has two columns.
    __device__ __forceinline__ void sum_skip(ChunkShared<K>& shared,
                                             const typename ChunkShared<K>::Step& step) const {
        const int first = 16 * warpgroup::warpid();
        float2 sum = {0.0f, 0.0f};
#pragma unroll 4
        for (int row = first; row < first + 16; ++row) {
            const auto pair = [&](const typename K::value_tile& tile) {
                return unpack_word<T>(
                    arch::load_shared<uint32_t>(tile.address_of(row, 2 * laneid())));
            };
            const float2 x = pair(step.v), y = pair(step.grad_out);
            sum = {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
        }
        arch::store_shared(shared.skip.address_of(VALUES * warpgroup::warpid() + 2 * laneid()),
                           sum);
    }

    // `load_next` begins to load the next state before the chunk, when all of the role have read
    // this one.
    template <class F>
    __device__ __forceinline__ void step(ChunkShared<K>& shared, int stage, int head, int slice,
                                         F load_next) {
        const auto& step = shared.steps[stage];
        const TokenVector& gates = shared.gates[stage];
        const float2 units = work.units(head, slice);
        const float states = linear_attention::warp_sum(
            state_product<T, WARPGROUP_WARPS>(step.before, step.after, warpgroup::warpid()));
        if (laneid() == 0)
            shared.state_products.set(warpgroup::warpid(), units.x * units.y * states);
        operand_a<T> rows[VALUE_BLOCKS];
        load_own_rows(rows, step.grad_out);
        const float2 c = row_pair(gates);
        const float scale = work.g.scale * units.x;
        float2 sums =
            add_from_state<K>(dq, rows, step.before, shared.q,
                              {scale * arch::exp2_approx(c.x), scale * arch::exp2_approx(c.y)});
        load_next();
        const float2 within = add_weights(rows, step, gates);
        write_rows(shared.sums.row, quad_sums({sums.x + within.x, sums.y + within.y}));
        if (work.g.skip_partials != nullptr) sum_skip(shared, step);
    }

    __device__ __forceinline__ void finish() {
        finish_keys(work, dq, sum, work.shared.k, work.g.dq, 0, 0,
                    arch::warp_uniform(warpgroup::warpid()) + 1);
    }
};

}  // namespace sm80
}  // namespace thunderkittens::recurrent
