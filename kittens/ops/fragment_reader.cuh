// Many fragments of one shared tile, for products of one warp. load() of a register tile computes
// the addresses of each base tile anew; a reader has one address a thread for all of the tile, to
// which each fragment adds what the compiler knows.
#pragma once

#include "group/mma_sync.cuh"

namespace kittens::inline KITTENS_BACKEND {

// PAIRS: of fragments whose halves along a row are neighbouring registers as ldmatrix leaves them,
// which the instruction wants of B: without, an operand of mma_ABt costs moves.
template <any_shared_tile ST, bool PAIRS = false>
struct fragment_reader {
    using T = typename ST::T;
    static_assert(float_16bit<T>, "ldmatrix moves elements of 16 bits");
    static_assert(ST::swizzle && ST::rows % 16 == 0, "fragments are 16 rows of a swizzled tile");
    using row_fragment = rt_base<T, row_l>;
    using col_fragment = rt_base<T, col_l>;

    uint32_t first;  // of the base tile's row that this lane names to ldmatrix

    // Rows count from `row`, a multiple of 16; the tile is that at `offset` bytes from `tile`.
    __device__ __forceinline__ explicit fragment_reader(const ST& tile, int row = 0,
                                                        uint32_t offset = 0)
        : first(tile.address_of(row + lane_row(), 8 * lane_chunk()) + offset) {}

    // The base tile at 16 * i rows and 16 * j columns; transposed, the operand B of mma_AB.
    __device__ __forceinline__ row_fragment load(int i, int j) const {
        row_fragment f;
        uint32_t(&w)[4] = reinterpret_cast<uint32_t(&)[4]>(f.data);
        if constexpr (PAIRS)
            arch::load_matrix_x4(w[0], w[2], w[1], w[3], address(i, j));
        else
            arch::load_matrix_x4(w[0], w[1], w[2], w[3], address(i, j));
        return f;
    }
    __device__ __forceinline__ col_fragment load_transposed(int i, int j) const {
        static_assert(!PAIRS, "transposed fragments have pairs as they are");
        col_fragment f;
        uint32_t(&w)[4] = reinterpret_cast<uint32_t(&)[4]>(f.data);
        arch::load_matrix_x4_transposed(w[0], w[2], w[1], w[3], address(i, j));
        return f;
    }
    __device__ __forceinline__ fragment_reader behind(uint32_t offset) const {
        return fragment_reader(first + offset);
    }

  private:
    static __device__ __forceinline__ int lane_row() {
        const int lane = kittens::laneid();
        return PAIRS ? lane % 8 + lane / 16 * 8 : lane % 16;
    }
    static __device__ __forceinline__ int lane_chunk() {
        const int lane = kittens::laneid();
        return PAIRS ? lane / 8 % 2 : lane / 16;
    }
    __device__ __forceinline__ explicit fragment_reader(uint32_t _first) : first(_first) {}

    // A swizzle exchanges chunks of 16 bytes within a row of a stripe, by a number that repeats
    // every eight rows: two chunks on is the exchange of the same bits.
    __device__ __forceinline__ uint32_t address(int i, int j) const {
        constexpr int of_stripe = ST::stripe_cols / 16;
        return (first ^ static_cast<uint32_t>(32 * (j % of_stripe))) +
               static_cast<uint32_t>(j / of_stripe * ST::stripe_bytes + i * 16 * ST::swizzle_bytes);
    }
};

// d += a b, of a 16 x 16 accumulator and fragments in the layouts of mma_AB and mma_ABt.
template <scalar T, class B>
__device__ __forceinline__ void mma_fragments(rt_base<float, row_l>& d, const rt_base<T, row_l>& a,
                                              const B& b) {
    static_assert(std::same_as<T, typename B::T>, "fragments of a product have one element type");
    detail::mma_base<T, T>(d, a, b);
}

}  // namespace kittens::inline KITTENS_BACKEND
