// Register tiles: rows x cols elements spread over the lanes of one warp as a grid of base tiles,
// each the fragment of a tensor-core operand. A warpgroup's tile of 64 rows is four warps' tiles of
// 16.
#pragma once

#include "../scalar.cuh"
#include "fragment.h"
#include "rv.cuh"

namespace kittens::inline KITTENS_BACKEND {

namespace register_layout {
struct row {};  // neighbours in a register lie along a row
struct col {};  // ... along a column
}  // namespace register_layout
using row_l = register_layout::row;
using col_l = register_layout::col;

template <class L>
concept tile_layout = std::same_as<L, row_l> || std::same_as<L, col_l>;

// Base tile: 16 x 16, or 16 x 32 (row layout) / 32 x 16 (column layout) for 8-bit types.
template <scalar _T, tile_layout _layout>
struct rt_base {
    using T = _T;
    using layout = _layout;
    using dtype = packed_type<T>;
    static constexpr int wide = 8 * packed<T>::count;
    static constexpr bool is_row = std::same_as<layout, row_l>;
    static constexpr int rows = is_row ? 16 : wide;
    static constexpr int cols = is_row ? wide : 16;
    static constexpr int packed_per_thread = 4;
    static constexpr int packing = packed<T>::count;

    dtype data[packed_per_thread];

    static __host__ __device__ constexpr fragment::Position position(int lane, int index,
                                                                     int element) {
        return is_row ? fragment::row_layout(lane, index, element, packing)
                      : fragment::col_layout(lane, index, element, packing);
    }
};

template <scalar _T, int _rows, int _cols, tile_layout _layout = row_l>
struct rt {
    using identity_type = identity::register_tile;
    using T = _T;
    using layout = _layout;
    using dtype = packed_type<T>;
    using base = rt_base<T, layout>;
    static constexpr int rows = _rows;
    static constexpr int cols = _cols;
    static constexpr int height = rows / base::rows;
    static constexpr int width = cols / base::cols;
    static constexpr int num_elements = rows * cols;
    static constexpr int elements_per_thread = num_elements / WARP_THREADS;
    static constexpr int packed_per_base = base::packed_per_thread;
    static_assert(
        rows > 0 && rows % base::rows == 0,
        "a register tile's rows must be a multiple of its base tile's rows (16; 32 for 8-bit "
        "types in column layout)");
    static_assert(
        cols > 0 && cols % base::cols == 0,
        "a register tile's columns must be a multiple of its base tile's columns (16; 32 for "
        "8-bit types in row layout)");

    // A vector with one element per row (to reduce along, or broadcast over, rows), and per column.
    using col_vec = rv<T, rows, std::conditional_t<base::is_row, ortho_l, align_l>>;
    using row_vec = rv<T, cols, std::conditional_t<base::is_row, align_l, ortho_l>>;

    base tiles[height][width];
};

template <int rows, int cols, tile_layout L = row_l>
using rt_fl = rt<float, rows, cols, L>;
template <int rows, int cols, tile_layout L = row_l>
using rt_bf = rt<bf16, rows, cols, L>;
template <int rows, int cols, tile_layout L = row_l>
using rt_hf = rt<half, rows, cols, L>;
template <int rows, int cols, tile_layout L = row_l>
using rt_fp8e4m3 = rt<fp8e4m3, rows, cols, L>;
template <int rows, int cols, tile_layout L = row_l>
using rt_fp8e5m2 = rt<fp8e5m2, rows, cols, L>;

template <class T>
concept row_layout_tile = any_register_tile<T> && std::same_as<typename T::layout, row_l>;
template <class T>
concept col_layout_tile = any_register_tile<T> && std::same_as<typename T::layout, col_l>;

}  // namespace kittens::inline KITTENS_BACKEND
