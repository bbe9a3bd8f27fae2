// Products of a warpgroup on the asynchronous tensor cores. D (16 rows per warp, 64 in all) is
// accumulated in registers; A is a shared tile or this warpgroup's register tile, B a shared tile.
//
//   mma_AB   D += A B      A 64 x K        B K x N
//   mma_ABt  D += A B^T    A 64 x K        B N x K
//   mma_AtB  D += A^T B    A K x 64        B K x N
//   mma_AtBt D += A^T B^T  A K x 64        B N x K
//   mm_...   the same, overwriting D
//
// Each call is one committed group; D and a register A must not be touched before mma_async_wait.
// Shared operands must be swizzled; 8-bit operands only as A and B^T, which the hardware requires.
#pragma once

#include "../../types/register/rt.cuh"
#include "../../types/shared/st.cuh"
#include "identity.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// First address of an operand, before the swizzle.
template <class Tile>
__device__ __forceinline__ uint32_t operand_origin(const Tile& tile) {
    if constexpr (requires { tile.offset; }) {
        return tile.base + swizzle::linear(tile.offset.x, tile.offset.y, Tile::underlying_rows,
                                           Tile::underlying_cols, int(sizeof(typename Tile::T)),
                                           Tile::swizzle_bytes);
    } else {
        return tile.address();
    }
}

// Descriptor of the first step of 32 bytes (16 or 32 elements) along K, and the distance in bytes
// of the k-th. A descriptor per product and an addition per step, rather than a descriptor per
// step: the products of a warpgroup are issued by few instructions.
// K contiguous: rows of the tile are M or N.
template <class Tile>
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t origin) {
    constexpr int width = Tile::swizzle_bytes;
    static_assert(width > 0, "a shared operand of wgmma must be a swizzled tile");
    return arch::wgmma_descriptor(origin, 16, 8 * width, width);
}
template <class Tile>
__host__ __device__ constexpr int k_major_distance(int k) {
    constexpr int width = Tile::swizzle_bytes;
    return (32 * k / width) * Tile::underlying_rows * width + 32 * k % width;
}
// M or N contiguous: rows of the tile are K.
template <class Tile>
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t origin) {
    constexpr int width = Tile::swizzle_bytes;
    static_assert(width > 0, "a shared operand of wgmma must be a swizzled tile");
    static_assert(
        sizeof(typename Tile::T) == 2,
        "8-bit wgmma operands must have K contiguous: use mma_ABt with A of 64 x K and B of N x K");
    return arch::wgmma_descriptor(origin, Tile::underlying_rows * width, 8 * width, width);
}
template <class Tile>
__host__ __device__ constexpr int mn_major_distance(int k) {
    return 16 * k * Tile::swizzle_bytes;
}

template <any_register_tile D>
__device__ __forceinline__ void pin_accumulator(D& d) {
    constexpr int words = D::elements_per_thread * int(sizeof(typename D::T)) / 4;
    if constexpr (std::same_as<typename D::T, float>) {
        auto& registers = reinterpret_cast<float(&)[words]>(d);
#pragma unroll
        for (int i = 0; i < words; ++i) arch::pin_register(registers[i]);
    } else {
        auto& registers = reinterpret_cast<uint32_t(&)[words]>(d);
#pragma unroll
        for (int i = 0; i < words; ++i) arch::pin_register(registers[i]);
    }
}

template <bool transpose_a, bool transpose_b, any_register_tile D, class A, any_shared_tile B>
__device__ __forceinline__ void wgmma_product(D& d, const A& a, const B& b, bool accumulate) {
    using TA = typename A::T;
    using TB = typename B::T;
    constexpr int N = D::cols;
    constexpr int K = transpose_b ? B::cols : B::rows;  // of B: N x K, or K x N
    constexpr int k_step = 32 / int(sizeof(TB));
    static_assert(D::rows == 16 && std::same_as<typename D::layout, row_l>,
                  "the accumulator of a warpgroup product has 16 rows per warp, in row layout");
    static_assert(std::same_as<typename D::T, float> || std::same_as<typename D::T, half>,
                  "wgmma accumulates in float or half");
    static_assert((transpose_b ? B::rows : B::cols) == N,
                  "B's outer dimension must equal the accumulator's columns");
    static_assert(N <= 256 && N % 16 == 0, "wgmma takes N of 16 to 256 in steps of 16");
    static_assert(K % k_step == 0, "K must be a multiple of 32 bytes");
    using instruction = arch::wgmma<N, typename D::T, TA, TB>;
    using Word = std::conditional_t<std::same_as<typename D::T, float>, float, uint32_t>;
    constexpr int words = D::elements_per_thread * int(sizeof(typename D::T)) / 4;
    auto& registers = reinterpret_cast<Word(&)[words]>(d);

    // wgmma's untransposed B is K-major, which is B given as N x K.
    const uint64_t b_first = [&] {
        if constexpr (transpose_b)
            return k_major_descriptor<B>(operand_origin(b));
        else
            return mn_major_descriptor<B>(operand_origin(b));
    }();
    const auto b_descriptor = [&](int k) {
        return arch::wgmma_advance(b_first,
                                   transpose_b ? k_major_distance<B>(k) : mn_major_distance<B>(k));
    };
    if constexpr (any_register_tile<A>) {
        static_assert(!transpose_a, "a register operand of wgmma cannot be transposed");
        static_assert(A::rows == 16 && A::cols == K && std::same_as<typename A::layout, row_l>,
                      "a register A has 16 rows per warp and K columns, in row layout");
#pragma unroll
        for (int k = 0; k < K / k_step; ++k) {
            const auto& words_a = reinterpret_cast<const uint32_t(&)[4]>(a.tiles[0][k].data);
            instruction::template from_registers<!transpose_b>(registers, words_a, b_descriptor(k),
                                                               accumulate || k > 0);
        }
    } else {
        static_assert((transpose_a ? A::cols : A::rows) == 64,
                      "a shared A of a warpgroup product has 64 rows (columns when transposed)");
        static_assert((transpose_a ? A::rows : A::cols) == K, "A and B must agree in K");
        const uint64_t a_first = [&] {
            if constexpr (transpose_a)
                return mn_major_descriptor<A>(operand_origin(a));
            else
                return k_major_descriptor<A>(operand_origin(a));
        }();
        const auto a_descriptor = [&](int k) {
            return arch::wgmma_advance(
                a_first, transpose_a ? mn_major_distance<A>(k) : k_major_distance<A>(k));
        };
#pragma unroll
        for (int k = 0; k < K / k_step; ++k) {
            instruction::template from_shared<transpose_a, !transpose_b>(
                registers, a_descriptor(k), b_descriptor(k), accumulate || k > 0);
        }
    }
}

}  // namespace detail

template <int WARPS>
struct wgmma_ops {};

template <>
struct wgmma_ops<WARPGROUP_WARPS> {
    // Before the first product on registers that ordinary instructions have written.
    template <any_register_tile D>
    static __device__ __forceinline__ void mma_fence(D& d) {
        detail::pin_accumulator(d);
        arch::wgmma_fence();
    }
    static __device__ __forceinline__ void mma_fence() { arch::wgmma_fence(); }
    static __device__ __forceinline__ void mma_commit_group() { arch::wgmma_commit(); }
    template <int pending = 0>
    static __device__ __forceinline__ void mma_async_wait() {
        arch::wgmma_wait<pending>();
    }
    // Waits, and keeps the compiler from reading d any earlier.
    template <int pending = 0, any_register_tile D>
    static __device__ __forceinline__ void mma_async_wait(D& d) {
        arch::wgmma_wait<pending>();
        detail::pin_accumulator(d);
    }

    template <any_register_tile D, class A, any_shared_tile B>
    static __device__ __forceinline__ void mma_AB(D& d, const A& a, const B& b) {
        product<false, false>(d, a, b, true);
    }
    template <any_register_tile D, class A, any_shared_tile B>
    static __device__ __forceinline__ void mma_ABt(D& d, const A& a, const B& b) {
        product<false, true>(d, a, b, true);
    }
    template <any_register_tile D, any_shared_tile A, any_shared_tile B>
    static __device__ __forceinline__ void mma_AtB(D& d, const A& a, const B& b) {
        product<true, false>(d, a, b, true);
    }
    template <any_register_tile D, any_shared_tile A, any_shared_tile B>
    static __device__ __forceinline__ void mma_AtBt(D& d, const A& a, const B& b) {
        product<true, true>(d, a, b, true);
    }
    template <any_register_tile D, class A, any_shared_tile B>
    static __device__ __forceinline__ void mm_AB(D& d, const A& a, const B& b) {
        product<false, false>(d, a, b, false);
    }
    template <any_register_tile D, class A, any_shared_tile B>
    static __device__ __forceinline__ void mm_ABt(D& d, const A& a, const B& b) {
        product<false, true>(d, a, b, false);
    }
    template <any_register_tile D, any_shared_tile A, any_shared_tile B>
    static __device__ __forceinline__ void mm_AtB(D& d, const A& a, const B& b) {
        product<true, false>(d, a, b, false);
    }
    template <any_register_tile D, any_shared_tile A, any_shared_tile B>
    static __device__ __forceinline__ void mm_AtBt(D& d, const A& a, const B& b) {
        product<true, true>(d, a, b, false);
    }
    // Choice at run time between mm_ and mma_, without a branch: the instruction takes it as a
    // predicate.
    template <bool transpose_a, bool transpose_b, any_register_tile D, class A, any_shared_tile B>
    static __device__ __forceinline__ void product(D& d, const A& a, const B& b, bool accumulate) {
        mma_fence(d);
        detail::wgmma_product<transpose_a, transpose_b>(d, a, b, accumulate);
        mma_commit_group();
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
