// Products of one warp on the synchronous tensor cores: D = A B + C, all in registers.
//
//   mma_AB   A M x K row layout     B K x N column layout
//   mma_ABt  A M x K row layout     B N x K row layout
//   mma_AtB  A K x M column layout  B K x N column layout
//   mma_AtBt A K x M column layout  B N x K row layout
//
// D and C are M x N in row layout. An operand with K along its registers is the instruction's
// fragment as it is, which is why a transposed operand needs the other layout.
#pragma once

#include "../elements.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// d += a b for one base tile of 16 x 16; b has a 16-wide N.
template <class TA, class TB, class DBase, class ABase, class BBase>
__device__ __forceinline__ void mma_base(DBase& d, const ABase& a, const BBase& b) {
    const auto& words_a = reinterpret_cast<const uint32_t(&)[4]>(a.data);
    const auto& words_b = reinterpret_cast<const uint32_t(&)[4]>(b.data);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const uint32_t half_b[2] = {words_b[n], words_b[n + 2]};
        if constexpr (std::same_as<typename DBase::T, float>) {
            float2 &top = d.data[2 * n], &bottom = d.data[2 * n + 1];
            float out[4] = {top.x, top.y, bottom.x, bottom.y};
            const float in[4] = {top.x, top.y, bottom.x, bottom.y};
            arch::mma_sync<TA, TB>::fma(out, words_a, half_b, in);
            top = {out[0], out[1]};
            bottom = {out[2], out[3]};
        } else {
            const uint32_t in[2] = {arch::bit_cast<uint32_t>(d.data[2 * n]),
                                    arch::bit_cast<uint32_t>(d.data[2 * n + 1])};
            uint32_t out[2];
            arch::mma_sync_f16(out, words_a, half_b, in);
            d.data[2 * n] = arch::bit_cast<half_2>(out[0]);
            d.data[2 * n + 1] = arch::bit_cast<half_2>(out[1]);
        }
    }
}

template <bool transpose_a, bool transpose_b, any_register_tile D, any_register_tile A,
          any_register_tile B, any_register_tile C>
__device__ __forceinline__ void mma_sync_product(D& d, const A& a, const B& b, const C& c) {
    using TA = typename A::T;
    using TB = typename B::T;
    constexpr int M = transpose_a ? A::cols : A::rows, K = transpose_a ? A::rows : A::cols;
    constexpr int N = transpose_b ? B::rows : B::cols;
    static_assert(is_row_layout<D> && is_row_layout<C>,
                  "D and C of a product must be in row layout");
    static_assert(
        is_row_layout<A> != transpose_a,
        "A must be in row layout (row_l) for mma_AB and mma_ABt, in column layout (col_l) for "
        "mma_AtB and mma_AtBt; swap_layout() converts");
    static_assert(
        is_row_layout<B> == transpose_b,
        "B must be in column layout (col_l) for mma_AB and mma_AtB, in row layout (row_l) for "
        "mma_ABt and mma_AtBt; swap_layout() converts");
    static_assert((transpose_b ? B::cols : B::rows) == K, "A and B must agree in K");
    static_assert(D::rows == M && D::cols == N && C::rows == M && C::cols == N,
                  "D and C must have the rows of A and the columns of B");
    static_assert(std::same_as<typename D::T, typename C::T>,
                  "D and C must have the same element type");
    static_assert(
        (std::same_as<typename D::T, float> &&
         ((float_16bit<TA> && std::same_as<TA, TB>) || (float_8bit<TA> && float_8bit<TB>))) ||
            (std::same_as<typename D::T, half> && std::same_as<TA, half> && std::same_as<TB, half>),
        "mma takes bf16 with bf16, half with half or 8-bit floats into float, or half with "
        "half into half");
    D sum;
#pragma unroll
    for (int m = 0; m < D::height; ++m) {
#pragma unroll
        for (int n = 0; n < D::width; ++n) sum.tiles[m][n] = c.tiles[m][n];
    }
    // K outermost: consecutive instructions do not wait for each other.
#pragma unroll
    for (int k = 0; k < across_bases<A>; ++k) {
#pragma unroll
        for (int m = 0; m < D::height; ++m) {
#pragma unroll
            for (int n = 0; n < D::width; ++n) {
                mma_base<TA, TB>(sum.tiles[m][n], base_at(a, m, k), base_at(b, n, k));
            }
        }
    }
    d = sum;
}

}  // namespace detail

template <int WARPS>
struct mma_sync_ops {};

template <>
struct mma_sync_ops<1> {
    template <any_register_tile D, any_register_tile A, any_register_tile B, any_register_tile C>
    static __device__ __forceinline__ void mma_AB(D& d, const A& a, const B& b, const C& c) {
        detail::mma_sync_product<false, false>(d, a, b, c);
    }
    template <any_register_tile D, any_register_tile A, any_register_tile B, any_register_tile C>
    static __device__ __forceinline__ void mma_ABt(D& d, const A& a, const B& b, const C& c) {
        detail::mma_sync_product<false, true>(d, a, b, c);
    }
    template <any_register_tile D, any_register_tile A, any_register_tile B, any_register_tile C>
    static __device__ __forceinline__ void mma_AtB(D& d, const A& a, const B& b, const C& c) {
        detail::mma_sync_product<true, false>(d, a, b, c);
    }
    template <any_register_tile D, any_register_tile A, any_register_tile B, any_register_tile C>
    static __device__ __forceinline__ void mma_AtBt(D& d, const A& a, const B& b, const C& c) {
        detail::mma_sync_product<true, true>(d, a, b, c);
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
