// Ragged layouts: a tensor (heads, rows, columns) whose rows hold segments of different lengths,
// one behind the other, such as the packed sequences of a batch. A tile belongs to one segment and
// ends with it, whatever follows. Where segments begin is the kernel's knowledge, known on the
// device only if need be: one tensor map per tile type serves them all (host/tensor_map.h says
// how).
#pragma once

#include "gl.cuh"

namespace kittens::inline KITTENS_BACKEND {

// A tile's place: the segment is rows [begin, begin + length) of the layout; `row`, the tile's
// first one, counts within it and is not negative. All in elements.
struct ragged_coord {
    int head = 0, begin = 0, length = 0, row = 0, col = 0;
};

// Strides in elements; the column stride is 1.
struct ragged_strides {
    int64_t head, row;
};

template <scalar _T, any_shared_tile... Tiles>
struct ragged_gl {
    using identity_type = identity::ragged_layout;
    using T = _T;
    using dtype = _T;

    T* raw_ptr;
    int heads, rows, cols;
    int64_t head_stride, row_stride;
    detail::tensor_maps<Tiles...> maps;

    // At most 2^30 rows, those of all segments. A transfer moves box_rows of them: those of a tile
    // (0), or of a piece of one, a multiple of 8 that divides its rows.
    __host__ inline ragged_gl(T* data, int _heads, int _rows, int _cols, ragged_strides strides,
                              int box_rows = 0)
        : raw_ptr(data),
          heads(_heads),
          rows(_rows),
          cols(_cols),
          head_stride(strides.head),
          row_stride(strides.row) {
        encode(maps, box_rows);
    }

    // Address of an element; `row` counts from the layout's first.
    __host__ __device__ __forceinline__ T* at(int head, int row, int col) const {
        return raw_ptr + (head * head_stride + row * row_stride + col);
    }
    template <class Tile>
    __host__ __device__ __forceinline__ const CUtensorMap* tensor_map() const {
        return detail::find_map<Tile, 2>(maps);
    }

  private:
    __host__ inline void encode(detail::tensor_maps<>&, int) {}
    template <class Tile, class... Rest>
    __host__ inline void encode(detail::tensor_maps<Tile, Rest...>& list, int box_rows) {
        static_assert(std::same_as<typename Tile::T, T>,
                      "a TMA type must have the element type of its global layout");
        static_assert(Tile::stripe_cols <= 256, "TMA copies at most 256 columns without a swizzle");
        static_assert(Tile::rows % detail::box_rows<Tile> == 0,
                      "a TMA tile of more than 256 rows needs a multiple of 256 rows");
        list.map = host::encode_ragged_tensor_map(
            {.data = raw_ptr,
             .type = detail::tensor_map_type<T>(),
             .element_bytes = int(sizeof(T)),
             .cols = cols,
             .rows = rows,
             .heads = heads,
             .row_stride = row_stride,
             .head_stride = head_stride,
             .box_cols = Tile::stripe_cols,
             .box_rows = box_rows > 0 ? box_rows : detail::box_rows<Tile>,
             .swizzle_bytes = Tile::swizzle_bytes});
        encode(list.rest, box_rows);
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
