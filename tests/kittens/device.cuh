// What the unit tests' kernels share: element-wise transfers between global memory and tiles that
// rely on nothing but the documented layouts, so that every operation is tested against an
// independent path.
#pragma once

#include <kittens.cuh>

#include "unit.h"

namespace unit {

using namespace kittens;

template <scalar T>
inline constexpr Type type_of = std::same_as<T, float>     ? Type::f32
                                : std::same_as<T, bf16>    ? Type::bf16
                                : std::same_as<T, half>    ? Type::f16
                                : std::same_as<T, fp8e4m3> ? Type::e4m3
                                                           : Type::e5m2;
template <scalar T>
const char* name_of() {
    return format(type_of<T>).name;
}
template <tile_layout L>
const char* name_of() {
    return std::same_as<L, row_l> ? "row" : "col";
}
template <vector_layout_type L>
const char* name_of() {
    return std::same_as<L, align_l> ? "align" : std::same_as<L, ortho_l> ? "ortho" : "naive";
}

template <class T>
T* Case::input(const char* name, const Values& values) {
    return static_cast<T*>(input(name, type_of<T>, values));
}
template <class T>
T* Case::output(const char* name, size_t count) {
    return static_cast<T*>(output(name, type_of<T>, count));
}
template <class T>
T* Case::output(const char* name, const Values& initial) {
    return static_cast<T*>(output(name, type_of<T>, initial));
}

template <class T, class... TMA>
using global = gl<T, -1, -1, -1, -1, TMA...>;

template <class G>
G make_global(typename G::T* data, const View& v) {
    return G(data, v.b, v.d, v.r, v.c, gl_strides{v.batch_stride, v.depth_stride, v.row_stride});
}
// A contiguous matrix.
template <class T>
global<T> matrix(T* data, int rows, int cols) {
    return global<T>(data, 1, 1, rows, cols);
}

// Element `e` of a packed register.
template <class T, class Packed>
__device__ __forceinline__ T& element_of(Packed& packed, int e) {
    return reinterpret_cast<T(&)[sizeof(Packed) / sizeof(T)]>(packed)[e];
}

// f(row, column, element) for every element that this lane holds.
template <any_register_tile RT, class F>
__device__ __forceinline__ void for_each_element(RT& tile, F f) {
    using Base = typename std::remove_const_t<RT>::base;
#pragma unroll
    for (int i = 0; i < RT::height; ++i) {
#pragma unroll
        for (int j = 0; j < RT::width; ++j) {
#pragma unroll
            for (int k = 0; k < Base::packed_per_thread; ++k) {
#pragma unroll
                for (int e = 0; e < Base::packing; ++e) {
                    const auto p = Base::position(laneid(), k, e);
                    f(i * Base::rows + p.row, j * Base::cols + p.col,
                      element_of<typename RT::T>(tile.tiles[i][j].data[k], e));
                }
            }
        }
    }
}
template <any_register_tile RT>
__device__ __forceinline__ void read(RT& tile, const global<typename RT::T>& from,
                                     int first_row = 0) {
    for_each_element(tile, [&](int row, int col, typename RT::T& value) {
        value = arch::load_global(from.at(elements(first_row + row, col)));
    });
}
template <any_register_tile RT>
__device__ __forceinline__ void write(const global<typename RT::T>& to, RT& tile,
                                      int first_row = 0) {
    for_each_element(tile, [&](int row, int col, typename RT::T& value) {
        arch::store_global(to.at(elements(first_row + row, col)), value);
    });
}

// f(index, element) for every element that this lane holds, copies in other lanes included.
template <any_register_vector RV, class F>
__device__ __forceinline__ void for_each_element(RV& vec, F f) {
    using T = typename RV::T;
    const int lane = laneid();
#pragma unroll
    for (int o = 0; o < RV::outer_dim; ++o) {
        if constexpr (RV::is_naive) {
            const int i = o * WARP_THREADS + lane;
            if (i < RV::length) f(i, vec.data[o][0]);
        } else if constexpr (std::same_as<typename RV::layout, ortho_l>) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                f(16 * o + lane / 4 + 8 * e, element_of<T>(vec.data[o][0], e));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    f(16 * o + 8 * i + 2 * (lane % 4) + e, element_of<T>(vec.data[o][i], e));
                }
            }
        }
    }
}
template <any_register_vector RV>
__device__ __forceinline__ void read(RV& vec, const global<typename RV::T>& from, int first = 0) {
    for_each_element(vec, [&](int i, typename RV::T& value) {
        value = arch::load_global(from.at(elements(0, first + i)));
    });
}
template <any_register_vector RV>
__device__ __forceinline__ void write(const global<typename RV::T>& to, RV& vec, int first = 0) {
    for_each_element(vec, [&](int i, typename RV::T& value) {
        arch::store_global(to.at(elements(0, first + i)), value);
    });
}

// f(row, column) or f(index), shared by all threads of the block.
template <any_shared_tile ST, class F>
__device__ __forceinline__ void for_each_place(F f) {
    for (int i = threadIdx.x; i < ST::rows * ST::cols; i += blockDim.x)
        f(i / ST::cols, i % ST::cols);
}
template <any_shared_vector SV, class F>
__device__ __forceinline__ void for_each_place(F f) {
    for (int i = threadIdx.x; i < SV::length; i += blockDim.x) f(i);
}
__device__ __forceinline__ element_coord place(int row, int col) { return elements(row, col); }
__device__ __forceinline__ element_coord place(int index) { return elements(0, index); }
// Shared objects, by all threads of the block; the caller synchronises.
template <any_shared O>
__device__ __forceinline__ void read(O& object, const global<typename O::T>& from) {
    for_each_place<O>(
        [&](auto... at) { object.set(at..., arch::load_global(from.at(place(at...)))); });
}
template <any_shared O>
__device__ __forceinline__ void write(const global<typename O::T>& to, const O& object) {
    for_each_place<O>(
        [&](auto... at) { arch::store_global(to.at(place(at...)), object.get(at...)); });
}
// NaN everywhere, ordered before later asynchronous writes.
template <any_shared O>
__device__ __forceinline__ void poison_shared(O& object) {
    const auto nan = convert<typename O::T>(__int_as_float(-1));
    for_each_place<O>([&](auto... at) { object.set(at..., nan); });
    arch::fence_async_shared();
    arch::sync_block();
}

// Rows and columns of an object, a vector being one row.
template <any_object O>
constexpr int rows_of() {
    if constexpr (any_tile<O>)
        return O::rows;
    else
        return 1;
}
template <any_object O>
constexpr int cols_of() {
    if constexpr (any_tile<O>)
        return O::cols;
    else
        return O::length;
}
template <any_object O>
constexpr int count_of = rows_of<O>() * cols_of<O>();

// A group's objects are consecutive bands of one object of the host's: `bands` register objects, or
// one shared object.
template <any_object O, int WARPS>
constexpr int bands = any_register<O> ? WARPS : 1;
template <any_object O, int WARPS>
global<typename O::T> bands_of(void* data) {
    auto* typed = static_cast<typename O::T*>(data);
    if constexpr (any_tile<O>)
        return matrix(typed, O::rows * bands<O, WARPS>, O::cols);
    else
        return matrix(typed, 1, O::length * bands<O, WARPS>);
}
template <any_object O>
__device__ __forceinline__ int band_start() {
    if constexpr (any_register_tile<O>)
        return kittens::warpid() * O::rows;
    else if constexpr (any_register_vector<O>)
        return kittens::warpid() * O::length;
    else
        return 0;
}
template <any_object O>
__device__ __forceinline__ void read_band(O& object, const global<typename O::T>& from) {
    if constexpr (any_register<O>)
        read(object, from, band_start<O>());
    else
        read(object, from);
}
template <any_object O>
__device__ __forceinline__ void write_band(const global<typename O::T>& to, O& object) {
    if constexpr (any_register<O>)
        write(to, object, band_start<O>());
    else
        write(to, object);
}

// A place for a test's object: in registers, or in the block's shared memory.
template <any_object O>
struct holder {
    O object;
    __device__ __forceinline__ explicit holder(shared_allocator<>&) {}
};
template <any_shared O>
struct holder<O> {
    O& object;
    __device__ __forceinline__ explicit holder(shared_allocator<>& al)
        : object(al.template allocate<O>()) {}
};
template <class... Objects>
constexpr size_t shared_bytes_of() {
    return ((any_shared<Objects> ? sizeof(Objects) + 1024 : 0) + ... + 1024);
}

template <any_object O>
std::string object_name() {
    using T = typename O::T;
    if constexpr (any_register_tile<O>) {
        return text("%s %dx%d %s", name_of<T>(), O::rows, O::cols, name_of<typename O::layout>());
    } else if constexpr (any_register_vector<O>) {
        return text("%s %d %s", name_of<T>(), O::length, name_of<typename O::layout>());
    } else if constexpr (any_shared_tile<O>) {
        return text("%s %dx%d swizzle%d", name_of<T>(), O::rows, O::cols, O::swizzle_bytes);
    } else {
        return text("%s %d", name_of<T>(), O::length);
    }
}
inline std::string scope_name(int warps) {
    return warps == 1 ? "warp" : warps == 4 ? "warpgroup" : text("group<%d>", warps);
}

}  // namespace unit
