// What the portable kernels of LoLCATS share: where tokens, maps and features are, copies of rows,
// and the features of tokens as operands. A first kernel makes the features of all tokens, which
// the others then read as often as they need them, without a map in shared memory.
#pragma once

#include "csrc/linear_attention/common/products_sm80.cuh"
#include "csrc/linear_attention/lolcats/feature_map.cuh"
#include "csrc/linear_attention/lolcats/portable.h"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int TOKEN_BLOCKS = CHUNK / 16;
template <class K>
constexpr int feature_blocks = 2 * K::features / 16;
template <class K>
constexpr float score_scale = K::head_dim == 128 ? 0.08838834764831845f : 0.125f;

// The features of all chunks in 16 bits, in blocks of 16 tokens and 16 features, each in the order
// of an operand's registers: 16 bytes a lane.
template <class K>
struct FeatureArray {
    using T = typename K::T;
    uint4* data;
    int chunks;

    __device__ __forceinline__ uint4* at(int64_t batch_head, int chunk, int tokens,
                                         int block) const {
        const int64_t first = (batch_head * chunks + chunk) * TOKEN_BLOCKS + tokens;
        return data + (first * feature_blocks<K> + block) * WARP_THREADS + laneid();
    }
    // Tokens as rows.
    __device__ __forceinline__ operand_a<T> load(int64_t batch_head, int chunk, int tokens,
                                                 int block) const {
        const uint4 x = arch::load_global(at(batch_head, chunk, tokens, block));
        return {{x.x, x.y, x.z, x.w}};
    }
};
// Features as rows, from tokens as rows.
template <class T>
__device__ __forceinline__ operand_a<T> transposed(const operand_a<T>& x) {
    return {{arch::transpose_matrix(x.words[0]), arch::transpose_matrix(x.words[2]),
             arch::transpose_matrix(x.words[1]), arch::transpose_matrix(x.words[3])}};
}
template <class T>
__device__ __forceinline__ float2 pair_of(const operand_a<T>& x, int i) {
    return unpack_pair<T>(arch::bit_cast<packed_type<T>>(x.words[i]));
}

// Copies rows from `first` on of a head, of which those in [0, length) exist; others are zeros.
template <int threads, class Tile>
__device__ __forceinline__ void copy_rows(const Tile& tile, const typename Tile::T* head,
                                          int64_t row_stride, int first, int length) {
    constexpr uint32_t per_copy = 8, stripe_copies = Tile::stripe_cols / per_copy;
    constexpr int pass_rows = threads / int(stripe_copies);
    static_assert(Tile::rows % pass_rows == 0 && pass_rows % 8 == 0);
    // The compiler does not move a shuffle: what follows from it takes no register elsewhere.
    const uint32_t thread = arch::shuffle_xor(threadIdx.x, 0);
    const uint32_t column = thread % stripe_copies * per_copy;
    const int row = static_cast<int>(thread / stripe_copies);
    const uint32_t to = tile.address_of(row, static_cast<int>(column));
#pragma unroll
    for (int pass = 0; pass < Tile::rows / pass_rows; ++pass) {
        const int at = first + row + pass * pass_rows;
        const bool exists = at >= 0 && at < length;
        const auto* from = head + (exists ? at : 0) * row_stride + column;
#pragma unroll
        for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
            const uint32_t offset =
                stripe * Tile::stripe_bytes + pass * pass_rows * Tile::swizzle_bytes;
            arch::cp_async<16>(to + offset, from + stripe * Tile::stripe_cols, exists);
        }
    }
}

// Rows of queries, or of what belongs to them.
template <class T>
struct QueryRowsOf {
    StridedRows<T> rows;
    int length;

    template <int threads, class Tile>
    __device__ __forceinline__ void copy(const Tile& tile, const LolcatsWorkTile& work, int chunk,
                                         int column = 0) const {
        copy_rows<threads>(tile, rows.at(work.b, work.head, 0, column), rows.row_stride,
                           work.terrace.row(chunk), length);
    }
};
// Rows of keys or values, whose first two chunks are elsewhere when there is an initial state.
template <class T>
struct KeyRowsOf {
    StridedRows<T> rows;
    const T* first;  // (batch, kv_heads, CACHE, head_dim); null: there is no state
    int length, group, kv_heads, head_dim;

    template <int threads, class Tile>
    __device__ __forceinline__ void copy(const Tile& tile, const LolcatsWorkTile& work, int chunk,
                                         int column = 0) const {
        const int head = work.head / group;
        if (first != nullptr && chunk < CACHE / CHUNK) {
            const int64_t row = int64_t(work.b * kv_heads + head) * CACHE;
            copy_rows<threads>(tile, first + row * head_dim + column, head_dim, chunk * CHUNK,
                               CACHE);
        } else {
            copy_rows<threads>(tile, rows.at(work.b, head, 0, column), rows.row_stride,
                               work.terrace.row(chunk), length);
        }
    }
};
template <class T>
QueryRowsOf<T> query_rows(const Operand& x, const LolcatsProblem& p) {
    return {x, int(p.length)};
}
template <class T>
KeyRowsOf<T> key_rows(const Operand& x, const void* first, const LolcatsProblem& p) {
    return {x,
            static_cast<const T*>(first),
            int(p.length),
            int(p.heads / p.kv_heads),
            int(p.kv_heads),
            int(p.head_dim)};
}
template <class K>
FeatureArray<K> feature_array(void* data, const LolcatsProblem& p) {
    return {static_cast<uint4*>(data), int(chunks_of(p))};
}

// A power of two that brings sums in half into their range, by all threads of a block of at most 8
// warps; `most` is the thread's largest magnitude. 1 in bf16. The caller's next barrier comes
// before the next call.
template <class T>
__device__ __forceinline__ float common_scale(float most, sv<float, 16>& scratch) {
    if constexpr (std::is_same_v<T, bf16>) {
        return 1.0f;
    } else {
        most = warp_maximum(most);
        if (laneid() == 0) scratch.set(kittens::warpid(), most);
        arch::sync_block();
        for (int w = 0; w < int(blockDim.x) / WARP_THREADS; ++w) most = fmaxf(most, scratch.get(w));
        const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
        // 2^13 at most, so that nothing overflows; zeros, infinities and NaN stay.
        if (exponent < -60 || exponent > 127) return 1.0f;
        return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
    }
}

// Weights of 16 tokens as columns of an operand, which they multiply: pairs of weight and delta.
struct TokenPairs {
    float4 low, high;  // of tokens 2c, 2c + 1 and of those 8 behind

    __device__ __forceinline__ TokenPairs(const float* weights, int token) {
        const float* from = weights + 2 * (token + 2 * (laneid() % 4));
        low = arch::load_global(reinterpret_cast<const float4*>(from));
        high = arch::load_global(reinterpret_cast<const float4*>(from + 16));
    }
    // The sums over the lane's tokens of weight, delta and feature, of the two rows.
    template <class T>
    __device__ __forceinline__ float2 deltas(const operand_a<T>& x) const {
        const float2 a = pair_of(x, 0), b = pair_of(x, 1), c = pair_of(x, 2), d = pair_of(x, 3);
        const float l0 = low.x * low.y, l1 = low.z * low.w, h0 = high.x * high.y,
                    h1 = high.z * high.w;
        return {fmaf(l0, a.x, fmaf(l1, a.y, fmaf(h0, c.x, h1 * c.y))),
                fmaf(l0, b.x, fmaf(l1, b.y, fmaf(h0, d.x, h1 * d.y)))};
    }
    template <class T>
    __device__ __forceinline__ operand_a<T> weigh(const operand_a<T>& x, float unit) const {
        operand_a<T> y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = pair_of(x, i);
            const float2 w = i < 2 ? float2{low.x, low.z} : float2{high.x, high.z};
            y.words[i] =
                arch::bit_cast<uint32_t>(pack_pair<T>(unit * w.x * pair.x, unit * w.y * pair.y));
        }
        return y;
    }
};

// Sums of features times columns of values, or of their gradients, `columns` of these from `first`
// on: a warp has 16 features, and 16 of each further group. Of the plain sums of features a lane
// has its part for two features of each group.
template <class K, int warps, int columns>
struct FeatureSumsOf {
    using T = typename K::T;
    static constexpr int blocks = feature_blocks<K>;
    static constexpr int groups = (blocks + warps - 1) / warps;
    using tile = st<T, 2 * K::features, columns>;
    rt_fl<16, columns> sums[groups];
    float2 counts[groups];

    static __device__ __forceinline__ int block_of_group(int i) { return own_warp() + warps * i; }
    static __device__ __forceinline__ bool has_group(int i) {
        return blocks % warps == 0 || block_of_group(i) < blocks;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            zero(sums[i]);
            counts[i] = {0.0f, 0.0f};
        }
    }
    // Calls f(pair, row of the numerator, column).
    template <class F>
    __device__ __forceinline__ void for_each_pair(F f) {
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            if (!has_group(i)) continue;
            const int row = 16 * block_of_group(i) + laneid() / 4, column = 2 * (laneid() % 4);
#pragma unroll
            for (int j = 0; j < columns / 16; ++j) {
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    f(sums[i].tiles[0][j].data[n], row + 8 * (n % 2),
                      16 * j + 8 * (n / 2) + column);
            }
        }
    }
    // From the sums of a head, numerators and denominators; may be null.
    __device__ __forceinline__ void add(const float* from, const float* from_counts, int first) {
        if (from == nullptr) return;
        for_each_pair([&](float2& pair, int row, int column) {
            const float2 x = arch::load_global(
                reinterpret_cast<const float2*>(from + row * K::head_dim + first + column));
            pair = {pair.x + x.x, pair.y + x.y};
        });
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            if (!has_group(i)) continue;
            const int row = 16 * block_of_group(i) + laneid() / 4;
            const float2 x = {arch::load_global(from_counts + row),
                              arch::load_global(from_counts + row + 8)};
            // One lane of the quad, whose parts are added up.
            if (laneid() % 4 == 0) counts[i] = {counts[i].x + x.x, counts[i].y + x.y};
        }
    }
    __device__ __forceinline__ float2 total(int i) const {
        return {quad_sum(counts[i].x), quad_sum(counts[i].y)};
    }
    __device__ __forceinline__ void store(float* to, float* to_counts, int first) {
        for_each_pair([&](const float2& pair, int row, int column) {
            arch::store_global(reinterpret_cast<float2*>(to + row * K::head_dim + first + column),
                               pair);
        });
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            if (!has_group(i)) continue;
            const float2 x = total(i);
            const int row = 16 * block_of_group(i) + laneid() / 4;
            if (first != 0 || laneid() % 4 != 0) continue;
            arch::store_global(to_counts + row, x.x);
            arch::store_global(to_counts + row + 8, x.y);
        }
    }
    // Writes both for the block: an operand in 16 bits, which is so many times too large as the
    // result says, and the plain sums.
    __device__ __forceinline__ float publish(tile& to, sv<float, 2 * K::features>& to_counts,
                                             sv<float, 16>& scratch) {
        float most = 0.0f;
        if constexpr (!std::is_same_v<T, bf16>) {
#pragma unroll
            for (int i = 0; i < groups; ++i) most = largest_magnitude(sums[i], most);
        }
        const float scale = common_scale<T>(most, scratch);
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            if (!has_group(i)) continue;
            store_accumulator(to, 16 * block_of_group(i), sums[i], scale);
            const float2 x = total(i);
            const int row = 16 * block_of_group(i) + laneid() / 4;
            if (laneid() % 4 == 0) to_counts.set(row, x.x), to_counts.set(row + 8, x.y);
        }
        return scale;
    }

    // The features of a chunk that the warp adds, which are on their way before they are needed.
    struct Features {
        operand_a<T> blocks[TOKEN_BLOCKS][groups];

        __device__ __forceinline__ Features(const FeatureArray<K>& from, int64_t batch_head,
                                            int chunk) {
#pragma unroll
            for (int k = 0; k < TOKEN_BLOCKS; ++k) {
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    blocks[k][i] = {};
                    if (has_group(i))
                        blocks[k][i] = from.load(batch_head, chunk, k, block_of_group(i));
                }
            }
        }
    };
    // Adds phi^T values of a chunk. change(k, features as rows, counts) may multiply them by
    // weights, and counts them.
    template <class Tile, class Change>
    __device__ __forceinline__ void add_chunk(const Features& features, const Tile& values,
                                              Change change) {
        static_assert(Tile::rows == CHUNK && Tile::cols == columns);
        const b_walker_of_rows<Tile> walker(values, 0, 0);
#pragma unroll
        for (int k = 0; k < TOKEN_BLOCKS; ++k) {
            operand_a<T> a[groups];
#pragma unroll
            for (int i = 0; i < groups; ++i) {
                a[i] = transposed(features.blocks[k][i]);
                change(k, a[i], counts[i]);
            }
#pragma unroll
            for (int j = 0; j < columns / 16; ++j) {
                operand_b<T> b;
                walker.load(b, 16 * k, 16 * j, 0);
#pragma unroll
                for (int i = 0; i < groups; ++i) mma_operands(block_of(sums[i], j), a[i], b);
            }
        }
    }
    template <class Tile>
    __device__ __forceinline__ void add_chunk(const Features& features, const Tile& values) {
        add_chunk(features, values, [](int, const operand_a<T>& x, float2& count) {
            const float2 a = pair_of(x, 0), b = pair_of(x, 1), c = pair_of(x, 2), d = pair_of(x, 3);
            count = {count.x + (a.x + a.y) + (c.x + c.y), count.y + (b.x + b.y) + (d.x + d.y)};
        });
    }
};

// sums += x y^T of a warp: 16 rows of x from `row` on, and rows of y, `columns` of both.
template <int columns, any_register_tile Sums, class A, class B>
__device__ __forceinline__ void add_products(Sums& sums, const A& x, int row, const B& y,
                                             int first_row = 0) {
    using T = typename A::T;
    const a_walker<A> a_tiles(x, row, 0);
    const b_walker<B> b_tiles(y, first_row, 0);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
        operand_a<T> a;
        a_tiles.load(a, 0, 16 * k, 0);
#pragma unroll
        for (int j = 0; j < Sums::width; ++j) {
            operand_b<T> b;
            b_tiles.load(b, 16 * j, 16 * k, 0);
            mma_operands(block_of(sums, j), a, b);
        }
    }
}

// Stores 16 rows of a warp from `row` on, of which those in [0, length) exist.
template <class Out, class Tile>
__device__ __forceinline__ void store_warp_rows(Out* to, int64_t row_stride, int row, int length,
                                                const Tile& tile) {
    const int column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = row + laneid() / 4 + 8 * (i % 2);
            if (at < 0 || at >= length) continue;
            const float2 pair = tile.tiles[0][j].data[i];
            arch::store_global(reinterpret_cast<packed_type<Out>*>(to + at * row_stride + 16 * j +
                                                                   8 * (i / 2) + column),
                               pack_pair<Out>(pair.x, pair.y));
        }
    }
}

}  // namespace sm80
}  // namespace thunderkittens::linear_attention
