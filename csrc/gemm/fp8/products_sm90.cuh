// How products of fp8 tiles start: of tiles, and of descriptors that a kernel keeps itself.
#pragma once

#include "csrc/gemm/fp8/types_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Starts the products of a step: `count` of them, of 64 rows each, from the first-th on.
template <class Traits, class B, int cols, int count>
__device__ __forceinline__ void multiply(rt_fl<16, cols> (&d)[count], typename Traits::Stage& stage,
                                         int first, bool accumulate) {
    using sums = rt_fl<16, B::rows>;
    const auto& columns = reinterpret_cast<const B&>(stage.b);
#pragma unroll
    for (int i = 0; i < count; ++i) warpgroup::mma_fence(reinterpret_cast<sums&>(d[i]));
#pragma unroll
    for (int i = 0; i < count; ++i) {
        auto rows = stage.a.template subtile<64, BLOCK_K>({first + i, 0});
        kittens::detail::wgmma_product<false, true>(reinterpret_cast<sums&>(d[i]), rows, columns,
                                                    accumulate);
    }
    warpgroup::mma_commit_group();
}
// The same; for a narrow tile, of the first columns alone.
template <class Traits, int cols, int count>
__device__ __forceinline__ void multiply(rt_fl<16, cols> (&d)[count], typename Traits::Stage& stage,
                                         int first, bool accumulate, bool narrow) {
    if constexpr (Traits::two_widths) {
        if (narrow) return multiply<Traits, typename Traits::narrow_b>(d, stage, first, accumulate);
    }
    multiply<Traits, typename Traits::b_tile>(d, stage, first, accumulate);
}

// The descriptor of a K-major operand that begins at an address; and of a stage's whose low word is
// known. The compiler knows that a word is the same in all lanes, and keeps descriptors in uniform
// registers: nothing has to be moved there between the end of a product and the start of the next,
// or between its parts.
template <class Traits>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
    return kittens::detail::k_major_descriptor<typename Traits::a_tile>(address);
}
template <class Traits>
__device__ __forceinline__ uint64_t with_low_word(uint32_t word) {
    return (operand_descriptor<Traits>(0) & 0xFFFFFFFF00000000) | word;
}
// How much farther the low word is of what begins so many rows later.
__host__ __device__ constexpr uint32_t low_word_of_rows(int rows) { return rows * BLOCK_K >> 4; }

// Issues the product of 64 rows of a stage by `cols` columns, which begin where descriptors say.
template <class Traits, int cols, int all>
__device__ __forceinline__ void issue_product(rt_fl<16, all>& d, uint64_t rows, uint64_t columns,
                                              bool accumulate) {
    using instruction = arch::wgmma<cols, float, typename Traits::TA, typename Traits::TB>;
    constexpr int words = rt_fl<16, cols>::elements_per_thread;
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; ++k) {
        instruction::template from_shared<false, false>(
            reinterpret_cast<float(&)[words]>(d), arch::wgmma_advance(rows, 32 * k),
            arch::wgmma_advance(columns, 32 * k), accumulate || k > 0);
    }
}

// Starts the products of a step, whose operands' descriptors have these low words.
template <class Traits, class B, int cols, int count>
__device__ __forceinline__ void multiply_at(rt_fl<16, cols> (&d)[count], uint32_t a, uint32_t b,
                                            bool accumulate) {
    using sums = rt_fl<16, B::rows>;
#pragma unroll
    for (int i = 0; i < count; ++i) warpgroup::mma_fence(reinterpret_cast<sums&>(d[i]));
#pragma unroll
    for (int i = 0; i < count; ++i) {
        issue_product<Traits, B::rows>(d[i], with_low_word<Traits>(a + low_word_of_rows(i * 64)),
                                       with_low_word<Traits>(b), accumulate);
    }
    warpgroup::mma_commit_group();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
