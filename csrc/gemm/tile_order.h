// The order in which clusters take tiles: a pure function of an index, the same on the host (tests,
// pictures) and in the kernel.
//
// Tiles are walked in bands of `band` tiles. Within a band the short side runs fastest, so that any
// run of consecutive indices, which is what the GPU works on at a time, covers a compact rectangle
// and needs few different rows of a and columns of b. Every other band runs backwards: it starts
// with what the last one has left in the L2 cache.
#pragma once

#include <cstdint>

#include "csrc/gemm/gemm.h"

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

// The order of a problem's tiles.
inline TileOrder make_order(const Config& config, const Schedule& schedule, int64_t m, int64_t n,
                            int64_t batch) {
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>((size + tile - 1) / tile);
    };
    const uint32_t rows = tiles(m, config.block_m);
    const uint32_t columns = tiles(n, config.block_n);
    const bool along_m = schedule.bands_along_m;
    return make_order(along_m ? columns : rows, along_m ? rows : columns,
                      static_cast<uint32_t>(batch), static_cast<uint32_t>(schedule.band), along_m);
}

}  // namespace thunderkittens::gemm
