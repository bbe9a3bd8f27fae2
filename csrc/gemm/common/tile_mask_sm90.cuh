// The tile mask (tile_mask.h) as kernels read it: on the device, so that the host never waits for
// what decides.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/tile_mask.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Whether the mask has the tile.
template <uint32_t height, uint32_t width, class Globals>
__device__ __forceinline__ bool in_mask(const Globals& g, const TilePosition at) {
    const uint32_t row = at.m * height, col = at.n * width;
    uint64_t mask = 0;
    for (uint32_t i = row / MASK_ROWS; i <= (min(row + height, g.m) - 1) / MASK_ROWS; ++i) {
        mask |= arch::load_global(g.mask.rows + i);
    }
    for (uint32_t i = col / MASK_ROWS; i <= (min(col + width, g.n) - 1) / MASK_ROWS; ++i) {
        mask |= arch::load_global(g.mask.columns + i);
    }
    return mask != 0;
}

// Whether the mask has any tile. Called by whole warps.
__device__ __forceinline__ bool any_in_mask(const TileMask& mask, uint32_t m, uint32_t n) {
    uint64_t found = 0;
    for (uint32_t i = laneid(); i < (m + MASK_ROWS - 1) / MASK_ROWS; i += WARP_THREADS) {
        found |= arch::load_global(mask.rows + i);
    }
    for (uint32_t i = laneid(); i < (n + MASK_ROWS - 1) / MASK_ROWS; i += WARP_THREADS) {
        found |= arch::load_global(mask.columns + i);
    }
    return arch::any_lane(found != 0);
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
