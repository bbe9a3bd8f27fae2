// A finished tile on its way out: rounded to 16 bits, and divided into pieces of 128 bytes a row,
// each of which passes through a warp's staging buffer.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Columns leave in pieces of one width; the last one begins earlier where they do not fit, and
// writes some values a second time.
template <int cols, int width>
struct Pieces {
    static constexpr int count = (cols + width - 1) / width;
    static __device__ __forceinline__ constexpr int first(int piece) {
        return (piece + 1) * width <= cols ? piece * width : cols - width;
    }
};

// The part of a register tile from column `first` on.
template <class Part, class Tile>
__device__ __forceinline__ void take_piece(Part& part, const Tile& tile, int first) {
#pragma unroll
    for (int t = 0; t < part.width; ++t) part.tiles[0][t] = tile.tiles[0][first / 16 + t];
}
// The same into a staging buffer.
template <class Part, class Tile, class Staging>
__device__ __forceinline__ void stage_piece(const Tile& tile, int first, Staging& buffer) {
    Part part;
    take_piece(part, tile, first);
    kittens::warp::store(buffer, part);
}

// Accumulators rounded to a 16-bit type (bf16 stands for both), to where column `first` begins.
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
