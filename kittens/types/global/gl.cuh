// Global layouts: a pointer, four dimensions (batch, depth, rows, columns; -1 in the type means
// known at run time only), strides of the outer three, and a tensor map for every listed tile type.
#pragma once

#include <cuda.h>

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../host/tensor_map.h"
#include "../shared/st.cuh"
#include "../shared/sv.cuh"
#include "coord.cuh"

namespace kittens::inline KITTENS_BACKEND {

namespace tma {
// A tile type whose rows lie along `axis` (0 batch, 1 depth, 2 row) of the global layout.
template <any_shared_tile _Tile, int _axis>
struct descriptor {
    using Tile = _Tile;
    static constexpr int axis = _axis;
};
}  // namespace tma

namespace detail {

// Constructor argument for one dimension: any integer, or nullptr for one that the type fixes. A
// converting constructor, so that braces do not narrow.
template <int fixed>
struct dimension_argument {
    size_t value;
    template <std::integral I>
    __host__ __device__ constexpr dimension_argument(I v) : value(static_cast<size_t>(v)) {}
    __host__ __device__ constexpr dimension_argument(std::nullptr_t)
        requires(fixed > 0)
        : value(fixed) {}
};

// A dimension reads as a number and as a call: `g.rows` and `g.rows()`.
template <int fixed>
struct dimension {
    __host__ __device__ constexpr explicit dimension(size_t) {}
    __host__ __device__ constexpr int operator()() const { return fixed; }
    __host__ __device__ constexpr operator int() const { return fixed; }
};
template <>
struct dimension<-1> {
    int value;
    __host__ __device__ constexpr explicit dimension(size_t v) : value(static_cast<int>(v)) {}
    __host__ __device__ constexpr int operator()() const { return value; }
    __host__ __device__ constexpr operator int() const { return value; }
};

template <scalar T>
constexpr CUtensorMapDataType tensor_map_type() {
    if constexpr (std::same_as<T, bf16>)
        return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    else if constexpr (std::same_as<T, half>)
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    else if constexpr (std::same_as<T, float>)
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    else
        return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

template <class Listed>
struct tma_entry {
    using Object = Listed;
    static constexpr int axis = 2;
};
template <class Tile, int _axis>
struct tma_entry<tma::descriptor<Tile, _axis>> {
    using Object = Tile;
    static constexpr int axis = _axis;
};

// One box per instruction: a stripe of at most 256 rows.
template <class Tile>
constexpr int box_rows = Tile::rows <= 256 ? Tile::rows : 256;
// A shared vector is copied in pieces of at most 256 elements.
template <class Vector>
constexpr int box_length = Vector::length <= 256 ? Vector::length : 256;

template <class... Listed>
struct tensor_maps {};
template <class First, class... Rest>
struct tensor_maps<First, Rest...> {
    CUtensorMap map;
    tensor_maps<Rest...> rest;
};

template <class Object, int axis, class First, class... Rest>
__host__ __device__ __forceinline__ const CUtensorMap* find_map(
    const tensor_maps<First, Rest...>& list) {
    using Entry = tma_entry<First>;
    if constexpr (std::same_as<typename Entry::Object, Object> && Entry::axis == axis) {
        return &list.map;
    } else {
        static_assert(sizeof...(Rest) > 0,
                      "this tile type is not among the global layout's TMA types: list it, or "
                      "tma::descriptor<tile, axis>, in gl<...>");
        return find_map<Object, axis>(list.rest);
    }
}

}  // namespace detail

// Strides in elements; the column stride is 1.
struct gl_strides {
    int64_t batch, depth, row;
};

template <scalar _T, int b, int d, int r, int c, class... TMA>
struct gl {
    using identity_type = identity::global_layout;
    using T = _T;
    using dtype = _T;
    static_assert((b == -1 || b > 0) && (d == -1 || d > 0) && (r == -1 || r > 0) &&
                      (c == -1 || c > 0),
                  "a global layout's dimension is a positive number, or -1 when known at run time");

    T* raw_ptr;
    detail::dimension<b> batch;
    detail::dimension<d> depth;
    detail::dimension<r> rows;
    detail::dimension<c> cols;
    int64_t batch_stride, depth_stride, row_stride;
    detail::tensor_maps<TMA...> maps;

    // A contiguous tensor of these dimensions.
    __host__ inline gl(T* data, detail::dimension_argument<b> _batch,
                       detail::dimension_argument<d> _depth, detail::dimension_argument<r> _rows,
                       detail::dimension_argument<c> _cols)
        : gl(data, _batch, _depth, _rows, _cols,
             gl_strides{int64_t(_depth.value * _rows.value * _cols.value),
                        int64_t(_rows.value * _cols.value), int64_t(_cols.value)}) {}

    __host__ inline gl(T* data, detail::dimension_argument<b> _batch,
                       detail::dimension_argument<d> _depth, detail::dimension_argument<r> _rows,
                       detail::dimension_argument<c> _cols, gl_strides strides)
        : raw_ptr(data),
          batch(_batch.value),
          depth(_depth.value),
          rows(_rows.value),
          cols(_cols.value),
          batch_stride(strides.batch),
          depth_stride(strides.depth),
          row_stride(strides.row) {
        encode(maps);
    }

    template <int axis>
    __host__ __device__ __forceinline__ int size() const {
        if constexpr (axis == 0)
            return batch();
        else if constexpr (axis == 1)
            return depth();
        else if constexpr (axis == 2)
            return rows();
        else
            return cols();
    }
    template <int axis>
    __host__ __device__ __forceinline__ int64_t stride() const {
        if constexpr (axis == 0)
            return batch_stride;
        else if constexpr (axis == 1)
            return depth_stride;
        else if constexpr (axis == 2)
            return row_stride;
        else
            return 1;
    }
    // Address of an element.
    __host__ __device__ __forceinline__ T* at(element_coord e) const {
        return raw_ptr + (e.b * batch_stride + e.d * depth_stride + e.r * row_stride + e.c);
    }

    // The tensor map made for `Object` with its rows along `axis`.
    template <class Object, int axis = 2>
    __host__ __device__ __forceinline__ const CUtensorMap* tensor_map() const {
        return detail::find_map<Object, axis>(maps);
    }

  private:
    __host__ inline void encode(detail::tensor_maps<>&) {}
    template <class First, class... Rest>
    __host__ inline void encode(detail::tensor_maps<First, Rest...>& list) {
        using Entry = detail::tma_entry<First>;
        using Object = typename Entry::Object;
        static_assert(std::same_as<typename Object::T, T>,
                      "a TMA type must have the element type of its global layout");
        host::TensorMapSpec spec{};
        spec.data = raw_ptr;
        spec.type = detail::tensor_map_type<T>();
        spec.element_bytes = int(sizeof(T));
        const int sizes[4] = {cols(), rows(), depth(), batch()};
        for (int i = 0; i < 4; ++i) spec.dims[i] = uint64_t(sizes[i]), spec.box[i] = 1;
        spec.strides[0] = row_stride;
        spec.strides[1] = depth_stride;
        spec.strides[2] = batch_stride;
        if constexpr (any_shared_tile<Object>) {
            spec.box[0] = Object::stripe_cols;
            spec.box[3 - Entry::axis] = detail::box_rows<Object>;
            spec.swizzle_bytes = Object::swizzle_bytes;
            static_assert(Object::stripe_cols <= 256,
                          "TMA copies at most 256 columns without a swizzle");
            static_assert(Object::rows % detail::box_rows<Object> == 0,
                          "a TMA tile of more than 256 rows needs a multiple of 256 rows");
        } else {
            spec.box[0] = detail::box_length<Object>;
            static_assert(Object::length % detail::box_length<Object> == 0,
                          "a TMA vector longer than 256 needs a multiple of 256 elements");
        }
        list.map = host::encode_tensor_map(spec);
        encode(list.rest);
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
