// The raster of a product's tiles (common/raster.h), as its configuration and its schedule say, the
// same on the host and in the kernel.
//
// Balanced tiling with run-time widths (Config::balanced) has one of its own, of tiles whose two
// widths are chosen for the problem, so that all SMs end together.
//
// Where b's rows lie along k, the two widths are NARROW_BY columns apart, and rows of tiles have
// `columns` tiles or one more, as in TwoWidthOrder. Where they lie along n, every tile begins with
// a whole line of 64 columns: the widths are 64 apart, and all wide tiles come first in the raster,
// so that they are dealt out evenly.
#pragma once

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

TK_HOST_DEVICE constexpr int balanced_step(const Config& c) {
    return c.b_n_major ? 64 : int(NARROW_BY);
}
TK_HOST_DEVICE constexpr int widest(const Config& c) {
    return c.block_n - (c.b_n_major ? 0 : int(NARROW_BY));
}
TK_HOST_DEVICE constexpr int narrowest(const Config& c) { return c.b_n_major ? 128 : 160; }

// How `tiles` tiles cover `columns`: `wide` of them are one step wider than the others, which have
// `narrow` columns.
struct Shares {
    uint32_t narrow, wide;
};
constexpr Shares share_columns(const Config& c, int64_t columns, int64_t tiles) {
    const int64_t unit = balanced_step(c), units = (columns + unit - 1) / unit;
    const int64_t least = narrowest(c) / unit, most = widest(c) / unit - 1;
    int64_t each = tiles > 0 ? units / tiles : most;
    each = each > most ? most : each < least ? least : each;
    int64_t wide = units - tiles * each;
    wide = wide < 0 ? 0 : wide > tiles ? tiles : wide;
    return {static_cast<uint32_t>(each * unit), static_cast<uint32_t>(wide)};
}

// Whether the tiles of a schedule cover the output, and each has at least one column of it.
constexpr bool covers(const Config& c, const Schedule& schedule, int64_t m, int64_t n) {
    const int64_t height = c.block_m * c.cluster_m;
    const int64_t rows = (m + height - 1) / height, most = (n - 1) / narrowest(c) + 1;
    const int64_t columns = schedule.columns, extra_rows = schedule.extra_rows;
    return columns > 0 && columns * widest(c) >= n && columns + (extra_rows > 0) <= most &&
           extra_rows >= 0 && (c.b_n_major ? extra_rows == 0 : extra_rows <= rows);
}

// Whether the balanced kernel computes a call: the output has the operands' type, TMA stores it,
// and k has a step for each subtile of the deferred store.
inline bool runs_balanced(const Config& c, const Params& p) {
    return p.out_dtype == c.dtype && p.batch == 1 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
           p.out_stride % 8 == 0 && (p.k + BLOCK_K - 1) / BLOCK_K >= (c.block_n + 63) / 64 &&
           covers(c, p.schedule, p.m, p.n);
}

struct BalancedPosition : TilePosition {
    uint32_t col = 0, width = 0;
    uint32_t kind = 0;  // 0 to 3: in `base` or `extra`, narrow or wide
};

struct BalancedOrder : TwoWidthOrder {
    uint32_t unit, narrow_of_base, narrow_of_extra;
    uint32_t first_tile, first_column;  // of `extra`

    TK_HOST_DEVICE constexpr BalancedPosition at(uint32_t index) const {
        const TwoWidthPosition at = TwoWidthOrder::at(index);
        const bool late = index >= base.total;
        const uint32_t narrow = late ? narrow_of_extra : narrow_of_base;
        BalancedPosition position{at};
        position.col = at.n * narrow + (at.narrow() ? at.wide : at.n) * unit;
        position.width = narrow + (at.narrow() ? 0 : unit);
        position.kind = (late ? 2 : 0) + (at.narrow() ? 0 : 1);
        if (late) position.n += first_tile, position.col += first_column;
        return position;
    }
    // The width of the tiles of a kind; 0 where there are none.
    constexpr uint32_t width_of(uint32_t kind) const {
        const bool late = kind >= 2;
        if ((late ? extra : base).total == 0) return 0;
        return (late ? narrow_of_extra : narrow_of_base) + kind % 2 * unit;
    }
};

// The raster of a schedule that covers the output.
inline BalancedOrder make_balanced_order(const Config& c, const Schedule& schedule, int64_t m,
                                         int64_t n) {
    const int64_t height = c.block_m * c.cluster_m;
    const auto rows = static_cast<uint32_t>((m + height - 1) / height);
    const auto columns = static_cast<uint32_t>(schedule.columns);
    const auto extra_rows = static_cast<uint32_t>(schedule.extra_rows);
    const auto raster_group = static_cast<uint32_t>(schedule.raster_group);
    const auto tiles_of = [&](uint32_t count, uint32_t across) {
        if (count == 0 || across == 0) return TileOrder{};
        const uint32_t raster_groups =
            count < raster_group ? 1 : (count + raster_group / 2) / raster_group;
        return make_order(count, across, 1, (count + raster_groups - 1) / raster_groups, false);
    };
    const Shares shares = share_columns(c, n, columns), of_extra = share_columns(c, n, columns + 1);
    const auto unit = static_cast<uint32_t>(balanced_step(c));
    BalancedOrder order{};
    order.unit = unit, order.narrow_of_base = shares.narrow;
    if (c.b_n_major) {
        order.base = tiles_of(rows, shares.wide),
        order.extra = tiles_of(rows, columns - shares.wide);
        order.rows = 0, order.wide_of_base = shares.wide, order.wide_of_extra = 0;
        order.narrow_of_extra = shares.narrow;
        order.first_tile = shares.wide, order.first_column = shares.wide * (shares.narrow + unit);
    } else {
        order.base = tiles_of(rows - extra_rows, columns),
        order.extra = tiles_of(extra_rows, columns + 1);
        order.rows = rows - extra_rows, order.wide_of_base = shares.wide;
        order.wide_of_extra = of_extra.wide, order.narrow_of_extra = of_extra.narrow;
        order.first_tile = order.first_column = 0;
    }
    order.total = order.base.total + order.extra.total;
    return order;
}

}  // namespace thunderkittens::gemm
