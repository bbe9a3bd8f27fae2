// What the kernels of the gated delta rule share: tiles, how operands and states are reached in
// memory, which tokens a block works on, and accumulators as operands.
#pragma once

#include <new>

#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/recurrent/gated_delta_rule/walk.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::recurrent::delta {

using namespace kittens;

template <DType dtype>
using type_of = std::conditional_t<dtype == DType::bf16, bf16, half>;

constexpr int CHUNK = DELTA_CHUNK, VALUES = DELTA_VALUES;
constexpr float LOG2_E = 1.44269504f;

// Rows of a batch through tensor maps of four dimensions, packed sequences through ragged ones, in
// which a tile ends with its sequence: rows behind it are zeros, and are not stored.
template <class Tile>
struct RowLayout {
    using T = typename Tile::T;
    using Dense = gl<T, -1, -1, -1, -1, Tile>;
    using Ragged = ragged_gl<T, Tile>;

    bool packed;
    union {
        Dense dense;
        Ragged ragged;
    };

    RowLayout(const DeltaRows& x, const DeltaRuleProblem& p, int64_t heads, int64_t columns)
        : packed(p.packed) {
        T* data = static_cast<T*>(const_cast<void*>(x.data));
        if (packed) {
            new (&ragged) Ragged(data, int(heads), int(p.length), int(columns),
                                 {x.head_stride, x.row_stride});
        } else {
            new (&dense) Dense(data, p.sequences, heads, p.length, columns,
                               {x.batch_stride, x.head_stride, x.row_stride});
        }
    }
    __device__ __forceinline__ void prefetch_map() const {
        if (packed)
            tma::prefetch_map<Tile>(ragged);
        else
            tma::prefetch_map<Tile>(dense);
    }
};

// The tokens of a segment of a sequence: of packed ones, rows [begin, begin + length) of the
// tensors; else `length` rows from `first` on. The sequence ends before row `end`.
struct DeltaSequence {
    int index, begin, first, length, end;
    int first_slot;  // of its first chunk, see delta_slots()

    __device__ __forceinline__ DeltaSequence(const int32_t* cu_seqlens, int n, int rows,
                                             int segment, int segments)
        : index(n), begin(0), first(0), length(rows) {
        if (cu_seqlens != nullptr) {
            begin = arch::load_global_readonly(cu_seqlens + n);
            length = arch::load_global_readonly(cu_seqlens + n + 1) - begin;
        }
        end = begin + length;
        first_slot = cu_seqlens != nullptr ? begin / CHUNK + n : 0;
        if (segments == 1) return;
        const int part = (chunks() + segments - 1) / segments;
        const int start = ::min(segment * part, chunks()) * CHUNK;
        length = ::min(::max(length - start, 0), part * CHUNK);
        (cu_seqlens != nullptr ? begin : first) += start;
        first_slot += start / CHUNK;
    }
    // A whole one that is known.
    __device__ __forceinline__ DeltaSequence(int _index, int _begin, int _length, int _first_slot)
        : index(_index),
          begin(_begin),
          first(0),
          length(_length),
          end(_begin + _length),
          first_slot(_first_slot) {}
    __device__ __forceinline__ int chunks() const { return (length + CHUNK - 1) / CHUNK; }

    template <class Tile>
    __device__ __forceinline__ void load(Tile& tile, const RowLayout<Tile>& from, int head, int row,
                                         int column, semaphore& arrived) const {
        tma::expect(arrived, tile);
        load_more(tile, from, head, row, column, arrived);
    }
    // Of several tiles that one semaphore announces.
    template <class Tile>
    __device__ __forceinline__ void load_more(Tile& tile, const RowLayout<Tile>& from, int head,
                                              int row, int column, semaphore& arrived) const {
        if (from.packed)
            tma::load_async(tile, from.ragged, ragged_coord{head, begin, length, row, column},
                            arrived);
        else
            tma::load_async(tile, from.dense, elements(index, head, first + row, column), arrived);
    }
    template <class Tile>
    __device__ __forceinline__ void store(const RowLayout<Tile>& to, const Tile& tile, int head,
                                          int row, int column) const {
        if (to.packed)
            tma::store_async(to.ragged, tile, ragged_coord{head, begin, length, row, column});
        else
            tma::store_async(to.dense, tile, elements(index, head, first + row, column));
    }
};

// A number per token and value head.
template <class T>
struct NumberView {
    const void* data;
    bool is_fp32;
    int64_t batch_stride, head_stride, row_stride;

    NumberView(const DeltaNumbers& x, bool packed)
        : data(x.data),
          is_fp32(x.is_fp32),
          batch_stride(packed ? 0 : x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride) {}
    // As it lies in memory: a conversion behind the load would wait for it.
    __device__ __forceinline__ uint32_t bits_at(int b, int head, int row) const {
        const int64_t place = b * batch_stride + head * head_stride + row * row_stride;
        if (is_fp32) return arch::load_global_readonly(static_cast<const uint32_t*>(data) + place);
        return arch::load_global_readonly(static_cast<const uint16_t*>(data) + place);
    }
    __device__ __forceinline__ float value(uint32_t bits) const {
        if (is_fp32) return arch::bit_cast<float>(bits);
        return convert<float>(arch::bit_cast<T>(uint16_t(bits)));
    }
    __device__ __forceinline__ float at(int b, int head, int row) const {
        return value(bits_at(b, head, row));
    }
};

// The state of a sequence's head.
struct StateView {
    void* data;
    bool is_fp32;
    int64_t key_stride, value_stride;

    // In the workspace.
    __device__ __forceinline__ StateView(float* _data, int _key_stride, int _value_stride)
        : data(_data), is_fp32(true), key_stride(_key_stride), value_stride(_value_stride) {}
    __device__ __forceinline__ StateView(const DeltaStates& x, int sequence, int head)
        : data(x.data), is_fp32(x.is_fp32), key_stride(x.key_stride), value_stride(x.value_stride) {
        if (data == nullptr) return;
        const int64_t place = sequence * x.sequence_stride + head * x.head_stride;
        data = is_fp32 ? static_cast<void*>(static_cast<float*>(data) + place)
                       : static_cast<void*>(static_cast<bf16*>(data) + place);
    }
    // Calls f(the elements).
    template <class F>
    __device__ __forceinline__ void with_type(F f) const {
        if (is_fp32)
            f(static_cast<float*>(data));
        else
            f(static_cast<bf16*>(data));
    }
};

// The log decay of a token in powers of two, and its beta. A decay of 2^-288 is one of zero; sums
// of what is below that would lose the digits of the others.
struct GateView {
    const float *A_log, *dt_bias;
    bool beta_sigmoid, allow_neg_eigval;

    __device__ __forceinline__ float factor(int head) const {
        return A_log == nullptr ? 0.0f : -expf(arch::load_global_readonly(A_log + head));
    }
    __device__ __forceinline__ float bias(int head) const {
        return dt_bias == nullptr ? 0.0f : arch::load_global_readonly(dt_bias + head);
    }
    __device__ __forceinline__ float decay(float g, float factor, float bias) const {
        if (A_log != nullptr) {
            const float x = g + bias;
            g = factor * (x > 20.0f ? x : log1pf(expf(x)));
        }
        return fmaxf(g, -200.0f) * LOG2_E;
    }
    __device__ __forceinline__ float beta(float x) const {
        if (!beta_sigmoid) return x;
        return (allow_neg_eigval ? 2.0f : 1.0f) / (1.0f + expf(-x));
    }
};

// Rounds an accumulator to an operand; a lane's `factor(column)` is that of two columns.
template <any_register_tile To, any_register_tile From>
__device__ __forceinline__ void to_operand(To& to, const From& from) {
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = from.tiles[0][j].data[i];
            to.tiles[0][j].data[i] = pack_pair<typename To::T>(pair.x, pair.y);
        }
    }
}

// Calls f(pair, column, register) for each pair of neighbours in an accumulator's columns, column
// being that of the first.
template <any_register_tile Tile, class F>
__device__ __forceinline__ void for_each_pair(Tile& tile, F f) {
    const int column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f(tile.tiles[0][j].data[i], 16 * j + 8 * (i / 2) + column, i);
    }
}

using linear_attention::discard;
using linear_attention::rematerialized;

// A lane, and a warp of a warpgroup, computed again as rematerialized() does.
__device__ __forceinline__ int recomputed_lane() {
    uint32_t lane = uint32_t(laneid());
    arch::pin_register(lane);
    return int(lane);
}
__device__ __forceinline__ int recomputed_warp() {
    uint32_t warp = uint32_t(warpgroup::warpid());
    arch::pin_register(warp);
    return int(warp);
}

// By each warp of a warpgroup, for what the warps have read or written on their own.
__device__ __forceinline__ void signal_by_warp(semaphore& s) {
    arch::sync_warp();
    if (laneid() == 0) arrive(s);
}

// What a token's rows are multiplied by: K S and Q S, U; and the decay of the state, in the first
// element. They lie in memory as DELTA_VECTORS vectors.
enum Factor { OF_KEYS, OF_NEW, OF_STATE, OF_QUERIES };

template <DType dtype, int _key_dim, int _consumers, bool _summary, bool _walk>
struct DeltaKernel {
    using T = type_of<dtype>;
    static constexpr int key_dim = _key_dim, consumers = _consumers;
    // Of what a segment makes of a state, without outputs.
    static constexpr bool summary = _summary;
    // A kernel before has prepared all chunks; one more warpgroup loads them.
    static constexpr bool walk = _walk;
    // One prepares as fast as two consume; one consumer that waits for nobody needs two.
    static constexpr int preparers = walk ? 0 : delta_preparers(consumers);
    static constexpr int warpgroups = consumers + (walk ? 1 : preparers);
    static constexpr int threads = warpgroups * WARPGROUP_THREADS;
    // Of 504 together, 168 for each of three warpgroups.
    static constexpr int consumer_registers = walk ? 240 : consumers == 1 ? 232 : 192;
    static constexpr int producer_registers = 24;
    static constexpr int preparer_registers = consumers == 1 ? 136 : 120;
    static constexpr bool spacious = walk || consumers == 1 || key_dim == 64;
    // Of keys and queries; of what is prepared, which comes later unless it is loaded, too; and of
    // values.
    static constexpr int stages = walk ? delta_walk_stages(consumers) : 4;
    static constexpr int slots = walk ? stages : 2;
    static constexpr int value_slots = walk ? DELTA_WALK_VALUES : 2;

    using key_tile = st<T, CHUNK, key_dim>;
    using value_tile = st<T, CHUNK, VALUES>;
    using square_tile = st<T, CHUNK, CHUNK>;
    using factors = sv<float, DELTA_VECTORS * CHUNK>;
};

// Where chunks lie that a kernel before has prepared: T and P one behind the other, and factors.
template <class K>
struct PreparedChunks {
    template <class Tile>
    using Rows = gl<typename Tile::T, 1, 1, -1, Tile::cols, Tile>;

    Rows<typename K::square_tile> t, p;
    gl<float, 1, 1, -1, K::factors::length, typename K::factors> factors;
    int slots;

    PreparedChunks(const DeltaRuleParams& params)
        : t(static_cast<typename K::T*>(params.prepared.solved), nullptr, nullptr,
            delta_chunks(params.problem) * CHUNK, nullptr),
          p(static_cast<typename K::T*>(params.prepared.scores), nullptr, nullptr,
            delta_chunks(params.problem) * CHUNK, nullptr),
          factors(params.prepared.vectors, nullptr, nullptr, delta_chunks(params.problem), nullptr),
          slots(int(delta_slots(params.problem))) {}
};
struct NoChunks {
    NoChunks() = default;
    NoChunks(const DeltaRuleParams&) {}
};

template <class K>
struct DeltaGlobals {
    using T = typename K::T;
    RowLayout<typename K::key_tile> q, k;
    RowLayout<typename K::value_tile> v, out;
    NumberView<T> g, beta;
    GateView gate;
    DeltaStates initial, final;
    const int32_t* cu_seqlens;
    T* out_rows;  // packed, for what lies behind the last sequence
    int sequences, length, ratio, value_heads, key_dim, value_dim, segments, slices, value_slices;
    float *states, *transitions;  // of segments, see delta_workspace()
    float scale;
    bool l2_norm;
    std::conditional_t<K::walk, PreparedChunks<K>, NoChunks> prepared;
};

// Columns of a block's values, of a segment of a head. Blocks of heads with the same keys are
// neighbours. In a summary the last slices are the columns of the transition: values of zero, and a
// state that begins as the identity.
template <class K>
struct DeltaWork {
    int slice, value_head, n, segment;
    DeltaSequence sequence;
    int head, first_column;
    bool transition;

    __device__ __forceinline__ DeltaWork(const DeltaGlobals<K>& g)
        : slice(int(blockIdx.x) % g.slices),
          value_head(int(blockIdx.x) / g.slices % g.value_heads),
          n(int(blockIdx.x) / g.slices / g.value_heads % g.sequences),
          segment(int(blockIdx.x) / g.slices / g.value_heads / g.sequences),
          sequence(g.cu_seqlens, n, g.length, segment, g.segments) {
        head = value_head / g.ratio;
        transition = K::summary && slice >= g.value_slices;
        first_column = (slice - (transition ? g.value_slices : 0)) * K::consumers * VALUES;
    }
    // What is kept of a segment, in the workspace.
    __device__ __forceinline__ int64_t kept(const DeltaGlobals<K>& g, int of_segment) const {
        return (int64_t(n) * g.value_heads + value_head) * (g.segments - 1) + of_segment;
    }
    // Of the first chunk among those that are prepared.
    __device__ __forceinline__ int first_chunk(const DeltaGlobals<K>& g) const {
        const int batch_head = (g.cu_seqlens != nullptr ? 0 : n) * g.value_heads + value_head;
        return batch_head * g.prepared.slots + sequence.first_slot;
    }
};

// A chunk as the consumers take it.
template <class K>
struct Prepared {
    typename K::square_tile t, p;  // T diag(beta), and P with the scale; zeros above the diagonal
    typename K::factors factors;   // of each token
};

// Of the tokens of a chunk, what depends on the value head and what does not.
struct TokenGates {
    sv<float, CHUNK> sums, beta;
};
struct TokenNorms {
    sv<float, CHUNK> key, query;
};

// What a warpgroup that inverts a matrix has for itself.
struct InverseScratch {
    // Floats from a column to the next one and from a block to the next one: what lanes write at a
    // time, and what they read of two blocks, is in different banks.
    static constexpr int pitch = 20, block = 16 * pitch + 4;
    // Diagonal blocks of 16 x 16, later their inverses, and those below (inverse_sm90.cuh).
    sv<float, 4 * block> diagonal;
    sv<float, 6 * 256> below;
};
// And for chunks in turn: those of the chunk before are still read.
struct PrepareScratch : InverseScratch {
    TokenGates gates[2];
    TokenNorms norms[2];
};

template <class K>
struct DeltaShared {
    struct Stage {
        typename K::key_tile q, k;
    } stages[K::stages];
    typename K::value_tile values[K::consumers][K::value_slots];  // later their outputs
    Prepared<K> prepared[K::slots];
    std::conditional_t<K::walk, NoChunks, PrepareScratch> scratch[K::walk ? 1 : K::preparers];
    semaphore loaded[K::stages], values_loaded[K::consumers][K::value_slots];
    semaphore full[K::slots], empty[K::slots];

    __device__ __forceinline__ void init() {
        for (auto& s : loaded) init_semaphore(s, 1);
        for (auto& of_consumer : values_loaded) {
            for (auto& s : of_consumer) init_semaphore(s, 1);
        }
        for (auto& s : full) init_semaphore(s, K::walk ? 1 : WARPGROUP_WARPS);
        for (auto& s : empty) init_semaphore(s, K::consumers * WARPGROUP_WARPS);
        arch::mbarrier_init_fence();
    }
};

}  // namespace thunderkittens::recurrent::delta
