// Tiles of two widths that are chosen for a problem (Config::varied): the order in which they are
// taken, the same on the host and in the kernel.
//
// Where rows of b lie along k, widths are neighbours, 16 columns apart, and rows of tiles have
// `columns` tiles or one more, as in UnevenOrder. Where they lie along n, a tile begins with a
// whole line of 64 columns: widths are 64 apart, and all wide tiles come first, so that they are
// dealt out evenly.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

TK_HOST_DEVICE constexpr int varied_unit(const Config& c) {
    return c.b_n_major ? 64 : int(NARROWER);
}
TK_HOST_DEVICE constexpr int widest(const Config& c) {
    return c.block_n - (c.b_n_major ? 0 : int(NARROWER));
}
TK_HOST_DEVICE constexpr int narrowest(const Config& c) { return c.b_n_major ? 128 : 160; }

// How `tiles` tiles cover `columns`: `wide` of them are a unit wider than the others, which have
// `narrow` columns.
struct Shares {
    uint32_t narrow, wide;
};
constexpr Shares share_columns(const Config& c, int64_t columns, int64_t tiles) {
    const int64_t unit = varied_unit(c), units = (columns + unit - 1) / unit;
    const int64_t least = narrowest(c) / unit, most = widest(c) / unit - 1;
    int64_t each = tiles > 0 ? units / tiles : most;
    each = each > most ? most : each < least ? least : each;
    int64_t wide = units - tiles * each;
    wide = wide < 0 ? 0 : wide > tiles ? tiles : wide;
    return {static_cast<uint32_t>(each * unit), static_cast<uint32_t>(wide)};
}

// Whether the tiles of a schedule cover the output, each with a column of it.
constexpr bool covers(const Config& c, const Schedule& schedule, int64_t m, int64_t n) {
    const int64_t rows = (m + c.block_m - 1) / c.block_m, most = (n - 1) / narrowest(c) + 1;
    const int64_t columns = schedule.columns, longer = schedule.longer;
    return columns > 0 && columns * widest(c) >= n && columns + (longer > 0) <= most &&
           longer >= 0 && (c.b_n_major ? longer == 0 : longer <= rows);
}

// Whether the kernel computes a call: its output has the operands' type, TMA stores it, and k has a
// step for each piece of a tile on its way out.
inline bool suits_varied(const Config& c, const Params& p) {
    return p.out_dtype == c.dtype && p.batch == 1 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
           p.out_stride % 8 == 0 && (p.k + BLOCK_K - 1) / BLOCK_K >= (c.block_n + 63) / 64 &&
           covers(c, p.schedule, p.m, p.n);
}

struct VariedPosition : TilePosition {
    uint32_t col = 0, width = 0;
    uint32_t kind = 0;  // of four: in the first or second part of the order, narrow or wide
};

struct VariedOrder : UnevenOrder {
    uint32_t unit, narrow_of_fewer, narrow_of_more;
    uint32_t first_tile, first_column;  // of the second part

    TK_HOST_DEVICE constexpr VariedPosition at(uint32_t index) const {
        const UnevenPosition at = UnevenOrder::at(index);
        const bool late = index >= fewer.total;
        const uint32_t narrow = late ? narrow_of_more : narrow_of_fewer;
        VariedPosition position{at};
        position.col = at.n * narrow + (at.narrow() ? at.wide : at.n) * unit;
        position.width = narrow + (at.narrow() ? 0 : unit);
        position.kind = (late ? 2 : 0) + (at.narrow() ? 0 : 1);
        if (late) position.n += first_tile, position.col += first_column;
        return position;
    }
    // Of tiles of a kind, where there are any.
    constexpr uint32_t width_of(uint32_t kind) const {
        const bool late = kind >= 2;
        if ((late ? more : fewer).total == 0) return 0;
        return (late ? narrow_of_more : narrow_of_fewer) + kind % 2 * unit;
    }
};

// Of a schedule that covers the output.
inline VariedOrder make_varied_order(const Config& c, const Schedule& schedule, int64_t m,
                                     int64_t n) {
    const auto rows = static_cast<uint32_t>((m + c.block_m - 1) / c.block_m);
    const auto columns = static_cast<uint32_t>(schedule.columns);
    const auto longer = static_cast<uint32_t>(schedule.longer);
    const auto band = static_cast<uint32_t>(schedule.band);
    const auto part = [&](uint32_t count, uint32_t across) {
        if (count == 0 || across == 0) return TileOrder{};
        const uint32_t bands = count < band ? 1 : (count + band / 2) / band;
        return make_order(count, across, 1, (count + bands - 1) / bands, false);
    };
    const Shares shares = share_columns(c, n, columns), of_more = share_columns(c, n, columns + 1);
    const auto unit = static_cast<uint32_t>(varied_unit(c));
    VariedOrder order{};
    order.unit = unit, order.narrow_of_fewer = shares.narrow;
    if (c.b_n_major) {
        order.fewer = part(rows, shares.wide), order.more = part(rows, columns - shares.wide);
        order.rows = 0, order.wide_of_fewer = shares.wide, order.wide_of_more = 0;
        order.narrow_of_more = shares.narrow;
        order.first_tile = shares.wide, order.first_column = shares.wide * (shares.narrow + unit);
    } else {
        order.fewer = part(rows - longer, columns), order.more = part(longer, columns + 1);
        order.rows = rows - longer, order.wide_of_fewer = shares.wide;
        order.wide_of_more = of_more.wide, order.narrow_of_more = of_more.narrow;
        order.first_tile = order.first_column = 0;
    }
    order.total = order.fewer.total + order.more.total;
    return order;
}

}  // namespace thunderkittens::gemm
