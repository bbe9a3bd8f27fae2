// Between global memory and a block without TMA: rows of operands to shared tiles by cp.async, 16
// bytes a thread, and rows of a warp's output to memory, 16 bytes a thread too.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// In every pass over rows, eight or four neighbouring threads copy a row of one stripe; a thread
// has the same chunk of every stripe, and rows so far from each other that they have one swizzle.
template <class Tile, int THREADS>
struct TileCopy {
    using T = typename Tile::T;
    static constexpr uint32_t per_copy = 16 / sizeof(T);
    static constexpr uint32_t stripe_copies = Tile::stripe_cols / per_copy;
    static constexpr int pass_rows = THREADS / int(stripe_copies);
    static constexpr int passes = Tile::rows / pass_rows;
    static_assert(Tile::rows % pass_rows == 0 && pass_rows % 8 == 0);

    // The first `rows` rows, and of them the first `columns`; others are zeros. `from` is the first
    // row. The next commit is that of these copies.
    static __device__ __forceinline__ void load(Tile& tile, const T* from, int64_t row_stride,
                                                int rows, int columns) {
        // The compiler does not move a shuffle: what follows from it takes no register elsewhere.
        const uint32_t thread = arch::shuffle_xor(threadIdx.x, 0);
        const uint32_t column = thread % stripe_copies * per_copy;
        const int row = static_cast<int>(thread / stripe_copies);
        const uint32_t to = tile.address_of(row, static_cast<int>(column));
        from = from + row * row_stride + column;
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
            for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
                const int first = stripe * Tile::stripe_cols;
                const uint32_t offset =
                    stripe * Tile::stripe_bytes + pass * pass_rows * Tile::swizzle_bytes;
                const bool exists =
                    row + pass * pass_rows < rows && static_cast<int>(column) + first < columns;
                arch::cp_async<16>(to + offset, from + first, exists);
            }
            from += pass_rows * row_stride;
        }
    }
    // The same of rows that lie anywhere: `address_of_row` is called for the rows that exist.
    template <class AddressOf>
    static __device__ __forceinline__ void load_scattered(Tile& tile, AddressOf address_of_row,
                                                          int rows, int columns) {
        const uint32_t thread = arch::shuffle_xor(threadIdx.x, 0);
        const uint32_t column = thread % stripe_copies * per_copy;
        const int row = static_cast<int>(thread / stripe_copies);
        const uint32_t to = tile.address_of(row, static_cast<int>(column));
        const T* from[passes] = {};  // looked up together
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            const int at = row + pass * pass_rows;
            if (at < rows) from[pass] = address_of_row(at) + column;
        }
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
            for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
                const int first = stripe * Tile::stripe_cols;
                const uint32_t offset =
                    stripe * Tile::stripe_bytes + pass * pass_rows * Tile::swizzle_bytes;
                arch::cp_async<16>(
                    to + offset, from[pass] + first,
                    from[pass] != nullptr && static_cast<int>(column) + first < columns);
            }
        }
    }
};

// Four words of each lane of a quad, transposed: lane i of the four gets word i of each.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
    const auto exchange = [](uint32_t& low, uint32_t& high, int lanes) {
        const bool is_high = (laneid() & lanes) != 0;
        const uint32_t received = arch::shuffle_xor(is_high ? low : high, lanes);
        if (is_high)
            low = received;
        else
            high = received;
    };
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
}

// The 16 rows of a warp's accumulator, of which the first `rows` exist; `to` is the first. Four
// threads have the columns of a row in twos; each of them stores eight of every 32.
template <class T, any_register_tile Tile>
__device__ __forceinline__ void store_rows(const Tile& tile, T* to, int64_t row_stride, int rows,
                                           int columns) {
    static_assert(Tile::height == 1 && Tile::width % 2 == 0);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int row = laneid() / 4 + 8 * lower;
        T* const line = to + row * row_stride;
#pragma unroll
        for (int j = 0; j < Tile::width; j += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = tile.tiles[0][j + i / 2].data[i % 2 * 2 + lower];
                words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x, pair.y));
            }
            transpose_quad(words);
            const int column = 16 * j + 8 * (laneid() % 4);
            if (row < rows && column < columns) {
                arch::store_global(reinterpret_cast<uint4*>(line + column),
                                   make_uint4(words[0], words[1], words[2], words[3]));
            }
        }
    }
}

// One tile of 16 x 16 of an accumulator, of which the first `rows` and `columns` exist; `to` is its
// first element. Each thread stores eight neighbours.
template <class T>
__device__ __forceinline__ void store_tile(const rt_fl<16, 16>& tile, T* to, int64_t row_stride,
                                           int rows, int columns) {
    uint32_t words[4];  // upper row, its right half, lower row, its right half
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = tile.tiles[0][0].data[i % 2 * 2 + i / 2];
        words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x, pair.y));
    }
    transpose_quad(words);
    const int lane = laneid(), row = lane / 4 + 8 * (lane % 4 / 2), column = 8 * (lane % 2);
    if (row < rows && column < columns) {
        arch::store_global(reinterpret_cast<uint4*>(to + row * row_stride + column),
                           make_uint4(words[0], words[1], words[2], words[3]));
    }
}

}  // namespace thunderkittens::attention
