// Up to eight tokens of the gated delta rule per sequence, in one pass over the states, in fp32.
// With a = exp(g), of a state S in memory and the first token
//   u = beta (v - a S^T k),   o = scale (a S^T q + (k.q) u),   S <- a S + k u^T
// so that both sums come from the old state, in one round over what a thread holds of it.
//
// The state is all that takes time. A block has 128 threads, each of which keeps eight vectors of
// 16 bytes in registers while tokens come and go. Where values are adjacent in memory they are of
// neighbouring keys, and eight lanes have a line of 128 bytes; where keys are, of neighbouring
// values, and a value's keys lie in one warp. Everything that a block reads is on its way before
// it waits for any of it: operands, the vectors, gates. One barrier is for the tokens, one for each
// of them for the sums over warps where values are adjacent.
// The portable kernel does the same.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/recurrent/common/state_words.cuh"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode.h"
#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int DECODE_VECTORS = 8, DECODE_WARPS = DELTA_DECODE_THREADS / WARP_THREADS;
constexpr int DECODE_TOKENS = int(DELTA_MAX_TOKENS), DECODE_KEYS = int(DELTA_MAX_KEY_DIM);
constexpr int DECODE_KEYS_OF_LANE = DECODE_KEYS / WARP_THREADS;
// Tokens whose values are on their way with everything else.
constexpr int DECODE_EARLY_TOKENS = 4;
static_assert(DECODE_VECTORS == 8, "what a thread has of a state exists, or does not, as a whole");
// Blocks of a multiprocessor: 72 registers a thread for vectors of four numbers (80 in the portable
// kernel), 128 for eight.
template <bool wide_state, bool portable>
constexpr int DECODE_BLOCKS = wide_state ? (portable ? 6 : 7) : 4;

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
    __device__ __forceinline__ T at(int b, int head, int row, int column) const {
        return arch::load_global_readonly(data + (b * batch_stride + head * head_stride +
                                                  row * row_stride + column * column_stride));
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
    int length, key_dim, value_dim;
    gemm::Divisor slices, value_heads, heads_per_head;
    float scale;
    bool l2_norm;
};

template <class S>
using DecodeNumbers = float[DECODE_VECTORS][StateWord<S>::elements];

// How the vectors of a block's part of a state lie in memory: `lanes` of them make a row, which is
// all keys of a value, or so many values of a key. The rows of a thread are neighbours.
template <class S, bool keys_inner, int _lanes>
struct DecodePlace {
    static constexpr int elements = StateWord<S>::elements, lanes = _lanes;
    static constexpr int rows = DECODE_VECTORS * DELTA_DECODE_THREADS / lanes;
    // Of a block, of the values.
    static constexpr int values = keys_inner ? rows : lanes * elements;
    static_assert(keys_inner || rows == DECODE_KEYS);
    int inner, row;

    __device__ __forceinline__ DecodePlace()
        : inner(int(threadIdx.x) % lanes * elements),
          row(int(threadIdx.x) / lanes * DECODE_VECTORS) {}
};
template <class S, bool keys_inner, bool few_keys>
constexpr int DECODE_LANES = keys_inner ? (few_keys ? 64 : 128) / StateWord<S>::elements : 8;

// The tokens, and the warps' parts of the sums with the key and the query, of every other token.
struct DecodeShared {
    sv<float, DECODE_TOKENS * DECODE_KEYS> keys, queries;
    sv<float, DECODE_TOKENS * 128> values;
    sv<float, DECODE_TOKENS> products, decays, betas;
    sv<float, 2 * DECODE_WARPS * 2 * 64> sums;
};

__device__ __forceinline__ float decode_warp_sum(float x) {
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) x += arch::shuffle_xor(x, d);
    return x;
}

// What a block works on.
struct DecodeWork {
    int batch_head, b, value_head, head, first_value;

    template <class T>
    __device__ __forceinline__ DecodeWork(const DecodeGlobals<T>& g, int values) {
        batch_head = int(g.slices.divide(blockIdx.x));
        first_value = (int(blockIdx.x) - batch_head * int(g.slices.value)) * values;
        b = int(g.value_heads.divide(uint32_t(batch_head)));
        value_head = batch_head - b * int(g.value_heads.value);
        head = int(g.heads_per_head.divide(uint32_t(value_head)));
    }
};

// A token's key and query, and its gates, by a warp. Columns that there are not are read as the
// last one.
template <class T>
__device__ __forceinline__ void prepare_token(const DecodeGlobals<T>& g, DecodeWork work, int t,
                                              DecodeShared& shared) {
    T k[DECODE_KEYS_OF_LANE], q[DECODE_KEYS_OF_LANE];
    // Addresses that are kept for the next token would take the registers that states need.
    work.b = computed_again(work.b);
    work.head = computed_again(work.head), work.value_head = computed_again(work.value_head);
#pragma unroll
    for (int i = 0; i < DECODE_KEYS_OF_LANE; ++i) {
        const int column = ::min(i * WARP_THREADS + laneid(), g.key_dim - 1);
        k[i] = g.k.at(work.b, work.head, t, column);
        q[i] = g.q.at(work.b, work.head, t, column);
    }
    // Nothing is made of any of them before all are on their way.
    const bool of_softplus = g.gate.A_log != nullptr;
    const float A_log =
        of_softplus ? arch::load_global_readonly(g.gate.A_log + work.value_head) : 0.0f;
    const float bias = g.gate.bias(work.value_head), given = g.g.at(work.b, work.value_head, t),
                beta = g.beta.at(work.b, work.value_head, t);
    float key[DECODE_KEYS_OF_LANE], query[DECODE_KEYS_OF_LANE];
    float sum_k = 0.0f, sum_q = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < DECODE_KEYS_OF_LANE; ++i) {
        const bool exists = i * WARP_THREADS + laneid() < g.key_dim;
        key[i] = exists ? convert<float>(k[i]) : 0.0f;
        query[i] = exists ? convert<float>(q[i]) : 0.0f;
        sum_k = fmaf(key[i], key[i], sum_k);
        sum_q = fmaf(query[i], query[i], sum_q);
        product = fmaf(query[i], key[i], product);
    }
    float norm_k = 1.0f, norm_q = 1.0f;
    if (g.l2_norm) {
        norm_k = arch::reciprocal_sqrt(decode_warp_sum(sum_k) + DELTA_L2_EPS);
        norm_q = arch::reciprocal_sqrt(decode_warp_sum(sum_q) + DELTA_L2_EPS);
    }
    norm_q *= g.scale;
    product = decode_warp_sum(product) * norm_k * norm_q;
#pragma unroll
    for (int i = 0; i < DECODE_KEYS_OF_LANE; ++i) {
        const int column = t * DECODE_KEYS + i * WARP_THREADS + laneid();
        shared.keys.set(column, key[i] * norm_k);
        shared.queries.set(column, query[i] * norm_q);
    }
    const float decay = exp2f(g.gate.decay(given, -expf(A_log), bias)), rate = g.gate.beta(beta);
    if (laneid() == 0) {
        shared.products.set(t, product);
        shared.decays.set(t, decay);
        shared.betas.set(t, rate);
    }
}

// The values of a block's columns. Columns that there are not are read as the last one.
template <class T, int values>
struct DecodeValues {
    static constexpr int tokens = DELTA_DECODE_THREADS / values;  // of a round
    static constexpr int rounds = DECODE_EARLY_TOKENS / tokens;
    static_assert(rounds >= 1);
    T early[rounds];

    static __device__ __forceinline__ int token(int round) {
        return int(threadIdx.x) / values + round * tokens;
    }
    static __device__ __forceinline__ T at(const DecodeGlobals<T>& g, const DecodeWork& work,
                                           int round) {
        const int column = work.first_value + int(threadIdx.x) % values;
        return g.v.at(work.b, work.value_head, ::min(token(round), g.length - 1),
                      ::min(column, g.value_dim - 1));
    }
    __device__ __forceinline__ void load(const DecodeGlobals<T>& g, const DecodeWork& work) {
#pragma unroll
        for (int round = 0; round < rounds; ++round) early[round] = at(g, work, round);
    }
    __device__ __forceinline__ void keep(const DecodeGlobals<T>& g, const DecodeWork& work,
                                         DecodeShared& shared) const {
#pragma unroll 1
        for (int round = rounds; round * tokens < g.length; ++round)
            set(g, shared, round, at(g, work, round));
#pragma unroll
        for (int round = 0; round < rounds; ++round) set(g, shared, round, early[round]);
    }

  private:
    static __device__ __forceinline__ void set(const DecodeGlobals<T>& g, DecodeShared& shared,
                                               int round, T value) {
        if (token(round) >= g.length) return;
        shared.values.set(token(round) * values + int(threadIdx.x) % values, convert<float>(value));
    }
};

// Of neighbouring columns that exist together.
template <class T, int count>
__device__ __forceinline__ void store_outputs(T* to, const float (&x)[count]) {
    uint32_t w[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i)
        w[i] = arch::bit_cast<uint32_t>(pack_pair<T>(x[2 * i], x[2 * i + 1]));
    if constexpr (count == 4)
        arch::store_global(reinterpret_cast<uint2*>(to), uint2{w[0], w[1]});
    else
        arch::store_global_whole(to, uint4{w[0], w[1], w[2], w[3]});
}

// Values adjacent in memory: a thread has the same columns of eight rows.
template <class T, class S, class Place>
__device__ __forceinline__ void decode_values_inner(const DecodeGlobals<T>& g, DecodeShared& shared,
                                                    const Place& place, DecodeNumbers<S>& state,
                                                    const DecodeWork& work) {
    constexpr int count = Place::elements, columns = Place::values;
    const int warp = int(threadIdx.x) / WARP_THREADS, value = work.first_value + place.inner;
#pragma unroll 1
    for (int t = 0; t < g.length; ++t) {
        const int buffer = t % 2 * DECODE_WARPS * 2 * columns;
#pragma unroll
        for (int with_query = 0; with_query < 2; ++with_query) {
            float x[DECODE_VECTORS], sums[count] = {};
            load_row(x, with_query ? shared.queries : shared.keys, t * DECODE_KEYS + place.row);
#pragma unroll
            for (int i = 0; i < DECODE_VECTORS; ++i) {
#pragma unroll
                for (int e = 0; e < count; ++e) sums[e] = fmaf(state[i][e], x[i], sums[e]);
            }
            // Over the four lanes with the same columns: each keeps a quarter.
            scatter_sums<16, 8>(sums);
            const int to = buffer + (2 * warp + with_query) * columns + place.inner +
                           laneid() / 8 * (count / 4);
            if constexpr (count == 4)
                shared.sums.set(to, sums[0]);
            else
                arch::store_shared(shared.sums.address_of(to), float2{sums[0], sums[1]});
        }
        arch::sync_block();
        const auto sum_over_warps = [&](float(&sum)[count], int with_query) {
#pragma unroll
            for (int w = 0; w < DECODE_WARPS; ++w) {
                float x[count];
                load_row(x, shared.sums, buffer + (2 * w + with_query) * columns + place.inner);
#pragma unroll
                for (int e = 0; e < count; ++e) sum[e] = w == 0 ? x[e] : sum[e] + x[e];
            }
        };
        const float decay = shared.decays.get(t), beta = shared.betas.get(t);
        float added[count], v[count];
        sum_over_warps(added, 0);
        load_row(v, shared.values, t * columns + place.inner);
#pragma unroll
        for (int e = 0; e < count; ++e) added[e] = beta * fmaf(-decay, added[e], v[e]);
        if (warp == t % DECODE_WARPS && laneid() < 8 && value < g.value_dim) {
            const float product = shared.products.get(t);
            float out[count];
            sum_over_warps(out, 1);
#pragma unroll
            for (int e = 0; e < count; ++e) out[e] = fmaf(product, added[e], decay * out[e]);
            store_outputs(g.out + ((int64_t(work.batch_head) * g.length + t) * g.value_dim + value),
                          out);
        }
        float k[DECODE_VECTORS];  // again: kept, it would take registers of the sums
        load_row(k, shared.keys, t * DECODE_KEYS + place.row);
#pragma unroll
        for (int i = 0; i < DECODE_VECTORS; ++i) {
#pragma unroll
            for (int e = 0; e < count; ++e) state[i][e] = fmaf(k[i], added[e], decay * state[i][e]);
        }
    }
}

// Keys adjacent in memory: a thread has the same keys of eight values.
template <class T, class S, class Place>
__device__ __forceinline__ void decode_keys_inner(const DecodeGlobals<T>& g, DecodeShared& shared,
                                                  const Place& place, DecodeNumbers<S>& state,
                                                  const DecodeWork& work) {
    constexpr int count = Place::elements, lanes = Place::lanes;
    // Rows whose sums, with the key and with the query, lanes share.
    constexpr int rows = lanes / 2 < DECODE_VECTORS ? lanes / 2 : DECODE_VECTORS;
    constexpr int lanes_of_sum = lanes / (2 * rows);
    const int lane = laneid() % lanes, own = lane / lanes_of_sum;
#pragma unroll 1
    for (int t = 0; t < g.length; ++t) {
        float k[count], q[count];
        load_row(k, shared.keys, t * DECODE_KEYS + place.inner);
        load_row(q, shared.queries, t * DECODE_KEYS + place.inner);
        const float decay = shared.decays.get(t), beta = shared.betas.get(t),
                    product = shared.products.get(t);
#pragma unroll
        for (int first = 0; first < DECODE_VECTORS; first += rows) {
            float sums[2 * rows] = {};
#pragma unroll
            for (int i = 0; i < rows; ++i) {
#pragma unroll
                for (int e = 0; e < count; ++e) {
                    sums[i] = fmaf(state[first + i][e], k[e], sums[i]);
                    sums[rows + i] = fmaf(state[first + i][e], q[e], sums[rows + i]);
                }
            }
            scatter_sums<lanes / 2, 1>(sums);
            // Lanes of the lower half have the sums with the key, of the upper with the query.
            const int row = place.row + first + own % rows, value = work.first_value + row;
            const float other = arch::shuffle_xor(sums[0], lanes / 2);
            const float with_key = own < rows ? sums[0] : other,
                        with_query = own < rows ? other : sums[0];
            const float v = shared.values.get(t * Place::values + row);
            const float added = beta * fmaf(-decay, with_key, v);
            if (own < rows && lane % lanes_of_sum == 0 && value < g.value_dim) {
                T* to = g.out + ((int64_t(work.batch_head) * g.length + t) * g.value_dim + value);
                arch::store_global(to, convert<T>(fmaf(product, added, decay * with_query)));
            }
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const float x = arch::shuffle(added, laneid() - lane + i * lanes_of_sum);
#pragma unroll
                for (int e = 0; e < count; ++e)
                    state[first + i][e] = fmaf(k[e], x, decay * state[first + i][e]);
            }
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

template <class T, class S, bool keys_inner, int lanes>
__device__ __forceinline__ void decode_slice(const DecodeGlobals<T>& g) {
    using Place = DecodePlace<S, keys_inner, lanes>;
    using Word = StateWord<S>;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DecodeShared>();
    const DecodeWork work(g, Place::values);
    int64_t slot = work.b;
    if (g.indices != nullptr) slot = arch::load_global_readonly(g.indices + work.b);
    const int warp = int(threadIdx.x) / WARP_THREADS;
    if (slot < 0 || slot >= g.slots) {
        clear_outputs(g, work.batch_head, work.first_value, Place::values);
        return;
    }
    const Place place;
    const int64_t outer_stride = keys_inner ? g.state.value_stride : g.state.key_stride;
    const int inner = place.inner + (keys_inner ? 0 : work.first_value),
              row = place.row + (keys_inner ? work.first_value : 0);
    // Rows and columns are multiples of eight: all of a thread's vectors exist, or none.
    const bool exists = inner < (keys_inner ? g.key_dim : g.value_dim) &&
                        row < (keys_inner ? g.value_dim : g.key_dim);
    S* const data = static_cast<S*>(g.state.data) +
                    (slot * g.state.sequence_stride + work.value_head * g.state.head_stride +
                     row * outer_stride + inner);
    uint4 words[DECODE_VECTORS] = {};
    if (exists) {
#pragma unroll
        for (int i = 0; i < DECODE_VECTORS; ++i) words[i] = Word::load(data + i * outer_stride);
    }
    DecodeValues<T, Place::values> values;
    values.load(g, work);
#pragma unroll 1
    for (int t = warp; t < g.length; t += DECODE_WARPS) prepare_token(g, work, t, shared);
    values.keep(g, work, shared);
    arch::sync_block();
    DecodeNumbers<S> state;
#pragma unroll
    for (int i = 0; i < DECODE_VECTORS; ++i) Word::unpack(state[i], words[i]);
    const int64_t stride = computed_again(outer_stride);
    if constexpr (keys_inner)
        decode_keys_inner<T, S>(g, shared, place, state, work);
    else
        decode_values_inner<T, S>(g, shared, place, state, work);
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < DECODE_VECTORS; ++i) Word::store(data + i * stride, state[i]);
}

template <class T, bool wide_state, bool keys_inner>
__device__ __forceinline__ void decode_tokens(const DecodeGlobals<T>& g) {
    using S = std::conditional_t<wide_state, float, bf16>;
    if (keys_inner && g.key_dim <= 64)
        decode_slice<T, S, keys_inner, DECODE_LANES<S, keys_inner, true>>(g);
    else
        decode_slice<T, S, keys_inner, DECODE_LANES<S, keys_inner, false>>(g);
}

template <class T, bool wide_state, bool keys_inner>
__global__
__launch_bounds__(DELTA_DECODE_THREADS, DECODE_BLOCKS<wide_state, false>) void delta_decode_kernel(
    const __grid_constant__ DecodeGlobals<T> g) {
    arch::wait_for_dependencies();
    arch::launch_dependents();
    decode_tokens<T, wide_state, keys_inner>(g);
}

template <class T, bool wide_state, bool keys_inner, bool portable>
void launch_decode(void (*kernel)(DecodeGlobals<T>), const DeltaRuleDecodeParams& params,
                   Stream stream) {
    using S = std::conditional_t<wide_state, float, bf16>;
    const DeltaRuleDecodeProblem& p = params.problem;
    const int64_t values =
        p.key_dim <= 64 ? DecodePlace<S, keys_inner, DECODE_LANES<S, keys_inner, true>>::values
                        : DecodePlace<S, keys_inner, DECODE_LANES<S, keys_inner, false>>::values;
    const int64_t slices = (p.value_dim + values - 1) / values;
    const DecodeGlobals<T> globals{
        .q = params.q,
        .k = params.k,
        .v = params.v,
        .g = {params.g, false},
        .beta = {params.beta, false},
        .gate = {params.gate.A_log, params.gate.dt_bias, params.gate.beta_sigmoid,
                 params.gate.allow_neg_eigval},
        .state = params.state,
        .indices = params.indices,
        .slots = params.slots,
        .out = static_cast<T*>(params.out),
        .length = int(p.length),
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .slices = gemm::Divisor(uint32_t(slices)),
        .value_heads = gemm::Divisor(uint32_t(p.value_heads)),
        .heads_per_head = gemm::Divisor(uint32_t(p.value_heads / p.heads)),
        .scale = params.scale,
        .l2_norm = params.l2_norm};
    kittens::launch({.dependent = !portable, .blocks_per_sm = DECODE_BLOCKS<wide_state, portable>},
                    kernel, dim3(unsigned(p.batch * p.value_heads * slices)),
                    dim3(DELTA_DECODE_THREADS), dim3(1), int(sizeof(DecodeShared)) + 1024, stream,
                    globals);
}

}  // namespace thunderkittens::recurrent::delta

namespace thunderkittens::recurrent {

template <DType dtype, bool wide_state, bool keys_inner>
void launch_gated_delta_rule_decode(const DeltaRuleDecodeParams& params, Stream stream) {
    using T = delta::type_of<dtype>;
    delta::launch_decode<T, wide_state, keys_inner, false>(
        delta::delta_decode_kernel<T, wide_state, keys_inner>, params, stream);
}

}  // namespace thunderkittens::recurrent
