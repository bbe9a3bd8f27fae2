// A few tokens of linear attention with a decay per head and token, in one pass over the states: of
// each token S = e^g S + w v k^T, then o = scale S q, in fp32.
//
// The state is all that takes time. A block has 64 columns of the values of one head, all of whose
// state it has on its way from memory at once, 16 bytes a lane and load; operands and gates come
// meanwhile, into shared memory. Tokens change the state in registers, so that it is read and
// written once per call. A row of the state in memory is along
//   the keys     rows are values: a row's output is a sum over the lanes that have it
//   the values   rows are keys: the output is a sum over the rows, of lanes and then of warps
// The portable kernel does the same.
#pragma once

#include "csrc/recurrent/common/chunks.cuh"
#include "csrc/recurrent/common/decode.h"

namespace thunderkittens::recurrent {

struct DecodeGlobals {
    DecodeOperand q, k, v, z;
    DecodeState state;
    GateOperands gates;
    HeadOperand skip;
    float scale;
    const int* indices;
    void* out;
    int heads, heads_per_group, tokens, key_dim, value_dim, slices;
};

struct DecodeShared {
    sv<float, MAX_DECODE_TOKENS * MAX_KEY_DIM> query, key;
    sv<float, MAX_DECODE_TOKENS * VALUES> value;
    sv<float, MAX_DECODE_TOKENS> weight, decay;
    // Of the output, of each warp where rows are keys.
    sv<float, DECODE_THREADS / WARP_THREADS * MAX_DECODE_TOKENS * VALUES> out;
};

template <class T>
__device__ __forceinline__ float element(const DecodeOperand& x, int b, int head, int row,
                                         int column) {
    const T* from = static_cast<const T*>(x.data) + (b * x.batch_stride + head * x.head_stride +
                                                     row * x.row_stride + column * x.column_stride);
    return float(arch::load_global(from));
}

// 16 bytes of a state.
template <class S>
struct StateWord {
    static constexpr int elements = 16 / int(sizeof(S));
    float x[elements];

    __device__ __forceinline__ void load(const S* from) {
        if constexpr (std::is_same_v<S, float>) {
            const float4 word = arch::load_global(reinterpret_cast<const float4*>(from));
            x[0] = word.x, x[1] = word.y, x[2] = word.z, x[3] = word.w;
        } else {
            const uint4 word = arch::load_global(reinterpret_cast<const uint4*>(from));
            const auto* pairs = reinterpret_cast<const packed_type<S>*>(&word);
#pragma unroll
            for (int i = 0; i < elements / 2; ++i) {
                const float2 pair = unpack_pair<S>(pairs[i]);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            }
        }
    }
    __device__ __forceinline__ void store(S* to) const {
        if constexpr (std::is_same_v<S, float>) {
            arch::store_global(reinterpret_cast<float4*>(to), float4{x[0], x[1], x[2], x[3]});
        } else {
            uint4 word;
            auto* words = reinterpret_cast<uint32_t*>(&word);
#pragma unroll
            for (int i = 0; i < elements / 2; ++i)
                words[i] = arch::bit_cast<uint32_t>(pack_pair<S>(x[2 * i], x[2 * i + 1]));
            arch::store_global(reinterpret_cast<uint4*>(to), word);
        }
    }
};

template <class S, bool _keys_first, int _columns>
struct DecodeTypes {
    using state_type = S;
    static constexpr bool keys_first = _keys_first;
    static constexpr int columns = _columns;
    static constexpr int elements = StateWord<S>::elements, lanes = columns / elements;
    static constexpr int rows = keys_first ? MAX_KEY_DIM : VALUES;
    static constexpr int rows_at_once = DECODE_THREADS / lanes, passes = rows / rows_at_once;
    static_assert(rows % rows_at_once == 0 && lanes <= WARP_THREADS);
};

// Neighbouring numbers of a vector in shared memory.
template <int count, class Vector>
__device__ __forceinline__ void load_row(float (&to)[count], const Vector& from, int first) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        const auto x = arch::load_shared<float4>(from.address_of(first + i));
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}

struct DecodeWork {
    int b, head, first_value;

    __device__ __forceinline__ DecodeWork(const DecodeGlobals& g) {
        int index = static_cast<int>(blockIdx.x);
        first_value = index % g.slices * VALUES;
        index /= g.slices;
        head = index % g.heads;
        b = index / g.heads;
    }
};

template <class T>
__device__ __forceinline__ void load_tokens(const DecodeGlobals& g, DecodeShared& shared,
                                            const DecodeWork& work) {
    const int thread = static_cast<int>(threadIdx.x), group = work.head / g.heads_per_group;
    for (int i = thread; i < g.tokens * MAX_KEY_DIM; i += DECODE_THREADS) {
        const int token = i / MAX_KEY_DIM, column = i % MAX_KEY_DIM;
        const bool exists = column < g.key_dim;
        shared.query.set(i, exists ? element<T>(g.q, work.b, group, token, column) : 0.0f);
        shared.key.set(i, exists ? element<T>(g.k, work.b, group, token, column) : 0.0f);
    }
    for (int i = thread; i < g.tokens * VALUES; i += DECODE_THREADS) {
        const int column = work.first_value + i % VALUES;
        const bool exists = column < g.value_dim;
        shared.value.set(i, exists ? element<T>(g.v, work.b, work.head, i / VALUES, column) : 0.0f);
    }
    if (thread < g.tokens) {
        const TokenOperand& given = g.gates.dt.data != nullptr ? g.gates.dt : g.gates.g;
        const float raw =
            given.data != nullptr ? element<T>(given, work.b, work.head, thread) : 0.0f;
        const TokenGate gate = token_gate(g.gates, head_gates<T>(g.gates, work.head), raw);
        shared.weight.set(thread, gate.weight);
        shared.decay.set(thread, arch::exp2_approx(gate.decay));
    }
}

// (scale o + skip v) silu(z), of the sums of `parts` warps.
template <class T>
__device__ __forceinline__ void store_tokens(const DecodeGlobals& g, DecodeShared& shared,
                                             const DecodeWork& work, int parts) {
    T* out =
        static_cast<T*>(g.out) + int64_t(work.b * g.heads + work.head) * g.tokens * g.value_dim;
    for (int i = static_cast<int>(threadIdx.x); i < g.tokens * VALUES; i += DECODE_THREADS) {
        const int token = i / VALUES, column = work.first_value + i % VALUES;
        if (column >= g.value_dim) continue;
        float sum = 0.0f;
        for (int part = 0; part < parts; ++part)
            sum += shared.out.get(part * MAX_DECODE_TOKENS * VALUES + i);
        sum *= g.scale;
        if (g.skip.data != nullptr)
            sum = fmaf(element<T>(g.skip, work.head, column, 0.0f), shared.value.get(i), sum);
        if (g.z.data != nullptr) sum *= silu(element<T>(g.z, work.b, work.head, token, column));
        arch::store_global(out + int64_t(token) * g.value_dim + column, T(sum));
    }
}

template <class T, class K>
__device__ __forceinline__ void decode_tokens(const DecodeGlobals& g) {
    using S = typename K::state_type;
    constexpr int E = K::elements;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DecodeShared>();
    const DecodeWork work(g);
    const int thread = static_cast<int>(threadIdx.x);
    const int slot = g.indices == nullptr ? work.b : arch::load_global(g.indices + work.b);
    if (slot < 0 || slot >= g.state.slots) {
        T* out =
            static_cast<T*>(g.out) + int64_t(work.b * g.heads + work.head) * g.tokens * g.value_dim;
        for (int i = thread; i < g.tokens * VALUES; i += DECODE_THREADS) {
            const int column = work.first_value + i % VALUES;
            if (column < g.value_dim)
                arch::store_global(out + int64_t(i / VALUES) * g.value_dim + column, T(0.0f));
        }
        return;
    }
    // Rows and columns of the state in memory, of the block's part.
    const int row_count = K::keys_first ? g.key_dim : ::min(g.value_dim - work.first_value, VALUES);
    const int column_count =
        K::keys_first ? ::min(g.value_dim - work.first_value, VALUES) : g.key_dim;
    const int first_row = thread / K::lanes, column = E * (thread % K::lanes);
    S* state = static_cast<S*>(g.state.data) + slot * g.state.slot_stride +
               work.head * g.state.head_stride +
               (K::keys_first ? int64_t(work.first_value) : work.first_value * g.state.row_stride) +
               column;
    StateWord<S> words[K::passes] = {};
#pragma unroll
    for (int pass = 0; pass < K::passes; ++pass) {
        const int row = first_row + pass * K::rows_at_once;
        if (row < row_count && column < column_count)
            words[pass].load(state + row * g.state.row_stride);
    }
    load_tokens<T>(g, shared, work);
    arch::sync_block();

#pragma unroll 1
    for (int token = 0; token < g.tokens; ++token) {
        const float decay = shared.decay.get(token), weight = shared.weight.get(token);
        if constexpr (K::keys_first) {
            float values[E], sums[E] = {};
            load_row(values, shared.value, token * VALUES + column);
#pragma unroll
            for (int i = 0; i < E; ++i) values[i] *= weight;
#pragma unroll
            for (int pass = 0; pass < K::passes; ++pass) {
                const int row = token * MAX_KEY_DIM + first_row + pass * K::rows_at_once;
                const float key = shared.key.get(row), query = shared.query.get(row);
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    float& x = words[pass].x[i];
                    x = fmaf(decay, x, key * values[i]);
                    sums[i] = fmaf(query, x, sums[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < E; ++i) {
#pragma unroll
                for (int distance = K::lanes; distance < WARP_THREADS; distance *= 2)
                    sums[i] += arch::shuffle_xor(sums[i], distance);
            }
            if (laneid() < K::lanes) {
                const int first = (warpid() * MAX_DECODE_TOKENS + token) * VALUES + column;
#pragma unroll
                for (int i = 0; i < E; ++i) shared.out.set(first + i, sums[i]);
            }
        } else {
            float keys[E], queries[E];
            load_row(keys, shared.key, token * MAX_KEY_DIM + column);
            load_row(queries, shared.query, token * MAX_KEY_DIM + column);
#pragma unroll
            for (int pass = 0; pass < K::passes; ++pass) {
                const int row = token * VALUES + first_row + pass * K::rows_at_once;
                const float value = weight * shared.value.get(row);
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    float& x = words[pass].x[i];
                    x = fmaf(decay, x, value * keys[i]);
                    sum = fmaf(queries[i], x, sum);
                }
#pragma unroll
                for (int distance = K::lanes / 2; distance > 0; distance /= 2)
                    sum += arch::shuffle_xor(sum, distance);
                if (laneid() % K::lanes == 0) shared.out.set(row, sum);
            }
        }
    }
#pragma unroll
    for (int pass = 0; pass < K::passes; ++pass) {
        const int row = first_row + pass * K::rows_at_once;
        if (row < row_count && column < column_count)
            words[pass].store(state + row * g.state.row_stride);
    }
    arch::sync_block();
    store_tokens<T>(g, shared, work, K::keys_first ? DECODE_THREADS / WARP_THREADS : 1);
}

template <class T, class K, bool portable>
__global__ __launch_bounds__(DECODE_THREADS, DECODE_BLOCKS_PER_SM) void recurrent_decode_kernel(
    const __grid_constant__ DecodeGlobals g) {
    decode_tokens<T, K>(g);
}

template <DType dtype, bool wide_state, bool keys_first, int columns, bool portable>
void launch_decode(const DecodeParams& params, Stream stream) {
    using T = type_of<dtype>;
    using K = DecodeTypes<std::conditional_t<wide_state, float, T>, keys_first, columns>;
    static_assert(sizeof(DecodeShared) + 1024 <= DECODE_BYTES);
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
                                .heads = int(p.heads),
                                .heads_per_group = int(p.heads / p.groups),
                                .tokens = int(p.tokens),
                                .key_dim = int(p.key_dim),
                                .value_dim = int(p.value_dim),
                                .slices = int(ceil_div(p.value_dim, VALUES))};
    kittens::launch({.blocks_per_sm = DECODE_BLOCKS_PER_SM},
                    recurrent_decode_kernel<T, K, portable>, dim3(unsigned(decode_blocks(p))),
                    dim3(DECODE_THREADS), dim3(1), DECODE_BYTES, stream, globals);
}
template <DType dtype, bool wide_state, bool keys_first, int columns>
void launch_recurrent_decode(const DecodeParams& params, Stream stream) {
    launch_decode<dtype, wide_state, keys_first, columns, false>(params, stream);
}

}  // namespace thunderkittens::recurrent
