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

// The lane's 16 rows of a tile that lies transposed in shared memory.
template <any_register_tile Tile, any_shared_tile Shared>
__device__ __forceinline__ void load_rows(Tile& to, Shared& from) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j)
        load_transposed(to.tiles[0][j], from, 16 * j, 16 * warpgroup::warpid());
}

// The sums of x y over the lane's two rows.
template <class T>
__device__ __forceinline__ void add_products(float2& sum, const rt_base<T, row_l>& x,
                                             const rt_base<T, row_l>& y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 a = unpack_pair<T>(x.data[i]), b = unpack_pair<T>(y.data[i]);
        float& s = i % 2 ? sum.y : sum.x;
        s = fmaf(a.x, b.x, fmaf(a.y, b.y, s));
    }
}

// Of rows of tokens and of an accumulator, in all lanes of a quad.
template <class G, any_shared_tile Tile>
__device__ __forceinline__ float2 dot_rows(Tile& tokens, const typename G::sum_tile& sums) {
    using T = typename G::T;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < G::key_dim / 16; ++j) {
        rt<T, 16, 16> part;
        warp::load(part, tokens.template subtile<16, 16>({warpgroup::warpid(), j}));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = unpack_pair<T>(part.tiles[0][0].data[i]), b = sums.tiles[0][j].data[i];
            float& s = i % 2 ? sum.y : sum.x;
            s = fmaf(a.x, b.x, fmaf(a.y, b.y, s));
        }
    }
    return {quad_sum(sum.x), quad_sum(sum.y)};
}

// By all lanes of a quad, which have the same sums.
template <class Vector>
__device__ __forceinline__ void store_row_sums(Vector& to, float2 sums) {
    if (laneid() % 4 != 0) return;
    to.set(lane_row(), sums.x);
    to.set(lane_row() + 8, sums.y);
}

// factor beta_j exp(c_i - c_j) x_ij for j <= i, or j < i.
template <bool with_diagonal, any_register_tile To, class Vectors>
__device__ __forceinline__ void decayed(To& to, const rt_fl<16, 64>& x, const Vectors& vectors,
                                        float factor) {
    const int row = lane_row(), first = 2 * (laneid() % 4);
    const float2 own = {vector_at(vectors, LOG2_C, row), vector_at(vectors, LOG2_C, row + 8)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 16 * j + 8 * half + first;
            const float2 c = vector_pair(vectors, LOG2_C, column);
            float2 beta = vector_pair(vectors, BETA, column);
            beta = {factor * beta.x, factor * beta.y};
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const int r = row + 8 * low - (with_diagonal ? 0 : 1);
                const float mine = low ? own.y : own.x;
                const float2 pair = x.tiles[0][j].data[2 * half + low];
                const float a = column <= r ? beta.x * arch::exp2_approx(mine - c.x) : 0.0f;
                const float b = column + 1 <= r ? beta.y * arch::exp2_approx(mine - c.y) : 0.0f;
                to.tiles[0][j].data[2 * half + low] =
                    pack_pair<typename To::T>(pair.x * a, pair.y * b);
            }
        }
    }
}

// Writes the lane's pairs of two neighbouring groups of 8 columns, of both rows: neighbouring lanes
// exchange pairs, so that a lane has four columns of one group and a quad whole sectors.
template <class T>
__device__ __forceinline__ void store_pairs(T* upper, T* lower, bool has_upper, bool has_lower,
                                            int column, int columns,
                                            const packed_type<T> (&data)[4]) {
    const int lane = laneid() % 4;
    const bool odd = lane % 2 == 1;
    const int at = column + 8 * (lane % 2) + 4 * (lane / 2);
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const uint32_t left = arch::bit_cast<uint32_t>(data[low]),
                       right = arch::bit_cast<uint32_t>(data[2 + low]);
        const uint32_t other = arch::shuffle_xor(odd ? left : right, 1);
        const uint2 word = odd ? uint2{other, right} : uint2{left, other};
        if ((low ? has_lower : has_upper) && at < columns)
            arch::store_global(reinterpret_cast<uint2*>((low ? lower : upper) + at), word);
    }
}

// dV = beta Y on its way to memory, a slice at a time; returns the sums of Y U' over rows. Both
// tiles are transposed.
template <class G, class Set>
__device__ __forceinline__ float2 finish_values(const TokenRows<typename G::T>& to, Set& values,
                                                Set& grad_values, float2 beta,
                                                const DeltaChunk& chunk, int value_head) {
    using T = typename G::T;
    const int row = lane_row();
    T* const upper = to.at(chunk, value_head, chunk.row() + row);
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < G::slices; ++s) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            rt_base<T, row_l> y, u;
            load_transposed(y, grad_values[s], 16 * j, 16 * warpgroup::warpid());
            load_transposed(u, values[s], 16 * j, 16 * warpgroup::warpid());
            add_products(sum, y, u);
            if (to.data == nullptr) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_pair<T>(y.data[i]);
                const float b = i % 2 ? beta.y : beta.x;
                y.data[i] = pack_pair<T>(pair.x * b, pair.y * b);
            }
            store_pairs<T>(upper, upper + 8 * to.row_stride, row < chunk.tokens(),
                           row + 8 < chunk.tokens(), 64 * s + 16 * j, to.columns, y.data);
        }
    }
    return {quad_sum(sum.x), quad_sum(sum.y)};
}

// A gradient of normalised rows y with y . dy = dot becomes that of the rows, and goes to memory.
template <class G, class Globals, any_shared_tile Tile>
__device__ __forceinline__ void finish_rows(const TokenRows<typename G::T>& to, const float* norms,
                                            const Globals& g, const typename G::sum_tile& sums,
                                            float2 dot, Tile& tokens, const DeltaChunk& chunk,
                                            int head) {
    using T = typename G::T;
    if (to.data == nullptr) return;
    const int row = lane_row();
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
    T* upper = to.at(chunk, head, chunk.row() + row);
#pragma unroll
    for (int j = 0; j < G::key_dim / 16; ++j) {
        rt<T, 16, 16> part;
        warp::load(part, tokens.template subtile<16, 16>({warpgroup::warpid(), j}));
        packed_type<T> data[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 y = unpack_pair<T>(part.tiles[0][0].data[i]);
            const float2 dy = sums.tiles[0][j].data[i];
            const float d = i % 2 ? dot.y : dot.x, f = i % 2 ? factor.y : factor.x;
            data[i] = pack_pair<T>(f * fmaf(-d, y.x, dy.x), f * fmaf(-d, y.y, dy.y));
        }
        store_pairs<T>(upper, upper + 8 * to.row_stride, has_upper, has_lower, 16 * j, to.columns,
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
