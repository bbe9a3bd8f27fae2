// The raster: the order in which clusters take tiles, a pure function of an index, the same on the
// host (tests, pictures) and in the kernel.
//
// Grouped rasterisation with reversal: tiles are walked in raster groups of `raster_group` rows of
// tiles (or columns, see along_m). Within a group the short side runs fastest, so that any run of
// consecutive indices, which is what the GPU works on at a time, covers a compact rectangle and
// needs few different rows of a and columns of b. Every other group runs backwards: it starts with
// what the last one has left in the L2 cache.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TK_HOST_DEVICE __host__ __device__
#else
#define TK_HOST_DEVICE
#endif

namespace thunderkittens::gemm {

// Division of numbers below 2^31 by a divisor that is known before the launch: one multiplication,
// and a shift (Granlund and Montgomery, 1994). Several dependent divisions would otherwise delay
// the first load.
struct Divisor {
    uint32_t value = 1, multiplier = 0, shift = 0;

    constexpr Divisor() = default;
    constexpr explicit Divisor(uint32_t divisor) : value(divisor) {
        if (divisor == 1) return;
        uint32_t log2 = 1;
        while ((uint64_t{1} << log2) < divisor) ++log2;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
        shift = log2 - 1;
    }
    TK_HOST_DEVICE constexpr uint32_t divide(uint32_t n) const {
        return value == 1 ? n : static_cast<uint32_t>((uint64_t{n} * multiplier) >> 32) >> shift;
    }
};

struct TilePosition {
    uint32_t batch, m, n;
};

struct TileOrder {
    uint32_t along;  // tiles along a raster group
    uint32_t total;  // tiles of the whole batch
    bool along_m;    // raster groups run along m
    uint32_t full_groups;
    Divisor matrix_tiles, group_tiles, height, last_height;

    TK_HOST_DEVICE constexpr TilePosition at(uint32_t index) const {
        const uint32_t batch = matrix_tiles.divide(index);
        const uint32_t in_matrix = index - batch * matrix_tiles.value;
        const uint32_t raster_group = group_tiles.divide(in_matrix);
        const uint32_t in_raster_group = in_matrix - raster_group * group_tiles.value;
        const bool full = raster_group < full_groups;
        const uint32_t tall = full ? height.value : last_height.value;
        const uint32_t step =
            full ? height.divide(in_raster_group) : last_height.divide(in_raster_group);
        const uint32_t u = raster_group * height.value + (in_raster_group - step * tall);
        const uint32_t v = raster_group % 2 == 0 ? step : along - 1 - step;
        return along_m ? TilePosition{batch, v, u} : TilePosition{batch, u, v};
    }
};

// The raster of `across` x `along` tiles of each of `batch` matrices, in raster groups `height`
// tiles high.
constexpr TileOrder make_order(uint32_t across, uint32_t along, uint32_t batch, uint32_t height,
                               bool along_m) {
    const uint32_t tall = height < across ? height : across;
    const uint32_t rest = across % tall;
    return {
        .along = along,
        .total = batch * across * along,
        .along_m = along_m,
        .full_groups = across / tall,
        .matrix_tiles = Divisor(across * along),
        .group_tiles = Divisor(tall * along),
        .height = Divisor(tall),
        .last_height = Divisor(rest == 0 ? tall : rest),
    };
}

// What the raster of a problem follows from: the size of the tiles, the height of a raster group
// and along which dimension it runs, and with tiles of two widths how many tiles a row has, see
// TwoWidthOrder.
struct TileWalk {
    int block_m, block_n;
    int raster_group;
    bool raster_along_m = false;
    int columns = 0, extra_rows = 0;
};

// The raster of a problem's tiles.
inline TileOrder make_order(const TileWalk& walk, int64_t m, int64_t n, int64_t batch) {
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>((size + tile - 1) / tile);
    };
    const uint32_t rows = tiles(m, walk.block_m);
    const uint32_t columns = tiles(n, walk.block_n);
    const bool along_m = walk.raster_along_m;
    return make_order(along_m ? columns : rows, along_m ? rows : columns,
                      static_cast<uint32_t>(batch), static_cast<uint32_t>(walk.raster_group),
                      along_m);
}

// Balanced tiling with two fixed widths: the raster of tiles of which some are narrower by
// NARROW_BY, so that all SMs are at work in the last wave as well. The first rows of tiles (`base`)
// have `columns` tiles each, the others (`extra`) one more; in every row the wide tiles come first.
// With a blocked gate (`halves`) columns are those of the output: a tile has half of its width of
// them.
constexpr uint32_t NARROW_BY = 16;

struct TwoWidthPosition : TilePosition {
    uint32_t wide = ~0u;  // so many tiles of this row are wide

    TK_HOST_DEVICE constexpr bool narrow() const { return n >= wide; }
    TK_HOST_DEVICE constexpr uint32_t column(uint32_t width) const {
        return n * (width - NARROW_BY) + (narrow() ? wide : n) * NARROW_BY;
    }
};

struct TwoWidthOrder {
    TileOrder base, extra;
    uint32_t total;
    uint32_t rows;  // of tiles, with fewer of them
    uint32_t wide_of_base, wide_of_extra;

    TK_HOST_DEVICE constexpr TwoWidthPosition at(uint32_t index) const {
        if (index < base.total) return {base.at(index), wide_of_base};
        TwoWidthPosition position{extra.at(index - base.total), wide_of_extra};
        position.m += rows;
        return position;
    }
    // The same for one matrix whose raster groups run along n, without branches: the compiler then
    // finds a tile in uniform registers, beside other work.
    TK_HOST_DEVICE constexpr TwoWidthPosition in_matrix(uint32_t index) const {
        const bool late = index >= base.total;
        const uint32_t i = late ? index - base.total : index;
        const Divisor tiles = select(late, extra.group_tiles, base.group_tiles);
        const uint32_t raster_group = tiles.divide(i),
                       in_raster_group = i - raster_group * tiles.value;
        const bool full = raster_group < (late ? extra.full_groups : base.full_groups);
        const Divisor height = select(late, extra.height, base.height);
        const Divisor tall =
            select(full, height, select(late, extra.last_height, base.last_height));
        const uint32_t step = tall.divide(in_raster_group), along = late ? extra.along : base.along;
        TwoWidthPosition position{};
        position.m =
            raster_group * height.value + (in_raster_group - step * tall.value) + (late ? rows : 0);
        position.n = raster_group % 2 == 0 ? step : along - 1 - step;
        position.wide = late ? wide_of_extra : wide_of_base;
        return position;
    }
    static TK_HOST_DEVICE constexpr Divisor select(bool second, const Divisor& b,
                                                   const Divisor& a) {
        Divisor divisor;
        divisor.value = second ? b.value : a.value;
        divisor.multiplier = second ? b.multiplier : a.multiplier;
        divisor.shift = second ? b.shift : a.shift;
        return divisor;
    }
};

// How many of `tiles` tiles of two widths are wide, when together they cover `columns`.
constexpr uint32_t wide_tiles(int64_t columns, int64_t tiles, int width) {
    const int64_t units = (columns + NARROW_BY - 1) / NARROW_BY;
    const int64_t wide = units - tiles * (width / int64_t{NARROW_BY} - 1);
    return static_cast<uint32_t>(wide < 0 ? 0 : wide > tiles ? tiles : wide);
}

// The raster of a problem; of tiles of two widths where the walk says so, and `allowed`.
inline TwoWidthOrder make_two_width_order(const TileWalk& walk, int64_t m, int64_t n, int64_t batch,
                                          bool allowed, bool halves = false) {
    const int width = halves ? walk.block_n / 2 : walk.block_n;
    const int64_t all = halves ? n / 2 : n;
    const auto rows = static_cast<uint32_t>((m + walk.block_m - 1) / walk.block_m);
    const auto extra_rows = static_cast<uint32_t>(walk.extra_rows);
    const auto columns = static_cast<uint32_t>(walk.columns);
    const bool covered = int64_t{columns} * width >= all && extra_rows <= rows;
    if (!allowed || columns == 0 || !covered || batch > 1 || walk.raster_along_m) {
        const TileOrder order = make_order(walk, m, n, batch);
        return {.base = order,
                .extra = order,
                .total = order.total,
                .rows = 0,
                .wide_of_base = ~0u,
                .wide_of_extra = ~0u};
    }
    const auto part = [&](uint32_t count, uint32_t across) {
        if (count == 0) return TileOrder{};
        const auto raster_group = static_cast<uint32_t>(walk.raster_group);
        const uint32_t raster_groups =
            count < raster_group ? 1 : (count + raster_group / 2) / raster_group;
        return make_order(count, across, 1, (count + raster_groups - 1) / raster_groups, false);
    };
    const TileOrder base = part(rows - extra_rows, columns), extra = part(extra_rows, columns + 1);
    return {.base = base,
            .extra = extra,
            .total = base.total + extra.total,
            .rows = rows - extra_rows,
            .wide_of_base = wide_tiles(all, columns, width),
            .wide_of_extra = wide_tiles(all, columns + 1, width)};
}

}  // namespace thunderkittens::gemm
