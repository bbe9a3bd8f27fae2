// The order in which clusters take the tiles of a product, see common/raster.h, as its
// configuration and its schedule have it.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

constexpr TileWalk tile_walk(const Config& c, const Schedule& s) {
    return {.block_m = c.block_m,
            .block_n = c.block_n,
            .band = s.band,
            .bands_along_m = s.bands_along_m,
            .columns = s.columns,
            .longer = s.longer};
}
inline TileOrder make_order(const Config& config, const Schedule& schedule, int64_t m, int64_t n,
                            int64_t batch) {
    return make_order(tile_walk(config, schedule), m, n, batch);
}
inline UnevenOrder make_uneven_order(const Config& config, const Schedule& schedule, int64_t m,
                                     int64_t n, int64_t batch, bool allowed, bool halves = false) {
    return make_uneven_order(tile_walk(config, schedule), m, n, batch, allowed, halves);
}

}  // namespace thunderkittens::gemm
