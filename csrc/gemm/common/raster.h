// The order in which clusters take tiles: a pure function of an index, the same on the host (tests,
// pictures) and in the kernel.
//
// Tiles are walked in bands of `band` tiles. Within a band the short side runs fastest, so that any
// run of consecutive indices, which is what the GPU works on at a time, covers a compact rectangle
// and needs few different rows of a and columns of b. Every other band runs backwards: it starts
// with what the last one has left in the L2 cache.
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
    uint32_t along;  // tiles along a band
    uint32_t total;  // tiles of the whole batch
    bool along_m;    // bands run along m
    uint32_t full_bands;
    Divisor matrix_tiles, band_tiles, height, last_height;

    TK_HOST_DEVICE constexpr TilePosition at(uint32_t index) const {
        const uint32_t batch = matrix_tiles.divide(index);
        const uint32_t in_matrix = index - batch * matrix_tiles.value;
        const uint32_t band = band_tiles.divide(in_matrix);
        const uint32_t in_band = in_matrix - band * band_tiles.value;
        const bool full = band < full_bands;
        const uint32_t tall = full ? height.value : last_height.value;
        const uint32_t step = full ? height.divide(in_band) : last_height.divide(in_band);
        const uint32_t u = band * height.value + (in_band - step * tall);
        const uint32_t v = band % 2 == 0 ? step : along - 1 - step;
        return along_m ? TilePosition{batch, v, u} : TilePosition{batch, u, v};
    }
};

// The order of `across` x `along` tiles of each of `batch` matrices, in bands `height` tiles high.
constexpr TileOrder make_order(uint32_t across, uint32_t along, uint32_t batch, uint32_t height,
                               bool along_m) {
    const uint32_t tall = height < across ? height : across;
    const uint32_t rest = across % tall;
    return {
        .along = along,
        .total = batch * across * along,
        .along_m = along_m,
        .full_bands = across / tall,
        .matrix_tiles = Divisor(across * along),
        .band_tiles = Divisor(tall * along),
        .height = Divisor(tall),
        .last_height = Divisor(rest == 0 ? tall : rest),
    };
}

// How the tiles of a problem are walked: their size, the tiles across a band and where it runs, and
// where tiles have two widths how many tiles a row has, see UnevenOrder.
struct TileWalk {
    int block_m, block_n;
    int band;
    bool bands_along_m = false;
    int columns = 0, longer = 0;
};

// The order of a problem's tiles.
inline TileOrder make_order(const TileWalk& walk, int64_t m, int64_t n, int64_t batch) {
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>((size + tile - 1) / tile);
    };
    const uint32_t rows = tiles(m, walk.block_m);
    const uint32_t columns = tiles(n, walk.block_n);
    const bool along_m = walk.bands_along_m;
    return make_order(along_m ? columns : rows, along_m ? rows : columns,
                      static_cast<uint32_t>(batch), static_cast<uint32_t>(walk.band), along_m);
}

// Tiles of two widths, so that all SMs are at work in the last round as well. Of the rows of tiles
// the first ones have `columns` tiles, the others one more; in either, the first tiles are as wide
// as they can be, and the others narrower by NARROWER. Where one half of z's columns gates the
// other (`halves`), columns are the output's: a tile has half of its width of them.
constexpr uint32_t NARROWER = 16;

struct UnevenPosition : TilePosition {
    uint32_t wide = ~0u;  // how many tiles of this row are wide

    TK_HOST_DEVICE constexpr bool narrow() const { return n >= wide; }
    TK_HOST_DEVICE constexpr uint32_t column(uint32_t width) const {
        return n * (width - NARROWER) + (narrow() ? wide : n) * NARROWER;
    }
};

struct UnevenOrder {
    TileOrder fewer, more;
    uint32_t total;
    uint32_t rows;  // of tiles, with fewer of them
    uint32_t wide_of_fewer, wide_of_more;

    TK_HOST_DEVICE constexpr UnevenPosition at(uint32_t index) const {
        if (index < fewer.total) return {fewer.at(index), wide_of_fewer};
        UnevenPosition position{more.at(index - fewer.total), wide_of_more};
        position.m += rows;
        return position;
    }
    // The same of one matrix whose bands run along n, without branches: the compiler then finds a
    // tile in uniform registers, beside other work.
    TK_HOST_DEVICE constexpr UnevenPosition in_matrix(uint32_t index) const {
        const bool late = index >= fewer.total;
        const uint32_t i = late ? index - fewer.total : index;
        const Divisor tiles = select(late, more.band_tiles, fewer.band_tiles);
        const uint32_t band = tiles.divide(i), in_band = i - band * tiles.value;
        const bool full = band < (late ? more.full_bands : fewer.full_bands);
        const Divisor height = select(late, more.height, fewer.height);
        const Divisor tall =
            select(full, height, select(late, more.last_height, fewer.last_height));
        const uint32_t step = tall.divide(in_band), along = late ? more.along : fewer.along;
        UnevenPosition position{};
        position.m = band * height.value + (in_band - step * tall.value) + (late ? rows : 0);
        position.n = band % 2 == 0 ? step : along - 1 - step;
        position.wide = late ? wide_of_more : wide_of_fewer;
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
    const int64_t units = (columns + NARROWER - 1) / NARROWER;
    const int64_t wide = units - tiles * (width / int64_t{NARROWER} - 1);
    return static_cast<uint32_t>(wide < 0 ? 0 : wide > tiles ? tiles : wide);
}

// The order of a problem's tiles; of two widths where the walk says so, and `allowed`.
inline UnevenOrder make_uneven_order(const TileWalk& walk, int64_t m, int64_t n, int64_t batch,
                                     bool allowed, bool halves = false) {
    const int width = halves ? walk.block_n / 2 : walk.block_n;
    const int64_t all = halves ? n / 2 : n;
    const auto rows = static_cast<uint32_t>((m + walk.block_m - 1) / walk.block_m);
    const auto longer = static_cast<uint32_t>(walk.longer);
    const auto columns = static_cast<uint32_t>(walk.columns);
    const bool covered = int64_t{columns} * width >= all && longer <= rows;
    if (!allowed || columns == 0 || !covered || batch > 1 || walk.bands_along_m) {
        const TileOrder order = make_order(walk, m, n, batch);
        return {.fewer = order,
                .more = order,
                .total = order.total,
                .rows = 0,
                .wide_of_fewer = ~0u,
                .wide_of_more = ~0u};
    }
    const auto part = [&](uint32_t count, uint32_t across) {
        if (count == 0) return TileOrder{};
        const auto band = static_cast<uint32_t>(walk.band);
        const uint32_t bands = count < band ? 1 : (count + band / 2) / band;
        return make_order(count, across, 1, (count + bands - 1) / bands, false);
    };
    const TileOrder fewer = part(rows - longer, columns), more = part(longer, columns + 1);
    return {.fewer = fewer,
            .more = more,
            .total = fewer.total + more.total,
            .rows = rows - longer,
            .wide_of_fewer = wide_tiles(all, columns, width),
            .wide_of_more = wide_tiles(all, columns + 1, width)};
}

}  // namespace thunderkittens::gemm
