// Masks: elements outside a region are replaced by a value. Rows, columns and diagonals count
// elements; in a group, the warps' register tiles are bands of rows of one tile.
#pragma once

#include "maps.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <int WARPS>
struct mask_ops {
    // Keeps column <= row.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void make_causal(D&& d, const S& s, const V& value = V()) {
        tril(d, s, 0, value);
    }
    // Keeps column >= row: the mask of a transposed score tile.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void make_causal_t(D&& d, const S& s, const V& value = V()) {
        triu(d, s, 0, value);
    }
    // Keeps column - row <= diagonal.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void tril(D&& d, const S& s, int diagonal = 0,
                                                const V& value = V()) {
        keep(d, s, value, [=](int row, int col) { return col - row <= diagonal; });
    }
    // Keeps column - row >= diagonal.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void triu(D&& d, const S& s, int diagonal = 0,
                                                const V& value = V()) {
        keep(d, s, value, [=](int row, int col) { return col - row >= diagonal; });
    }
    // Replaces columns < bound.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void left_fill(D&& d, const S& s, int bound,
                                                     const V& value = V()) {
        keep(d, s, value, [=](int, int col) { return col >= bound; });
    }
    // Replaces columns >= bound.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void right_fill(D&& d, const S& s, int bound,
                                                      const V& value = V()) {
        keep(d, s, value, [=](int, int col) { return col < bound; });
    }
    // Replaces rows < bound.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void upper_fill(D&& d, const S& s, int bound,
                                                      const V& value = V()) {
        keep(d, s, value, [=](int row, int) { return row >= bound; });
    }
    // Replaces rows >= bound.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void lower_fill(D&& d, const S& s, int bound,
                                                      const V& value = V()) {
        keep(d, s, value, [=](int row, int) { return row < bound; });
    }
    // Replaces rows < row_bound where columns >= col_bound.
    template <any_tile D, any_tile S, class V = float>
    static __device__ __forceinline__ void upper_right_fill(D&& d, const S& s, int row_bound,
                                                            int col_bound, const V& value = V()) {
        keep(d, s, value, [=](int row, int col) { return row >= row_bound || col < col_bound; });
    }

  private:
    template <any_tile D, any_tile S, class V, class Region>
    static __device__ __forceinline__ void keep(D& d, const S& s, const V& value, Region region) {
        using T = typename D::T;
        const T fill = detail::to_element<T>(value);
        map_ops<WARPS>::apply(
            d, s, [=](int row, int col, const T& x) { return region(row, col) ? x : fill; });
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
