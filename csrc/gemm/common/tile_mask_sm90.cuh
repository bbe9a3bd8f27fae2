// Which tiles of a product are marked, see tile_mask.h: read on the device, so that the host never
// waits for what decides.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/tile_mask.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Whether a tile is to be computed, where only those that are marked are.
template <uint32_t height, uint32_t width, class Globals>
__device__ __forceinline__ bool is_marked(const Globals& g, const TilePosition at) {
    const uint32_t row = at.m * height, col = at.n * width;
    uint64_t marks = 0;
    for (uint32_t i = row / MARKED_ROWS; i <= (min(row + height, g.m) - 1) / MARKED_ROWS; ++i) {
        marks |= arch::load_global(g.marks.rows + i);
    }
    for (uint32_t i = col / MARKED_ROWS; i <= (min(col + width, g.n) - 1) / MARKED_ROWS; ++i) {
        marks |= arch::load_global(g.marks.columns + i);
    }
    return marks != 0;
}

// Whether there is a mark at all. Called by whole warps.
__device__ __forceinline__ bool any_mark(const Marks& marks, uint32_t m, uint32_t n) {
    uint64_t found = 0;
    for (uint32_t i = laneid(); i < (m + MARKED_ROWS - 1) / MARKED_ROWS; i += WARP_THREADS) {
        found |= arch::load_global(marks.rows + i);
    }
    for (uint32_t i = laneid(); i < (n + MARKED_ROWS - 1) / MARKED_ROWS; i += WARP_THREADS) {
        found |= arch::load_global(marks.columns + i);
    }
    return arch::any_lane(found != 0);
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
