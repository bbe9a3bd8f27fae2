// What the portable kernels of Based share: copies of chunks, the transposed elements, the state as
// an operand, and the loop over a chunk's tokens in which the state grows. A fragment of values
// comes through shared memory once for all products that it is an operand of.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"
#include "csrc/linear_attention/common/products_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int CHUNK_BLOCKS = CHUNK / 16, VALUE_BLOCKS = VALUES / 16;

// 16 rows of elements as an operand: one address for all rows of the tile.
template <class T>
struct ElementRows {
    static_assert(ELEMENTS == 16 && sizeof(element_tile<T>) == CHUNK * 32);
    uint32_t first, first_b;

    __device__ __forceinline__ explicit ElementRows(const element_tile<T>& tile) {
        const int lane = laneid(), low = lane / 8 % 2 * 8, high = lane / 16 * 8;
        first = tile.address_of(lane % 8 + low, high);
        first_b = tile.address_of(lane % 8 + high, low);
    }
    // Rows of A.
    __device__ __forceinline__ operand_a<T> a(int block) const {
        operand_a<T> x;
        arch::load_matrix_x4(x.words[0], x.words[1], x.words[2], x.words[3],
                             first + uint32_t(512 * block));
        return x;
    }
    // Columns of B, whose sums are over elements, and rows, whose sums are over tokens.
    __device__ __forceinline__ operand_b<T> columns(int block) const {
        operand_b<T> x;
        arch::load_matrix_x4(x.words[0], x.words[1], x.words[2], x.words[3],
                             first_b + uint32_t(512 * block));
        return x;
    }
    __device__ __forceinline__ operand_b<T> rows(int block) const {
        operand_b<T> x;
        arch::load_matrix_x4_transposed(x.words[0], x.words[1], x.words[2], x.words[3],
                                        first + uint32_t(512 * block));
        return x;
    }
};

// Copies of a chunk's rows; what does not exist becomes zeros.
template <class T>
struct ChunkCopies {
    const Segments& segments;
    const Segments::WorkTile& work;

    __device__ __forceinline__ void elements(element_tile<T>& to, const StridedRows<T>& x,
                                             int chunk) const {
        tile_copy<element_tile<T>>::load(to, x.at(work.b, work.head, chunk * CHUNK, 0),
                                         x.row_stride, segments.tokens(chunk), ELEMENTS);
    }
    __device__ __forceinline__ void values(value_tile<T>& to, const StridedRows<T>& x,
                                           int chunk) const {
        tile_copy<value_tile<T>>::load(
            to, x.at(work.b, work.head, chunk * CHUNK, work.first_column()), x.row_stride,
            segments.tokens(chunk), segments.value_dim - work.first_column());
    }
    // (values and denominator, batch * heads, padded length)
    __device__ __forceinline__ void weights(TokenWeights& to, const float* from, int chunk) const {
        constexpr int words = CHUNK / 4;
        const int thread = static_cast<int>(threadIdx.x), word = thread % words;
        if (thread >= 2 * words) return;
        const int64_t padded = int64_t((segments.length + CHUNK - 1) / CHUNK) * CHUNK;
        const int64_t line = work.batch_head + (thread < words ? 0 : segments.batch_heads);
        const auto& weights = thread < words ? to.values : to.denominator;
        arch::cp_async<16>(weights.address_of(4 * word),
                           from + line * padded + chunk * CHUNK + 4 * word);
    }
    // The 16 rows of this warp.
    __device__ __forceinline__ void store_values(const StridedRows<T>& to, int chunk,
                                                 const rt_fl<16, VALUES>& tile) const {
        const int row = chunk * CHUNK + warp_row();
        attention::store_rows<T>(tile, to.at(work.b, work.head, row, work.first_column()),
                                 to.row_stride, segments.length - row,
                                 segments.value_dim - work.first_column());
    }
};

// `transpose_chunk`, and a second time with the tokens' weights where there are some.
template <class T, bool weighted>
__device__ __forceinline__ void transpose(const Transposed<T>& to, const Transposed<T>& scaled,
                                          const element_tile<T>& x, const TokenWeights* weights) {
    const int lane = laneid(), matrix = lane / 8, warp = own_warp();
    uint32_t r[4];
    arch::load_matrix_x4_transposed(
        r[0], r[1], r[2], r[3],
        x.address_of(16 * warp + 8 * (matrix % 2) + lane % 8, 8 * (matrix / 2)));
    constexpr float unit = state_unit<T, weighted>;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int row = 8 * (m / 2) + lane / 4, piece = 2 * warp + m % 2;
        arch::store_shared(to.piece(row, piece) + 4 * (lane % 4), r[m]);
        if constexpr (weighted) {
            const float2 w =
                TokenWeights::pair(weights->values, 16 * warp + 8 * (m % 2) + 2 * (lane % 4));
            const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(r[m]));
            arch::store_shared(scaled.piece(row, piece) + 4 * (lane % 4),
                               pack_pair<T>(unit * w.x * x.x, unit * w.y * x.y));
            if (m < 2 && lane < 4) {
                arch::store_shared(scaled.piece(ONE, piece) + 4 * lane,
                                   pack_pair<T>(unit * w.x, unit * w.y));
            }
        }
    }
}

// `RunningState::store_operand`.
template <class T, bool weighted>
__device__ __forceinline__ float store_operand(const RunningState<T, weighted>& state,
                                               state_tile<T>& tile, sv<float, 16>& scratch) {
    const float scale = state.operand_scale(scratch);
#pragma unroll
    for (int group = 0; group < 3; ++group) {
        const int block = 4 * group + own_warp();
        if (block < FEATURE_BLOCKS) store_accumulator(tile, 16 * block, state.sums[group], scale);
    }
    return 1.0f / (scale * RunningState<T, weighted>::unit);
}

// The features of 16 tokens as an operand whose rows are features.
template <class T>
struct FeatureOperands {
    uint32_t first[2], second[3];

    __device__ __forceinline__ explicit FeatureOperands(const FeatureRows<T>& rows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) first[i] = FeatureRows<T>::fresh(rows.first[i]);
#pragma unroll
        for (int i = 0; i < 3; ++i) second[i] = FeatureRows<T>::fresh(rows.second[i]);
    }
    static __device__ __forceinline__ operand_a<T> product(const uint32_t (&a)[4],
                                                           const uint32_t (&b)[4]) {
        using P = packed_type<T>;
        operand_a<T> x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x.words[i] = arch::bit_cast<uint32_t>(
                times<T>(arch::bit_cast<P>(a[i]), arch::bit_cast<P>(b[i])));
        }
        return x;
    }
    // Calls f(group, its operand) for the groups of which this warp has features.
    template <class F>
    __device__ __forceinline__ void for_each_group(int k, F f) const {
        uint32_t a[4], b[4];
        FeatureRows<T>::load(a, first[0], k);
        FeatureRows<T>::load(b, second[0], k);
        f(0, product(a, b));
        FeatureRows<T>::load(b, second[1], k);
        f(1, product(a, b));
        if (8 + own_warp() < FEATURE_BLOCKS) {
            FeatureRows<T>::load(a, first[1], k);
            FeatureRows<T>::load(b, second[2], k);
            f(2, product(a, b));
        }
    }
};

// Adds phi(x)^T values of a chunk to the state. Before that it calls use(block of 16 tokens, their
// values as operands), for each block. Unrolled, addresses of all blocks take registers.
template <int unrolled = CHUNK_BLOCKS, class T, bool weighted, class F>
__device__ __forceinline__ void accumulate(RunningState<T, weighted>& state,
                                           const FeatureRows<T>& rows, const value_tile<T>& values,
                                           F use) {
    const b_walker_of_rows<value_tile<T>> walker(values, 0, 0);
    const FeatureOperands<T> features(rows);
#pragma unroll unrolled
    for (int k = 0; k < CHUNK_BLOCKS; ++k) {
        operand_b<T> b[VALUE_BLOCKS];
#pragma unroll
        for (int j = 0; j < VALUE_BLOCKS; ++j) walker.load(b[j], 16 * k, 16 * j, 0);
        use(k, b);
        features.for_each_group(k, [&](int group, const operand_a<T>& a) {
#pragma unroll
            for (int j = 0; j < VALUE_BLOCKS; ++j)
                mma_operands(block_of(state.sums[group], j), a, b[j]);
        });
    }
}

// out += phi(x) times the state, for this warp's 16 tokens.
template <class T>
__device__ __forceinline__ void add_state(rt_fl<16, VALUES>& out, const RotatedRows<T>& rows,
                                          const state_tile<T>& state) {
    const b_walker_of_rows<state_tile<T>> walker(state, 0, 0);
#pragma unroll
    for (int block = 0; block < FEATURE_BLOCKS; ++block) {
        operand_a<T> a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a.words[i] = arch::bit_cast<uint32_t>(rows.feature(block, i / 2, i % 2));
#pragma unroll
        for (int j = 0; j < VALUE_BLOCKS; ++j) {
            operand_b<T> b;
            walker.load(b, 16 * block, 16 * j, 0);
            mma_operands(block_of(out, j), a, b);
        }
    }
}

__device__ __forceinline__ float polynomial(float x) {
    return fmaf(x, fmaf(x, 1.0f / 32, 0.25f), 1.0f);
}

// Changes the pairs of a lane in a block of 16 x 16 elements: f(pair, row, column).
template <class F>
__device__ __forceinline__ void for_each_pair(rt_fl<16, 16>& tile, F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f(tile.tiles[0][0].data[i], laneid() / 4 + 8 * (i % 2), 8 * (i / 2) + 2 * (laneid() % 4));
    }
}

}  // namespace sm80
}  // namespace thunderkittens::linear_attention
