// What the kernels of chunks share, of the gradient and of portable kernels: tiles, where a chunk's
// tokens are, gates, and what is done to accumulators in registers.
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::recurrent::delta_common {

using namespace kittens;

constexpr float DELTA_LOG2_E = 1.44269504f;

template <DType _dtype, int _key_dim>
struct DeltaTiles {
    using T = std::conditional_t<_dtype == DType::bf16, bf16, half>;
    static constexpr int key_dim = _key_dim;
    using token_tile = st<T, DELTA_CHUNK, key_dim>;  // tokens or columns of values, and keys
    using square_tile = st<T, 64, 64>;
    using vectors = sv<float, DELTA_VECTORS * DELTA_CHUNK>;
};
enum DeltaVector { EXP_C, EXP_REST, BETA, LOG2_C };  // of a chunk's vectors

__device__ __forceinline__ float vector_at(const sv<float, DELTA_VECTORS * DELTA_CHUNK>& v,
                                           DeltaVector which, int token) {
    return v.get(which * DELTA_CHUNK + token);
}
__device__ __forceinline__ float2 vector_pair(const sv<float, DELTA_VECTORS * DELTA_CHUNK>& v,
                                              DeltaVector which, int token) {
    return arch::load_shared<float2>(v.address_of(which * DELTA_CHUNK + token));
}

// A sequence's chunks, or those of the tokens behind the last sequence.
struct DeltaSequence {
    int b;  // of the tensors; 0 where packed
    int begin, length;
    int first_slot;

    __device__ __forceinline__ int chunks() const {
        return (length + DELTA_CHUNK - 1) / DELTA_CHUNK;
    }
};
struct DeltaChunk : DeltaSequence {
    int slot;
    bool exists, is_rest;

    __device__ __forceinline__ int row() const { return (slot - first_slot) * DELTA_CHUNK; }
    __device__ __forceinline__ int tokens() const { return length - row(); }
};

struct DeltaSequences {
    const int32_t* edges;  // null: a batch
    int count, length, slots;

    DeltaSequences(const DeltaRuleParams& params)
        : edges(params.cu_seqlens),
          count(int(params.problem.sequences)),
          length(int(params.problem.length)),
          slots(int(delta_slots(params.problem))) {}

    __device__ __forceinline__ int edge(int s) const {
        return ::min(::max(arch::load_global_readonly(edges + s), 0), length);
    }
    // Sequence `count` of packed ones is what is behind them.
    __device__ __forceinline__ DeltaSequence sequence(int s) const {
        if (edges == nullptr) return {s, 0, length, 0};
        const int begin = edge(s), end = s < count ? edge(s + 1) : length;
        return {0, begin, ::max(end - begin, 0), begin / DELTA_CHUNK + s};
    }
    __device__ __forceinline__ DeltaChunk chunk(int b, int slot) const {
        int s = b;
        if (edges != nullptr) {
            s = 0;
            for (int end = count + 1; end - s > 1;) {
                const int middle = (s + end) / 2;
                (edge(middle) / DELTA_CHUNK + middle <= slot ? s : end) = middle;
            }
        }
        DeltaChunk chunk{sequence(s), slot, false, edges != nullptr && s == count};
        chunk.exists = slot >= chunk.first_slot && slot - chunk.first_slot < chunk.chunks();
        return chunk;
    }
};

// Rows that threads read and write themselves.
template <class T>
struct TokenRows {
    T* data;
    int64_t batch_stride, head_stride, row_stride;
    int columns;

    TokenRows(const DeltaRows& x, int64_t _columns)
        : data(static_cast<T*>(const_cast<void*>(x.data))),
          batch_stride(x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride),
          columns(int(_columns)) {}
    // Of a sequence's row; null where the tensor is not wanted.
    __device__ __forceinline__ T* at(const DeltaSequence& s, int head, int row) const {
        return data + (s.b * batch_stride + head * head_stride + (s.begin + row) * row_stride);
    }
};

template <class T>
struct TokenNumbers {
    void* data;
    bool is_fp32;
    int64_t batch_stride, head_stride, row_stride;

    TokenNumbers(const DeltaNumbers& x)
        : data(const_cast<void*>(x.data)),
          is_fp32(x.is_fp32),
          batch_stride(x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride) {}
    __device__ __forceinline__ int64_t offset(const DeltaSequence& s, int head, int row) const {
        return s.b * batch_stride + head * head_stride + (s.begin + row) * row_stride;
    }
    // As it lies in memory: a conversion behind the load would wait for it.
    __device__ __forceinline__ uint32_t load_bits(const DeltaSequence& s, int head, int row) const {
        const int64_t at = offset(s, head, row);
        if (is_fp32) return arch::load_global(static_cast<const uint32_t*>(data) + at);
        return arch::load_global(static_cast<const uint16_t*>(data) + at);
    }
    __device__ __forceinline__ float value(uint32_t bits) const {
        if (is_fp32) return arch::bit_cast<float>(bits);
        return convert<float>(arch::bit_cast<T>(uint16_t(bits)));
    }
    __device__ __forceinline__ float load(const DeltaSequence& s, int head, int row) const {
        return value(load_bits(s, head, row));
    }
    __device__ __forceinline__ void store(const DeltaSequence& s, int head, int row,
                                          float x) const {
        if (data == nullptr) return;
        const int64_t at = offset(s, head, row);
        if (is_fp32)
            arch::store_global(static_cast<float*>(data) + at, x);
        else
            arch::store_global(static_cast<T*>(data) + at, convert<T>(x));
    }
};

// The gates of a token.
struct DeltaGate {
    const float *A_log, *dt_bias;
    bool beta_sigmoid, allow_neg_eigval;

    DeltaGate(const DeltaRuleGate& gate)
        : A_log(gate.A_log),
          dt_bias(gate.dt_bias),
          beta_sigmoid(gate.beta_sigmoid),
          allow_neg_eigval(gate.allow_neg_eigval) {}

    static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
    // What a head's g is multiplied by, and what is added to its argument.
    __device__ __forceinline__ float rate(int head) const {
        return A_log == nullptr ? 0.0f : arch::load_global_readonly(A_log + head);
    }
    __device__ __forceinline__ float factor_of(float rate) const {
        return A_log == nullptr ? 1.0f : -expf(rate);
    }
    __device__ __forceinline__ float factor(int head) const { return factor_of(rate(head)); }
    __device__ __forceinline__ float bias(int head) const {
        return dt_bias == nullptr ? 0.0f : arch::load_global_readonly(dt_bias + head);
    }
    // log(decay)
    __device__ __forceinline__ float decay(float x, float factor, float bias) const {
        if (A_log == nullptr) return x;
        x += bias;
        return factor * (x > 20.0f ? x : log1pf(expf(x)));
    }
    __device__ __forceinline__ float decay_slope(float x, float factor, float bias) const {
        return A_log == nullptr ? 1.0f : factor * sigmoid(x + bias);
    }
    __device__ __forceinline__ float beta(float x) const {
        return beta_sigmoid ? (allow_neg_eigval ? 2.0f : 1.0f) * sigmoid(x) : x;
    }
    __device__ __forceinline__ float beta_slope(float x) const {
        if (!beta_sigmoid) return 1.0f;
        const float s = sigmoid(x);
        return (allow_neg_eigval ? 2.0f : 1.0f) * s * (1.0f - s);
    }
};

// ---- accumulators ----

__device__ __forceinline__ bool first_thread() { return threadIdx.x == 0; }
// The lane's upper row in a warpgroup's tile; the lower one is 8 rows below.
__device__ __forceinline__ int lane_row() { return 16 * warpgroup::warpid() + laneid() / 4; }

__device__ __forceinline__ float quad_sum(float x) {
    x += arch::shuffle_xor(x, 1);
    return x + arch::shuffle_xor(x, 2);
}

// The registers of a row-layout tile that is the transpose of a shared tile's 16 x 16 elements.
template <class T, any_shared_tile Tile>
__device__ __forceinline__ void load_transposed(rt_base<T, row_l>& to, Tile& from, int row,
                                                int column) {
    rt<T, 16, 16, col_l> part;
    warp::load(part, from.template subtile<16, 16>({row / 16, column / 16}));
#pragma unroll
    for (int i = 0; i < 4; ++i) to.data[i] = part.tiles[0][0].data[i];
}

// to = from, each pair multiplied by factor(column, lower row).
template <any_register_tile To, any_register_tile From, class F>
__device__ __forceinline__ void scale_into(To& to, const From& from, F factor) {
    using T = typename To::T;
    const int column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 f = factor(16 * j + 8 * (i / 2) + column, i % 2 == 1);
            float2 pair;
            if constexpr (std::is_same_v<typename From::T, float>)
                pair = from.tiles[0][j].data[i];
            else
                pair = unpack_pair<typename From::T>(from.tiles[0][j].data[i]);
            to.tiles[0][j].data[i] = pack_pair<T>(pair.x * f.x, pair.y * f.y);
        }
    }
}

template <any_register_tile Tile>
__device__ __forceinline__ void scale_all(Tile& tile, float factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& pair = tile.tiles[0][j].data[i];
            pair = {pair.x * factor, pair.y * factor};
        }
    }
}

}  // namespace thunderkittens::recurrent::delta_common
