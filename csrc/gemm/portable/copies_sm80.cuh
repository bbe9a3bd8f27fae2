// How the threads of a block copy an operand's tiles into the ring, by cp.async, 16 bytes at a
// time. A thread has the vector of one column of vectors in every few rows, and keeps one pointer,
// to the first vector of the stage that comes next. What lies outside the operand becomes zeros.
//
// With a blocked gate, gates and values of an output's columns are half of b's columns apart. A
// warp has the gates of some columns in the first half of its columns, and their values in the
// second: in b's tile columns therefore come from two places by turns.
#pragma once

#include "csrc/gemm/portable/types_sm80.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

// Copies of tiles whose rows lie along k (`k_adjacent`), or whose columns do. A unit are the rows,
// or columns, of a warp in which a blocked gate takes turns.
template <class Tile, int threads, bool k_adjacent, int unit>
struct Copies {
    static constexpr int VECTOR = 8, STRIPE = 64, half = unit / 2;
    static constexpr int row_step = threads / 8, passes = Tile::rows / row_step;
    static constexpr int count = passes * Tile::stripes;  // vectors of a thread
    static_assert(Tile::stripe_cols == STRIPE && row_step % 8 == 0 && Tile::rows % row_step == 0);
    static_assert(!k_adjacent || row_step <= half,
                  "a thread's rows of a half are one pass at least");
    static_assert(count <= 32);

    const uint8_t* from;
    uint32_t to;      // address in the first stage
    uint32_t exists;  // by pass, or by stripe where columns lie along k: whether there are such

    static __device__ __forceinline__ uint32_t thread_row() { return threadIdx.x / 8; }
    static __device__ __forceinline__ uint32_t thread_col() { return threadIdx.x % 8 * VECTOR; }

    // Where the tile's rows or columns begin in the operand, how many there are behind, and of a
    // blocked gate the distance from gates to values, else 0; and where k begins.
    __device__ __forceinline__ Copies(const Tile& first, const Source& source, uint32_t batch,
                                      uint32_t begin, uint32_t left, uint32_t to_values) {
        to = first.address_of(int(thread_row()), int(thread_col()));
        arch::pin_register(to);
        uint32_t row = thread_row(), col = thread_col();
        if constexpr (k_adjacent) {
            row += begin;
        } else {
            col = begin + place(col, to_values);
        }
        from = source.data + batch * source.batch_stride + row * source.stride + col * 2;
        exists = 0;
#pragma unroll
        for (int i = 0; i < (k_adjacent ? passes : Tile::stripes); ++i) {
            const uint32_t at =
                k_adjacent ? thread_row() + i * row_step : thread_col() + i * STRIPE;
            exists |= behind(at, to_values) < left ? 1u << i : 0;
        }
    }

    // The vector that comes after the i-th.
    static __device__ __forceinline__ void advance(const uint8_t*& at, const Source& source,
                                                   int i) {
        if constexpr (k_adjacent) {
            const int next = (i + 1) * row_step % unit;
            at += next == 0 ? source.to_unit : next == half ? source.to_half : source.in_unit;
        } else {
            at += (i + 1) % passes == 0 ? source.to_unit : source.in_unit;
        }
    }

    // Copies vector i of a stage of which all vectors that exist are whole.
    __device__ __forceinline__ void copy_whole(const uint8_t* at, int i, uint32_t slot) const {
        const int bit = k_adjacent ? i : i / passes;
        arch::cp_async<16>(to + slot + distance(i), at, (exists >> bit & 1) != 0);
    }
    // Copies all vectors of a stage, at an end of the operand: `k_left` from the stage's beginning,
    // and of columns that do not lie along k `left` from the tile's.
    __device__ __forceinline__ void copy_ragged(const Source& source, uint32_t slot, int k_left,
                                                uint32_t left, uint32_t to_values) const {
        const uint8_t* at = from;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int bit = k_adjacent ? i : i / passes;
            const int elements =
                k_adjacent ? k_left - int(thread_col())
                           : int(left) - int(behind(thread_col() + i / passes * STRIPE, to_values));
            const bool there = (exists >> bit & 1) != 0 &&
                               (k_adjacent || int(thread_row()) + i % passes * row_step < k_left);
            const int missing = k_adjacent ? source.k_short : 0;
            const int bytes = there ? max(0, min(elements * 2 - missing, VECTOR * 2)) : 0;
            // What is not read has to be an address nevertheless.
            arch::cp_async_partial<16>(to + slot + distance(i), bytes > 0 ? at : source.data,
                                       bytes);
            advance(at, source, i);
        }
    }

  private:
    static __host__ __device__ constexpr uint32_t distance(int i) {
        const int pass = k_adjacent ? i : i % passes, stripe = k_adjacent ? 0 : i / passes;
        return uint32_t(pass * row_step * Tile::swizzle_bytes + stripe * Tile::stripe_bytes);
    }
    // Of a row or column of the tile, where it is behind the tile's first one in the operand, and
    // where its gate or value would be if these were side by side.
    static __device__ __forceinline__ uint32_t place(uint32_t at, uint32_t to_values) {
        return behind(at, to_values) + (at % unit < half ? 0 : to_values);
    }
    static __device__ __forceinline__ uint32_t behind(uint32_t at, uint32_t to_values) {
        return to_values == 0 ? at : at / unit * half + at % half;
    }
};

// How a thread's pointer goes on, for Copies of a tile with so many rows at a time.
inline Source make_source(const void* data, int64_t stride, int64_t batch_stride, bool k_adjacent,
                          int row_step, int unit, int64_t to_values) {
    const int64_t row = stride * 2, half = unit / 2;
    Source s{.data = static_cast<const uint8_t*>(data), .batch_stride = batch_stride * 2};
    s.stride = row;
    s.in_unit = row * row_step;
    if (k_adjacent) {
        s.k_step = BLOCK_K * 2;
        const int64_t values = to_values == 0 ? half : to_values;
        s.to_half = (values - half + row_step) * row;
        s.to_unit = (to_values == 0 ? row_step : row_step - to_values) * row;
    } else {
        s.k_step = BLOCK_K * row;
        s.to_half = s.in_unit;
        const int64_t stripe = (to_values == 0 ? 64 : 32) * 2;
        s.to_unit = stripe - (BLOCK_K / row_step - 1) * s.in_unit;
    }
    return s;
}

}  // namespace sm80
}  // namespace thunderkittens::gemm
