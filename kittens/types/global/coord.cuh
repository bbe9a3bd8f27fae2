// Coordinates of a tile, vector or element in a global layout: batch, depth, row, column. They
// count in units of the object that they are used with; `elements(...)` counts in elements instead.
#pragma once

#include "../scalar.cuh"

namespace kittens::inline KITTENS_BACKEND {

struct element_coord {
    int b = 0, d = 0, r = 0, c = 0;
};
__host__ __device__ constexpr element_coord elements(int b, int d, int r, int c) {
    return {b, d, r, c};
}
__host__ __device__ constexpr element_coord elements(int r, int c) { return {0, 0, r, c}; }

template <class Object = void>
struct coord {
    int b = 0, d = 0, r = 0, c = 0;
    bool in_elements = std::is_void_v<Object>;

    constexpr coord() = default;
    __host__ __device__ constexpr coord(int b, int d, int r, int c) : b(b), d(d), r(r), c(c) {}
    __host__ __device__ constexpr coord(int d, int r, int c) : d(d), r(r), c(c) {}
    __host__ __device__ constexpr coord(int r, int c) : r(r), c(c) {}
    __host__ __device__ constexpr coord(int c) : c(c) {}
    __host__ __device__ constexpr coord(element_coord e)
        : b(e.b), d(e.d), r(e.r), c(e.c), in_elements(true) {}

    // The position in elements of an object whose rows lie along `axis` (0 batch, 1 depth, 2 row).
    template <int axis = 2>
    __host__ __device__ constexpr element_coord position() const {
        static_assert(axis >= 0 && axis <= 2, "a tile's rows lie along axis 0, 1 or 2");
        if (in_elements) return {b, d, r, c};
        if constexpr (std::is_void_v<Object>) {
            return {b, d, r, c};
        } else if constexpr (requires { Object::rows; }) {
            return {axis == 0 ? b * Object::rows : b, axis == 1 ? d * Object::rows : d,
                    axis == 2 ? r * Object::rows : r, c * Object::cols};
        } else {
            return {b, d, r, c * Object::length};
        }
    }
};

// A parameter of this type takes braces and element coordinates alike: it deduces nothing.
template <class Object>
using coord_of = std::type_identity_t<coord<Object>>;

}  // namespace kittens::inline KITTENS_BACKEND
