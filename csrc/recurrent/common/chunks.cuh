// What a block of the recurrent kernels works on, and its chunks in memory: operands by TMA, also
// of packed sequences, the log decays and weights of tokens, and the states.
#pragma once

#include <new>

#include "csrc/recurrent/common/recurrent.h"
#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::recurrent {

using namespace kittens;

template <DType dtype>
using type_of = std::conditional_t<dtype == DType::bf16, bf16, half>;

// Rows [begin, begin + length) of one sequence of a batch, or of packed sequences.
struct Sequence {
    int index, b, begin, length;
};

// Tokens of a batch, or of sequences that are packed: then rows behind a sequence's end load as
// zeros, and are not stored.
template <class T, class Tile>
struct TokenLayout {
    using Batch = gl<T, -1, -1, -1, -1, Tile>;
    using Packed = ragged_gl<T, Tile>;
    bool packed;
    union {
        Batch batch;
        Packed ragged;
    };

    TokenLayout(const Operand& x, int64_t batches, int64_t heads, int64_t length, int64_t columns,
                bool _packed)
        : packed(_packed) {
        T* data = static_cast<T*>(const_cast<void*>(x.data));
        if (packed) {
            new (&ragged) Packed(data, int(heads), int(length), int(columns),
                                 ragged_strides{x.head_stride, x.row_stride});
        } else {
            new (&batch) Batch(data, batches, heads, length, columns,
                               gl_strides{x.batch_stride, x.head_stride, x.row_stride});
        }
    }
    __device__ __forceinline__ void load(Tile& to, const Sequence& s, int head, int row, int column,
                                         semaphore& arrived) const {
        if (packed) {
            tma::load_async(to, ragged, ragged_coord{head, s.begin, s.length, row, column},
                            arrived);
        } else {
            tma::load_async(to, batch, elements(s.b, head, row, column), arrived);
        }
    }
    __device__ __forceinline__ void store(const Tile& from, const Sequence& s, int head, int row,
                                          int column) const {
        if (packed) {
            tma::store_async(ragged, from, ragged_coord{head, s.begin, s.length, row, column});
        } else {
            tma::store_async(batch, from, elements(s.b, head, row, column));
        }
    }
};

// An element of a tensor whose dtype is known at run time: fp32, or that of the operands. It is as
// it lies in memory, since a conversion behind the load would wait for it.
__device__ __forceinline__ uint32_t element_bits(const void* data, DType dtype, int64_t at) {
    if (dtype == DType::fp32) return arch::load_global(static_cast<const uint32_t*>(data) + at);
    return arch::load_global(static_cast<const uint16_t*>(data) + at);
}
template <class T>
__device__ __forceinline__ float element_of_bits(DType dtype, uint32_t bits) {
    if (dtype == DType::fp32) return arch::bit_cast<float>(bits);
    return float(arch::bit_cast<T>(uint16_t(bits)));
}
template <class T>
__device__ __forceinline__ float element(const void* data, DType dtype, int64_t at) {
    return element_of_bits<T>(dtype, element_bits(data, dtype, at));
}
template <class T>
__device__ __forceinline__ float element(const HeadOperand& x, int head, int column, float none) {
    if (x.data == nullptr) return none;
    return element<T>(x.data, x.dtype, head * x.head_stride + column * x.column_stride);
}
__device__ __forceinline__ uint32_t element_bits(const TokenOperand& x, int b, int head,
                                                 int64_t row) {
    return element_bits(x.data, x.dtype,
                        b * x.batch_stride + head * x.head_stride + row * x.row_stride);
}
template <class T>
__device__ __forceinline__ float element(const TokenOperand& x, int b, int head, int64_t row) {
    return element_of_bits<T>(x.dtype, element_bits(x, b, head, row));
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

constexpr float LOG2_E = 1.44269504088896340736f;

__device__ __forceinline__ float silu(float x) {
    return x * arch::reciprocal_approx(1.0f + arch::exp2_approx(-LOG2_E * x));
}

// Bounds that leave a NaN what it is.
__device__ __forceinline__ float at_least(float x, float low) { return x < low ? low : x; }
__device__ __forceinline__ float at_most(float x, float high) { return x > high ? high : x; }

// What the gates of a head are made of: what is added to dt, and A log2(e); without dt the log
// decay of every token, base 2.
struct HeadGates {
    float bias = 0.0f, rate = 0.0f;
};
template <class T>
__device__ __forceinline__ HeadGates head_gates(const GateOperands& g, int head) {
    return {element<T>(g.dt_bias, head, 0, 0.0f),
            LOG2_E * element<T>(g.dt.data != nullptr ? g.A : g.decay, head, 0, 0.0f)};
}

// The weight of a token's values, and its log decay, base 2.
struct TokenGate {
    float weight = 0.0f, decay = 0.0f;
};
__device__ __forceinline__ TokenGate token_gate(const GateOperands& g, const HeadGates& head,
                                                float given) {
    TokenGate gate;
    if (g.dt.data != nullptr) {
        const float dt = given + head.bias;
        gate.weight = at_most(at_least(g.softplus ? softplus(dt) : dt, g.dt_min), g.dt_max);
        gate.decay = head.rate * gate.weight;
    } else {
        gate.weight = 1.0f;
        gate.decay = fmaf(LOG2_E, given, head.rate);
    }
    gate.decay = at_least(gate.decay, LEAST_LOG_DECAY * LOG2_E);
    return gate;
}

// Of the tokens of a chunk, for one head. With c the sums of log decays up to and including a
// token, all base 2:
struct ChunkGates {
    sv<float, CHUNK> sum;     // c
    sv<float, CHUNK> key;     // c - log(weight): e^(sum_i - key_j) is the factor of score (i, j)
    sv<float, CHUNK> before;  // e^c, of what comes from before the chunk
    sv<float, CHUNK> after;   // weight e^(c_last - c), of what the token leaves behind the chunk
    sv<float, CHUNK> total;   // c_last and e^c_last
};

// By one warp: a lane has two neighbouring tokens.
__device__ __forceinline__ void store_gates(ChunkGates& to, TokenGate first, TokenGate second) {
    const int lane = laneid();
    float sum = first.decay + second.decay;
#pragma unroll
    for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
        const float other = arch::shuffle(sum, (lane - distance) % WARP_THREADS);
        if (lane >= distance) sum += other;
    }
    const float last = arch::shuffle(sum, WARP_THREADS - 1);
    const float2 sums = {sum - second.decay, sum};
    const auto set = [&](sv<float, CHUNK>& x, float2 pair) {
        arch::store_shared(x.address_of(2 * lane), pair);
    };
    set(to.sum, sums);
    set(to.key,
        {sums.x - arch::log2_approx(first.weight), sums.y - arch::log2_approx(second.weight)});
    set(to.before, {arch::exp2_approx(sums.x), arch::exp2_approx(sums.y)});
    set(to.after, {first.weight * arch::exp2_approx(last - sums.x),
                   second.weight * arch::exp2_approx(last - sums.y)});
    if (lane == 0) set(to.total, {last, arch::exp2_approx(last)});
}

// A segment of a sequence, and the slices of the values that go with a head of q and k.
struct WorkTile {
    Sequence sequence;
    int group, first_slice, segment;
    int begin, end;  // chunks

    __device__ __forceinline__ int chunks() const { return end - begin; }
};

struct WorkTiles {
    const int* cu_seqlens;
    int groups, heads_per_group, slices, segments;  // slices: of a head
    int length;
    int bundles, warpgroups;  // a bundle: slices of the warpgroups of a block

    WorkTiles(const RecurrentProblem& p, const int* _cu_seqlens, int _segments, int _warpgroups)
        : cu_seqlens(_cu_seqlens),
          groups(int(p.groups)),
          heads_per_group(int(p.heads / p.groups)),
          slices(int(slices_of(p))),
          segments(_segments),
          length(int(p.length)),
          bundles(int(ceil_div(slices_of_group(p), _warpgroups))),
          warpgroups(_warpgroups) {}

    __device__ __forceinline__ Sequence sequence(int index) const {
        if (cu_seqlens == nullptr) return {index, index, 0, length};
        const int begin = ::min(::max(arch::load_global(cu_seqlens + index), 0), length);
        const int end = ::min(arch::load_global(cu_seqlens + index + 1), length);
        return {index, 0, begin, ::max(end - begin, 0)};
    }
    __device__ __forceinline__ WorkTile tile(int count) const {
        int index = static_cast<int>(blockIdx.x);
        WorkTile work;
        work.first_slice = index % bundles * warpgroups;
        index /= bundles;
        work.segment = index % count;
        index /= count;
        work.group = index % groups;
        work.sequence = sequence(index / groups);
        const int chunks = (work.sequence.length + CHUNK - 1) / CHUNK;
        const int each = (chunks + segments - 1) / segments;
        work.begin = ::min(work.segment * each, chunks);
        work.end = ::min(work.begin + each, chunks);
        return work;
    }
    __device__ __forceinline__ int64_t all_slices() const {
        return int64_t(groups) * heads_per_group * slices;
    }
    // Of the slices of a group.
    __device__ __forceinline__ int active(const WorkTile& work) const {
        return ::min(warpgroups, heads_per_group * slices - work.first_slice);
    }
};

// The slice of the values that a warpgroup works on.
struct Slice {
    int head, column, index;  // index: among all of the call's, without sequences

    __device__ __forceinline__ Slice(const WorkTiles& tiles, const WorkTile& work, int warpgroup) {
        const int slice = work.first_slice + warpgroup;
        head = work.group * tiles.heads_per_group + slice / tiles.slices;
        column = slice % tiles.slices * VALUES;
        index = work.group * tiles.heads_per_group * tiles.slices + slice;
    }
};

}  // namespace thunderkittens::recurrent
