// What portable kernels of the family do in place of wgmma, TMA and stmatrix: products of mma.sync
// with operands from shared tiles, and an accumulator's way into them. A block has four warps, each
// of which has 16 of a chunk's 64 rows.
#pragma once

#include "csrc/attention/portable/copies_sm80.cuh"
#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int PORTABLE_THREADS = 4 * WARP_THREADS, PORTABLE_BLOCKS_PER_SM = 2;

__device__ __forceinline__ int own_warp() { return arch::warp_uniform(kittens::warpid()); }
// The warp's first row of a chunk.
__device__ __forceinline__ int warp_row() { return 16 * own_warp(); }

template <class Tile>
using tile_copy = attention::TileCopy<Tile, PORTABLE_THREADS>;
// Operands whose columns, or whose rows, lie along the products' sums.
template <any_shared_tile Tile>
using a_walker = operand_walker<operand_a, true, Tile>;
template <any_shared_tile Tile>
using b_walker = operand_walker<operand_b, true, Tile>;
template <any_shared_tile Tile>
using b_walker_of_rows = operand_walker<operand_b, false, Tile>;

// 16 columns of an accumulator.
template <any_register_tile Tile>
__device__ __forceinline__ rt_fl<16, 16>& block_of(Tile& tile, int j) {
    static_assert(Tile::height == 1 && sizeof(tile.tiles[0][0]) == sizeof(rt_fl<16, 16>));
    return reinterpret_cast<rt_fl<16, 16>&>(tile.tiles[0][j]);
}

// Rounds 16 columns of an accumulator to an operand.
template <class T>
__device__ __forceinline__ operand_a<T> to_operand_a(const rt_fl<16, 16>& tile) {
    operand_a<T> a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = tile.tiles[0][0].data[i];
        a.words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x, pair.y));
    }
    return a;
}

// Stores 16 rows of a warp to those of a tile whose rows have 128 bytes in a stripe: every lane its
// pairs, 32 banks at a time. pair(j, i) is pair i of the lane's in block j of 16 columns. One
// address, because columns change bits that nothing else does.
template <int blocks, any_shared_tile Tile, class Pair>
__device__ __forceinline__ void store_pairs(const Tile& tile, int row, Pair pair) {
    static_assert(Tile::swizzle_bytes == 128 && sizeof(typename Tile::T) == 2);
    const uint32_t first = tile.address_of(row + laneid() / 4, 2 * (laneid() % 4));
#pragma unroll
    for (int j = 0; j < blocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t at = (first ^ uint32_t(32 * (j % 4) + 16 * (i / 2))) +
                                uint32_t(j / 4 * Tile::stripe_bytes + i % 2 * 8 * 128);
            arch::store_shared(at, pair(j, i));
        }
    }
}
// Those of an accumulator, times a factor and rounded, and those of an operand.
template <any_shared_tile Tile, any_register_tile Accumulator>
__device__ __forceinline__ void store_accumulator(const Tile& tile, int row,
                                                  const Accumulator& from, float factor = 1.0f) {
    store_pairs<Accumulator::width>(tile, row, [&](int j, int i) {
        const float2 pair = from.tiles[0][j].data[i];
        return pack_pair<typename Tile::T>(factor * pair.x, factor * pair.y);
    });
}
template <any_shared_tile Tile, any_register_tile Operand>
__device__ __forceinline__ void store_operand_rows(const Tile& tile, int row, const Operand& from) {
    store_pairs<Operand::width>(tile, row, [&](int j, int i) { return from.tiles[0][j].data[i]; });
}

}  // namespace sm80
}  // namespace thunderkittens::linear_attention
