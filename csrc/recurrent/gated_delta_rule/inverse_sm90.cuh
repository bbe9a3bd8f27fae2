// The inverse of a unit lower triangular matrix of 64 x 64, I + L, by a warpgroup: of the four
// diagonal blocks of 16 x 16 by substitution in fp32, two blocks a warp; then of 32 x 32 and
// 64 x 64 by -D M A of the two inverses D, A beside a block M. Operands are the sums of two numbers
// in bf16, sums are in fp32. Operands in fp16 would take a third of the instructions, but for equal
// keys and a beta near 2, where terms cancel, have three times the error (simulated).
//
// A product of powers of L would take fewer steps. But of keys that are nearly equal, as those of
// a run of equal tokens, its powers grow as binomial coefficients and cancel, although the inverse
// itself is small.
//
// A block is split into its two parts once, where it is made, and lies in shared memory as four
// times 8 x 8 elements of one part, and four of the other: 16 bytes a lane, which ldmatrix reads as
// either operand without bank conflicts. Blocks of L below the diagonal lie by rows, inverses of
// diagonal blocks by columns.
#pragma once

#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

class TriangularInverse {
  public:
    // A block's elements as a lane has them in an accumulator: two times eight columns.
    using Sums = float[2][4];

    __device__ __forceinline__ TriangularInverse(const InverseScratch& scratch, int _warp)
        : diagonal(scratch.diagonal.address()),
          below(scratch.below.address()),
          warp(_warp),
          lane(recomputed_lane()) {}

    // Where element (row, column) of diagonal block b of L is, columns behind each other.
    __device__ __forceinline__ uint32_t place(int b, int row, int column) const {
        return diagonal +
               uint32_t(4 * (b * InverseScratch::block + column * InverseScratch::pitch + row));
    }
    // Block (row, column) of L, row > column.
    __device__ __forceinline__ void store_below(int row, int column, const Sums& x) const {
        store(of_below(row, column), x);
    }

    // Warps 0 and 1, two blocks each: in the place of L's.
    __device__ __forceinline__ void invert_diagonal() const {
        const int column = lane % 16, b = 2 * warp + lane / 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < 15; ++m) {
            float l[16];
#pragma unroll
            for (int i = (m + 1) / 4 * 4; i < 16; i += 4) {
                const auto four = arch::load_shared<float4>(place(b, i, m));
                l[i] = four.x, l[i + 1] = four.y, l[i + 2] = four.z, l[i + 3] = four.w;
            }
#pragma unroll
            for (int i = m + 1; i < 16; ++i) x[i] = fmaf(-l[i], x[m], x[i]);
        }
        arch::sync_warp();
        const uint32_t to = inverse_of(b) + column / 8 * 256 + column % 8 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split(high[i], low[i], x[8 * half + 2 * i], x[8 * half + 2 * i + 1]);
            arch::store_shared(to + 128 * half, uint4{high[0], high[1], high[2], high[3]});
            arch::store_shared(to + 128 * half + part_bytes, uint4{low[0], low[1], low[2], low[3]});
        }
        arch::sync_warp();
    }
    // Warps 0 and 1: block (1, 0) or (3, 2) of the inverse, in the place of L's.
    __device__ __forceinline__ void merge_16(Sums& x) const {
        const int column = 2 * warp, row = column + 1;
        const uint32_t block = warp == 0 ? of_below(1, 0) : of_below(3, 2);
        Sums w = {};
        multiply(w, Parts(of_diagonal(row), true), Parts(block, true));
        multiply(x, Parts(w), Parts(of_diagonal(column), false));
        negate(x);
        arch::sync_warp();
        store(block, x);
    }
    // Blocks (2, 0), (2, 1), (3, 0) and (3, 1), one a warp.
    __device__ __forceinline__ void merge_32(Sums& x) const {
        const int row = 2 + warp / 2;
        Sums w[2] = {};
        if (warp % 2 == 0) {
            if (row == 3) {
                const Parts beside(of_below(3, 2), false);
                multiply(w, beside, beside, Parts(of_below(2, 0), true),
                         Parts(of_below(2, 1), true));
            }
            const Parts own(of_diagonal(row), true);
            multiply(w, own, own, Parts(of_below(row, 0), true), Parts(of_below(row, 1), true));
            Sums sums[2] = {};
            multiply(sums, Parts(w[0]), Parts(w[1]), Parts(of_diagonal(0), false),
                     Parts(of_below(1, 0), true));
            add(x, sums);
        } else {
            if (row == 3) multiply(w[0], Parts(of_below(3, 2), false), Parts(of_below(2, 1), true));
            multiply(w[1], Parts(of_diagonal(row), true), Parts(of_below(row, 1), true));
            add(w[0], w);
            multiply(x, Parts(w[0]), Parts(of_diagonal(1), false));
        }
        negate(x);
    }
    // This warp's diagonal block.
    __device__ __forceinline__ void load_diagonal(Sums& x) const {
        const Parts parts(of_diagonal(warp), true);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = unpack_pair<bf16>(arch::bit_cast<packed_type<bf16>>(parts.high[i])),
                         b = unpack_pair<bf16>(arch::bit_cast<packed_type<bf16>>(parts.low[i]));
            x[i / 2][2 * (i % 2)] = a.x + b.x;
            x[i / 2][2 * (i % 2) + 1] = a.y + b.y;
        }
    }

  private:
    static constexpr uint32_t part_bytes = 512;

    // Two numbers, each the sum of two in bf16: 16 bits, and the range of fp32.
    static __device__ __forceinline__ void split(uint32_t& high, uint32_t& low, float a, float b) {
        const auto rounded = pack_pair<bf16>(a, b);
        const float2 x = unpack_pair<bf16>(rounded);
        high = arch::bit_cast<uint32_t>(rounded);
        low = arch::bit_cast<uint32_t>(pack_pair<bf16>(a - x.x, b - x.y));
    }
    // A block as an operand; transposed where the operand's pairs are not neighbours in memory.
    struct Parts {
        uint32_t high[4], low[4];

        // Of this lane's place in the block.
        __device__ __forceinline__ Parts(uint32_t own, bool transposed) {
            load(high, own, transposed);
            load(low, own + part_bytes, transposed);
        }
        __device__ __forceinline__ explicit Parts(const Sums& x) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int first = 2 * (i % 2);
                split(high[i], low[i], x[i / 2][first], x[i / 2][first + 1]);
            }
        }
        static __device__ __forceinline__ void load(uint32_t (&to)[4], uint32_t own,
                                                    bool transposed) {
            if (transposed)
                arch::load_matrix_x4_transposed(to[0], to[1], to[2], to[3], own);
            else
                arch::load_matrix_x4(to[0], to[1], to[2], to[3], own);
        }
    };

    // Blocks, and this lane's 16 bytes in one.
    __device__ __forceinline__ uint32_t inverse_of(int b) const {
        return diagonal + uint32_t(b / 2 * (8 * InverseScratch::block) + b % 2 * 2 * part_bytes);
    }
    __device__ __forceinline__ uint32_t of_diagonal(int b) const {
        return inverse_of(b) + 16 * uint32_t(lane);
    }
    __device__ __forceinline__ uint32_t of_below(int row, int column) const {
        return below + 2 * part_bytes * uint32_t(row * (row - 1) / 2 + column) +
               16 * uint32_t(lane);
    }
    __device__ __forceinline__ static void store(uint32_t to, const Sums& x) {
        const Parts parts(x);
        arch::store_matrix_x4(to, parts.high[0], parts.high[1], parts.high[2], parts.high[3]);
        arch::store_matrix_x4(to + part_bytes, parts.low[0], parts.low[1], parts.low[2],
                              parts.low[3]);
    }
    __device__ __forceinline__ static void negate(Sums& x) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[half][i] = -x[half][i];
        }
    }
    __device__ __forceinline__ static void add(Sums& x, const Sums (&sums)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[half][i] = sums[0][half][i] + sums[1][half][i];
        }
    }
    // Half of the columns of a product: sum += a b, with one part of a and one of b.
    __device__ __forceinline__ static void multiply(float (&sum)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[4], int half) {
        const uint32_t of_half[2] = {b[2 * half], b[2 * half + 1]};
        arch::mma_sync<bf16, bf16>::fma(sum, a, of_half, sum);
    }
    // sum += a b
    __device__ __forceinline__ static void multiply(Sums& sum, const Parts& a, const Parts& b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) multiply(sum[half], a.low, b.high, half);
#pragma unroll
        for (int half = 0; half < 2; ++half) multiply(sum[half], a.high, b.low, half);
#pragma unroll
        for (int half = 0; half < 2; ++half) multiply(sum[half], a.high, b.high, half);
    }
    // The same of two products that do not depend on each other.
    __device__ __forceinline__ static void multiply(Sums (&sums)[2], const Parts& a0,
                                                    const Parts& a1, const Parts& b0,
                                                    const Parts& b1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            multiply(sums[0][half], a0.low, b0.high, half);
            multiply(sums[1][half], a1.low, b1.high, half);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            multiply(sums[0][half], a0.high, b0.low, half);
            multiply(sums[1][half], a1.high, b1.low, half);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            multiply(sums[0][half], a0.high, b0.high, half);
            multiply(sums[1][half], a1.high, b1.high, half);
        }
    }

    const uint32_t diagonal, below;
    const int warp, lane;
};

}  // namespace thunderkittens::recurrent::delta
