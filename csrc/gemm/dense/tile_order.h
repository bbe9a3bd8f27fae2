// The raster of a product's tiles (common/raster.h), as its configuration and its schedule say.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

constexpr TileWalk tile_walk(const Config& c, const Schedule& s) {
    return {.block_m = c.block_m * c.cluster_m,
            .block_n = c.block_n,
            .raster_group = s.raster_group,
            .raster_along_m = s.raster_along_m,
            .columns = s.columns,
            .extra_rows = s.extra_rows};
}
inline TileOrder make_order(const Config& config, const Schedule& schedule, int64_t m, int64_t n,
                            int64_t batch) {
    return make_order(tile_walk(config, schedule), m, n, batch);
}
inline TwoWidthOrder make_two_width_order(const Config& config, const Schedule& schedule, int64_t m,
                                          int64_t n, int64_t batch, bool allowed,
                                          bool halves = false) {
    return make_two_width_order(tile_walk(config, schedule), m, n, batch, allowed, halves);
}

}  // namespace thunderkittens::gemm
