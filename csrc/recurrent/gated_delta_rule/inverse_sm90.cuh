// The inverse of a unit lower triangular matrix of 64 x 64, I + L, by a warpgroup: of the four
// diagonal blocks of 16 x 16 by substitution in fp32, a warp each; then of 32 x 32 and 64 x 64 by
// -D M A of the two inverses D, A beside a block M. Operands are the sums of two numbers in bf16,
// sums are in fp32. Operands in fp16 would take a third of the instructions, but for equal keys and
// a beta near 2, where terms cancel, have three times the error (simulated).
//
// A product of powers of L would take fewer steps. But of keys that are nearly equal, as those of
// a run of equal tokens, its powers grow as binomial coefficients and cancel, although the inverse
// itself is small.
//
// The matrix is in shared memory transposed, element (row, column) at place (column, row): columns
// are what the substitution reads, and pairs along a column what B operands hold. A lane's elements
// of A operands lie in 32 different banks.
#pragma once

#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

class TriangularInverse {
  public:
    static constexpr int pitch = PrepareScratch::pitch;

    // Blocks of 16 x 16: `block` that of L, later of the inverse, on the diagonal; `beside` where
    // an inverse's block below the diagonal is kept, above it, since L's is still read there.
    __device__ __forceinline__ explicit TriangularInverse(uint32_t _matrix)
        : matrix(_matrix), warp(warpgroup::warpid()), row(laneid() / 4), pair(2 * (laneid() % 4)) {}

    // Each warp by itself, whose L is there.
    __device__ __forceinline__ void invert_diagonal() const {
        const int column = laneid() % 16, first = 16 * warp;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < 15; ++m) {
            float l[16];
#pragma unroll
            for (int i = (m + 1) / 4 * 4; i < 16; i += 4) {
                const auto four = arch::load_shared<float4>(place(first + i, first + m));
                l[i] = four.x, l[i + 1] = four.y, l[i + 2] = four.z, l[i + 3] = four.w;
            }
#pragma unroll
            for (int i = m + 1; i < 16; ++i) x[i] = fmaf(-l[i], x[m], x[i]);
        }
        arch::sync_warp();
        if (laneid() < 16) {
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                arch::store_shared(place(first + i, first + column),
                                   float4{x[i], x[i + 1], x[i + 2], x[i + 3]});
            }
        }
    }

    // Blocks (1, 0) and (3, 2), a warp half of the columns of one. All warps have done the above.
    __device__ __forceinline__ void merge_16() {
        const int a = warp / 2 * 2, b = a + 1;
        float w[2][4] = {};
        const Operand d(*this, place(16 * b, 16 * b));
        multiply(w, d, place(16 * b, 16 * a));
        const Operand left(w);
        multiply_half(half_block, left, place(16 * a, 16 * a + 8 * (warp % 2)));
        const uint32_t to = place(16 * a, 16 * b + 8 * (warp % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            half_block[i] = -half_block[i];
            arch::store_shared(to + offset(row + 8 * (i / 2), pair + i % 2), half_block[i]);
        }
    }
    // Blocks (2, 0), (2, 1), (3, 0) and (3, 1), one a warp. All warps have done the above.
    __device__ __forceinline__ void merge_32() {
        const int r = warp / 2, c = warp % 2;
#pragma unroll
        for (int middle = 0; middle < 2; ++middle) {
            if (middle < c) continue;
            float w[2][4] = {};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (k > r) continue;
                const int d_row = 16 * (2 + r), d_column = 16 * (2 + k);
                const Operand d(*this, k == r ? place(d_row, d_column) : place(32, 48));
                multiply(w, d, place(d_column, 16 * middle));
            }
            const Operand left(w);
            multiply(block, left, middle == c ? place(16 * c, 16 * c) : place(0, 16));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) block[half][i] = -block[half][i];
        }
    }

    // This warp's part of the inverse, its columns multiplied by `factors`, into a tile.
    template <any_shared_tile Tile>
    __device__ __forceinline__ void store(Tile& to, const sv<float, CHUNK>& factors) const {
        const int a = warp / 2 * 2;
        store_half(to, factors, half_block, 16 * (a + 1), 16 * a + 8 * (warp % 2));
        const int first = 16 * warp;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            store_half(to, factors, block[half], 32 + 16 * (warp / 2), 16 * (warp % 2) + 8 * half);
            float diagonal[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                diagonal[i] = arch::load_shared<float>(
                    place(first + row + 8 * (i / 2), first + 8 * half + pair + i % 2));
            }
            store_half(to, factors, diagonal, first, first + 8 * half);
        }
    }

  private:
    // Two numbers, each the sum of two in bf16: 16 bits, and the range of fp32.
    struct Pair {
        uint32_t high, low;

        Pair() = default;
        __device__ __forceinline__ Pair(float a, float b) {
            const auto rounded = pack_pair<bf16>(a, b);
            const float2 x = unpack_pair<bf16>(rounded);
            high = arch::bit_cast<uint32_t>(rounded);
            low = arch::bit_cast<uint32_t>(pack_pair<bf16>(a - x.x, b - x.y));
        }
    };
    // A operand of 16 x 16.
    struct Operand {
        uint32_t high[4], low[4];

        // Of a block in shared memory.
        __device__ __forceinline__ Operand(const TriangularInverse& of, uint32_t from) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = of.row + 8 * (i % 2), c = of.pair + 8 * (i / 2);
                set(i, arch::load_shared<float>(from + offset(r, c)),
                    arch::load_shared<float>(from + offset(r, c + 1)));
            }
        }
        // Of an accumulator of two times eight columns.
        __device__ __forceinline__ explicit Operand(const float (&x)[2][4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) set(i, x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1]);
        }
        __device__ __forceinline__ void set(int i, float a, float b) {
            const Pair two(a, b);
            high[i] = two.high;
            low[i] = two.low;
        }
    };

    static __device__ __forceinline__ uint32_t offset(int row, int column) {
        return uint32_t(4 * (column * pitch + row));
    }
    __device__ __forceinline__ uint32_t place(int row, int column) const {
        return matrix + offset(row, column);
    }
    // sum += a b, b the 16 x 8 block at `from`.
    __device__ __forceinline__ void multiply_half(float (&sum)[4], const Operand& a,
                                                  uint32_t from) const {
        uint32_t high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto two = arch::load_shared<float2>(from + offset(pair + 8 * i, laneid() / 4));
            const Pair parts(two.x, two.y);
            high[i] = parts.high;
            low[i] = parts.low;
        }
        using mma = arch::mma_sync<bf16, bf16>;
        mma::fma(sum, a.low, high, sum);
        mma::fma(sum, a.high, low, sum);
        mma::fma(sum, a.high, high, sum);
    }
    __device__ __forceinline__ void multiply(float (&sum)[2][4], const Operand& a,
                                             uint32_t from) const {
        multiply_half(sum[0], a, from);
        multiply_half(sum[1], a, from + offset(0, 8));
    }
    template <any_shared_tile Tile>
    __device__ __forceinline__ void store_half(Tile& to, const sv<float, CHUNK>& factors,
                                               const float (&x)[4], int first_row,
                                               int first_column) const {
        using T = typename Tile::T;
        const int column = first_column + pair;
        const auto factor = arch::load_shared<float2>(factors.address_of(column));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            arch::store_shared(to.address_of(first_row + row + 8 * i, column),
                               pack_pair<T>(x[2 * i] * factor.x, x[2 * i + 1] * factor.y));
        }
    }

    uint32_t matrix;
    int warp, row, pair;
    float half_block[4] = {}, block[2][4] = {};
};

}  // namespace thunderkittens::recurrent::delta
