// What the portable kernels share beside the products of csrc/linear_attention: addresses of rows,
// transposed operands, and pairs of elements in words.
#pragma once

#include "csrc/linear_attention/common/products_sm80.cuh"
#include "csrc/recurrent/common/chunks.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

using linear_attention::sm80::a_walker;
using linear_attention::sm80::b_walker;
using linear_attention::sm80::b_walker_of_rows;
using linear_attention::sm80::block_of;
using linear_attention::sm80::own_warp;
using linear_attention::sm80::PORTABLE_THREADS;
using linear_attention::sm80::store_pairs;
using linear_attention::sm80::tile_copy;
using linear_attention::sm80::to_operand_a;

// Rows of A are columns of the tile.
template <any_shared_tile Tile>
using a_walker_of_columns = operand_walker<operand_a, false, Tile>;

constexpr int CHUNK_BLOCKS = CHUNK / 16, VALUE_BLOCKS = VALUES / 16;

// `row` is of the sequence.
template <class T>
__device__ __forceinline__ T* address_in(const Operand& x, const Sequence& s, int head, int row,
                                         int column) {
    return static_cast<T*>(const_cast<void*>(x.data)) +
           (s.b * x.batch_stride + head * x.head_stride + int64_t(s.begin + row) * x.row_stride +
            column);
}

template <class T>
__device__ __forceinline__ uint32_t pack_word(float2 pair) {
    return arch::bit_cast<uint32_t>(pack_pair<T>(pair.x, pair.y));
}
template <class T>
__device__ __forceinline__ float2 unpack_word(uint32_t word) {
    return unpack_pair<T>(arch::bit_cast<packed_type<T>>(word));
}

// Multiplies the tokens of an operand whose columns are 16 of them: factor(token), a pair.
template <class T, class Factor>
__device__ __forceinline__ void scale_columns(operand_a<T>& operand, Factor factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 f = factor(8 * half + 2 * (laneid() % 4));
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const float2 x = unpack_word<T>(operand.words[i]);
            operand.words[i] = pack_word<T>({f.x * x.x, f.y * x.y});
        }
    }
}
// Adds the product of 16 of a chunk's tokens with rows of keys, one block of 16 after another.
template <class T, any_register_tile State, class Walker>
__device__ __forceinline__ void add_tokens(State& state, const operand_a<T>& values,
                                           const Walker& keys, int block) {
#pragma unroll
    for (int n = 0; n < State::width; ++n) {
        operand_b<T> b;
        keys.load(b, 16 * block, 16 * n, 0);
        mma_operands(block_of(state, n), values, b);
    }
}

}  // namespace sm80
}  // namespace thunderkittens::recurrent
