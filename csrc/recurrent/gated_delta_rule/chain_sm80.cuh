// The walk over the chunks of a sequence, of portable kernels in both directions: what a block has,
// the operands that it loads, and states between memory and registers. A group of four warps has 64
// columns of values, and a warp 16 of them: of the state, which is an accumulator of mma.sync and
// lies transposed, values as rows. As an operand of the next product it stays in the registers that
// have it, and so do all that follows from it; only keys, queries, H and P come through shared
// memory, one copy for the groups of a block.
//
// What a chunk's first product needs (keys, H, vectors) is loaded a chunk ahead into one of two
// places; the rest into the only one, as soon as all warps are done with it.
#pragma once

#include "csrc/recurrent/gated_delta_rule/products_sm80.cuh"

namespace thunderkittens::recurrent::delta_portable {

constexpr int MAX_GROUPS = 2;

template <class _K>
struct ChainGlobals {
    using K = _K;
    using T = typename K::T;
    TokenRows<T> q, k, values;  // V or dO
    const T *solved, *scores;
    const float* vectors;
    T *kept_states, *kept_values;  // of each chunk and slice; may be null
    DeltaSequences sequences;
    int value_heads, ratio, key_dim, value_dim, slices;
};

template <class K>
struct ChainShared {
    typename K::token_tile k[2], q;
    typename K::square_tile solved[2], scores, values[MAX_GROUPS];
    typename K::vectors vectors[2];
};

// Calls f(element, column of the values, of the keys) for the lane's elements of a warp's state.
template <int key_dim, class F>
__device__ __forceinline__ void for_each_of_state(rt_fl<16, key_dim>& state, F f) {
    const int row = 16 * own_warp() + laneid() / 4, column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < key_dim / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& pair = state.tiles[0][j].data[i];
            const int r = row + 8 * (i % 2), c = 16 * j + 8 * (i / 2) + column;
            f(pair.x, r, c);
            f(pair.y, r, c + 1);
        }
    }
}

// From the first column of a group on, in fp32 or bf16.
struct StatePart {
    void* data;
    bool is_fp32;
    int64_t place, key_stride, value_stride;
    int keys, values;  // that exist

    StatePart() = default;
    __device__ __forceinline__ StatePart(const DeltaStates& x, int sequence, int head, int first,
                                         int _keys, int _values)
        : data(x.data),
          is_fp32(x.is_fp32),
          place(sequence * x.sequence_stride + head * x.head_stride + first * x.value_stride),
          key_stride(x.key_stride),
          value_stride(x.value_stride),
          keys(_keys),
          values(_values - first) {}
    __device__ __forceinline__ StatePart(float* _data, int64_t _key_stride, int64_t _value_stride,
                                         int first, int _keys, int _values)
        : data(_data),
          is_fp32(true),
          place(first * _value_stride),
          key_stride(_key_stride),
          value_stride(_value_stride),
          keys(_keys),
          values(_values - first) {}

    template <int key_dim>
    __device__ __forceinline__ void load(rt_fl<16, key_dim>& state) const {
        if (data == nullptr || values <= 0)
            zero(state);
        else if (is_fp32)
            load_elements<float>(state);
        else
            load_elements<bf16>(state);
    }
    template <int key_dim>
    __device__ __forceinline__ void store(rt_fl<16, key_dim>& state) const {
        if (data == nullptr) return;
        if (is_fp32)
            store_elements<float>(state);
        else
            store_elements<bf16>(state);
    }

  private:
    // Without branches, so that all loads are on their way together.
    template <class From, int key_dim>
    __device__ __forceinline__ void load_elements(rt_fl<16, key_dim>& state) const {
        const auto* first = static_cast<const From*>(data) + place;
        for_each_of_state(state, [&](float& x, int value, int key) {
            const float found =
                convert<float>(arch::load_global(first + ::min(value, values - 1) * value_stride +
                                                 ::min(key, keys - 1) * key_stride));
            x = value < values && key < keys ? found : 0.0f;
        });
    }
    template <class To, int key_dim>
    __device__ __forceinline__ void store_elements(rt_fl<16, key_dim>& state) const {
        auto* first = static_cast<To*>(data) + place;
        for_each_of_state(state, [&](float& x, int value, int key) {
            if (value < values && key < keys)
                arch::store_global(first + value * value_stride + key * key_stride, convert<To>(x));
        });
    }
};

template <class G>
struct Chain {
    using K = typename G::K;
    using T = typename K::T;
    using state_tile = rt_fl<16, K::key_dim>;
    using square = rt_fl<16, 64>;
    using Shared = ChainShared<K>;

    const G& g;
    Shared& shared;
    DeltaSequence sequence;
    int index, value_head;  // index: of the sequence
    int first_column;       // of the block's values

    __device__ __forceinline__ int head() const { return value_head / g.ratio; }
    // Of the warp's group.
    __device__ __forceinline__ int column() const {
        return first_column + own_group() * DELTA_VALUES;
    }
    __device__ __forceinline__ int64_t chunk_at(int chunk) const {
        return (int64_t(sequence.b) * g.value_heads + value_head) * g.sequences.slots +
               sequence.first_slot + chunk;
    }
    __device__ __forceinline__ int rows_from(int chunk) const {
        return sequence.length - chunk * DELTA_CHUNK;
    }

    __device__ __forceinline__ void load_ahead(int chunk, int stage) const {
        const int64_t at = chunk_at(chunk);
        copy_rows(shared.k[stage], g.k.at(sequence, head(), chunk * DELTA_CHUNK), g.k.row_stride,
                  rows_from(chunk), g.key_dim);
        copy_tile(shared.solved[stage], g.solved + at * DELTA_SQUARE);
        copy_vector(shared.vectors[stage], g.vectors + at * (DELTA_VECTORS * DELTA_CHUNK));
    }
    __device__ __forceinline__ void load_queries(int chunk) const {
        copy_rows(shared.q, g.q.at(sequence, head(), chunk * DELTA_CHUNK), g.q.row_stride,
                  rows_from(chunk), g.key_dim);
    }
    __device__ __forceinline__ void load_scores(int chunk) const {
        copy_tile(shared.scores, g.scores + chunk_at(chunk) * DELTA_SQUARE);
    }
    // Each group its own.
    __device__ __forceinline__ void load_values(int chunk) const {
        copy_rows(shared.values[own_group()],
                  g.values.at(sequence, value_head, chunk * DELTA_CHUNK) + column(),
                  g.values.row_stride, rows_from(chunk), g.value_dim - column(),
                  int(threadIdx.x) % GROUP_THREADS, GROUP_THREADS);
    }

    // What a gradient keeps: the state as it is, and U' or Y.
    __device__ __forceinline__ int64_t tile_at(int chunk) const {
        return chunk_at(chunk) * g.slices + column() / DELTA_VALUES;
    }
    __device__ __forceinline__ void keep_state(const state_tile& state, int chunk) const {
        if (g.kept_states == nullptr || column() / DELTA_VALUES >= g.slices) return;
        store_tile_rows(state, g.kept_states + tile_at(chunk) * (DELTA_VALUES * K::key_dim));
    }
    __device__ __forceinline__ void keep_values(const square& values, int chunk) const {
        if (g.kept_values == nullptr || column() / DELTA_VALUES >= g.slices) return;
        store_tile_rows(values, g.kept_values + tile_at(chunk) * (DELTA_VALUES * DELTA_CHUNK));
    }
    static __device__ __forceinline__ float2 product_of(const typename K::vectors& vectors,
                                                        DeltaVector a, DeltaVector b, int column) {
        const float2 x = vector_pair(vectors, a, column), y = vector_pair(vectors, b, column);
        return {x.x * y.x, x.y * y.y};
    }
};

}  // namespace thunderkittens::recurrent::delta_portable
