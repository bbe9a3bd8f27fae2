// Addresses inside a shared tile. A tile of `rows` rows is stored as column stripes, each
// `swizzle_bytes` wide and holding all rows; inside a stripe the 16-byte chunks of a row are
// permuted by XOR with the row number, as TMA and wgmma define their 32, 64 and 128-byte swizzles,
// so that eight rows at one column fall into different banks.
#pragma once

#include "../register/fragment.h"

namespace kittens::swizzle {

// Widest swizzle whose width divides a row of `row_bytes` bytes; 0 when none does.
KITTENS_HOST_DEVICE constexpr int widest(int row_bytes) {
    return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : row_bytes % 32 == 0 ? 32 : 0;
}

// XORs address bits 4 up to the swizzle's width with the bits from 7 on. `offset` counts from an
// address aligned to 8 times the swizzle's width.
KITTENS_HOST_DEVICE constexpr unsigned permute(unsigned offset, int swizzle_bytes) {
    const unsigned mask = swizzle_bytes == 128  ? 0x70u
                          : swizzle_bytes == 64 ? 0x30u
                          : swizzle_bytes == 32 ? 0x10u
                                                : 0u;
    return offset ^ ((offset >> 3) & mask);
}

// Byte offset of element (row, col) before the permutation.
KITTENS_HOST_DEVICE constexpr unsigned linear(int row, int col, int rows, int cols,
                                              int element_bytes, int swizzle_bytes) {
    if (swizzle_bytes == 0) return static_cast<unsigned>((row * cols + col) * element_bytes);
    const int stripe_cols = swizzle_bytes / element_bytes;
    return static_cast<unsigned>((col / stripe_cols) * rows * swizzle_bytes + row * swizzle_bytes +
                                 (col % stripe_cols) * element_bytes);
}

}  // namespace kittens::swizzle
