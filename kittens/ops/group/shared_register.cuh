// Tiles and vectors between shared memory and registers. A group's warps take consecutive bands of
// rows: a shared tile of WARPS * rows meets a register tile of `rows` per warp.
#pragma once

#include "../../types/register/rt.cuh"
#include "../../types/shared/st.cuh"
#include "../../types/shared/sv.cuh"
#include "identity.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

template <class Pair>
__device__ __forceinline__ uint32_t& as_word(Pair& pair) {
    static_assert(sizeof(Pair) == 4);
    return reinterpret_cast<uint32_t&>(pair);
}

// A base tile of T from one of another type, register by register.
template <scalar To, class Base>
__device__ __forceinline__ rt_base<To, typename Base::layout> convert_base(const Base& from) {
    using From = typename Base::T;
    if constexpr (std::same_as<To, From>) {
        return from;
    } else {
        static_assert(
            packed<To>::count == 2 && packed<From>::count == 2,
            "loads and stores convert between float, bf16 and half only; use copy() for fp8");
        rt_base<To, typename Base::layout> to;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_pair<From>(from.data[i]);
            to.data[i] = pack_pair<To>(pair.x, pair.y);
        }
        return to;
    }
}

// Shared address of the row that this lane names to ldmatrix or stmatrix, for the base tile at
// (row, col).
template <class Base, any_shared_tile ST>
__device__ __forceinline__ uint32_t matrix_row_address(const ST& tile, int row, int col) {
    const int lane = kittens::laneid(), matrix = lane / 8;
    if constexpr (Base::is_row) {
        return tile.address_of(row + lane % 8 + 8 * (matrix % 2), col + 8 * (matrix / 2));
    } else {
        return tile.address_of(row + lane % 8 + 8 * (matrix / 2), col + 8 * (matrix % 2));
    }
}

}  // namespace detail

template <int WARPS>
struct shared_register_ops {
    template <any_register_tile RT, any_shared_tile ST>
    static __device__ __forceinline__ void load(RT& destination, const ST& source) {
        static_assert(
            ST::rows == RT::rows * WARPS && ST::cols == RT::cols,
            "the shared tile must have the register tile's columns and its rows times the "
            "group's warps");
        using Base = rt_base<typename ST::T, typename RT::layout>;
        const int first_row = group_identity<WARPS>::warpid() * RT::rows;
#pragma unroll
        for (int i = 0; i < RT::height; ++i) {
#pragma unroll
            for (int j = 0; j < RT::width; ++j) {
                const int row = first_row + i * RT::base::rows, col = j * RT::base::cols;
                Base base;
                if constexpr (sizeof(typename ST::T) == 2) {
                    const uint32_t address = detail::matrix_row_address<Base>(source, row, col);
                    uint32_t(&w)[4] = reinterpret_cast<uint32_t(&)[4]>(base.data);
                    if constexpr (Base::is_row) {
                        arch::load_matrix_x4(w[0], w[1], w[2], w[3], address);
                    } else {
                        arch::load_matrix_x4_transposed(w[0], w[1], w[2], w[3], address);
                    }
                } else {
                    for_each_register<Base>(source, row, col, [&](int k, auto address_of) {
                        using Packed = typename Base::dtype;
                        if constexpr (Base::is_row) {
                            base.data[k] = arch::load_shared<Packed>(address_of(0));
                        } else {
                            auto* elements = reinterpret_cast<typename ST::T*>(&base.data[k]);
#pragma unroll
                            for (int e = 0; e < Base::packing; ++e) {
                                elements[e] = arch::load_shared<typename ST::T>(address_of(e));
                            }
                        }
                    });
                }
                destination.tiles[i][j] = detail::convert_base<typename RT::T>(base);
            }
        }
    }

    template <any_shared_tile ST, any_register_tile RT>
    static __device__ __forceinline__ void store(const ST& destination, const RT& source) {
        static_assert(
            ST::rows == RT::rows * WARPS && ST::cols == RT::cols,
            "the shared tile must have the register tile's columns and its rows times the "
            "group's warps");
        using Base = rt_base<typename ST::T, typename RT::layout>;
        const int first_row = group_identity<WARPS>::warpid() * RT::rows;
#pragma unroll
        for (int i = 0; i < RT::height; ++i) {
#pragma unroll
            for (int j = 0; j < RT::width; ++j) {
                const int row = first_row + i * RT::base::rows, col = j * RT::base::cols;
                Base base = detail::convert_base<typename ST::T>(source.tiles[i][j]);
                if constexpr (sizeof(typename ST::T) == 2) {
                    const uint32_t address =
                        detail::matrix_row_address<Base>(destination, row, col);
                    uint32_t(&w)[4] = reinterpret_cast<uint32_t(&)[4]>(base.data);
                    if constexpr (Base::is_row) {
                        arch::store_matrix_x4(address, w[0], w[1], w[2], w[3]);
                    } else {
                        arch::store_matrix_x4_transposed(address, w[0], w[1], w[2], w[3]);
                    }
                } else {
                    for_each_register<Base>(destination, row, col, [&](int k, auto address_of) {
                        if constexpr (Base::is_row) {
                            arch::store_shared(address_of(0), base.data[k]);
                        } else {
                            auto* elements = reinterpret_cast<typename ST::T*>(&base.data[k]);
#pragma unroll
                            for (int e = 0; e < Base::packing; ++e) {
                                arch::store_shared(address_of(e), elements[e]);
                            }
                        }
                    });
                }
            }
        }
    }

  private:
    // access(register, function from an element of that register to its shared address)
    template <class Base, any_shared_tile ST, class Access>
    static __device__ __forceinline__ void for_each_register(const ST& tile, int row, int col,
                                                             Access access) {
#pragma unroll
        for (int k = 0; k < Base::packed_per_thread; ++k) {
            access(k, [&, k](int element) {
                const auto p = Base::position(kittens::laneid(), k, element);
                return tile.address_of(row + p.row, col + p.col);
            });
        }
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
