// Register vectors of one warp, in three layouts:
//   align  the layout of a row of a row-layout tile: lane l holds elements 2(l%4) and 2(l%4)+1 of
//          every 8, replicated over l/4
//   ortho  the layout of a column of a row-layout tile: lane l holds elements l/4 and l/4 + 8 of
//          every 16, replicated over l%4
//   naive  lane l holds elements l, l + 32, ...: no replication, for work that is vectors only
#pragma once

#include "../scalar.cuh"

namespace kittens::inline KITTENS_BACKEND {

namespace vector_layout {
struct align {};
struct ortho {};
struct naive {};
}  // namespace vector_layout
using align_l = vector_layout::align;
using ortho_l = vector_layout::ortho;
using naive_l = vector_layout::naive;

template <class L>
concept vector_layout_type =
    std::same_as<L, align_l> || std::same_as<L, ortho_l> || std::same_as<L, naive_l>;

template <scalar _T, int _length, vector_layout_type _layout = naive_l>
struct rv {
    using identity_type = identity::register_vector;
    using T = _T;
    using layout = _layout;
    static constexpr bool is_naive = std::same_as<layout, naive_l>;
    using dtype = std::conditional_t<is_naive, T, packed_type<T>>;
    static constexpr int length = _length;
    static constexpr int tiles = length / 16;
    static constexpr int outer_dim = is_naive ? (length + WARP_THREADS - 1) / WARP_THREADS : tiles;
    static constexpr int inner_dim = std::same_as<layout, align_l> ? 2 : 1;
    static_assert(length > 0 && length % 16 == 0,
                  "a register vector's length must be a multiple of 16");

    // align: data[o][i] holds elements 16 o + 8 i + 2 (lane % 4) + {0, 1}
    // ortho: data[o][0] holds elements 16 o + lane / 4 + {0, 8}
    // naive: data[o][0] holds element 32 o + lane
    dtype data[outer_dim][inner_dim];
};

template <int length, vector_layout_type L = naive_l>
using rv_fl = rv<float, length, L>;
template <int length, vector_layout_type L = naive_l>
using rv_bf = rv<bf16, length, L>;
template <int length, vector_layout_type L = naive_l>
using rv_hf = rv<half, length, L>;

}  // namespace kittens::inline KITTENS_BACKEND
