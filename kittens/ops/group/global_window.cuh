// The part of a global layout that a tile or vector covers: bounds, alignment, and checked access
// to runs of elements. Elements outside the layout, in any dimension, read as zero and are not
// written.
#pragma once

#include "../../types/global/gl.cuh"
#include "../elements.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// Rows lie along `axis` (0 batch, 1 depth, 2 row). Row and column numbers count from the window's
// corner.
template <class GL, int axis>
struct global_window {
    using T = typename GL::T;
    T* corner;
    int64_t row_stride;
    // The valid rows are first_row <= row < end_row, and so the columns.
    int first_row, end_row, first_col, end_col;

    __device__ __forceinline__ global_window(const GL& global, element_coord at)
        : corner(global.at(at)), row_stride(global.template stride<axis>()) {
        const int row = axis == 0 ? at.b : axis == 1 ? at.d : at.r;
        first_row = -row;
        end_row = global.template size<axis>() - row;
        first_col = -at.c;
        end_col = global.cols() - at.c;
        const bool elsewhere_inside = (axis == 0 || inside(at.b, global.batch())) &&
                                      (axis == 1 || inside(at.d, global.depth())) &&
                                      (axis == 2 || inside(at.r, global.rows()));
        if (!elsewhere_inside) end_row = first_row;
    }

    // Every element of a rows x cols rectangle at the corner exists.
    __device__ __forceinline__ bool covers(int rows, int cols) const {
        return first_row <= 0 && rows <= end_row && first_col <= 0 && cols <= end_col;
    }
    // All rows of the window begin at a multiple of so many bytes (a power of two).
    __device__ __forceinline__ bool aligned(int bytes) const {
        const auto bits = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(corner)) |
                          (static_cast<uint64_t>(row_stride) * sizeof(T));
        return (bits & static_cast<uint64_t>(bytes - 1)) == 0;
    }
    __device__ __forceinline__ bool has_row(int row) const {
        return row >= first_row && row < end_row;
    }
    __device__ __forceinline__ bool has(int row, int col) const {
        return has_row(row) && col >= first_col && col < end_col;
    }
    __device__ __forceinline__ bool has_run(int row, int col, int n) const {
        return has_row(row) && col >= first_col && col + n <= end_col;
    }
    __device__ __forceinline__ T* at(int row, int col) const {
        return corner + (row * row_stride + col);
    }

    // Unchecked; `n` elements at an address aligned to all of them.
    template <int n>
    __device__ __forceinline__ elements<T, n> load_whole(int row, int col) const {
        return arch::load_global(reinterpret_cast<const elements<T, n>*>(at(row, col)));
    }
    template <int n>
    __device__ __forceinline__ void store_whole(int row, int col, const elements<T, n>& run) const {
        arch::store_global(reinterpret_cast<elements<T, n>*>(at(row, col)), run);
    }
    // Checked, element by element.
    template <int n>
    __device__ __forceinline__ elements<T, n> load_checked(int row, int col) const {
        elements<T, n> run;
#pragma unroll
        for (int e = 0; e < n; ++e) {
            run.v[e] = has(row, col + e) ? arch::load_global(at(row, col + e)) : convert<T>(0.0f);
        }
        return run;
    }
    template <int n>
    __device__ __forceinline__ void store_checked(int row, int col,
                                                  const elements<T, n>& run) const {
#pragma unroll
        for (int e = 0; e < n; ++e) {
            if (has(row, col + e)) arch::store_global(at(row, col + e), run.v[e]);
        }
    }

  private:
    static __device__ __forceinline__ bool inside(int i, int size) { return i >= 0 && i < size; }
};

}  // namespace detail
}  // namespace kittens::inline KITTENS_BACKEND
