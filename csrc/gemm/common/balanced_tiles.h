// Balanced tiling with two fixed widths, block_n and block_n - NARROW_BY (raster.h): when it pays,
// and how many tiles of each width a row has.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/raster.h"

namespace thunderkittens::gemm {

// How many tiles a row has, see Schedule. `units` are the columns that one SM computes, in units of
// NARROW_BY; `wide` tiles of a row are wide, and `wide_of_extra` of a row with one more tile.
template <class Int>
struct TileCounts {
    Int columns = 0, extra_rows = 0, units = 0, wide = 0, wide_of_extra = 0;
};

// Balanced tiling against wave quantisation: as many tiles as fill the waves that are needed
// anyway, so that the SMs that would idle in the last wave take columns from the others. The
// grouped kernel calls this on the device, which alone knows how many rows of tiles there are.
template <class Int>
TK_HOST_DEVICE constexpr TileCounts<Int> count_tiles(Int rows, Int n, int block_n, Int sm_count) {
    const Int full = block_n / Int(NARROW_BY), all = (n + NARROW_BY - 1) / NARROW_BY;
    const Int least = (n + block_n - 1) / block_n, most = (all + full - 2) / (full - 1);
    const Int waves = (rows * least + sm_count - 1) / sm_count;
    if (waves < 2) return {};
    Int columns = waves * sm_count / rows, extra_rows = waves * sm_count % rows;
    if (columns >= most) columns = most, extra_rows = 0;
    const Int spare = all - columns * (full - 1);
    const Int wide = spare < 0 ? 0 : spare < columns ? spare : columns;
    const Int spare_of_extra = spare - (full - 1);
    const Int wide_of_extra = spare_of_extra < 0 ? 0 : spare_of_extra;
    // The wide tiles are dealt out evenly enough for this estimate.
    const Int all_wide = (rows - extra_rows) * wide + extra_rows * wide_of_extra;
    const Int units = waves * (full - 1) + (all_wide + sm_count - 1) / sm_count;
    if (units >= waves * full) return {};
    return {columns, extra_rows, units, wide, wide_of_extra};
}

// Whether narrow tiles cover more columns than the output has by over 2.5 %. Where b's rows lie
// along n, a narrow tile loads the full width and begins anywhere in a line of 128 bytes; there the
// excess columns cost more than the balance brings.
template <class Int>
TK_HOST_DEVICE constexpr bool cover_too_much(Int columns, Int n, int block_n) {
    const Int all = (n + NARROW_BY - 1) / NARROW_BY;
    return (columns * (block_n / Int(NARROW_BY) - 1) - all) * 40 > all;
}

// `share` is the work of an SM relative to tiles of one width.
struct Widths {
    int columns = 0, extra_rows = 0;
    double share = 1;
};

constexpr Widths two_widths(int64_t block_m, int block_n, int64_t m, int64_t n, int sm_count) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t rows = ceil_div(m, block_m);
    const auto counts = count_tiles<int64_t>(rows, n, block_n, sm_count);
    if (counts.columns == 0) return {};
    const int64_t waves = ceil_div(rows * ceil_div(n, block_n), sm_count);
    return {static_cast<int>(counts.columns), static_cast<int>(counts.extra_rows),
            double(counts.units) / double(waves * (block_n / int64_t{NARROW_BY}))};
}

}  // namespace thunderkittens::gemm
