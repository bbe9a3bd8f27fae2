// H = -(I + N B)^-1 N of a chunk, B = diag(beta), by a warpgroup: of the four diagonal blocks of
// 16 x 16 by substitution in fp32, a warp each; then of 32 x 32 and 64 x 64 by products. Where N
// has the blocks a, b and M below the diagonal, H has beside its own of a and b
//   -(I + H_b B_b) M (I + B_a H_a),
// which divides by no beta. Operands of products are the sums of two numbers in bf16, sums are in
// fp32. Powers of N would grow and cancel where keys repeat; these blocks do not.
//
// The matrix is in shared memory transposed, element (row, column) at place (column, row): columns
// are what the substitution reads, and pairs along a column what B operands hold. A lane's elements
// of A operands lie in 32 different banks.
#pragma once

#include "csrc/recurrent/gated_delta_rule/within_chunks.cuh"

namespace thunderkittens::recurrent::delta_gradient {

using namespace kittens;
using namespace delta_common;

class DeltaSolver {
  public:
    // `matrix` has N, later blocks of H on the diagonal; above it are those of H that lie below,
    // where N's are still read.
    __device__ __forceinline__ DeltaSolver(uint32_t _matrix, const sv<float, DELTA_CHUNK>& _beta)
        : matrix(_matrix),
          beta(_beta),
          warp(arch::warp_uniform(warpgroup::warpid())),
          row(laneid() / 4),
          pair(2 * (laneid() % 4)) {}

    static __device__ __forceinline__ uint32_t offset(int row, int column) {
        return uint32_t(4 * (column * DELTA_PITCH + row));
    }

    // Each warp by itself, whose rows of N are there.
    __device__ __forceinline__ void solve_diagonal() const {
        const int column = laneid() % 16, first = 16 * warp;
        float h[16];
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const auto four = arch::load_shared<float4>(place(first + i, first + column));
            h[i] = -four.x, h[i + 1] = -four.y, h[i + 2] = -four.z, h[i + 3] = -four.w;
        }
#pragma unroll
        for (int m = 0; m < 15; ++m) {
            const float weighted = beta.get(first + m) * h[m];
            float n[16];
#pragma unroll
            for (int i = (m + 1) / 4 * 4; i < 16; i += 4) {
                const auto four = arch::load_shared<float4>(place(first + i, first + m));
                n[i] = four.x, n[i + 1] = four.y, n[i + 2] = four.z, n[i + 3] = four.w;
            }
#pragma unroll
            for (int i = m + 1; i < 16; ++i) h[i] = fmaf(-n[i], weighted, h[i]);
        }
        arch::sync_warp();
        if (laneid() < 16) {
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                arch::store_shared(place(first + i, first + column),
                                   float4{h[i], h[i + 1], h[i + 2], h[i + 3]});
            }
        }
    }
    // Blocks (1, 0) and (3, 2), a warp half of the columns of one. All warps have done the above.
    __device__ __forceinline__ void merge_16() {
        const int a = warp / 2 * 2, b = a + 1;
        float w[2][4] = {};
        const Operand left(*this, place(16 * b, 16 * b), 16 * b, 1.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            multiply(w[half], left, PlainHalf(*this, place(16 * b, 16 * a + 8 * half)));
        }
        const int first = 8 * (warp % 2);
        multiply(half_block, Operand(w),
                 Half(*this, place(16 * a, 16 * a + first), 16 * a, first, 1.0f));
        const uint32_t to = place(16 * a, 16 * b + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            half_block[i] = -half_block[i];
            arch::store_shared(to + offset(row + 8 * (i / 2), pair + i % 2), half_block[i]);
        }
    }
    // Blocks (2, 0), (2, 1), (3, 0) and (3, 1), one a warp. All warps have done the above.
    __device__ __forceinline__ void merge_32() {
        const int r = warp / 2, c = warp % 2;
        float w[2][2][4] = {};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (k > r) continue;
            const bool diagonal = k == r;
            const Operand left(*this, diagonal ? place(16 * (2 + r), 16 * (2 + r)) : place(32, 48),
                               16 * (2 + k), diagonal ? 1.0f : 0.0f);
#pragma unroll
            for (int middle = 0; middle < 2; ++middle) {
                if (middle < c) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    multiply(w[middle][half], left,
                             PlainHalf(*this, place(16 * (2 + k), 16 * middle + 8 * half)));
                }
            }
        }
#pragma unroll
        for (int middle = 0; middle < 2; ++middle) {
            if (middle < c) continue;
            const bool diagonal = middle == c;
            const Operand left(w[middle]);
            const uint32_t from = diagonal ? place(16 * c, 16 * c) : place(0, 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                multiply(block[half], left,
                         Half(*this, from + offset(0, 8 * half), 16 * middle, 8 * half,
                              diagonal ? 1.0f : 0.0f));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) block[half][i] = -block[half][i];
        }
    }

    // This warp's part of H, and of the zeros above the diagonal.
    template <any_shared_tile Tile>
    __device__ __forceinline__ void store(Tile& to) const {
        const int a = warp / 2 * 2, first = 16 * warp;
        store_half(to, half_block, 16 * (a + 1), 16 * a + 8 * (warp % 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            store_half(to, block[half], 32 + 16 * (warp / 2), 16 * (warp % 2) + 8 * half);
            float diagonal[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                diagonal[i] = arch::load_shared<float>(
                    place(first + row + 8 * (i / 2), first + 8 * half + pair + i % 2));
            }
            store_half(to, diagonal, first, first + 8 * half);
        }
#pragma unroll
        for (int j = 1; j < 4; ++j) {
            if (j <= warp) continue;
            arch::store_shared(to.address_of(first + laneid() / 2, 16 * j + 8 * (laneid() % 2)),
                               uint4{});
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
        Pair pairs[4];

        // diagonal I + H B of a block of H; its columns are tokens from `token` on.
        __device__ __forceinline__ Operand(const DeltaSolver& of, uint32_t from, int token,
                                           float diagonal) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = of.row + 8 * (i % 2), c = of.pair + 8 * (i / 2);
                const float2 beta = of.betas(token + c);
                pairs[i] = Pair(fmaf(arch::load_shared<float>(from + offset(r, c)), beta.x,
                                     r == c ? diagonal : 0.0f),
                                fmaf(arch::load_shared<float>(from + offset(r, c + 1)), beta.y,
                                     r == c + 1 ? diagonal : 0.0f));
            }
        }
        // Of an accumulator of two times eight columns.
        __device__ __forceinline__ explicit Operand(const float (&x)[2][4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = Pair(x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1]);
        }
    };
    // B operands of 16 x 8: of a block of N, and diagonal I + B H of one of H, whose rows are
    // tokens from `token` on and whose first column is `column` of the block.
    struct PlainHalf {
        Pair pairs[2];

        __device__ __forceinline__ PlainHalf(const DeltaSolver& of, uint32_t from) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto two = arch::load_shared<float2>(from + of.place_of_pair(i));
                pairs[i] = Pair(two.x, two.y);
            }
        }
    };
    struct Half {
        Pair pairs[2];

        __device__ __forceinline__ Half(const DeltaSolver& of, uint32_t from, int token, int column,
                                        float diagonal) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = of.pair + 8 * i, c = column + laneid() / 4;
                const float2 beta = of.betas(token + r);
                const auto two = arch::load_shared<float2>(from + of.place_of_pair(i));
                pairs[i] = Pair(fmaf(beta.x, two.x, r == c ? diagonal : 0.0f),
                                fmaf(beta.y, two.y, r + 1 == c ? diagonal : 0.0f));
            }
        }
    };

    __device__ __forceinline__ uint32_t place(int row, int column) const {
        return matrix + offset(row, column);
    }
    __device__ __forceinline__ uint32_t place_of_pair(int i) const {
        return offset(pair + 8 * i, laneid() / 4);
    }
    __device__ __forceinline__ float2 betas(int token) const {
        return arch::load_shared<float2>(beta.address_of(token));
    }
    // sum += a b
    template <class B>
    static __device__ __forceinline__ void multiply(float (&sum)[4], const Operand& a, const B& b) {
        using mma = arch::mma_sync<bf16, bf16>;
        const uint32_t a_high[4] = {a.pairs[0].high, a.pairs[1].high, a.pairs[2].high,
                                    a.pairs[3].high};
        const uint32_t a_low[4] = {a.pairs[0].low, a.pairs[1].low, a.pairs[2].low, a.pairs[3].low};
        const uint32_t b_high[2] = {b.pairs[0].high, b.pairs[1].high};
        const uint32_t b_low[2] = {b.pairs[0].low, b.pairs[1].low};
        mma::fma(sum, a_low, b_high, sum);
        mma::fma(sum, a_high, b_low, sum);
        mma::fma(sum, a_high, b_high, sum);
    }
    template <any_shared_tile Tile>
    __device__ __forceinline__ void store_half(Tile& to, const float (&x)[4], int first_row,
                                               int first_column) const {
        using T = typename Tile::T;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            arch::store_shared(to.address_of(first_row + row + 8 * i, first_column + pair),
                               pack_pair<T>(x[2 * i], x[2 * i + 1]));
        }
    }

    uint32_t matrix;
    const sv<float, DELTA_CHUNK>& beta;
    int warp, row, pair;
    float half_block[4] = {}, block[2][4] = {};
};

}  // namespace thunderkittens::recurrent::delta_gradient
