// A few tokens of linear attention with a decay per head and token, in one pass over the states: of
// each token S = e^g S + w v k^T, then o = scale S q, in fp32.
//
// The state is all that takes time. A block has 64 columns of the values of one head, and two
// threads for each of up to 64 or 128 keys. Everything that it reads is on its way before it waits
// for any of it: its part of the state, 16 bytes a lane and load, operands and gates, which go into
// shared memory, and what the output is made of. Tokens change the state in registers, so that it
// is read and written once per call. A row of the state in memory is along
//   the keys     rows are values: a row's output is a sum over the lanes that have it
//   the values   rows are keys: the output is a sum over the rows, of lanes and then of warps
// The rows of a thread are neighbours. The portable kernel does the same.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/recurrent/common/chunks.cuh"
#include "csrc/recurrent/common/decode.h"
#include "csrc/recurrent/common/state_words.cuh"

namespace thunderkittens::recurrent {

struct DecodeGlobals {
    DecodeOperand q, k, v, z;
    DecodeState state;
    GateOperands gates;
    HeadOperand skip;
    float scale;
    const int* indices;
    void* out;
    int tokens, key_dim, value_dim;
    gemm::Divisor slices, heads, heads_per_group;
};

// `parts` of the output, one of each warp where rows are keys.
template <int parts>
struct DecodeShared {
    sv<float, MAX_DECODE_TOKENS * MAX_KEY_DIM> query, key;
    sv<float, MAX_DECODE_TOKENS * VALUES> value, z;
    sv<float, VALUES> skip;
    sv<float, MAX_DECODE_TOKENS> weight, decay;
    sv<float, parts * MAX_DECODE_TOKENS * VALUES> out;
};

template <class T>
__device__ __forceinline__ T element_in_memory(const DecodeOperand& x, int b, int head, int row,
                                               int column) {
    const T* from = static_cast<const T*>(x.data) + (b * x.batch_stride + head * x.head_stride +
                                                     row * x.row_stride + column * x.column_stride);
    return arch::load_global_readonly(from);
}

// A block with so many keys, of which it may have fewer.
template <class S, bool _keys_first, int _keys>
struct DecodeTypes {
    using state_type = S;
    static constexpr bool keys_first = _keys_first;
    static constexpr int keys = _keys, threads = decode_threads(keys);
    static constexpr int columns = keys_first ? VALUES : keys;  // of a row of the state in memory
    static constexpr int elements = StateWord<S>::elements, lanes = columns / elements;
    static constexpr int rows = keys_first ? keys : VALUES;
    static constexpr int rows_of_thread = rows * lanes / threads;
    static constexpr int warps = threads / WARP_THREADS, parts = keys_first ? warps : 1;
    // Numbers of a state that a thread has: 32.
    static_assert(rows_of_thread * elements == 32 && lanes <= WARP_THREADS);
    using Shared = DecodeShared<parts>;
    static_assert(sizeof(Shared) + 1024 <= decode_bytes(keys_first, keys));
};
// 64 registers a thread; in the portable kernel 80.
template <int keys, bool portable>
constexpr int DECODE_BLOCKS = (portable ? 768 : 1024) / decode_threads(keys);

struct DecodeWork {
    int b, head, group, first_value;

    __device__ __forceinline__ DecodeWork(const DecodeGlobals& g) {
        const uint32_t batch_head = g.slices.divide(blockIdx.x);
        first_value = int(blockIdx.x - batch_head * g.slices.value) * VALUES;
        b = int(g.heads.divide(batch_head));
        head = int(batch_head - uint32_t(b) * g.heads.value);
        group = int(g.heads_per_group.divide(uint32_t(head)));
    }
    template <class T>
    __device__ __forceinline__ T* out(const DecodeGlobals& g) const {
        return static_cast<T*>(g.out) +
               int64_t(b * int(g.heads.value) + head) * g.tokens * g.value_dim;
    }
};

// What a thread loads of the operands, as it is in memory. Of one round, two tokens' keys and
// queries, and four or two tokens' values. What there is not is read as the last of its kind.
template <class T, class K>
struct DecodeOperands {
    static constexpr int early_tokens = 4;  // on their way with everything else
    static constexpr int tokens_of_keys = K::threads / K::keys,
                         tokens_of_values = K::threads / VALUES;
    static constexpr int key_rounds = early_tokens / tokens_of_keys,
                         value_rounds = early_tokens / tokens_of_values;
    T k[key_rounds], q[key_rounds], v[value_rounds], z[value_rounds] = {};

    static __device__ __forceinline__ int key_token(int round) {
        return int(threadIdx.x) / K::keys + round * tokens_of_keys;
    }
    static __device__ __forceinline__ int key_column() { return int(threadIdx.x) % K::keys; }
    static __device__ __forceinline__ int value_token(int round) {
        return int(threadIdx.x) / VALUES + round * tokens_of_values;
    }
    static __device__ __forceinline__ int value_column() { return int(threadIdx.x) % VALUES; }

    static __device__ __forceinline__ T of_keys(const DecodeGlobals& g, const DecodeOperand& x,
                                                const DecodeWork& work, int round) {
        return element_in_memory<T>(x, work.b, work.group, ::min(key_token(round), g.tokens - 1),
                                    ::min(key_column(), g.key_dim - 1));
    }
    static __device__ __forceinline__ T of_values(const DecodeGlobals& g, const DecodeOperand& x,
                                                  const DecodeWork& work, int round) {
        return element_in_memory<T>(x, work.b, work.head, ::min(value_token(round), g.tokens - 1),
                                    ::min(work.first_value + value_column(), g.value_dim - 1));
    }
    __device__ __forceinline__ void load(const DecodeGlobals& g, const DecodeWork& work) {
#pragma unroll
        for (int round = 0; round < key_rounds; ++round) {
            if (round > 0 && round * tokens_of_keys >= g.tokens) continue;
            k[round] = of_keys(g, g.k, work, round);
            q[round] = of_keys(g, g.q, work, round);
        }
#pragma unroll
        for (int round = 0; round < value_rounds; ++round) {
            if (round > 0 && round * tokens_of_values >= g.tokens) continue;
            v[round] = of_values(g, g.v, work, round);
            if (g.z.data != nullptr) z[round] = of_values(g, g.z, work, round);
        }
    }
    __device__ __forceinline__ void keep(const DecodeGlobals& g, const DecodeWork& work,
                                         typename K::Shared& shared) const {
#pragma unroll 1
        for (int round = key_rounds; round * tokens_of_keys < g.tokens; ++round)
            set_keys(g, shared, round, of_keys(g, g.k, work, round), of_keys(g, g.q, work, round));
#pragma unroll
        for (int round = 0; round < key_rounds; ++round)
            set_keys(g, shared, round, k[round], q[round]);
#pragma unroll 1
        for (int round = value_rounds; round * tokens_of_values < g.tokens; ++round) {
            T gate = v[0];
            if (g.z.data != nullptr) gate = of_values(g, g.z, work, round);
            set_values(g, work, shared, round, of_values(g, g.v, work, round), gate);
        }
#pragma unroll
        for (int round = 0; round < value_rounds; ++round)
            set_values(g, work, shared, round, v[round], z[round]);
    }

  private:
    // Columns that there are not are zeros.
    static __device__ __forceinline__ void set_keys(const DecodeGlobals& g,
                                                    typename K::Shared& shared, int round, T k,
                                                    T q) {
        if (key_token(round) >= g.tokens) return;
        const int to = key_token(round) * K::keys + key_column();
        const bool exists = key_column() < g.key_dim;
        shared.key.set(to, exists ? float(k) : 0.0f);
        shared.query.set(to, exists ? float(q) : 0.0f);
    }
    static __device__ __forceinline__ void set_values(const DecodeGlobals& g,
                                                      const DecodeWork& work,
                                                      typename K::Shared& shared, int round, T v,
                                                      T z) {
        if (value_token(round) >= g.tokens) return;
        const int to = value_token(round) * VALUES + value_column();
        const bool exists = work.first_value + value_column() < g.value_dim;
        shared.value.set(to, exists ? float(v) : 0.0f);
        if (g.z.data != nullptr) shared.z.set(to, float(z));
    }
};

// By the threads that have a token each.
template <class T, class Shared>
__device__ __forceinline__ void prepare_gates(const DecodeGlobals& g, const DecodeWork& work,
                                              Shared& shared) {
    const int token = static_cast<int>(threadIdx.x);
    if (token >= g.tokens) return;
    const HeadGates head = head_gates<T>(g.gates, work.head);
    const TokenOperand& given = g.gates.dt.data != nullptr ? g.gates.dt : g.gates.g;
    const float raw = given.data != nullptr ? element<T>(given, work.b, work.head, token) : 0.0f;
    const TokenGate gate = token_gate(g.gates, head, raw);
    shared.weight.set(token, gate.weight);
    shared.decay.set(token, arch::exp2_approx(gate.decay));
}

// (scale o + skip v) silu(z), of the sums of the parts.
template <class T, class K>
__device__ __forceinline__ void store_tokens(const DecodeGlobals& g, typename K::Shared& shared,
                                             const DecodeWork& work) {
    for (int i = static_cast<int>(threadIdx.x); i < g.tokens * VALUES; i += K::threads) {
        const int column = work.first_value + i % VALUES;
        if (column >= g.value_dim) continue;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < K::parts; ++part)
            sum += shared.out.get(part * MAX_DECODE_TOKENS * VALUES + i);
        sum *= g.scale;
        if (g.skip.data != nullptr)
            sum = fmaf(shared.skip.get(i % VALUES), shared.value.get(i), sum);
        if (g.z.data != nullptr) sum *= silu(shared.z.get(i));
        arch::store_global(work.out<T>(g) + int64_t(i / VALUES) * g.value_dim + column, T(sum));
    }
}

template <class T, class K>
__device__ __forceinline__ void clear_outputs(const DecodeGlobals& g, const DecodeWork& work) {
    for (int i = static_cast<int>(threadIdx.x); i < g.tokens * VALUES; i += K::threads) {
        const int column = work.first_value + i % VALUES;
        if (column < g.value_dim)
            arch::store_global(work.out<T>(g) + int64_t(i / VALUES) * g.value_dim + column,
                               T(0.0f));
    }
}

template <class K>
using DecodeNumbers = float[K::rows_of_thread][K::elements];

// One token, of the rows from `row` on and the columns from `column` on: the state changes, and the
// block's, or the warp's, part of the output is left in shared memory.
template <class K>
__device__ __forceinline__ void decode_token(typename K::Shared& shared, int token,
                                             DecodeNumbers<K>& state, int row, int column) {
    constexpr int E = K::elements, rows = K::rows_of_thread;
    const float decay = shared.decay.get(token), weight = shared.weight.get(token);
    if constexpr (K::keys_first) {
        float values[E], sums[E] = {}, keys[rows], queries[rows];
        load_row(values, shared.value, token * VALUES + column);
        load_row(keys, shared.key, token * K::keys + row);
        load_row(queries, shared.query, token * K::keys + row);
#pragma unroll
        for (int i = 0; i < E; ++i) values[i] *= weight;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
#pragma unroll
            for (int i = 0; i < E; ++i) {
                state[r][i] = fmaf(keys[r], values[i], decay * state[r][i]);
                sums[i] = fmaf(queries[r], state[r][i], sums[i]);
            }
        }
        // Two sums are left to each of the lanes with the same columns.
        scatter_sums<WARP_THREADS / 2, K::lanes>(sums);
        static_assert(E * K::lanes == 2 * WARP_THREADS);
        const int first = (warpid() * MAX_DECODE_TOKENS + token) * VALUES + column;
        arch::store_shared(shared.out.address_of(first + laneid() / K::lanes * 2),
                           float2{sums[0], sums[1]});
    } else {
        float keys[E], queries[E], values[rows], sums[rows] = {};
        load_row(keys, shared.key, token * K::keys + column);
        load_row(queries, shared.query, token * K::keys + column);
        load_row(values, shared.value, token * VALUES + row);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const float value = weight * values[r];
#pragma unroll
            for (int i = 0; i < E; ++i) {
                state[r][i] = fmaf(keys[i], value, decay * state[r][i]);
                sums[r] = fmaf(queries[i], state[r][i], sums[r]);
            }
        }
        scatter_sums<K::lanes / 2, 1>(sums);
        constexpr int lanes_of_sum = K::lanes / rows;
        if (laneid() % lanes_of_sum == 0)
            shared.out.set(token * VALUES + row + laneid() % K::lanes / lanes_of_sum, sums[0]);
    }
}

template <class T, class K>
__device__ __forceinline__ void decode_tokens(const DecodeGlobals& g) {
    using S = typename K::state_type;
    using Word = StateWord<S>;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const DecodeWork work(g);
    const int thread = static_cast<int>(threadIdx.x);
    const int slot = g.indices == nullptr ? work.b : arch::load_global_readonly(g.indices + work.b);
    if (slot < 0 || slot >= g.state.slots) {
        clear_outputs<T, K>(g, work);
        return;
    }
    // Rows and columns of the state in memory, of the block's part. All are multiples of eight: a
    // thread's rows exist, or none of them does.
    const int values = ::min(g.value_dim - work.first_value, VALUES);
    const int row = thread / K::lanes * K::rows_of_thread, column = thread % K::lanes * K::elements;
    const bool exists =
        row < (K::keys_first ? g.key_dim : values) && column < (K::keys_first ? values : g.key_dim);
    S* const data = static_cast<S*>(g.state.data) + slot * g.state.slot_stride +
                    work.head * g.state.head_stride +
                    ((K::keys_first ? row : work.first_value + row) * g.state.row_stride +
                     (K::keys_first ? work.first_value + column : column));
    uint4 words[K::rows_of_thread] = {};
    if (exists) {
#pragma unroll
        for (int r = 0; r < K::rows_of_thread; ++r)
            words[r] = Word::load(data + r * g.state.row_stride);
    }
    DecodeOperands<T, K> operands;
    operands.load(g, work);
    // (A number of each column, of as many threads as there are.)
    const float skip = element<T>(g.skip, work.head,
                                  ::min(work.first_value + thread % VALUES, g.value_dim - 1), 0.0f);
    prepare_gates<T>(g, work, shared);
    if (thread < VALUES) shared.skip.set(thread, skip);
    operands.keep(g, work, shared);
    arch::sync_block();

    DecodeNumbers<K> state;
#pragma unroll
    for (int r = 0; r < K::rows_of_thread; ++r) Word::unpack(state[r], words[r]);
    const int64_t row_stride = computed_again(g.state.row_stride);
#pragma unroll 1
    for (int token = 0; token < g.tokens; ++token)
        decode_token<K>(shared, token, state, row, column);
    if (exists) {
#pragma unroll
        for (int r = 0; r < K::rows_of_thread; ++r) Word::store(data + r * row_stride, state[r]);
    }
    arch::sync_block();
    store_tokens<T, K>(g, shared, work);
}

// Where keys come first, blocks of few keys have half of the threads.
template <class T, class S, bool keys_first, int keys, bool portable>
__global__
__launch_bounds__(decode_threads(keys), DECODE_BLOCKS<keys, portable>) void recurrent_decode_kernel(
    const __grid_constant__ DecodeGlobals g) {
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (keys_first && g.key_dim <= 64)
        decode_tokens<T, DecodeTypes<S, keys_first, 64>>(g);
    else
        decode_tokens<T, DecodeTypes<S, keys_first, keys>>(g);
}

template <DType dtype, bool wide_state, bool keys_first, int columns, bool portable>
void launch_decode(const DecodeParams& params, Stream stream) {
    using T = type_of<dtype>;
    using S = std::conditional_t<wide_state, float, T>;
    constexpr int keys = keys_first ? MAX_KEY_DIM : columns;
    const DecodeProblem& p = params.problem;
    const DecodeGlobals globals{.q = params.q,
                                .k = params.k,
                                .v = params.v,
                                .z = params.z,
                                .state = params.state,
                                .gates = params.gates,
                                .skip = params.skip,
                                .scale = params.scale,
                                .indices = params.indices,
                                .out = params.out,
                                .tokens = int(p.tokens),
                                .key_dim = int(p.key_dim),
                                .value_dim = int(p.value_dim),
                                .slices = gemm::Divisor(uint32_t(ceil_div(p.value_dim, VALUES))),
                                .heads = gemm::Divisor(uint32_t(p.heads)),
                                .heads_per_group = gemm::Divisor(uint32_t(p.heads / p.groups))};
    const int of_block = keys_first && p.key_dim <= 64 ? 64 : keys;
    kittens::launch({.dependent = !portable, .blocks_per_sm = DECODE_BLOCKS<keys, portable>},
                    recurrent_decode_kernel<T, S, keys_first, keys, portable>,
                    dim3(unsigned(decode_blocks(p))), dim3(unsigned(decode_threads(of_block))),
                    dim3(1), size_t(decode_bytes(keys_first, of_block)), stream, globals);
}
template <DType dtype, bool wide_state, bool keys_first, int columns>
void launch_recurrent_decode(const DecodeParams& params, Stream stream) {
    launch_decode<dtype, wide_state, keys_first, columns, false>(params, stream);
}

}  // namespace thunderkittens::recurrent
