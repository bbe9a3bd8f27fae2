// Operands of mma.sync from a swizzled shared tile, 16 x 16 elements at a time by one ldmatrix, for
// loops in which products and loads take turns. Loads of whole register tiles compute an address
// for every base tile; here a walker keeps one: 16 rows further the swizzle is the same, and 16
// columns further it exchanges bits of the address alone. What is loaded has the order in which the
// instruction wants its registers, which for B is not that of a register tile.
#pragma once

#include "shared_register.cuh"

namespace kittens::inline KITTENS_BACKEND {

// 16 x 16 elements of A; of B, with 16 of k, those of 8 columns of the product in two words, and
// those of the other 8 in two more.
template <scalar T>
struct operand_a {
    uint32_t words[4];
};
template <scalar T>
struct operand_b {
    uint32_t words[4];
};

// d += a b.
template <scalar T>
__device__ __forceinline__ void mma_operands(rt_fl<16, 16>& d, const operand_a<T>& a,
                                             const operand_b<T>& b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float2 &top = d.tiles[0][0].data[2 * n], &bottom = d.tiles[0][0].data[2 * n + 1];
        const uint32_t half[2] = {b.words[2 * n], b.words[2 * n + 1]};
        const float in[4] = {top.x, top.y, bottom.x, bottom.y};
        float out[4];
        arch::mma_sync<T, T>::fma(out, a.words, half, in);
        top = {out[0], out[1]};
        bottom = {out[2], out[3]};
    }
}

// Walks over operands in a shared tile, whose rows lie along k (`k_adjacent`), or its columns.
template <template <class> class Operand, bool k_adjacent, any_shared_tile ST>
struct operand_walker {
    using T = typename ST::T;
    using operand = Operand<T>;
    static_assert(sizeof(T) == 2, "ldmatrix loads elements of 16 bits");
    static_assert(ST::swizzle_bytes >= 64,
                  "the shared tile must have a swizzle of 64 or 128 bytes");

    uint32_t first;  // this lane's row of the operand at the origin

    // The origin's row is a multiple of 16. Its column within a stripe of 64 is 0, or what is
    // loaded lies in fewer columns behind it than it is a multiple of.
    __device__ __forceinline__ operand_walker(const ST& source, int row, int col) {
        constexpr bool is_b = std::same_as<operand, operand_b<T>>;
        const int lane = kittens::laneid(), low = lane / 8 % 2 * 8, high = lane / 16 * 8;
        first = k_adjacent != is_b ? source.address_of(row + lane % 8 + low, col + high)
                                   : source.address_of(row + lane % 8 + high, col + low);
    }

    // Loads the operand so many rows and columns behind the origin, multiples of 16, of a tile that
    // is `bytes` behind the walker's, a multiple of 1024.
    __device__ __forceinline__ void load(operand& to, int rows, int cols, uint32_t bytes) const {
        const uint32_t address =
            ((first + bytes) ^ uint32_t(cols % ST::stripe_cols * 2)) +
            uint32_t(rows * ST::swizzle_bytes + cols / ST::stripe_cols * ST::stripe_bytes);
        if constexpr (k_adjacent)
            arch::load_matrix_x4(to.words[0], to.words[1], to.words[2], to.words[3], address);
        else
            arch::load_matrix_x4_transposed(to.words[0], to.words[1], to.words[2], to.words[3],
                                            address);
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
