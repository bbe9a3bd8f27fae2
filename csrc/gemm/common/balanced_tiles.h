// When tiles of two widths pay, see raster.h.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/raster.h"

namespace thunderkittens::gemm {

// Tiles of two widths: see Schedule. `units` are the columns that an SM computes, in parts of
// NARROWER; `wide` of a row's tiles are wide, `wide_of_longer` of one with one more.
template <class Int>
struct TileCounts {
    Int columns = 0, longer = 0, units = 0, wide = 0, wide_of_longer = 0;
};

// As many tiles as there are SMs in as many rounds as without: the SMs that would have nothing to
// do in the last round take columns from the others. The kernel itself counts where only the device
// knows how many rows of tiles there are.
template <class Int>
TK_HOST_DEVICE constexpr TileCounts<Int> count_tiles(Int rows, Int n, int block_n, Int sm_count) {
    const Int full = block_n / Int(NARROWER), all = (n + NARROWER - 1) / NARROWER;
    const Int least = (n + block_n - 1) / block_n, most = (all + full - 2) / (full - 1);
    const Int rounds = (rows * least + sm_count - 1) / sm_count;
    if (rounds < 2) return {};
    Int columns = rounds * sm_count / rows, longer = rounds * sm_count % rows;
    if (columns >= most) columns = most, longer = 0;
    const Int spare = all - columns * (full - 1);
    const Int wide = spare < 0 ? 0 : spare < columns ? spare : columns;
    const Int spare_of_longer = spare - (full - 1);
    const Int wide_of_longer = spare_of_longer < 0 ? 0 : spare_of_longer;
    // Wide tiles are dealt out evenly enough.
    const Int all_wide = (rows - longer) * wide + longer * wide_of_longer;
    const Int units = rounds * (full - 1) + (all_wide + sm_count - 1) / sm_count;
    if (units >= rounds * full) return {};
    return {columns, longer, units, wide, wide_of_longer};
}

// Rows of b along n are loaded whole, and a narrow tile begins anywhere in a line: there more
// columns than the output has cost more than they bring.
template <class Int>
TK_HOST_DEVICE constexpr bool cover_too_much(Int columns, Int n, int block_n) {
    const Int all = (n + NARROWER - 1) / NARROWER;
    return (columns * (block_n / Int(NARROWER) - 1) - all) * 40 > all;
}

// `share` is what an SM computes, of what it would have to with tiles of one width.
struct Widths {
    int columns = 0, longer = 0;
    double share = 1;
};

constexpr Widths two_widths(int64_t block_m, int block_n, int64_t m, int64_t n, int sm_count) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t rows = ceil_div(m, block_m);
    const auto counts = count_tiles<int64_t>(rows, n, block_n, sm_count);
    if (counts.columns == 0) return {};
    const int64_t rounds = ceil_div(rows * ceil_div(n, block_n), sm_count);
    return {static_cast<int>(counts.columns), static_cast<int>(counts.longer),
            double(counts.units) / double(rounds * (block_n / int64_t{NARROWER}))};
}

}  // namespace thunderkittens::gemm
