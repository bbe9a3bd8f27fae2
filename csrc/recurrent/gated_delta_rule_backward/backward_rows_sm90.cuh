// What the roles of the gated delta rule's gradient do with the rows of a chunk: sums over a row,
// decays, and gradients on their way to memory.
#pragma once

#include <algorithm>

#include "csrc/recurrent/gated_delta_rule_backward/backward_types_sm90.cuh"

namespace thunderkittens::recurrent::delta_gradient {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) x += arch::shuffle_xor(x, d);
    return x;
}

// Of two pairs of elements.
template <class T>
__device__ __forceinline__ void add_product(float& sum, uint32_t x, uint32_t y) {
    const float2 a = unpack_pair<T>(arch::bit_cast<packed_type<T>>(x)),
                 b = unpack_pair<T>(arch::bit_cast<packed_type<T>>(y));
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
}

// The warp, or the lane's row, in a register of its own: else what follows from it, addresses and
// elements, would be registers from one use to the next.
__device__ __forceinline__ int pinned(int x) {
    auto value = uint32_t(x);
    arch::pin_register(value);
    return int(value);
}

// f(pair of tokens' elements, tile and register of the same elements in an accumulator)
template <class G, any_shared_tile Tile, class F>
__device__ __forceinline__ void for_each_pair(Tile& tokens, F f) {
    const int warp = pinned(warpgroup::warpid());
#pragma unroll
    for (int j = 0; j < G::key_dim / 16; ++j) {
        rt<typename G::T, 16, 16> part;
        warp::load(part, tokens.template subtile<16, 16>({warp, j}));
#pragma unroll
        for (int i = 0; i < 4; ++i) f(unpack_pair<typename G::T>(part.tiles[0][0].data[i]), j, i);
    }
}
// The lane's part of a dot product of the row to which its `i`th register belongs.
__device__ __forceinline__ void add_dot(float2& sum, int i, float2 a, float2 b) {
    float& s = i % 2 ? sum.y : sum.x;
    s = fmaf(a.x, b.x, fmaf(a.y, b.y, s));
}
__device__ __forceinline__ float2 quad_sums(float2 x) { return {quad_sum(x.x), quad_sum(x.y)}; }

// Of rows of tokens and of an accumulator, in all lanes of a quad.
template <class G, any_shared_tile Tile>
__device__ __forceinline__ float2 dot_rows(Tile& tokens, const typename G::sum_tile& sums) {
    float2 sum = {0.0f, 0.0f};
    for_each_pair<G>(tokens,
                     [&](float2 x, int j, int i) { add_dot(sum, i, x, sums.tiles[0][j].data[i]); });
    return quad_sums(sum);
}

// By all lanes of a quad, which have the same sums.
template <class Vector>
__device__ __forceinline__ void store_row_sums(Vector& to, float2 sums) {
    if (laneid() % 4 != 0) return;
    to.set(lane_row(), sums.x);
    to.set(lane_row() + 8, sums.y);
}

// By the lanes that have an element of the diagonal.
template <class Vector>
__device__ __forceinline__ void store_diagonal(Vector& to, const rt_fl<16, 64>& x) {
    const int warp = arch::warp_uniform(warpgroup::warpid()), lane = laneid();
    float2 upper = x.tiles[0][0].data[0], lower = x.tiles[0][0].data[3];
#pragma unroll
    for (int j = 1; j < 4; ++j) {
        if (j == warp) upper = x.tiles[0][j].data[0], lower = x.tiles[0][j].data[3];
    }
    if (lane / 8 != lane % 4) return;
    to.set(lane_row(), lane / 4 % 2 ? upper.y : upper.x);
    to.set(lane_row() + 8, lane / 4 % 2 ? lower.y : lower.x);
}

// factor_i beta_j exp(c_i - c_j) x_ij for j <= i, or j < i; factors of the lane's two rows.
template <bool with_diagonal, any_register_tile To, class Vectors>
__device__ __forceinline__ void decayed(To& to, const rt_fl<16, 64>& x, const Vectors& vectors,
                                        float2 factors) {
    const int row = pinned(lane_row()), first = pinned(2 * (laneid() % 4));
    const float2 own = {vector_at(vectors, LOG2_C, row), vector_at(vectors, LOG2_C, row + 8)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 16 * j + 8 * half + first;
            const float2 c = vector_pair(vectors, LOG2_C, column);
            const float2 betas = vector_pair(vectors, BETA, column);
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const int r = row + 8 * low - (with_diagonal ? 0 : 1);
                const float mine = low ? own.y : own.x, factor = low ? factors.y : factors.x;
                const float2 beta = {factor * betas.x, factor * betas.y};
                const float2 pair = x.tiles[0][j].data[2 * half + low];
                const float a = column <= r ? beta.x * arch::exp2_approx(mine - c.x) : 0.0f;
                const float b = column + 1 <= r ? beta.y * arch::exp2_approx(mine - c.y) : 0.0f;
                to.tiles[0][j].data[2 * half + low] =
                    pack_pair<typename To::T>(pair.x * a, pair.y * b);
            }
        }
    }
}

// Writes the lane's pairs of 64 columns, of both rows: neighbouring lanes exchange pairs, so that a
// lane has four columns of one group of 8, and a quad whole sectors. All exchanges come before the
// stores: none waits for another one.
template <class T>
__device__ __forceinline__ void store_pairs(T* upper, T* lower, bool has_upper, bool has_lower,
                                            int columns, const packed_type<T> (&data)[4][4]) {
    const int lane = laneid() % 4, at = 8 * (lane % 2) + 4 * (lane / 2);
    const bool odd = lane % 2 == 1;
    uint2 words[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            const uint32_t left = arch::bit_cast<uint32_t>(data[j][low]),
                           right = arch::bit_cast<uint32_t>(data[j][2 + low]);
            const uint32_t other = arch::shuffle_xor(odd ? left : right, 1);
            words[j][low] = odd ? uint2{other, right} : uint2{left, other};
        }
    }
    auto *to_upper = reinterpret_cast<uint2*>(upper + at),
         *to_lower = reinterpret_cast<uint2*>(lower + at);
    columns -= at;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (has_upper && 16 * j < columns) arch::store_global(to_upper + 4 * j, words[j][0]);
        if (has_lower && 16 * j < columns) arch::store_global(to_lower + 4 * j, words[j][1]);
    }
}

// dV = beta Y on its way to memory, a slice at a time. The tiles are transposed.
template <class G, class Set>
__device__ __forceinline__ void finish_values(const TokenRows<typename G::T>& to, Set& grad_values,
                                              float2 beta, const DeltaChunk& chunk, int value_head,
                                              int part) {
    using T = typename G::T;
    if (to.data == nullptr) return;
    const int row = pinned(lane_row());
    const int before = part * G::slices * DELTA_VALUES;  // columns of other parts
    T* const upper = to.at(chunk, value_head, chunk.row() + row) + before;
#pragma unroll
    for (int s = 0; s < G::slices; ++s) {
        rt_base<T, row_l> y[4];
        packed_type<T> data[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            load_transposed(y[j], grad_values[s], 16 * j, 16 * warpgroup::warpid());
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_pair<T>(y[j].data[i]);
                const float b = i % 2 ? beta.y : beta.x;
                data[j][i] = pack_pair<T>(pair.x * b, pair.y * b);
            }
        }
        T* const first = upper + 64 * s;
        store_pairs<T>(first, first + 8 * to.row_stride, row < chunk.tokens(),
                       row + 8 < chunk.tokens(), to.columns - before - 64 * s, data);
    }
}

// A gradient of normalised rows y with y . dy = dot becomes that of the rows, and goes to memory.
template <class G, class Globals, any_shared_tile Tile>
__device__ __forceinline__ void finish_rows(const TokenRows<typename G::T>& to, const float* norms,
                                            const Globals& g, const typename G::sum_tile& sums,
                                            float2 dot, Tile& tokens, const DeltaChunk& chunk,
                                            int head) {
    using T = typename G::T;
    if (to.data == nullptr) return;
    const int warp = pinned(warpgroup::warpid()), row = pinned(lane_row());
    const bool has_upper = row < chunk.tokens(), has_lower = row + 8 < chunk.tokens();
    float2 factor = {1.0f, 1.0f};
    if (norms != nullptr) {
        const float* at = norms + (int64_t(chunk.b) * g.heads + head) * g.sequences.length +
                          chunk.begin + chunk.row() + row;
        if (has_upper) factor.x = arch::load_global_readonly(at);
        if (has_lower) factor.y = arch::load_global_readonly(at + 8);
    } else {
        dot = {0.0f, 0.0f};
    }
    T* const upper = to.at(chunk, head, chunk.row() + row);
#pragma unroll
    for (int k = 0; k < G::key_dim / 64; ++k) {
        rt<T, 16, 16> parts[4];
        packed_type<T> data[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            warp::load(parts[j], tokens.template subtile<16, 16>({warp, 4 * k + j}));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 y = unpack_pair<T>(parts[j].tiles[0][0].data[i]);
                const float2 dy = sums.tiles[0][4 * k + j].data[i];
                const float d = i % 2 ? dot.y : dot.x, f = i % 2 ? factor.y : factor.x;
                data[j][i] = pack_pair<T>(f * fmaf(-d, y.x, dy.x), f * fmaf(-d, y.y, dy.y));
            }
        }
        T* const first = upper + 64 * k;
        store_pairs<T>(first, first + 8 * to.row_stride, has_upper, has_lower, to.columns - 64 * k,
                       data);
    }
}

// Zeros for tokens that no sequence has, by a warpgroup.
template <class G>
__device__ __forceinline__ void clear_rows(const TokenRows<typename G::T>& to,
                                           const DeltaChunk& chunk, int head) {
    if (to.data == nullptr || !chunk.exists) return;
    const int words = to.columns / 8, count = ::min(DELTA_CHUNK, chunk.tokens()) * words;
    for (int i = warpgroup::laneid(); i < count; i += WARPGROUP_THREADS) {
        auto* row = to.at(chunk, head, chunk.row() + i / words);
        arch::store_global(reinterpret_cast<uint4*>(row + 8 * (i % words)), uint4{0, 0, 0, 0});
    }
}

}  // namespace thunderkittens::recurrent::delta_gradient
