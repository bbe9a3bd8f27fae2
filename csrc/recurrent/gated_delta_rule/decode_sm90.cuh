// Up to eight tokens of the gated delta rule per sequence, in one pass over the states: all in
// fp32. With a = exp(g), of a state S in memory and the first token
//   u = beta (v - a S^T k),   o = scale (a S^T q + (k.q) u),   S <- a S + k u^T
// so that both sums come from the old state, in one round over what a thread holds of it.
//
// The state is all that takes time. A block has 128 threads, each of which keeps eight vectors of
// 16 bytes in registers, all loaded before the first is used, while tokens come and go. Where
// values are adjacent in memory, eight lanes have a line of 128 bytes of a key's row, and the sums
// go over lanes and warps, by a barrier per token. Where keys are, a value's row lies in one warp.
// The portable kernel does the same.
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode.h"
#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int DECODE_VECTORS = 8, DECODE_WARPS = DELTA_DECODE_THREADS / WARP_THREADS;
constexpr int DECODE_TOKENS = int(DELTA_MAX_TOKENS), DECODE_KEYS = int(DELTA_MAX_KEY_DIM);

template <class T>
struct ElementView {
    const T* data;
    int64_t batch_stride, head_stride, row_stride, column_stride;

    ElementView(const DeltaElements& x)
        : data(static_cast<const T*>(x.data)),
          batch_stride(x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride),
          column_stride(x.column_stride) {}
    __device__ __forceinline__ float at(int b, int head, int row, int column) const {
        return convert<float>(
            arch::load_global_readonly(data + (b * batch_stride + head * head_stride +
                                               row * row_stride + column * column_stride)));
    }
};

template <class T>
struct DecodeGlobals {
    ElementView<T> q, k, v;
    NumberView<T> g, beta;
    GateView gate;
    DeltaStates state;
    const int32_t* indices;
    int64_t slots;
    T* out;
    int heads, value_heads, length, key_dim, value_dim, slices;
    float scale;
    bool l2_norm;
};

// The tokens, and the warps' parts of the sums with the key and the query, of every other token.
struct DecodeShared {
    sv<float, DECODE_TOKENS * DECODE_KEYS> keys, queries;
    sv<float, DECODE_TOKENS> products, decays, betas;
    sv<float, 2 * DECODE_WARPS * 2 * 64> sums;
};

// 16 bytes of a state in fp32.
template <class S>
struct StateVector {
    static constexpr int count = 16 / int(sizeof(S));
    float x[count];

    __device__ __forceinline__ void load(const S* from) {
        const auto words = arch::load_global(reinterpret_cast<const uint4*>(from));
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<S, float>) {
                x[i] = arch::bit_cast<float>(w[i]);
            } else {
                const float2 two = unpack_pair<S>(arch::bit_cast<packed_type<S>>(w[i]));
                x[2 * i] = two.x, x[2 * i + 1] = two.y;
            }
        }
    }
    __device__ __forceinline__ void store(S* to) const {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<S, float>)
                w[i] = arch::bit_cast<uint32_t>(x[i]);
            else
                w[i] = arch::bit_cast<uint32_t>(pack_pair<S>(x[2 * i], x[2 * i + 1]));
        }
        arch::store_global(reinterpret_cast<uint4*>(to), uint4{w[0], w[1], w[2], w[3]});
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& e : x) e = 0.0f;
    }
};

__device__ __forceinline__ float decode_warp_sum(float x) {
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) x += arch::shuffle_xor(x, d);
    return x;
}

// How the vectors of a block's part of a state lie: values first to `values` behind, of all keys.
template <class S, bool keys_inner>
struct DecodePlace {
    static constexpr int vector = 16 / int(sizeof(S));
    // Of a warp's load: lanes along a row of memory, which are neighbours, and rows.
    int lanes, rows, inner, row;

    __device__ __forceinline__ explicit DecodePlace(int key_dim) {
        lanes = keys_inner ? (key_dim <= 64 ? 64 : 128) / vector : 8;
        rows = WARP_THREADS / lanes;
        inner = laneid() % lanes * vector;
        row = int(threadIdx.x) / WARP_THREADS * rows + laneid() / lanes;
    }
    __host__ __device__ static constexpr int values(int key_dim) {
        if (!keys_inner) return 8 * vector;
        const int lanes = (key_dim <= 64 ? 64 : 128) / vector;
        return DECODE_VECTORS * DELTA_DECODE_THREADS / lanes;
    }
    // The i-th vector's row.
    __device__ __forceinline__ int row_of(int i) const { return row + i * DECODE_WARPS * rows; }
};

template <class T>
__device__ __forceinline__ void prepare_tokens(const DecodeGlobals<T>& g, DecodeShared& shared,
                                               int b, int value_head) {
    const int head = value_head / (g.value_heads / g.heads);
    for (int t = int(threadIdx.x) / WARP_THREADS; t < g.length; t += DECODE_WARPS) {
        float k[DECODE_KEYS / WARP_THREADS], q[DECODE_KEYS / WARP_THREADS];
        float sum_k = 0.0f, sum_q = 0.0f, product = 0.0f;
#pragma unroll
        for (int i = 0; i < DECODE_KEYS / WARP_THREADS; ++i) {
            const int column = i * WARP_THREADS + laneid();
            const bool exists = column < g.key_dim;
            k[i] = exists ? g.k.at(b, head, t, column) : 0.0f;
            q[i] = exists ? g.q.at(b, head, t, column) : 0.0f;
            sum_k = fmaf(k[i], k[i], sum_k);
            sum_q = fmaf(q[i], q[i], sum_q);
            product = fmaf(q[i], k[i], product);
        }
        float norm_k = 1.0f, norm_q = 1.0f;
        if (g.l2_norm) {
            norm_k = arch::reciprocal_sqrt(decode_warp_sum(sum_k) + DELTA_L2_EPS);
            norm_q = arch::reciprocal_sqrt(decode_warp_sum(sum_q) + DELTA_L2_EPS);
        }
        norm_q *= g.scale;
        product = decode_warp_sum(product) * norm_k * norm_q;
#pragma unroll
        for (int i = 0; i < DECODE_KEYS / WARP_THREADS; ++i) {
            const int column = t * DECODE_KEYS + i * WARP_THREADS + laneid();
            shared.keys.set(column, k[i] * norm_k);
            shared.queries.set(column, q[i] * norm_q);
        }
        if (laneid() == 0) {
            shared.products.set(t, product);
            const float decay = g.gate.decay(g.g.at(b, value_head, t), g.gate.factor(value_head),
                                             g.gate.bias(value_head));
            shared.decays.set(t, exp2f(decay));
            shared.betas.set(t, g.gate.beta(g.beta.at(b, value_head, t)));
        }
    }
}

template <class S>
using DecodeVectors = StateVector<S>[DECODE_VECTORS];

// Values adjacent in memory: a thread has the same columns of eight rows.
template <class T, class S>
__device__ __forceinline__ void decode_values_inner(const DecodeGlobals<T>& g, DecodeShared& shared,
                                                    const DecodePlace<S, false>& place,
                                                    DecodeVectors<S>& state, int batch_head,
                                                    int first_value) {
    constexpr int count = StateVector<S>::count, columns = 8 * count;
    const int b = batch_head / g.value_heads, value_head = batch_head % g.value_heads;
    const int warp = int(threadIdx.x) / WARP_THREADS, value = first_value + place.inner;
#pragma unroll 1
    for (int t = 0; t < g.length; ++t) {
        float with_key[count] = {}, with_query[count] = {};
#pragma unroll
        for (int i = 0; i < DECODE_VECTORS; ++i) {
            const float k = shared.keys.get(t * DECODE_KEYS + place.row_of(i));
            const float q = shared.queries.get(t * DECODE_KEYS + place.row_of(i));
#pragma unroll
            for (int e = 0; e < count; ++e) {
                with_key[e] = fmaf(state[i].x[e], k, with_key[e]);
                with_query[e] = fmaf(state[i].x[e], q, with_query[e]);
            }
        }
        const int buffer = t % 2 * DECODE_WARPS * 2 * columns;
#pragma unroll
        for (int e = 0; e < count; ++e) {
            for (float* x : {&with_key[e], &with_query[e]}) {
                *x += arch::shuffle_xor(*x, 8);
                *x += arch::shuffle_xor(*x, 16);
            }
        }
        if (laneid() < 8) {
#pragma unroll
            for (int e = 0; e < count; ++e) {
                const int to = buffer + warp * 2 * columns + place.inner + e;
                shared.sums.set(to, with_key[e]);
                shared.sums.set(to + columns, with_query[e]);
            }
        }
        arch::sync_block();
        const float decay = shared.decays.get(t), beta = shared.betas.get(t),
                    product = shared.products.get(t);
        float added[count];
#pragma unroll
        for (int e = 0; e < count; ++e) {
            float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll
            for (int w = 0; w < DECODE_WARPS; ++w) {
                const int from = buffer + w * 2 * columns + place.inner + e;
                key_sum += shared.sums.get(from);
                query_sum += shared.sums.get(from + columns);
            }
            const bool exists = value + e < g.value_dim;
            const float v = exists ? g.v.at(b, value_head, t, value + e) : 0.0f;
            added[e] = beta * fmaf(-decay, key_sum, v);
            if (exists && threadIdx.x < 8) {
                T* to = g.out + ((int64_t(batch_head) * g.length + t) * g.value_dim + value + e);
                arch::store_global(to, convert<T>(fmaf(product, added[e], decay * query_sum)));
            }
        }
#pragma unroll
        for (int i = 0; i < DECODE_VECTORS; ++i) {
            const float k = shared.keys.get(t * DECODE_KEYS + place.row_of(i));
#pragma unroll
            for (int e = 0; e < count; ++e)
                state[i].x[e] = fmaf(k, added[e], decay * state[i].x[e]);
        }
    }
}

// Keys adjacent in memory: a thread has the same keys of eight values.
template <class T, class S>
__device__ __forceinline__ void decode_keys_inner(const DecodeGlobals<T>& g, DecodeShared& shared,
                                                  const DecodePlace<S, true>& place,
                                                  DecodeVectors<S>& state, int batch_head,
                                                  int first_value) {
    constexpr int count = StateVector<S>::count;
    const int b = batch_head / g.value_heads, value_head = batch_head % g.value_heads;
#pragma unroll 1
    for (int t = 0; t < g.length; ++t) {
        float k[count], q[count];
#pragma unroll
        for (int e = 0; e < count; ++e) {
            k[e] = shared.keys.get(t * DECODE_KEYS + place.inner + e);
            q[e] = shared.queries.get(t * DECODE_KEYS + place.inner + e);
        }
        const float decay = shared.decays.get(t), beta = shared.betas.get(t),
                    product = shared.products.get(t);
#pragma unroll
        for (int i = 0; i < DECODE_VECTORS; ++i) {
            const int value = first_value + place.row_of(i);
            float with_key = 0.0f, with_query = 0.0f;
#pragma unroll
            for (int e = 0; e < count; ++e) {
                with_key = fmaf(state[i].x[e], k[e], with_key);
                with_query = fmaf(state[i].x[e], q[e], with_query);
            }
            for (int d = place.lanes / 2; d > 0; d /= 2) {
                with_key += arch::shuffle_xor(with_key, d);
                with_query += arch::shuffle_xor(with_query, d);
            }
            const bool exists = value < g.value_dim;
            const float v = exists ? g.v.at(b, value_head, t, value) : 0.0f;
            const float added = beta * fmaf(-decay, with_key, v);
            if (exists && laneid() % place.lanes == 0) {
                T* to = g.out + ((int64_t(batch_head) * g.length + t) * g.value_dim + value);
                arch::store_global(to, convert<T>(fmaf(product, added, decay * with_query)));
            }
#pragma unroll
            for (int e = 0; e < count; ++e)
                state[i].x[e] = fmaf(k[e], added, decay * state[i].x[e]);
        }
    }
}

// A sequence that is skipped.
template <class T>
__device__ __forceinline__ void clear_outputs(const DecodeGlobals<T>& g, int batch_head, int first,
                                              int values) {
    for (int i = int(threadIdx.x); i < g.length * values; i += DELTA_DECODE_THREADS) {
        const int value = first + i % values;
        if (value >= g.value_dim) continue;
        arch::store_global(
            g.out + ((int64_t(batch_head) * g.length + i / values) * g.value_dim + value),
            convert<T>(0.0f));
    }
}

template <class T, bool wide_state, bool keys_inner>
__device__ __forceinline__ void decode_tokens(const DecodeGlobals<T>& g) {
    using S = std::conditional_t<wide_state, float, bf16>;
    using Place = DecodePlace<S, keys_inner>;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DecodeShared>();
    const int batch_head = int(blockIdx.x) / g.slices, b = batch_head / g.value_heads,
              value_head = batch_head % g.value_heads;
    const int values = Place::values(g.key_dim);
    const int first_value = int(blockIdx.x) % g.slices * values;
    const int64_t slot = g.indices == nullptr ? b : arch::load_global_readonly(g.indices + b);
    if (slot < 0 || slot >= g.slots) {
        clear_outputs(g, batch_head, first_value, values);
        return;
    }
    const Place place(g.key_dim);
    const int64_t outer_stride = keys_inner ? g.state.value_stride : g.state.key_stride;
    const int first_inner = keys_inner ? 0 : first_value, first_row = keys_inner ? first_value : 0;
    const int inner_end = keys_inner ? g.key_dim : g.value_dim,
              row_end = keys_inner ? g.value_dim : g.key_dim;
    S* const data = static_cast<S*>(g.state.data) +
                    (slot * g.state.sequence_stride + value_head * g.state.head_stride);
    const auto address = [&](int i) {
        return data + ((first_row + place.row_of(i)) * outer_stride + first_inner + place.inner);
    };
    const auto exists = [&](int i) {
        return first_inner + place.inner < inner_end && first_row + place.row_of(i) < row_end;
    };
    DecodeVectors<S> state;
#pragma unroll
    for (int i = 0; i < DECODE_VECTORS; ++i) {
        if (exists(i))
            state[i].load(address(i));
        else
            state[i].clear();
    }
    prepare_tokens(g, shared, b, value_head);
    arch::sync_block();
    if constexpr (keys_inner)
        decode_keys_inner(g, shared, place, state, batch_head, first_value);
    else
        decode_values_inner(g, shared, place, state, batch_head, first_value);
#pragma unroll
    for (int i = 0; i < DECODE_VECTORS; ++i) {
        if (exists(i)) state[i].store(address(i));
    }
}

template <class T, bool wide_state, bool keys_inner>
__global__ __launch_bounds__(DELTA_DECODE_THREADS) void delta_decode_kernel(
    const __grid_constant__ DecodeGlobals<T> g) {
    decode_tokens<T, wide_state, keys_inner>(g);
}

template <class T, bool wide_state, bool keys_inner>
void launch_decode(void (*kernel)(DecodeGlobals<T>), const DeltaRuleDecodeParams& params,
                   Stream stream) {
    using S = std::conditional_t<wide_state, float, bf16>;
    const DeltaRuleDecodeProblem& p = params.problem;
    const int64_t values = DecodePlace<S, keys_inner>::values(int(p.key_dim));
    const int64_t slices = (p.value_dim + values - 1) / values;
    const DecodeGlobals<T> globals{.q = params.q,
                                   .k = params.k,
                                   .v = params.v,
                                   .g = {params.g, false},
                                   .beta = {params.beta, false},
                                   .gate = {params.gate.A_log, params.gate.dt_bias,
                                            params.gate.beta_sigmoid, params.gate.allow_neg_eigval},
                                   .state = params.state,
                                   .indices = params.indices,
                                   .slots = params.slots,
                                   .out = static_cast<T*>(params.out),
                                   .heads = int(p.heads),
                                   .value_heads = int(p.value_heads),
                                   .length = int(p.length),
                                   .key_dim = int(p.key_dim),
                                   .value_dim = int(p.value_dim),
                                   .slices = int(slices),
                                   .scale = params.scale,
                                   .l2_norm = params.l2_norm};
    kittens::launch(kernel, dim3(unsigned(p.batch * p.value_heads * slices)),
                    dim3(DELTA_DECODE_THREADS), dim3(1), int(sizeof(DecodeShared)) + 1024, stream,
                    globals);
}

}  // namespace thunderkittens::recurrent::delta

namespace thunderkittens::recurrent {

template <DType dtype, bool wide_state, bool keys_inner>
void launch_gated_delta_rule_decode(const DeltaRuleDecodeParams& params, Stream stream) {
    using T = delta::type_of<dtype>;
    delta::launch_decode<T, wide_state, keys_inner>(
        delta::delta_decode_kernel<T, wide_state, keys_inner>, params, stream);
}

}  // namespace thunderkittens::recurrent
