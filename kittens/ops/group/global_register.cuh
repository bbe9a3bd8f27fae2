// Register tiles and vectors from and to global memory. A window that lies inside and is aligned
// moves in registers' words; any other is checked element by element.
#pragma once

#include "global_window.cuh"
#include "identity.cuh"
#include "shared_register.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// Calls access(base, k, row, col) for the registers of a lane; `row`, `col` of the first neighbour.
template <class Base, any_register_tile RT, class Access>
__device__ __forceinline__ void for_each_register(int first_row, Access access) {
    const int lane = kittens::laneid();
#pragma unroll
    for (int i = 0; i < RT::height; ++i) {
#pragma unroll
        for (int j = 0; j < RT::width; ++j) {
#pragma unroll
            for (int k = 0; k < Base::packed_per_thread; ++k) {
                const auto p = Base::position(lane, k, 0);
                access(i, j, k, first_row + i * Base::rows + p.row, j * Base::cols + p.col);
            }
        }
    }
}

template <class GL, any_register_tile RT>
__host__ __device__ constexpr void check_global_types() {
    static_assert(
        packed<typename GL::T>::count == packed<typename RT::T>::count &&
            (packed<typename RT::T>::count == 2 || std::same_as<typename GL::T, typename RT::T>),
        "loads and stores convert between float, bf16 and half only; use copy() for fp8");
}

// `first_row` is where this warp's band begins in the window.
template <any_register_tile RT, class GL, int axis>
__device__ __forceinline__ void load_register_tile(RT& tile, const global_window<GL, axis>& window,
                                                   int first_row) {
    using From = typename GL::T;
    using Base = rt_base<From, typename RT::layout>;
    check_global_types<GL, RT>();
    constexpr int n = Base::packing;
    const auto load_all = [&](auto load_register) {
        for_each_register<Base, RT>(first_row, [&](int i, int j, int k, int row, int col) {
            const packed_type<From> p = join<From>(load_register(row, col));
            if constexpr (std::same_as<From, typename RT::T>)
                tile.tiles[i][j].data[k] = p;
            else
                tile.tiles[i][j].data[k] = pack<typename RT::T>(unpack<From>(p));
        });
    };
    const bool whole = window.covers(first_row + RT::rows, RT::cols);
    if constexpr (Base::is_row) {
        if (whole && window.aligned(n * int(sizeof(From)))) {
            load_all([&](int row, int col) { return window.template load_whole<n>(row, col); });
        } else {
            load_all([&](int row, int col) { return window.template load_checked<n>(row, col); });
        }
    } else {
        // Neighbours lie one below the other.
        const auto load_column = [&](auto load_element) {
            load_all([&](int row, int col) {
                elements<From, n> run;
#pragma unroll
                for (int e = 0; e < n; ++e) run.v[e] = load_element(row + e, col);
                return run;
            });
        };
        if (whole) {
            load_column([&](int row, int col) { return arch::load_global(window.at(row, col)); });
        } else {
            load_column(
                [&](int row, int col) { return window.template load_checked<1>(row, col).v[0]; });
        }
    }
}

template <any_register_tile RT, class GL, int axis>
__device__ __forceinline__ void store_register_tile(const global_window<GL, axis>& window,
                                                    const RT& tile, int first_row) {
    using To = typename GL::T;
    using Base = rt_base<To, typename RT::layout>;
    check_global_types<GL, RT>();
    constexpr int n = Base::packing;
    const auto store_all = [&](auto store_register) {
        for_each_register<Base, RT>(first_row, [&](int i, int j, int k, int row, int col) {
            const auto& from = tile.tiles[i][j].data[k];
            if constexpr (std::same_as<To, typename RT::T>) {
                store_register(row, col, split<To>(from));
            } else {
                store_register(row, col, split<To>(pack<To>(unpack<typename RT::T>(from))));
            }
        });
    };
    const bool whole = window.covers(first_row + RT::rows, RT::cols);
    if constexpr (Base::is_row) {
        if (whole && window.aligned(n * int(sizeof(To)))) {
            store_all(
                [&](int row, int col, const auto& run) { window.store_whole(row, col, run); });
        } else {
            store_all(
                [&](int row, int col, const auto& run) { window.store_checked(row, col, run); });
        }
    } else {
        store_all([&](int row, int col, const auto& run) {
#pragma unroll
            for (int e = 0; e < n; ++e) {
                if (whole || window.has(row + e, col)) {
                    arch::store_global(window.at(row + e, col), run.v[e]);
                }
            }
        });
    }
}

// The window of a vector is its only row; `first` is where this warp's piece begins.
template <any_register_vector RV, class GL, int axis>
__device__ __forceinline__ void load_register_vector(RV& vector,
                                                     const global_window<GL, axis>& window,
                                                     int first) {
    for_each_element(vector, [&](int index, auto& element) {
        const bool exists = index < RV::length && window.has(0, first + index);
        element = exists ? convert<typename RV::T>(arch::load_global(window.at(0, first + index)))
                         : convert<typename RV::T>(0.0f);
    });
}
// One lane of those that hold an element writes it: another one for every 8 elements.
template <any_register_vector RV>
__device__ __forceinline__ bool writes_element(int index) {
    const int lane = kittens::laneid();
    if constexpr (std::same_as<typename RV::layout, align_l>)
        return index / 8 % 8 == lane / 4;
    else if constexpr (std::same_as<typename RV::layout, ortho_l>)
        return index / 8 % 4 == lane % 4;
    else
        return index < RV::length;
}
template <any_register_vector RV, class GL, int axis>
__device__ __forceinline__ void store_register_vector(const global_window<GL, axis>& window,
                                                      const RV& vector, int first) {
    for_each_element(vector, [&](int index, const auto& element) {
        if (writes_element<RV>(index) && window.has(0, first + index)) {
            arch::store_global(window.at(0, first + index), convert<typename GL::T>(element));
        }
    });
}

}  // namespace detail
}  // namespace kittens::inline KITTENS_BACKEND
