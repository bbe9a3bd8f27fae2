// Which element of a 16 x 16 base tile (16 x 32 for 8-bit types) a lane holds: the fragment of the
// tensor cores' A operand. Pure arithmetic, for device code, tests and pictures alike.
#pragma once

#if defined(__CUDACC__)
#define KITTENS_HOST_DEVICE __host__ __device__
#else
#define KITTENS_HOST_DEVICE
#endif

namespace kittens::fragment {

struct Position {
    int row, col;
};

// Register `index` (0-3) of `lane` holds `count` neighbours; `element` picks one. Row layout:
// neighbours lie along a row. A column-layout tile holds the transposed positions.
KITTENS_HOST_DEVICE constexpr Position row_layout(int lane, int index, int element, int count) {
    return {lane / 4 + 8 * (index % 2), count * (lane % 4) + element + 4 * count * (index / 2)};
}
KITTENS_HOST_DEVICE constexpr Position col_layout(int lane, int index, int element, int count) {
    const Position p = row_layout(lane, index, element, count);
    return {p.col, p.row};
}

}  // namespace kittens::fragment
