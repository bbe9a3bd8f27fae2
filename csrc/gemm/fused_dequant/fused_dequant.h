// Fused dequantization: products of operands that the kernel itself dequantizes to 16 bits in a
// workspace, overlapped with the products: what is dequantized in which order (DequantOrder), and
// the launches. Host C++ only; see fused_dequant_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

// An operand (rows, k) is divided into regions of 128 rows by 256 of k, each of which has a
// counter; a warp dequantizes 16 rows of one at a time, an item.
constexpr int REGION_ROWS = 128, REGION_K = 256;
constexpr int ITEM_ROWS = 16;
constexpr int REGION_ITEMS = REGION_ROWS / ITEM_ROWS;

constexpr uint32_t regions(int64_t size, int of) {
    return static_cast<uint32_t>((size + of - 1) / of);
}

// The order in which items are dequantized: first what the tiles of the first wave need of either
// operand, then the rest of b, then the rest of a, the last two in packs of `wide` regions side by
// side; in each pack all rows of 256 of k, then those of the next.
struct DequantOrder {
    uint32_t columns;           // of regions along k
    uint32_t rows_a, rows_b;    // regions along the rows; 0 for an operand that is not dequantized
    uint32_t first_a, first_b;  // of those, in the first part
    // The number of regions for 256 of k in the first part, in a pack and in the last pack; and of
    // all regions in a pack.
    Divisor first, wide, last_wide, pack;

    struct Region {
        bool of_b;
        uint32_t row, column;
    };
    TK_HOST_DEVICE constexpr uint32_t total() const { return (rows_a + rows_b) * columns; }
    TK_HOST_DEVICE constexpr Region at(uint32_t index) const {
        if (index < first.value * columns) {
            const uint32_t column = first.divide(index), row = index - column * first.value;
            return row < first_a ? Region{false, row, column} : Region{true, row - first_a, column};
        }
        index -= first.value * columns;
        const uint32_t rest = rows_a + rows_b - first.value, rest_b = rows_b - first_b;
        const uint32_t number = pack.divide(index), begin = number * wide.value;
        index -= number * pack.value;
        const bool last = begin + wide.value > rest;
        const uint32_t column = last ? last_wide.divide(index) : wide.divide(index);
        const uint32_t row = begin + (index - column * (last ? last_wide.value : wide.value));
        return row < rest_b ? Region{true, first_b + row, column}
                            : Region{false, first_a + (row - rest_b), column};
    }
    // Where the counter of a region is, behind those of all that has been claimed, and completed.
    TK_HOST_DEVICE constexpr uint32_t counter(bool of_b, uint32_t row, uint32_t column) const {
        return 2 + ((of_b ? rows_a + row : row) * columns + column);
    }
    TK_HOST_DEVICE constexpr uint32_t counters() const { return 2 + total(); }
};

// The items up to which the consumers take part, before their first tile: a small share of what the
// first wave needs, beyond one item each, so that the first tiles need not wait long; and where the
// dequantizing warps would not keep pace, at some 1.8 elements per cycle and block, what is left.
constexpr int64_t early_items(const Config& config, const DequantOrder& order, int64_t tiles,
                              int64_t blocks, int64_t steps) {
    const int64_t waves = (tiles + blocks - 1) / blocks;
    const int64_t cycles = waves * steps * config.block_m * config.block_n / 32;
    const int64_t first = int64_t{order.first_a + order.first_b} * order.columns * REGION_ITEMS;
    const int64_t late = blocks * cycles * 18 / 10 / (ITEM_ROWS * REGION_K);
    return std::max(first / 20, int64_t{order.total()} * REGION_ITEMS - late);
}

// The kernels' tiles: rows of both operands along k.
constexpr Config fused_dequant_config(DType dtype) {
    return make_config(tile_shape(128, 256), dtype, false, false);
}
// The same with tiles of 128 x 176, where these come out even.
constexpr Config narrow_fused_dequant_config(DType dtype) {
    return make_config({128, 176, 5, 2}, dtype, false, false);
}

// As instances.txt names them.
consteval Config fused_dequant_config_of(const ConfigName& name) {
    const Config narrow = narrow_fused_dequant_config(name.dtype);
    return name.is_of(narrow) ? narrow : config_of(name);
}

// An MXFP8 operand: k a multiple of 16, rows of codes aligned to 16 bytes, scales in the 128x4
// layout.
struct Mxfp8Source {
    const void* codes = nullptr;
    const void* scales = nullptr;
    int stride = 0;  // bytes
    bool e5m2 = false;
};
// Both operands.
struct Mxfp8Sources {
    Mxfp8Source a, b;
};
// b alone, as prepared for nvfp4/nvfp4_gemm.h: elements times their scales over 128, in whole
// pieces of rows and columns, to be multiplied by 128 and `factor`, which is on the device.
struct Nvfp4Source {
    const void* prepared = nullptr;
    const float* factor = nullptr;
};
constexpr float NVFP4_ALPHA = 128;

// `product` has the dequantized operands: what is dequantized goes where its a and b point.
template <class Sources>
struct FusedDequantParams {
    Params product;
    Sources sources;
    int* counters = nullptr;  // zeros
};

constexpr DequantOrder dequant_order(const Config& config, const Schedule& schedule, int64_t m,
                                     int64_t n, int64_t k, bool dequantize_a) {
    const uint32_t rows = regions(m, config.block_m), columns = regions(n, config.block_n);
    const uint32_t raster_group = std::min<uint32_t>(schedule.raster_group, rows);
    const auto blocks = static_cast<uint32_t>(schedule.blocks);
    const uint32_t raster_groups = regions(blocks, static_cast<int>(raster_group * columns));
    const uint32_t wide = std::min(columns, regions(blocks, static_cast<int>(raster_group)));
    DequantOrder order{.columns = regions(k, REGION_K),
                       .rows_a = dequantize_a ? regions(m, REGION_ROWS) : 0,
                       .rows_b = regions(n, REGION_ROWS)};
    order.first_a =
        std::min(order.rows_a, raster_groups * raster_group * config.block_m / REGION_ROWS);
    order.first_b = std::min(order.rows_b, regions(int64_t{wide} * config.block_n, REGION_ROWS));
    const uint32_t first = order.first_a + order.first_b, pack = std::max(1u, order.first_b);
    const uint32_t rest = (order.rows_a + order.rows_b - first) % pack;
    order.first = Divisor(first), order.wide = Divisor(pack);
    order.last_wide = Divisor(rest == 0 ? pack : rest), order.pack = Divisor(pack * order.columns);
    return order;
}

template <class Sources>
constexpr DequantOrder dequant_order(const Config& config, const FusedDequantParams<Sources>& p) {
    const Params& product = p.product;
    return dequant_order(config, product.schedule, product.m, product.n, product.k,
                         std::is_same_v<Sources, Mxfp8Sources>);
}

template <Config config, class Sources>
void launch_fused_dequant(const FusedDequantParams<Sources>& params, Stream stream);

}  // namespace thunderkittens::gemm
