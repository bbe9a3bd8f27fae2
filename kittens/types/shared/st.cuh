// Shared tiles: swizzled so that TMA, wgmma, ldmatrix and plain accesses are free of bank
// conflicts, and views of rectangles inside them.
#pragma once

#include "../scalar.cuh"
#include "swizzle.h"

namespace kittens::inline KITTENS_BACKEND {

template <class Tile, int _rows, int _cols>
struct st_subtile;

// `_swizzle` false: plain row-major. `_swizzle_bytes` 0: the widest swizzle that divides a row.
template <scalar _T, int _rows, int _cols, bool _swizzle = true, int _swizzle_bytes = 0>
struct alignas(128) st {
    using identity_type = identity::shared_tile;
    using T = _T;
    using dtype = _T;
    static constexpr int rows = _rows;
    static constexpr int cols = _cols;
    static constexpr int underlying_rows = rows;
    static constexpr int underlying_cols = cols;
    static constexpr int num_elements = rows * cols;
    static constexpr bool swizzle = _swizzle;
    static constexpr int swizzle_bytes =
        !swizzle ? 0
                 : (_swizzle_bytes != 0 ? _swizzle_bytes : swizzle::widest(cols * int(sizeof(T))));
    // Columns that lie side by side in memory.
    static constexpr int stripe_cols = swizzle_bytes ? swizzle_bytes / int(sizeof(T)) : cols;
    static constexpr int stripes = cols / stripe_cols;
    static constexpr int stripe_bytes = rows * stripe_cols * int(sizeof(T));
    static_assert(rows > 0 && cols > 0, "a shared tile needs at least one row and one column");
    static_assert(!swizzle || swizzle_bytes > 0,
                  "a swizzled shared tile's row must be a multiple of 32 bytes");
    static_assert(swizzle_bytes == 0 || cols % stripe_cols == 0,
                  "a shared tile's row must be a multiple of its swizzle's width");
    static_assert((cols * int(sizeof(T))) % 16 == 0,
                  "a shared tile's row must be a multiple of 16 bytes");

    T data[num_elements];

    __device__ __forceinline__ uint32_t address() const { return arch::shared_address(this); }
    // Address of an element, given the tile's first address.
    static __device__ __forceinline__ uint32_t idx(uint32_t base, int2 at) {
        const uint32_t offset =
            swizzle::linear(at.x, at.y, rows, cols, int(sizeof(T)), swizzle_bytes);
        // The hardware permutes absolute addresses; tiles need only be aligned to 128 bytes here.
        return swizzle::permute(base + offset, swizzle_bytes);
    }
    __device__ __forceinline__ uint32_t address_of(int row, int col) const {
        return idx(address(), {row, col});
    }
    __device__ __forceinline__ T get(int row, int col) const {
        return arch::load_shared<T>(address_of(row, col));
    }
    __device__ __forceinline__ void set(int row, int col, const T& value) {
        arch::store_shared(address_of(row, col), value);
    }

    // View of the rectangle of r x c elements, `at` counts in rectangles of that size.
    template <int r, int c>
    __device__ __forceinline__ st_subtile<st, r, c> subtile(int2 at) {
        return st_subtile<st, r, c>(*this, {at.x * r, at.y * c});
    }
};

template <class Tile, int _rows, int _cols>
struct st_subtile {
    using identity_type = identity::shared_tile;
    using parent = Tile;
    using T = typename Tile::T;
    using dtype = T;
    static constexpr int rows = _rows;
    static constexpr int cols = _cols;
    static constexpr int underlying_rows = Tile::rows;
    static constexpr int underlying_cols = Tile::cols;
    static constexpr int num_elements = rows * cols;
    static constexpr bool swizzle = Tile::swizzle;
    static constexpr int swizzle_bytes = Tile::swizzle_bytes;
    static constexpr int stripe_cols = Tile::stripe_cols;
    static_assert(rows <= Tile::rows && cols <= Tile::cols,
                  "a subtile must not be larger than its tile");
    static_assert(cols % stripe_cols == 0 || stripe_cols % cols == 0,
                  "a subtile's columns must divide, or be a multiple of, its tile's stripe");

    uint32_t base;  // of the whole tile
    int2 offset;    // of the rectangle, in elements

    __device__ __forceinline__ st_subtile(Tile& tile, int2 at) : base(tile.address()), offset(at) {}

    __device__ __forceinline__ uint32_t address_of(int row, int col) const {
        return Tile::idx(base, {offset.x + row, offset.y + col});
    }
    __device__ __forceinline__ T get(int row, int col) const {
        return arch::load_shared<T>(address_of(row, col));
    }
    __device__ __forceinline__ void set(int row, int col, const T& value) {
        arch::store_shared(address_of(row, col), value);
    }
};

template <int rows, int cols, bool swizzle = true, int swizzle_bytes = 0>
using st_fl = st<float, rows, cols, swizzle, swizzle_bytes>;
template <int rows, int cols, bool swizzle = true, int swizzle_bytes = 0>
using st_bf = st<bf16, rows, cols, swizzle, swizzle_bytes>;
template <int rows, int cols, bool swizzle = true, int swizzle_bytes = 0>
using st_hf = st<half, rows, cols, swizzle, swizzle_bytes>;
template <int rows, int cols, bool swizzle = true, int swizzle_bytes = 0>
using st_fp8e4m3 = st<fp8e4m3, rows, cols, swizzle, swizzle_bytes>;
template <int rows, int cols, bool swizzle = true, int swizzle_bytes = 0>
using st_fp8e5m2 = st<fp8e5m2, rows, cols, swizzle, swizzle_bytes>;

}  // namespace kittens::inline KITTENS_BACKEND
