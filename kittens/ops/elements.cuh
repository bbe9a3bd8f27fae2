// What the verbs are made of: concepts over all objects, small runs of elements that move and
// compute together, and the application of a functor to packed registers.
#pragma once

#include <concepts>

#include "../types/register/rt.cuh"
#include "../types/shared/st.cuh"
#include "../types/shared/sv.cuh"
#include "functors.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <class T>
concept any_tile = any_register_tile<T> || any_shared_tile<T>;
template <class T>
concept any_vector = any_register_vector<T> || any_shared_vector<T>;
template <class T>
concept any_object = any_tile<T> || any_vector<T>;
template <class T>
concept any_shared = any_shared_tile<T> || any_shared_vector<T>;
template <class T>
concept any_register = any_register_tile<T> || any_register_vector<T>;
// A value that is broadcast over an object.
template <class T>
concept scalar_operand =
    scalar<std::remove_cvref_t<T>> || std::is_arithmetic_v<std::remove_cvref_t<T>>;

namespace detail {

// `n` neighbouring elements, aligned so that they load and store as one word.
template <scalar T, int n>
struct alignas(n * sizeof(T)) elements {
    static constexpr int count = n;
    T v[n];
};

// Float values of the elements of one register or element.
template <int n>
struct floats {
    float v[n];
};

template <scalar T>
__device__ __forceinline__ floats<packed<T>::count> unpack(const packed_type<T>& p) {
    if constexpr (packed<T>::count == 2) {
        const float2 pair = unpack_pair<T>(p);
        return {{pair.x, pair.y}};
    } else {
        const float4 four = static_cast<float4>(p);
        return {{four.x, four.y, four.z, four.w}};
    }
}
template <scalar T>
__device__ __forceinline__ packed_type<T> pack(const floats<packed<T>::count>& f) {
    if constexpr (packed<T>::count == 2)
        return pack_pair<T>(f.v[0], f.v[1]);
    else
        return packed_type<T>(make_float4(f.v[0], f.v[1], f.v[2], f.v[3]));
}

// A scalar as an element, and as a packed register that repeats it.
template <scalar T, scalar_operand S>
__device__ __forceinline__ T to_element(const S& value) {
    if constexpr (scalar<S>)
        return convert<T>(value);
    else
        return convert<T>(static_cast<float>(value));
}
template <scalar T>
__device__ __forceinline__ packed_type<T> repeat(const T& value) {
    if constexpr (packed<T>::count == 2) {
        return {value, value};
    } else {
        const float f = convert<float>(value);
        return pack<T>({{f, f, f, f}});
    }
}

// The functor on elements of type T: natively where it has packed arithmetic, else in float.
template <class Op, scalar T, class... Packed>
__device__ __forceinline__ packed_type<T> apply_packed(const Packed&... operands) {
    if constexpr (requires { Op::packed(operands...); }) {
        return Op::packed(operands...);
    } else {
        floats<packed<T>::count> out;
        const auto compute = [&](const auto&... f) {
#pragma unroll
            for (int i = 0; i < packed<T>::count; ++i) out.v[i] = Op::apply(f.v[i]...);
        };
        compute(unpack<T>(operands)...);
        return pack<T>(out);
    }
}
template <class Op, scalar T, class... Elements>
__device__ __forceinline__ T apply_element(const Elements&... operands) {
    return convert<T>(Op::apply(convert<float>(operands)...));
}

// A packed register as a run and back; the i-th packed register of a run.
template <scalar T>
__device__ __forceinline__ elements<T, packed<T>::count> split(const packed_type<T>& p) {
    return arch::bit_cast<elements<T, packed<T>::count>>(p);
}
template <scalar T>
__device__ __forceinline__ packed_type<T> join(const elements<T, packed<T>::count>& run) {
    return arch::bit_cast<packed_type<T>>(run);
}
template <scalar T, int n>
__device__ __forceinline__ packed_type<T> packed_at(const elements<T, n>& run, int i) {
    packed_type<T> p;
    __builtin_memcpy(&p, &run.v[i * packed<T>::count], sizeof(p));
    return p;
}
template <class Op, scalar T, int n, class... Runs>
__device__ __forceinline__ elements<T, n> apply_run(const Runs&... operands) {
    elements<T, n> out;
    if constexpr (n % packed<T>::count == 0) {
#pragma unroll
        for (int i = 0; i < n / packed<T>::count; ++i) {
            const packed_type<T> p = apply_packed<Op, T>(packed_at(operands, i)...);
            __builtin_memcpy(&out.v[i * packed<T>::count], &p, sizeof(p));
        }
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) out.v[i] = apply_element<Op, T>(operands.v[i]...);
    }
    return out;
}
template <scalar To, scalar From, int n>
__device__ __forceinline__ elements<To, n> convert_run(const elements<From, n>& from) {
    elements<To, n> to;
#pragma unroll
    for (int i = 0; i < n; ++i) to.v[i] = convert<To>(from.v[i]);
    return to;
}
template <scalar T, int n>
__device__ __forceinline__ elements<T, n> repeat_run(const T& value) {
    elements<T, n> run;
#pragma unroll
    for (int i = 0; i < n; ++i) run.v[i] = value;
    return run;
}

// Half 0 or 1 of a packed pair.
template <class Pair>
__device__ __forceinline__ auto& component(Pair& pair, int half) {
    return half == 0 ? pair.x : pair.y;
}

// Largest run, in elements, that is contiguous and aligned everywhere in a shared object: the
// swizzles move 16 bytes as one.
template <any_shared Object>
__host__ __device__ constexpr int longest_run() {
    using T = typename Object::T;
    int length;
    if constexpr (any_shared_tile<Object>)
        length = Object::cols;
    else
        length = Object::length;
    int bytes = 16;
    while (length * int(sizeof(T)) % bytes != 0) bytes /= 2;
    return bytes / int(sizeof(T));
}
template <any_shared... Objects>
__host__ __device__ constexpr int common_run() {
    int run = 16;
    ((run = run < longest_run<Objects>() ? run : longest_run<Objects>()), ...);
    return run;
}

template <int n, any_shared_tile ST>
__device__ __forceinline__ auto load_run(const ST& tile, int row, int col) {
    return arch::load_shared<elements<typename ST::T, n>>(tile.address_of(row, col));
}
template <any_shared_tile ST, class Run>
__device__ __forceinline__ void store_run(const ST& tile, int row, int col, const Run& run) {
    arch::store_shared(tile.address_of(row, col), run);
}
template <int n, any_shared_vector SV>
__device__ __forceinline__ auto load_run(const SV& vector, int i) {
    return arch::load_shared<elements<typename SV::T, n>>(vector.address_of(i));
}
template <any_shared_vector SV, class Run>
__device__ __forceinline__ void store_run(const SV& vector, int i, const Run& run) {
    arch::store_shared(vector.address_of(i), run);
}

// Calls visit(row, col) for the runs of n elements of a tile, or visit(index) of a vector, that are
// this thread's among `threads`.
template <int n, any_shared_tile ST, class Visit>
__device__ __forceinline__ void for_each_run(int thread, int threads, Visit visit) {
    constexpr int per_row = ST::cols / n;
#pragma unroll 4
    for (int i = thread; i < ST::rows * per_row; i += threads) visit(i / per_row, i % per_row * n);
}
template <int n, any_shared_vector SV, class Visit>
__device__ __forceinline__ void for_each_run(int thread, int threads, Visit visit) {
#pragma unroll 4
    for (int i = thread; i < SV::length / n; i += threads) visit(i * n);
}

// Index in a register vector of component `half` of data[outer][inner] of a lane.
template <any_register_vector RV>
__device__ __forceinline__ int vector_index(int lane, int outer, int inner, int half) {
    using layout = typename RV::layout;
    if constexpr (std::same_as<layout, align_l>) {
        return 16 * outer + 8 * inner + 2 * (lane % 4) + half;
    } else if constexpr (std::same_as<layout, ortho_l>) {
        return 16 * outer + lane / 4 + 8 * half;
    } else {
        return WARP_THREADS * outer + lane;
    }
}
// Calls visit(index, element) for every element that a lane holds; a naive vector's last register
// may lie beyond the end.
template <any_register_vector RV, class Visit>
__device__ __forceinline__ void for_each_element(RV& vector, Visit visit) {
    using V = std::remove_const_t<RV>;
    static_assert(V::is_naive || packed<typename V::T>::count == 2,
                  "a register vector of an 8-bit type must be naive_l; convert with copy() first");
    const int lane = kittens::laneid();
#pragma unroll
    for (int o = 0; o < V::outer_dim; ++o) {
        if constexpr (V::is_naive) {
            visit(vector_index<V>(lane, o, 0, 0), vector.data[o][0]);
        } else {
#pragma unroll
            for (int i = 0; i < V::inner_dim; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    visit(vector_index<V>(lane, o, i, half), component(vector.data[o][i], half));
                }
            }
        }
    }
}

// A row-layout tile and the transposed column-layout tile hold their registers alike. Along "lines"
// (rows in row layout, columns in column layout) neighbours share a register.
template <any_register_tile RT>
constexpr bool is_row_layout = std::same_as<typename std::remove_cvref_t<RT>::layout, row_l>;
template <any_register_tile RT>
constexpr int line_bases = is_row_layout<RT> ? RT::height : RT::width;
template <any_register_tile RT>
constexpr int across_bases = is_row_layout<RT> ? RT::width : RT::height;
template <any_register_tile RT>
__device__ __forceinline__ auto& base_at(RT& tile, int line, int across) {
    if constexpr (is_row_layout<RT>)
        return tile.tiles[line][across];
    else
        return tile.tiles[across][line];
}

// What an element-wise operation asks of an operand.
template <any_object A, any_object B>
constexpr bool same_kind = std::same_as<typename std::remove_cvref_t<A>::identity_type,
                                        typename std::remove_cvref_t<B>::identity_type>;
template <any_object A, any_object B>
__host__ __device__ constexpr bool same_shape() {
    if constexpr (any_tile<A>)
        return A::rows == B::rows && A::cols == B::cols;
    else
        return A::length == B::length;
}
template <any_object A, any_object B>
__host__ __device__ constexpr bool same_layout() {
    if constexpr (any_register<A>)
        return std::same_as<typename A::layout, typename B::layout>;
    else
        return true;
}
template <any_object D, class S>
__host__ __device__ constexpr void check_shape() {
    if constexpr (any_object<S>) {
        static_assert(
            same_kind<D, S>,
            "an element-wise operation takes operands of one kind: register tiles with "
            "register tiles, shared vectors with shared vectors, ...; load and store move "
            "data between kinds");
        static_assert(same_shape<D, S>(),
                      "the operands of an element-wise operation must have the same size");
    } else {
        static_assert(scalar_operand<S>, "an operand must be a tile, a vector or a number");
    }
}
template <any_object D, class S>
__host__ __device__ constexpr void check_operand() {
    check_shape<D, S>();
    if constexpr (any_object<S>) {
        static_assert(std::same_as<typename D::T, typename S::T>,
                      "the operands of an element-wise operation must have the same element type; "
                      "copy() converts");
        static_assert(same_layout<D, S>(),
                      "the operands of an element-wise operation must have the same layout; "
                      "swap_layout() converts a tile, copy() a vector");
    }
}

}  // namespace detail
}  // namespace kittens::inline KITTENS_BACKEND
