// What the portable kernels of the gated delta rule share: operands of mma.sync in shared memory
// and registers, copies of rows, and rows on their way to memory.
#pragma once

#include "csrc/linear_attention/common/products_sm80.cuh"
#include "csrc/recurrent/gated_delta_rule/within_chunks.cuh"

namespace thunderkittens::recurrent::delta_portable {

using namespace kittens;
using namespace delta_common;
using linear_attention::sm80::a_walker;
using linear_attention::sm80::b_walker;
using linear_attention::sm80::b_walker_of_rows;
using linear_attention::sm80::block_of;
using linear_attention::sm80::to_operand_a;
// Rows of A that lie along the columns of a tile.
template <any_shared_tile Tile>
using a_walker_of_columns = operand_walker<operand_a, false, Tile>;

constexpr int BLOCKS = DELTA_CHUNK / 16, GROUP_THREADS = WARPGROUP_THREADS;

__device__ __forceinline__ int own_warp() { return arch::warp_uniform(warpid() % WARPGROUP_WARPS); }
__device__ __forceinline__ int own_group() {
    return arch::warp_uniform(warpid() / WARPGROUP_WARPS);
}

// By all threads of a block: the first `rows` rows and of them the first `columns`; others become
// zeros. The next commit is that of these copies.
template <any_shared_tile Tile>
__device__ __forceinline__ void copy_rows(const Tile& tile, const typename Tile::T* from,
                                          int64_t row_stride, int rows, int columns, int thread,
                                          int threads) {
    static_assert(Tile::stripe_cols == 64);
    const int column = thread % 8 * 8, pass = threads / 8;
    int row = thread / 8;
    uint32_t to = tile.address_of(row, column);
    from += row * row_stride + column;
#pragma unroll 1
    for (; row < Tile::rows; row += pass) {
#pragma unroll
        for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
            arch::cp_async<16>(to + uint32_t(stripe * Tile::stripe_bytes), from + 64 * stripe,
                               row < rows && column + 64 * stripe < columns);
        }
        to += uint32_t(pass * Tile::swizzle_bytes);
        from += pass * row_stride;
    }
}
template <any_shared_tile Tile>
__device__ __forceinline__ void copy_rows(const Tile& tile, const typename Tile::T* from,
                                          int64_t row_stride, int rows, int columns) {
    copy_rows(tile, from, row_stride, rows, columns, int(threadIdx.x), int(blockDim.x));
}
// A whole tile of the workspace, and the vectors of a chunk.
template <any_shared_tile Tile>
__device__ __forceinline__ void copy_tile(const Tile& tile, const typename Tile::T* from) {
    copy_rows(tile, from, Tile::cols, Tile::rows, Tile::cols);
}
template <class Vector>
__device__ __forceinline__ void copy_vector(const Vector& to, const float* from) {
    const int first = 4 * int(threadIdx.x);
    if (first < Vector::length) arch::cp_async<16>(to.address_of(first), from + first);
}

// The pairs of an operand, times factor(column, lower row) and rounded.
template <class T, class F>
__device__ __forceinline__ operand_a<T> scaled(const operand_a<T>& x, int first, F factor) {
    operand_a<T> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = factor(first + 8 * (i / 2) + 2 * (laneid() % 4), i % 2 == 1);
        const float2 pair = unpack_pair<T>(arch::bit_cast<packed_type<T>>(x.words[i]));
        y.words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x * f.x, pair.y * f.y));
    }
    return y;
}
template <class T, class F>
__device__ __forceinline__ operand_a<T> scaled(const rt_fl<16, 16>& x, int first, F factor) {
    operand_a<T> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = factor(first + 8 * (i / 2) + 2 * (laneid() % 4), i % 2 == 1);
        const float2 pair = x.tiles[0][0].data[i];
        y.words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x * f.x, pair.y * f.y));
    }
    return y;
}

// 16 x 16 elements of an operand to memory, of which the first `rows` and `columns` exist; `to` is
// the first. Each thread stores eight neighbours.
template <class T>
__device__ __forceinline__ void store_operand(const operand_a<T>& x, T* to, int64_t row_stride,
                                              int rows, int columns) {
    uint32_t words[4] = {x.words[0], x.words[2], x.words[1], x.words[3]};
    attention::transpose_quad(words);
    const int lane = laneid(), row = lane / 4 + 8 * (lane % 4 / 2), column = 8 * (lane % 2);
    if (row < rows && column < columns) {
        arch::store_global(reinterpret_cast<uint4*>(to + row * row_stride + column),
                           uint4{words[0], words[1], words[2], words[3]});
    }
}
template <class T>
__device__ __forceinline__ operand_a<T> transposed(const operand_a<T>& x) {
    return {{arch::transpose_matrix(x.words[0]), arch::transpose_matrix(x.words[2]),
             arch::transpose_matrix(x.words[1]), arch::transpose_matrix(x.words[3])}};
}
// The warp's 16 rows of a tile of the workspace.
template <any_register_tile Tile, class T>
__device__ __forceinline__ void store_tile_rows(const Tile& tile, T* to) {
    attention::store_rows<T>(tile, to + 16 * own_warp() * Tile::cols, Tile::cols, 16, Tile::cols);
}

// sum += a times the 16 rows of a tile from `row` on, `bytes` behind the walker's.
template <any_register_tile Sum, class T, class Walker>
__device__ __forceinline__ void add_rows(Sum& sum, const operand_a<T>& a, const Walker& walker,
                                         int row, uint32_t bytes = 0) {
#pragma unroll
    for (int j = 0; j < Sum::width; ++j) {
        operand_b<T> b;
        walker.load(b, row, 16 * j, bytes);
        mma_operands(block_of(sum, j), a, b);
    }
}

}  // namespace thunderkittens::recurrent::delta_portable
