// copy() between element types and vector layouts, and register tiles in another layout or
// transposed. What moves between lanes here goes through shuffles; nothing touches shared memory.
#pragma once

#include "identity.cuh"
#include "maps.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// Registers of a base tile in the other layout (equally: of the transposed base in the same
// layout). The four 8x8 matrices are transposed one by one; the middle two change places.
template <scalar T>
__device__ __forceinline__ void exchange_base(packed_type<T> (&to)[4],
                                              const packed_type<T> (&from)[4]) {
    packed_type<T> transposed[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const packed_type<T> pair = from[(k % 2) * 2 + k / 2];
        if constexpr (sizeof(T) == 2) {
            transposed[k] = arch::bit_cast<packed_type<T>>(
                arch::transpose_matrix(arch::bit_cast<uint32_t>(pair)));
        } else {
            // This lane wants elements (2 (l % 4) + {0, 1}, l / 4) of the matrix.
            const int lane = kittens::laneid(), column = lane / 4;
            const int source = 8 * (lane % 4) + column / 2;
            const auto first = arch::shuffle(pair, source);
            const auto second = arch::shuffle(pair, source + 4);
            transposed[k] = {component(first, column % 2), component(second, column % 2)};
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = transposed[k];
}

// An 8-bit base is as long as two bases of the wider types, and its lanes hold four neighbours
// instead of two: lane q of a quad takes halves from lanes 2 (q % 2) and 2 (q % 2) + 1.
template <float_8bit To, class From, class Base>
__device__ __forceinline__ void narrow_bases(Base& to, const From& first, const From& second) {
    using T = typename From::T;
    const int lane = kittens::laneid(), q = lane % 4;
    const int source = lane - q + 2 * (q % 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const From& base = k < 2 ? first : second;
        const float2 low = unpack_pair<T>(base.data[k % 2]),
                     high = unpack_pair<T>(base.data[k % 2 + 2]);
        const auto four = pack<To>({{low.x, low.y, high.x, high.y}});
        const uint32_t even = arch::shuffle(arch::bit_cast<uint32_t>(four), source);
        const uint32_t odd = arch::shuffle(arch::bit_cast<uint32_t>(four), source + 1);
        const uint32_t word =
            q < 2 ? (even & 0xffffu) | (odd << 16) : (even >> 16) | (odd & 0xffff0000u);
        to.data[k] = arch::bit_cast<packed_type<To>>(word);
    }
}
template <float_8bit From, class Base, class To>
__device__ __forceinline__ void widen_base(To& first, To& second, const Base& from) {
    using T = typename To::T;
    const int lane = kittens::laneid(), q = lane % 4;
    const int source = lane - q + q / 2;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        To& base = k < 2 ? first : second;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t word =
                arch::shuffle(arch::bit_cast<uint32_t>(from.data[k]), source + 2 * half);
            const auto four = unpack<From>(arch::bit_cast<packed_type<From>>(word));
            base.data[k % 2 + 2 * half] = q % 2 == 0 ? pack_pair<T>(four.v[0], four.v[1])
                                                     : pack_pair<T>(four.v[2], four.v[3]);
        }
    }
}

// The value of element `index` of a vector, for a lane that wants it in data[outer][inner], half
// `half`. All lanes ask for the same register of theirs at a time.
template <any_register_vector To, any_register_vector From>
__device__ __forceinline__ auto fetch_element(const From& from, int outer, int inner, int half) {
    using T = typename From::T;
    using layout = typename From::layout;
    const int index = vector_index<To>(kittens::laneid(), outer, inner, half);
    const auto pick = [](const auto& pair, int which) { return which == 0 ? pair.x : pair.y; };
    if constexpr (To::is_naive) {
        // Lanes 0-15 want one group of 16, the others the next.
        T value = T();
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const int o = 2 * outer + group;
            if (o < From::outer_dim) {
#pragma unroll
                for (int i = 0; i < From::inner_dim; ++i) {
                    T candidate;
                    bool wanted = index / 16 == o;
                    if constexpr (std::same_as<layout, align_l>) {
                        candidate = pick(arch::shuffle(from.data[o][i], index % 8 / 2), index % 2);
                        wanted = wanted && index % 16 / 8 == i;
                    } else {
                        candidate =
                            pick(arch::shuffle(from.data[o][i], index % 8 * 4), index % 16 / 8);
                    }
                    if (wanted) value = candidate;
                }
            }
        }
        return value;
    } else if constexpr (From::is_naive) {
        return arch::shuffle(from.data[outer / 2][0], index % WARP_THREADS);
    } else if constexpr (std::same_as<layout, ortho_l>) {
        return pick(arch::shuffle(from.data[outer][0], index % 8 * 4), inner);
    } else {
        return pick(arch::shuffle(from.data[outer][half], index % 8 / 2), index % 2);
    }
}

}  // namespace detail

template <int WARPS>
struct conversion_ops {
    // Register tiles of any two element types.
    template <any_register_tile D, any_register_tile S>
    static __device__ __forceinline__ void copy(D& d, const S& s) {
        using To = typename D::T;
        using From = typename S::T;
        detail::check_shape<D, S>();
        static_assert(detail::same_layout<D, S>(),
                      "copy() keeps the layout of a register tile; swap_layout() changes it");
        if constexpr (D::base::packing == S::base::packing) {
#pragma unroll
            for (int i = 0; i < D::height; ++i) {
#pragma unroll
                for (int j = 0; j < D::width; ++j) {
#pragma unroll
                    for (int k = 0; k < D::packed_per_base; ++k) {
                        const auto& from = s.tiles[i][j].data[k];
                        if constexpr (std::same_as<To, From>)
                            d.tiles[i][j].data[k] = from;
                        else
                            d.tiles[i][j].data[k] = detail::pack<To>(detail::unpack<From>(from));
                    }
                }
            }
        } else if constexpr (float_8bit<To>) {
#pragma unroll
            for (int line = 0; line < detail::line_bases<D>; ++line) {
#pragma unroll
                for (int across = 0; across < detail::across_bases<D>; ++across) {
                    detail::narrow_bases<To>(detail::base_at(d, line, across),
                                             detail::base_at(s, line, 2 * across),
                                             detail::base_at(s, line, 2 * across + 1));
                }
            }
        } else {
#pragma unroll
            for (int line = 0; line < detail::line_bases<S>; ++line) {
#pragma unroll
                for (int across = 0; across < detail::across_bases<S>; ++across) {
                    detail::widen_base<From>(detail::base_at(d, line, 2 * across),
                                             detail::base_at(d, line, 2 * across + 1),
                                             detail::base_at(s, line, across));
                }
            }
        }
    }
    // Register vectors of any two element types and layouts.
    template <any_register_vector D, any_register_vector S>
    static __device__ __forceinline__ void copy(D& d, const S& s) {
        using To = typename D::T;
        detail::check_shape<D, S>();
        if constexpr (detail::same_layout<D, S>()) {
#pragma unroll
            for (int o = 0; o < D::outer_dim; ++o) {
#pragma unroll
                for (int i = 0; i < D::inner_dim; ++i) {
                    if constexpr (D::is_naive) {
                        d.data[o][i] = convert<To>(s.data[o][i]);
                    } else if constexpr (std::same_as<To, typename S::T>) {
                        d.data[o][i] = s.data[o][i];
                    } else {
                        const float2 pair = unpack_pair<typename S::T>(s.data[o][i]);
                        d.data[o][i] = pack_pair<To>(pair.x, pair.y);
                    }
                }
            }
        } else {
#pragma unroll
            for (int o = 0; o < D::outer_dim; ++o) {
#pragma unroll
                for (int i = 0; i < D::inner_dim; ++i) {
                    if constexpr (D::is_naive) {
                        d.data[o][i] = convert<To>(detail::fetch_element<D>(s, o, i, 0));
                    } else {
                        d.data[o][i] =
                            packed_type<To>{convert<To>(detail::fetch_element<D>(s, o, i, 0)),
                                            convert<To>(detail::fetch_element<D>(s, o, i, 1))};
                    }
                }
            }
        }
    }
    // Shared objects of any two element types.
    template <any_shared D, any_shared S>
    static __device__ __forceinline__ void copy(D&& d, const S& s) {
        using Object = std::remove_cvref_t<D>;
        detail::check_shape<Object, S>();
        constexpr int n = detail::common_run<Object, S>();
        detail::for_each_run<n, Object>(
            group_identity<WARPS>::laneid(), group_identity<WARPS>::GROUP_THREADS, [&](auto... at) {
                detail::store_run(
                    d, at...,
                    detail::convert_run<typename Object::T>(detail::load_run<n>(s, at...)));
            });
    }
    // One value everywhere.
    template <any_object D, scalar_operand S>
    static __device__ __forceinline__ void copy(D&& d, const S& value) {
        using T = typename std::remove_cvref_t<D>::T;
        map_ops<WARPS>::fill(d, detail::to_element<T>(value));
    }

    // The same elements in the other layout.
    template <any_register_tile D, any_register_tile S>
    static __device__ __forceinline__ void swap_layout(D& d, const S& s) {
        using T = typename D::T;
        detail::check_shape<D, S>();
        static_assert(
            std::same_as<T, typename S::T> && !detail::same_layout<D, S>(),
            "swap_layout() keeps the element type and changes the layout; copy() converts types");
        if constexpr (float_8bit<T>) {
            // Both base shapes differ; half holds every 8-bit value exactly.
            rt<half, S::rows, S::cols, typename S::layout> wide;
            rt<half, D::rows, D::cols, typename D::layout> swapped;
            copy(wide, s);
            swap_layout(swapped, wide);
            copy(d, swapped);
        } else {
#pragma unroll
            for (int i = 0; i < D::height; ++i) {
#pragma unroll
                for (int j = 0; j < D::width; ++j) {
                    detail::exchange_base<T>(d.tiles[i][j].data, s.tiles[i][j].data);
                }
            }
        }
    }
    // Changes the layout in the tile's own registers, and returns them as a tile of the other
    // layout. The tile must not be used under its old type afterwards.
    template <any_register_tile RT>
    static __device__ __forceinline__ auto& swap_layout_inplace(RT& tile) {
        using T = typename RT::T;
        using Other = std::conditional_t<std::same_as<typename RT::layout, row_l>, col_l, row_l>;
        static_assert(
            !float_8bit<T>,
            "an 8-bit tile's registers are shaped otherwise in the other layout: swap_layout()");
#pragma unroll
        for (int i = 0; i < RT::height; ++i) {
#pragma unroll
            for (int j = 0; j < RT::width; ++j) {
                detail::exchange_base<T>(tile.tiles[i][j].data, tile.tiles[i][j].data);
            }
        }
        return reinterpret_cast<rt<T, RT::rows, RT::cols, Other>&>(tile);
    }
    // The i-th band of `rows` rows, in place.
    template <int rows, any_register_tile RT>
    static __device__ __forceinline__ auto& subtile_inplace(RT& tile, int i) {
        using Band = rt<typename RT::T, rows, RT::cols, typename RT::layout>;
        static_assert(RT::rows % rows == 0, "a subtile's rows must divide its tile's rows");
        return reinterpret_cast<Band&>(tile.tiles[i * Band::height]);
    }
    // The columns of s from column `first` on, as many as d has; `first` is a multiple of a base
    // tile's columns. Where it is a constant after unrolling, no register moves.
    template <any_register_tile D, any_register_tile S>
    static __device__ __forceinline__ void take_columns(D& d, const S& s, int first) {
        static_assert(D::rows == S::rows && D::cols <= S::cols &&
                          std::same_as<typename D::T, typename S::T> && detail::same_layout<D, S>(),
                      "take_columns() needs a destination with the source's rows, type and layout, "
                      "and no more columns");
#pragma unroll
        for (int i = 0; i < D::height; ++i) {
#pragma unroll
            for (int j = 0; j < D::width; ++j) {
                d.tiles[i][j] = s.tiles[i][first / D::base::cols + j];
            }
        }
    }
    // The i-th piece of `length` elements, in place.
    template <int length, any_shared_vector SV>
    static __device__ __forceinline__ auto& subvec_inplace(SV& vector, int i) {
        static_assert(SV::length % length == 0,
                      "a subvector's length must divide its vector's length");
        return reinterpret_cast<sv<typename SV::T, length>&>(vector.data[i * length]);
    }

    // d = s^T. The registers of s must not be those of d. In the same layout the elements move
    // between lanes; in the other layout they are already where they belong.
    template <any_register_tile D, any_register_tile S>
    static __device__ __forceinline__ void transpose_sep(D& d, const S& s) {
        using T = typename D::T;
        static_assert(
            WARPS == 1,
            "a group's register tile is spread over its warps: transpose at warp scope, or "
            "through shared memory");
        static_assert(
            D::rows == S::cols && D::cols == S::rows && std::same_as<T, typename S::T>,
            "transpose_sep() needs a destination of the transposed size and the same type");
        if constexpr (!detail::same_layout<D, S>()) {
#pragma unroll
            for (int i = 0; i < S::height; ++i) {
#pragma unroll
                for (int j = 0; j < S::width; ++j) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) d.tiles[j][i].data[k] = s.tiles[i][j].data[k];
                }
            }
        } else {
            using Other = std::conditional_t<std::same_as<typename S::layout, row_l>, col_l, row_l>;
            rt<T, D::rows, D::cols, Other> relabelled;
            transpose_sep(relabelled, s);
            swap_layout(d, relabelled);
        }
    }
    template <any_register_tile RT>
    static __device__ __forceinline__ void transpose_inplace(RT& tile) {
        static_assert(RT::rows == RT::cols, "transpose_inplace() needs a square tile");
        RT transposed;
        transpose_sep(transposed, tile);
        tile = transposed;
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
