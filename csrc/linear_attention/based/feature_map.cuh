// The features of Based: 1, x / 2 and the products x_a x_b of a token's 16 elements, with weights
// such that phi(q) . phi(k) = 1 + s + s^2 / 2 for s = q . k / 4. Of x_a x_b and x_b x_a one is
// kept: 153 features instead of 273.
//
// Memory holds states in the order of common/linear_attention.h. The kernels have one of their own,
// in blocks of 16, so that both forms of an operand are made without a table:
//   tokens as rows      a lane of a quad holds columns 2c, 2c + 1, 8 + 2c, 9 + 2c of a fragment. It
//                       reads its row rotated by 4c elements, and every feature of these columns is
//                       a product of registers that are the same in all lanes.
//   features as rows    a row is the product of two rows of the transposed tile, which ldmatrix
//                       fetches by the addresses of its lanes.
// Weights go where they are exact: rows are made from x / 4, squares halved; states are plain sums
// of k_a k_b v, and get their weights on the way to and from memory.
#pragma once

#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/linear_attention/common/linear_attention.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

constexpr int FEATURE_BLOCKS = 10, FEATURE_ROWS = 16 * FEATURE_BLOCKS;

// The two elements whose product is a feature; behind the token's 16 there are a one and a zero.
constexpr int ONE = 16, ZERO = 17, TRANSPOSED_ROWS = 18;
struct FeaturePair {
    int a, b;
};
// Blocks 0 to 5: elements at distances 2, 4 and 6 as pairs, straight and crosswise; 6: distance 8,
// of which each lane of the quad has one kind; 7: squares; 8: neighbours in a pair, and in place of
// the rest the constant and seven zeros; 9: the elements themselves.
__host__ __device__ constexpr FeaturePair feature_pair(int block, int place) {
    const int c = place % 8 / 2, h = place / 8, e = place % 2;
    const int own = 4 * c + 2 * h + e;
    if (block < 7) {
        const int distance = block == 6 ? 4 : 1 + block / 2;
        const bool crosswise = block == 6 ? c >= 2 : block % 2 == 1;
        return {own, (4 * c + 2 * (h + distance) + (crosswise ? 1 - e : e)) % 16};
    }
    if (block == 7) return {own, own};
    if (block == 9) return {own, ONE};
    if (block == 8 && h == 0) return {4 * c + 2 * e, 4 * c + 2 * e + 1};
    return block == 8 && place == 8 ? FeaturePair{ONE, ONE} : FeaturePair{ZERO, ZERO};
}

// Where a feature is in a state in memory, and its weight there; no row for the zeros.
struct StateRow {
    int row;
    float weight;
};
__host__ __device__ constexpr StateRow state_row_of(int a, int b) {
    if (b == ZERO) return {-1, 0.0f};
    if (a == ONE) return {0, 1.0f};
    if (b == ONE) return {1 + a, 0.5f};
    if (a == b) return {17 + a, 0.17677669529663687f};
    const int i = a < b ? a : b, j = a < b ? b : a;
    return {33 + i * (31 - i) / 2 + j - i - 1, 0.25f};
}

template <class T>
__device__ __forceinline__ packed_type<T> times(const packed_type<T>& x, const packed_type<T>& y) {
    return functor::mul::packed(x, y);
}
template <class P>
__device__ __forceinline__ P crossed(const P& x) {
    return {x.y, x.x};
}
template <class T>
__device__ __forceinline__ packed_type<T> both(float x) {
    return pack_pair<T>(x, x);
}

template <class T>
using element_tile = st<T, CHUNK, ELEMENTS>;
template <class T>
using value_tile = st<T, CHUNK, VALUES>;
template <class T>
using state_tile = st<T, FEATURE_ROWS, VALUES>;

// A chunk's elements as rows of tokens, and behind them a row of ones and one of zeros. The 16-byte
// pieces of a row are permuted such that the rows of a fragment of features lie in different banks.
template <class T>
struct alignas(128) Transposed {
    T data[TRANSPOSED_ROWS * CHUNK];

    static __device__ __forceinline__ uint32_t key(int row) { return (row & 1) | (row >> 1 & 6); }
    __device__ __forceinline__ uint32_t piece(int row, int index) const {
        return arch::shared_address(this) + uint32_t(row) * 128 +
               ((uint32_t(index) ^ key(row)) << 4);
    }
    // By a warpgroup.
    __device__ __forceinline__ void fill_constants() {
        const int thread = warpgroup::laneid();
        if (thread >= 2 * CHUNK / 8) return;
        const bool one = thread < CHUNK / 8;
        const auto word = arch::bit_cast<uint32_t>(both<T>(one ? 1.0f : 0.0f));
        arch::store_shared(piece(one ? ONE : ZERO, thread % (CHUNK / 8)),
                           make_uint4(word, word, word, word));
    }
};

// Weights of the tokens in a state, where they are not 1: of the values, and of the denominator.
struct alignas(128) TokenWeights {
    sv<float, CHUNK> values, denominator;

    // Of two neighbouring tokens.
    static __device__ __forceinline__ float2 pair(const sv<float, CHUNK>& weights, int token) {
        return arch::load_shared<float2>(weights.address_of(token));
    }
};

// Weights of values are multiplied into 16-bit operands. They may be as small as one over the
// sequence's length, which half has few bits for; sums then are this many times too large.
template <class T, bool weighted>
constexpr float state_unit = weighted && std::is_same_v<T, half> ? 64.0f : 1.0f;

// Writes a tile transposed, and a second time with the tokens' weights. Each warp takes 16 tokens.
template <class T>
__device__ __forceinline__ void transpose_chunk(const Transposed<T>& to, const element_tile<T>& x) {
    const int lane = laneid(), matrix = lane / 8, warp = warpgroup::warpid();
    uint32_t r[4];
    arch::load_matrix_x4_transposed(
        r[0], r[1], r[2], r[3],
        x.address_of(16 * warp + 8 * (matrix % 2) + lane % 8, 8 * (matrix / 2)));
    arch::store_matrix_x4(to.piece(8 * (matrix / 2) + lane % 8, 2 * warp + matrix % 2), r[0], r[1],
                          r[2], r[3]);
}
template <class T>
__device__ __forceinline__ void transpose_chunk(const Transposed<T>& to,
                                                const Transposed<T>& scaled,
                                                const element_tile<T>& x,
                                                const TokenWeights& weights) {
    const int lane = laneid(), matrix = lane / 8, warp = warpgroup::warpid();
    uint32_t r[4];
    arch::load_matrix_x4_transposed(
        r[0], r[1], r[2], r[3],
        x.address_of(16 * warp + 8 * (matrix % 2) + lane % 8, 8 * (matrix / 2)));
    const uint32_t row = 8 * (matrix / 2) + lane % 8;
    arch::store_matrix_x4(to.piece(row, 2 * warp + matrix % 2), r[0], r[1], r[2], r[3]);
    constexpr float unit = state_unit<T, true>;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const float2 w =
            TokenWeights::pair(weights.values, 16 * warp + 8 * (m % 2) + 2 * (lane % 4));
        const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(r[m]));
        r[m] = arch::bit_cast<uint32_t>(pack_pair<T>(unit * w.x * x.x, unit * w.y * x.y));
        if (m < 2 && lane < 4) {
            const auto ones = pack_pair<T>(unit * w.x, unit * w.y);
            arch::store_shared(scaled.piece(ONE, 2 * warp + m) + 4 * lane, ones);
        }
    }
    arch::store_matrix_x4(scaled.piece(row, 2 * warp + matrix % 2), r[0], r[1], r[2], r[3]);
}

// Features as rows: this warp's 16 rows of a group of four blocks, for the 64 tokens.
template <class T>
struct FeatureRows {
    using fragment = rt<T, 16, CHUNK>;
    uint32_t first[2], second[3];  // addresses of this lane's rows

    __device__ __forceinline__ FeatureRows(const Transposed<T>& x, const Transposed<T>& scaled) {
        const int lane = laneid(), place = lane % 16, half = lane / 16;
#pragma unroll
        for (int group = 0; group < 3; ++group) {
            const FeaturePair pair = feature_pair(4 * group + warpgroup::warpid(), place);
            if (group != 1) first[group / 2] = x.piece(pair.a, half);
            second[group] = scaled.piece(pair.b, half);
        }
    }
    static __device__ __forceinline__ void load(uint32_t (&r)[4], uint32_t address, int k) {
        arch::load_matrix_x4(r[0], r[1], r[2], r[3], address ^ uint32_t(32 * k));
    }
    // Pinned, so that the addresses of all pieces are not kept in registers over the loop.
    static __device__ __forceinline__ uint32_t fresh(uint32_t address) {
        arch::pin_register(address);
        return address;
    }
    // The own elements, which are the first factor in groups 0 and 1.
    __device__ __forceinline__ void load_own(fragment& own) const {
        const uint32_t from = fresh(first[0]);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
            load(reinterpret_cast<uint32_t(&)[4]>(own.tiles[0][k].data), from, k);
    }
    template <int group>
    __device__ __forceinline__ void make(fragment& features, const fragment& own) const {
        const uint32_t from_a = fresh(first[1]), from_b = fresh(second[group]);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            uint32_t a[4], b[4];
            load(b, from_b, k);
            if constexpr (group == 2) load(a, from_a, k);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const auto x =
                    group == 2 ? arch::bit_cast<packed_type<T>>(a[i]) : own.tiles[0][k].data[i];
                features.tiles[0][k].data[i] = times<T>(x, arch::bit_cast<packed_type<T>>(b[i]));
            }
        }
    }
};

// Tokens as rows: a quarter of the elements of this lane's two rows, as pairs, rotated by 4c.
template <class T>
struct RotatedRows {
    using P = packed_type<T>;
    P x[2][6];

    __device__ __forceinline__ void load(const element_tile<T>& tile) {
        const int row = 16 * warpgroup::warpid() + laneid() / 4, c = laneid() % 4;
        const P quarter = both<T>(0.25f);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const uint2 word = arch::load_shared<uint2>(
                    tile.address_of(row + 8 * r, (4 * c + 4 * i) % ELEMENTS));
                x[r][2 * i] = times<T>(arch::bit_cast<P>(word.x), quarter);
                x[r][2 * i + 1] = times<T>(arch::bit_cast<P>(word.y), quarter);
            }
        }
    }
    __device__ __forceinline__ P feature(int block, int h, int r) const {
        const P own = x[r][h];
        if (block < 6) {
            const P other = x[r][h + 1 + block / 2];
            return times<T>(own, block % 2 ? crossed(other) : other);
        }
        if (block == 6) {
            const P other = x[r][h + 4];
            return times<T>(own, laneid() % 4 >= 2 ? crossed(other) : other);
        }
        if (block == 7) return times<T>(times<T>(own, both<T>(0.5f)), own);
        if (block == 9) return own;
        if (h == 0) return times<T>(P{x[r][0].x, x[r][1].x}, P{x[r][0].y, x[r][1].y});
        return pack_pair<T>(laneid() % 4 == 0 ? 1.0f : 0.0f, 0.0f);
    }
    __device__ __forceinline__ void make(rt<T, 16, FEATURE_ROWS>& features) const {
#pragma unroll
        for (int block = 0; block < FEATURE_BLOCKS; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                features.tiles[0][block].data[i] = feature(block, i / 2, i % 2);
        }
    }
};

// The gradient of a token's elements from that of its features, for this lane's two rows. Elements
// are counted from the lane's first; what belongs to other lanes of the quad is exchanged at last.
template <class T>
struct ElementGradient {
    float sum[2][12] = {};
    float x[2][12];  // elements / 4

    __device__ __forceinline__ explicit ElementGradient(const RotatedRows<T>& rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 6; ++i) {
                const float2 pair = unpack_pair<T>(rows.x[r][i]);
                x[r][2 * i] = pair.x;
                x[r][2 * i + 1] = pair.y;
            }
        }
    }
    __device__ __forceinline__ void product(int r, int a, int b, float g) {
        sum[r][a] = fmaf(g, x[r][b], sum[r][a]);
        sum[r][b] = fmaf(g, x[r][a], sum[r][b]);
    }
    // Of blocks [first, first + blocks).
    template <int first, any_register_tile Tile>
    __device__ __forceinline__ void add(const Tile& gradient) {
        const bool crosswise = laneid() % 4 >= 2;
#pragma unroll
        for (int j = 0; j < Tile::width; ++j) {
            const int block = first + j;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i / 2, r = i % 2, own = 2 * h;
                const float2 g = gradient.tiles[0][j].data[i];
                if (block < 6) {
                    const int other = own + 2 + 2 * (block / 2), flip = block % 2;
                    product(r, own, other + flip, g.x);
                    product(r, own + 1, other + 1 - flip, g.y);
                } else if (block == 6) {
                    const int other = own + 8;
                    const float y0 = crosswise ? x[r][other + 1] : x[r][other];
                    const float y1 = crosswise ? x[r][other] : x[r][other + 1];
                    sum[r][own] = fmaf(g.x, y0, sum[r][own]);
                    sum[r][own + 1] = fmaf(g.y, y1, sum[r][own + 1]);
                    const float z0 = g.x * x[r][own], z1 = g.y * x[r][own + 1];
                    sum[r][other] += crosswise ? z1 : z0;
                    sum[r][other + 1] += crosswise ? z0 : z1;
                } else if (block == 7) {
                    sum[r][own] = fmaf(g.x, x[r][own], sum[r][own]);
                    sum[r][own + 1] = fmaf(g.y, x[r][own + 1], sum[r][own + 1]);
                } else if (block == 9) {
                    sum[r][own] += g.x;
                    sum[r][own + 1] += g.y;
                } else if (h == 0) {
                    product(r, 0, 1, g.x);
                    product(r, 2, 3, g.y);
                }
            }
        }
    }
    // Elements 4c to 4c + 3 of the two rows. A lane has sums of its own elements, of those of the
    // next lane of the quad, and of the one after that.
    __device__ __forceinline__ void finish(float4 (&result)[2], float2 factors) const {
        const int lane = laneid(), quad = lane & ~3;
        const int before = quad | ((lane + 3) & 3), twice = quad | ((lane + 2) & 3);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float own[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                own[i] = sum[r][i] + arch::shuffle(sum[r][4 + i], before) +
                         arch::shuffle(sum[r][8 + i], twice);
            }
            const float factor = r ? factors.y : factors.x;
            result[r] = {factor * own[0], factor * own[1], factor * own[2], factor * own[3]};
        }
    }
};

// An accumulator of 16 columns in the same places: elements 4c to 4c + 3 of the lane's two rows.
__device__ __forceinline__ void own_elements(float4 (&result)[2], const rt_fl<16, 16>& tile) {
    const int lane = laneid(), quad = lane & ~3, c = lane & 3;
    const int first = quad | (2 * c & 3), second = first | 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 low = tile.tiles[0][0].data[r], high = tile.tiles[0][0].data[2 + r];
        const float2 l0 = arch::shuffle(low, first), h0 = arch::shuffle(high, first);
        const float2 l1 = arch::shuffle(low, second), h1 = arch::shuffle(high, second);
        const float2 a = c < 2 ? l0 : h0, b = c < 2 ? l1 : h1;
        result[r] = {a.x, a.y, b.x, b.y};
    }
}

}  // namespace thunderkittens::linear_attention
