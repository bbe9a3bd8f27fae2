// Products of a warp by mma.sync in which every operand that comes through shared memory is loaded
// one ahead of its use.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// Calls use(i, operand) for COUNT operands b, which load(operand, i) loads.
template <scalar T, int COUNT, class Load, class Use>
__device__ __forceinline__ void with_operands(Load load, Use use) {
    operand_b<T> next;
    load(next, 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const auto now = next;
        if (i + 1 < COUNT) load(next, i + 1);
        use(i, now);
    }
}

// d += a b, of so many tiles of 16 rows and of 16 columns, and steps of 16 of k. load_a(operand,
// row tile, step) and load_b(operand, column tile, step) load operands, at(row tile, column tile)
// is a tile of d, and between(i) is called before product i of row_tiles each, STEPS * COLUMN_TILES
// of them: for work that the tensor cores do not wait for.
template <scalar T, int ROW_TILES, int COLUMN_TILES, int STEPS>
struct Product {
    static constexpr int COUNT = STEPS * COLUMN_TILES;

    template <class LoadA, class LoadB, class At, class Between>
    static __device__ __forceinline__ void add(LoadA load_a, LoadB load_b, At at, Between between) {
        operand_a<T> a[2][ROW_TILES];  // of this step and the next
        const auto load_step = [&](int step) {
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) load_a(a[step % 2][m], m, step);
        };
        load_step(0);
        with_operands<T, COUNT>(
            [&](auto& b, int i) { load_b(b, i % COLUMN_TILES, i / COLUMN_TILES); },
            [&](int i, const auto& b) {
                const int step = i / COLUMN_TILES, n = i % COLUMN_TILES;
                if (n == 0 && step + 1 < STEPS) load_step(step + 1);
                between(i);
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) mma_operands(at(m, n), a[step % 2][m], b);
            });
    }
    template <class LoadA, class LoadB, class At>
    static __device__ __forceinline__ void add(LoadA load_a, LoadB load_b, At at) {
        add(load_a, load_b, at, [](int) {});
    }
};

// A tile of 16 x 16 of an accumulator that has 16 rows.
template <any_register_tile Tile>
__device__ __forceinline__ rt<typename Tile::T, 16, 16>& tile_at(Tile& tile, int column_tile) {
    static_assert(Tile::height == 1);
    return reinterpret_cast<rt<typename Tile::T, 16, 16>&>(tile.tiles[0][column_tile]);
}
template <any_register_tile Tile>
__device__ __forceinline__ const rt<typename Tile::T, 16, 16>& tile_at(const Tile& tile,
                                                                       int column_tile) {
    return tile_at(const_cast<Tile&>(tile), column_tile);
}

}  // namespace thunderkittens::attention
