// What the kernels of the gradients share: tiles, how operands lie in memory, where a slot's
// tokens are, and single numbers of any type.
#pragma once

#include "csrc/linear_attention/common/fragment.cuh"
#include "csrc/recurrent/common/chunks.cuh"
#include "csrc/recurrent/gradient/gradient.h"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::recurrent {

using namespace kittens;
using linear_attention::discard;
using linear_attention::first_thread;
using linear_attention::lane_row;
using linear_attention::pin;
using linear_attention::quad_sum;
using linear_attention::rematerialized;
using linear_attention::scale_rows;
using linear_attention::scale_tile;
using linear_attention::signal;
using linear_attention::signal_by_warp;
using linear_attention::to_operand;
using linear_attention::warp_sum;

template <DType _dtype, int _key_dim>
struct GradientTypes {
    static constexpr DType dtype = _dtype;
    static constexpr int key_dim = _key_dim;
    using T = type_of<_dtype>;
    static constexpr bool in_units = std::is_same_v<T, half>;  // the states in memory
    using key_tile = st<T, CHUNK, key_dim>;                    // of q, k: tokens are rows
    using value_tile = st<T, CHUNK, VALUES>;    // of v and the gradient of the output
    using state_tile = st<T, VALUES, key_dim>;  // a slice of the values are rows
    using state_layout = gl<T, 1, -1, VALUES, key_dim, state_tile>;
    using state = rt_fl<16, key_dim>;
    using square = rt_fl<16, CHUNK>;
    using values = rt_fl<16, VALUES>;
    using operand = rt<T, 16, CHUNK>;
};

// Numbers of the tokens of a chunk of one head, as they lie in memory: cumulative decay and weight;
// gradients of the decay and of the weight.
using TokenVector = sv<float, 2 * CHUNK>;
using TokenNumbers = gl<float, 1, 1, -1, 2 * CHUNK, TokenVector>;

// Tokens of q, k, v and their gradients.
template <class Tile>
using Rows = TokenLayout<typename Tile::T, Tile>;
template <class Tile>
Rows<Tile> rows_of(const Operand& x, const RecurrentProblem& p, int64_t heads, int64_t columns) {
    return Rows<Tile>(x, p.batch, heads, p.length, columns, p.sequences > 0);
}
__device__ __forceinline__ Sequence sequence_of(const SlotTokens& at) {
    return {at.sequence, at.sequence, at.begin, at.length};
}
// The rows of a slot, by one thread.
template <class Tile>
__device__ __forceinline__ void load_rows(Tile& tile, const Rows<Tile>& from, const SlotTokens& at,
                                          int head, int column, semaphore& arrived) {
    from.load(tile, sequence_of(at), head, at.chunk * CHUNK, column, arrived);
}
template <class Tile>
__device__ __forceinline__ void store_rows(const Rows<Tile>& to, const Tile& tile,
                                           const SlotTokens& at, int head, int column) {
    to.store(tile, sequence_of(at), head, at.chunk * CHUNK, column);
}

// Where the sequences are.
struct Sequences {
    const int* cu_seqlens;      // null: a batch
    int count, length, chunks;  // chunks: of a sequence of a batch

    Sequences(const RecurrentParams& params)
        : cu_seqlens(params.cu_seqlens),
          count(int(states_of(params.problem))),
          length(int(params.problem.length)),
          chunks((length + CHUNK - 1) / CHUNK) {}

    __device__ __forceinline__ int bound(int i) const {
        return ::min(::max(arch::load_global_readonly(cu_seqlens + i), 0), length);
    }
    // Begin and length of a sequence.
    __device__ __forceinline__ int2 tokens(int sequence) const {
        if (cu_seqlens == nullptr) return {0, length};
        const int begin = bound(sequence);
        return {begin, ::max(bound(sequence + 1) - begin, 0)};
    }
    __device__ __forceinline__ int first_slot(int sequence, int begin) const {
        return cu_seqlens == nullptr ? sequence * chunks : begin / CHUNK + sequence;
    }
    // What a slot holds.
    __device__ __forceinline__ SlotTokens at(int slot) const {
        if (cu_seqlens == nullptr) return {slot / chunks, 0, length, slot % chunks};
        int low = 0, high = count - 1;  // the last sequence whose first slot is not behind
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_slot(middle, bound(middle)) <= slot)
                low = middle;
            else
                high = middle - 1;
        }
        const int2 sequence = tokens(low);
        const int chunk = slot - first_slot(low, sequence.x);
        if (chunk < 0 || chunk * CHUNK >= sequence.y) return {-1, 0, 0, 0};
        return {low, sequence.x, sequence.y, chunk};
    }
};

__device__ __forceinline__ SlotTokens load_slot(const SlotTokens* table, int slot) {
    const int4 x = arch::load_global(reinterpret_cast<const int4*>(table) + slot);
    return {x.x, x.y, x.z, x.w};
}

// A number of `dtype` at an offset in elements.
__device__ __forceinline__ float load_number(const void* data, DType dtype, int64_t at) {
    if (dtype == DType::fp32) return arch::load_global(static_cast<const float*>(data) + at);
    if (dtype == DType::bf16)
        return convert<float>(arch::load_global(static_cast<const bf16*>(data) + at));
    return convert<float>(arch::load_global(static_cast<const half*>(data) + at));
}
__device__ __forceinline__ void store_number(void* data, DType dtype, int64_t at, float value) {
    if (dtype == DType::fp32)
        arch::store_global(static_cast<float*>(data) + at, value);
    else if (dtype == DType::bf16)
        arch::store_global(static_cast<bf16*>(data) + at, convert<bf16>(value));
    else
        arch::store_global(static_cast<half*>(data) + at, convert<half>(value));
}
// Null gives `otherwise`.
__device__ __forceinline__ float load_head(const HeadOperand& x, int head, int column,
                                           float otherwise) {
    if (x.data == nullptr) return otherwise;
    return load_number(x.data, x.dtype, head * x.head_stride + column * x.column_stride);
}
__device__ __forceinline__ float load_token(const TokenOperand& x, int b, int head, int row) {
    return load_number(x.data, x.dtype,
                       b * x.batch_stride + head * x.head_stride + row * x.row_stride);
}

// What a token's gates are made of, in the end and on the way.
struct GradientGate {
    float log_decay, weight;
    float input;                  // of softplus: dt + dt_bias
    bool clamped, decay_clamped;  // whether d is at a bound, and the log decay is
};
// As reference/ssd.py and reference/linear_attention.py.
__device__ __forceinline__ GradientGate gradient_gate(const GateOperands& g, int b, int head,
                                                      int row) {
    GradientGate gate{0.0f, 1.0f, 0.0f, false, false};
    float log_decay;
    if (g.dt.data != nullptr) {
        gate.input = load_token(g.dt, b, head, row) + load_head(g.dt_bias, head, 0, 0.0f);
        const float d = g.softplus ? softplus(gate.input) : gate.input;
        gate.weight = ::fminf(::fmaxf(d, g.dt_min), g.dt_max);
        gate.clamped = d < g.dt_min || d > g.dt_max;
        log_decay = gate.weight * load_head(g.A, head, 0, 0.0f);
    } else {
        log_decay = load_head(g.decay, head, 0, 0.0f);
        if (g.g.data != nullptr) log_decay += load_token(g.g, b, head, row);
    }
    gate.log_decay = ::fmaxf(log_decay, LEAST_LOG_DECAY);
    gate.decay_clamped = log_decay < LEAST_LOG_DECAY;
    return gate;
}

}  // namespace thunderkittens::recurrent
