// Whole numbers of tiles. Host C++ only.
#pragma once

#include <cstdint>

namespace thunderkittens {

// How many tiles cover a size.
constexpr int64_t ceil_div(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
// The size that they cover.
constexpr int64_t round_up(int64_t size, int64_t tile) { return ceil_div(size, tile) * tile; }

}  // namespace thunderkittens
