// When tiles of two widths pay, see tile_order.h. Host C++ only.
#pragma once

#include <cstdint>

#include "csrc/gemm/tile_order.h"

namespace thunderkittens::gemm {

// Tiles of two widths: see Schedule. `share` is what an SM computes, of what it would have to with
// tiles of one width.
struct Widths {
    int columns = 0, longer = 0;
    double share = 1;
};

// As many tiles as there are SMs in as many rounds as without: the SMs that would have nothing to
// do in the last round take columns from the others.
constexpr Widths two_widths(int64_t block_m, int block_n, int64_t m, int64_t n, int sm_count) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t rows = ceil_div(m, block_m), least = ceil_div(n, block_n);
    const int64_t rounds = ceil_div(rows * least, sm_count);
    if (rounds < 2) return {};
    const int64_t full = block_n / NARROWER;
    const int64_t most = ceil_div(ceil_div(n, NARROWER), full - 1);
    int64_t columns = rounds * sm_count / rows, longer = rounds * sm_count % rows;
    if (columns >= most) columns = most, longer = 0;
    const int64_t wide = (rows - longer) * wide_tiles(n, columns, block_n) +
                         longer * wide_tiles(n, columns + 1, block_n);
    // Wide tiles are dealt out evenly enough.
    const int64_t units = rounds * (full - 1) + ceil_div(wide, sm_count);
    if (units >= rounds * full) return {};
    return {static_cast<int>(columns), static_cast<int>(longer),
            double(units) / double(rounds * full)};
}

}  // namespace thunderkittens::gemm
