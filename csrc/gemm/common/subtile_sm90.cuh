// Store subtiles: a finished tile is rounded to 16 bits and stored in subtiles of 128 bytes a row,
// each of which passes through a warp's staging buffer.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// All subtiles have one width. Where it does not divide the columns, the last subtile begins
// earlier and stores some values a second time.
template <int cols, int width>
struct Subtiles {
    static constexpr int count = (cols + width - 1) / width;
    static __device__ __forceinline__ constexpr int first(int subtile) {
        return (subtile + 1) * width <= cols ? subtile * width : cols - width;
    }
};

// Takes the subtile from column `first` of a register tile.
template <class Subtile, class Tile>
__device__ __forceinline__ void take_subtile(Subtile& subtile, const Tile& tile, int first) {
#pragma unroll
    for (int t = 0; t < subtile.width; ++t) subtile.tiles[0][t] = tile.tiles[0][first / 16 + t];
}
// The same into a staging buffer.
template <class Subtile, class Tile, class Staging>
__device__ __forceinline__ void stage_subtile(const Tile& tile, int first, Staging& buffer) {
    Subtile subtile;
    take_subtile(subtile, tile, first);
    kittens::warp::store(buffer, subtile);
}

// Rounds accumulators to a 16-bit type (bf16 stands for both), into `values` from column `first`
// on.
template <class O, class Values, class Sums>
__device__ __forceinline__ void round_to(Values& values, const Sums& d, int first = 0) {
#pragma unroll
    for (int j = 0; j < d.width; ++j) {
#pragma unroll
        for (int r = 0; r < d.packed_per_base; ++r) {
            const float2 pair = d.tiles[0][j].data[r];
            values.tiles[0][first / 16 + j].data[r] =
                arch::bit_cast<bf16_2>(pack_pair<O>(pair.x, pair.y));
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
