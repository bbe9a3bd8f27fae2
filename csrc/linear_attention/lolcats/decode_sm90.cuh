// One token more of each sequence: a block has one head of one sequence. What counts is to read the
// sums and the caches at the speed of memory: each thread issues its loads of keys and sums first,
// 16 bytes each, and makes the query's features under them. The sums are written only where the
// token completes a block of 64: then the block before it leaves the window, and its features and
// values, which the caches still have, are added. Lengths are counted up by a launch of their own,
// when no block reads them any more.
//
// With the sliding window, of the last 64 tokens, a kernel of its own first adds the token that the
// new one pushes out of it, in every step.
//
// The portable kernels are these without stmatrix and programmatic launches.
#pragma once

#include "csrc/linear_attention/common/products_sm80.cuh"
#include "csrc/linear_attention/lolcats/feature_map.cuh"

namespace thunderkittens::linear_attention {

constexpr int LOLCATS_DECODE_THREADS = 256,
              LOLCATS_DECODE_WARPS = LOLCATS_DECODE_THREADS / WARP_THREADS;

template <class T>
struct LolcatsDecodeGlobals {
    Operand q, k, v, out, q_map, k_map;
    const float *alpha, *beta;
    LolcatsStatePointers state;
    int heads, kv_heads;
    bool sliding;

    // Tokens of the sequence, and the first of those that a new one's window has.
    __device__ __forceinline__ int2 tokens(int b) const {
        const Terrace terrace(state.lengths, b, 1);
        const int in_window = sliding ? ::min(terrace.before, WINDOW - 1) : terrace.cached;
        return {terrace.before, terrace.before - in_window};
    }

    template <class P>
    static __device__ __forceinline__ P* row(const Operand& x, int b, int head, int row = 0) {
        return reinterpret_cast<P*>(static_cast<T*>(const_cast<void*>(x.data)) +
                                    b * x.batch_stride + head * x.head_stride + row * x.row_stride);
    }
};

template <class T>
__device__ __forceinline__ void unpack_eight(float (&to)[8], const uint4& from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(arch::bit_cast<packed_type<T>>(words[i]));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

template <class K>
struct LolcatsDecodeShared {
    float q[K::head_dim], key[K::head_dim], value[K::head_dim];
    float features[2 * K::features];
    float weights[CACHE + 1];  // scores; the last is the new token's
    float linear, window;      // parts of the denominator
    union {
        float map_sums[LOLCATS_DECODE_THREADS * 8];  // of the projection, per row of the map
        struct {
            float values[LOLCATS_DECODE_THREADS * 8];  // of weights times values
            float state[LOLCATS_DECODE_THREADS * 4];   // of features times sums
        } sums;
        struct {  // the block that is added
            union {
                typename K::map_tile map;
                typename K::token_tile values;
            };
            typename K::feature_tile features[K::groups];
        } fold;
    };
};

template <class K, bool portable>
struct LolcatsDecode {
    using T = typename K::T;
    using Globals = LolcatsDecodeGlobals<T>;
    static constexpr int D = K::head_dim, F = K::features;
    // Rows of sums, of keys and of maps that all threads read at a time, with the threads of one.
    static constexpr int state_lanes = D / 4, state_rows = LOLCATS_DECODE_THREADS / state_lanes;
    static constexpr int state_passes = 2 * F / state_rows;
    static constexpr int token_lanes = D / 8, token_rows = LOLCATS_DECODE_THREADS / token_lanes;
    static constexpr int token_passes = CACHE / token_rows;
    static constexpr int map_lanes = F / 8, map_rows = LOLCATS_DECODE_THREADS / map_lanes;

    const Globals& g;
    LolcatsDecodeShared<K>& shared;
    int b, head, kv_head, thread, before, first;

    __device__ __forceinline__ int token_of(int row) const {
        return before - 1 - (((before - 1 - row) % CACHE + CACHE) % CACHE);
    }
    __device__ __forceinline__ const uint4* cache(const void* cache, int row) const {
        return reinterpret_cast<const uint4*>(
            static_cast<const T*>(cache) + ((int64_t(b) * g.kv_heads + kv_head) * CACHE + row) * D);
    }
    __device__ __forceinline__ float* sums() const {
        return g.state.numerator + (int64_t(b) * g.heads + head) * 2 * F * D;
    }
    __device__ __forceinline__ float* denominators() const {
        return g.state.denominator + (int64_t(b) * g.heads + head) * 2 * F;
    }

    // The new token as floats; the first head of a group puts its key and value into the caches.
    __device__ __forceinline__ void load_token() {
        constexpr int words = D / 8;
        if (thread >= 3 * words) return;
        const int which = thread / words, word = thread % words;
        const Operand& x = which == 0 ? g.q : which == 1 ? g.k : g.v;
        const uint4 raw = arch::load_global(
            Globals::template row<const uint4>(x, b, which == 0 ? head : kv_head) + word);
        float* to = which == 0 ? shared.q : which == 1 ? shared.key : shared.value;
        float values[8];
        unpack_eight<T>(values, raw);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[8 * word + i] = values[i];
        if (which > 0 && head == kv_head * (g.heads / g.kv_heads)) {
            const uint4* row = cache(which == 1 ? g.state.keys : g.state.values, before % CACHE);
            arch::store_global(const_cast<uint4*>(row) + word, raw);
        }
    }
    // The projection of shared.q, a part of the rows per thread; summed by finish_features.
    __device__ __forceinline__ void project(const Operand& map) {
        const int column = 8 * (thread % map_lanes), group = thread / map_lanes;
        float sum[8] = {};
#pragma unroll
        for (int pass = 0; pass < D / map_rows; ++pass) {
            const int row = pass * map_rows + group;
            const uint4 raw = arch::load_global(
                Globals::template row<const uint4>(map, 0, head, row) + thread % map_lanes);
            float w[8];
            unpack_eight<T>(w, raw);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(shared.q[row], w[i], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) shared.map_sums[group * F + column + i] = sum[i];
    }
    // By one warp.
    __device__ __forceinline__ void finish_features(float alpha) {
        constexpr int each = F / WARP_THREADS;
        float z[each], e[2][each];
        float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < each; ++i) {
            z[i] = 0.0f;
            for (int row = 0; row < map_rows; ++row)
                z[i] += shared.map_sums[row * F + laneid() + WARP_THREADS * i];
            top[0] = fmaxf(top[0], z[i]);
            top[1] = fmaxf(top[1], -z[i]);
        }
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            top[s] = warp_maximum(top[s]);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                e[s][i] = arch::exp2_approx(((s ? -z[i] : z[i]) - top[s]) * LOG2_E);
                sum[s] += e[s][i];
            }
            sum[s] = warp_sum(sum[s]);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const int feature = s * F + laneid() + WARP_THREADS * i;
                const float x = alpha * e[s][i] / sum[s];
                shared.features[feature] = x;
                total = fmaf(x, arch::load_global(denominators() + feature), total);
            }
        }
        total = warp_sum(total);
        if (laneid() == 0) shared.linear = total;
    }
    // By one warp: scores become weights.
    __device__ __forceinline__ void weigh(float beta) {
        constexpr float unit = LOG2_E * (D == 128 ? 0.08838834764831845f : 0.125f);
        float score = 0.0f, top = -INFINITY, sum = 0.0f;
        for (int i = laneid(); i < D; i += WARP_THREADS)
            score = fmaf(shared.q[i], shared.key[i], score);
        score = warp_sum(score);
        float x[CACHE / WARP_THREADS];
#pragma unroll
        for (int i = 0; i < CACHE / WARP_THREADS; ++i) {
            x[i] = shared.weights[laneid() + WARP_THREADS * i];
            top = fmaxf(top, x[i]);
        }
        top = fmaxf(warp_maximum(top), score);
#pragma unroll
        for (int i = 0; i < CACHE / WARP_THREADS; ++i) {
            x[i] = beta * arch::exp2_approx((x[i] - top) * unit);
            shared.weights[laneid() + WARP_THREADS * i] = x[i];
            sum += x[i];
        }
        const float own = beta * arch::exp2_approx((score - top) * unit);
        sum = warp_sum(sum) + own;
        if (laneid() == 0) {
            shared.weights[CACHE] = own;
            shared.window = sum;
        }
    }

    __device__ __forceinline__ void run() {
        const int lane = thread % token_lanes, row = thread / token_lanes;
        const int state_lane = thread % state_lanes, state_row = thread / state_lanes;
        uint4 keys[token_passes];
#pragma unroll
        for (int pass = 0; pass < token_passes; ++pass) {
            const int at = pass * token_rows + row;
            keys[pass] = make_uint4(0, 0, 0, 0);
            if (token_of(at) >= first)
                keys[pass] = arch::load_global(cache(g.state.keys, at) + lane);
        }
        load_token();
        arch::sync_block();
        float q[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = shared.q[8 * lane + i];
        project(g.q_map);
#pragma unroll
        for (int pass = 0; pass < token_passes; ++pass) {
            float key[8], score = 0.0f;
            unpack_eight<T>(key, keys[pass]);
#pragma unroll
            for (int i = 0; i < 8; ++i) score = fmaf(q[i], key[i], score);
#pragma unroll
            for (int d = token_lanes / 2; d > 0; d /= 2) score += arch::shuffle_xor(score, d);
            const int at = pass * token_rows + row;
            if (lane == 0) shared.weights[at] = token_of(at) >= first ? score : -INFINITY;
        }
        // Half of the sums now, the other half when the values' registers are free.
        constexpr int half = state_passes / 2;
        float4 state[half];
        const auto load_state = [&](int from) {
            const auto* at = reinterpret_cast<const float4*>(sums()) + thread;
#pragma unroll
            for (int pass = 0; pass < half; ++pass)
                state[pass] = arch::load_global(at + (from + pass) * LOLCATS_DECODE_THREADS);
        };
        load_state(0);
        uint4 values[token_passes];
#pragma unroll
        for (int pass = 0; pass < token_passes; ++pass) {
            const int at = pass * token_rows + row;
            values[pass] = make_uint4(0, 0, 0, 0);
            if (token_of(at) >= first)
                values[pass] = arch::load_global(cache(g.state.values, at) + lane);
        }
        arch::sync_block();
        if (thread / WARP_THREADS == 0)
            finish_features(arch::load_global_readonly(g.alpha + head));
        else if (thread / WARP_THREADS == 1)
            weigh(arch::load_global_readonly(g.beta + head));
        arch::sync_block();
        float sum[8] = {};
#pragma unroll
        for (int pass = 0; pass < token_passes; ++pass) {
            float value[8];
            unpack_eight<T>(value, values[pass]);
            const float weight = shared.weights[pass * token_rows + row];
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, value[i], sum[i]);
        }
        float4 linear = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int from = 0; from < state_passes; from += half) {
            if (from > 0) load_state(from);
#pragma unroll
            for (int pass = 0; pass < half; ++pass) {
                const float f = shared.features[(from + pass) * state_rows + state_row];
                linear = {fmaf(f, state[pass].x, linear.x), fmaf(f, state[pass].y, linear.y),
                          fmaf(f, state[pass].z, linear.z), fmaf(f, state[pass].w, linear.w)};
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) shared.sums.values[row * D + 8 * lane + i] = sum[i];
        float* to = shared.sums.state + state_row * D + 4 * state_lane;
        to[0] = linear.x, to[1] = linear.y, to[2] = linear.z, to[3] = linear.w;
        arch::sync_block();
        if (thread < D) {
            float x = shared.weights[CACHE] * shared.value[thread];
            for (int i = 0; i < token_rows; ++i) x += shared.sums.values[i * D + thread];
            for (int i = 0; i < state_rows; ++i) x += shared.sums.state[i * D + thread];
            x /= shared.linear + shared.window;
            arch::store_global(Globals::template row<T>(g.out, b, head) + thread, T(x));
        }
        const int after = before + 1;
        if (g.sliding || after % WINDOW != 0 || after < 2 * WINDOW) return;
        arch::sync_block();
        fold((after / WINDOW - 2) * WINDOW % CACHE);
    }

    // Adds the token that leaves the sliding window, in fp32. The sums are on their way meanwhile.
    __device__ __forceinline__ void slide() {
        auto* at = reinterpret_cast<float4*>(sums()) + thread;
        float4 state[state_passes];
#pragma unroll
        for (int pass = 0; pass < state_passes; ++pass)
            state[pass] = arch::load_global(at + pass * LOLCATS_DECODE_THREADS);
        const int row = (before - WINDOW) % CACHE;
        const auto element = [&](const void* rows) {
            return convert<float>(
                arch::load_global(reinterpret_cast<const T*>(cache(rows, row)) + thread));
        };
        if (thread < D) {
            shared.q[thread] = element(g.state.keys);
            shared.value[thread] = element(g.state.values);
        }
        arch::sync_block();
        project(g.k_map);
        arch::sync_block();
        if (thread / WARP_THREADS == 0) finish_features(1.0f);
        arch::sync_block();
        const float* value = shared.value + 4 * (thread % state_lanes);
#pragma unroll
        for (int pass = 0; pass < state_passes; ++pass) {
            const float f = shared.features[pass * state_rows + thread / state_lanes];
            const float4 x = state[pass];
            arch::store_global(at + pass * LOLCATS_DECODE_THREADS,
                               float4{fmaf(f, value[0], x.x), fmaf(f, value[1], x.y),
                                      fmaf(f, value[2], x.z), fmaf(f, value[3], x.w)});
        }
        if (thread < 2 * F) {
            float* to = denominators() + thread;
            arch::store_global(to, arch::load_global(to) + shared.features[thread]);
        }
    }

    // d += a b of 16 x 16 elements.
    template <bool transposed, class A, class B, class Base>
    static __device__ __forceinline__ void add_product(Base& d, const A& a, const B& b) {
        rt_fl<16, 16> sum;
        sum.tiles[0][0] = d;
        if constexpr (transposed)
            warp::mma_AtB(sum, a, b, sum);
        else
            warp::mma_AB(sum, a, b, sum);
        d = sum.tiles[0][0];
    }

    // Adds a block of 64 tokens, which lies in the caches from `row` on, to the sums, on the tensor
    // cores, as the forward does.
    __device__ __forceinline__ void fold(int row) {
        constexpr int lanes = D / 8, words = CHUNK * lanes / LOLCATS_DECODE_THREADS;
        auto& fold = shared.fold;
        const int warp_index = thread / WARP_THREADS;
        uint4 values[words];
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int word = i * LOLCATS_DECODE_THREADS + thread;
            values[i] = arch::load_global(cache(g.state.values, row + word / lanes) + word % lanes);
        }
        for (int word = thread; word < D * map_lanes; word += LOLCATS_DECODE_THREADS) {
            const int at = word / map_lanes, column = word % map_lanes;
            const auto* from = Globals::template row<const uint4>(g.k_map, 0, head, at) + column;
            arch::store_shared(fold.map.address_of(at, 8 * column), arch::load_global(from));
        }
        arch::sync_block();
        if (warp_index < CHUNK / 16) {
            typename K::projection z;
            typename K::Features features;
            warp::zero(z);
            const int token = row + 16 * warp_index + laneid() / 4;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                rt<T, 16, 16> keys;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const auto* from = reinterpret_cast<const packed_type<T>*>(
                        cache(g.state.keys, token + 8 * (i % 2)));
                    keys.tiles[0][0].data[i] =
                        arch::load_global(from + 8 * k + 4 * (i / 2) + laneid() % 4);
                }
#pragma unroll
                for (int j = 0; j < F / 16; ++j) {
                    rt<T, 16, 16, col_l> map;
                    warp::load(map, fold.map.template subtile<16, 16>({k, j}));
                    add_product<false>(z.tiles[0][j], keys, map);
                }
            }
            make_features<K>(features, z);
            if constexpr (portable) {
#pragma unroll
                for (int t = 0; t < K::groups; ++t)
                    sm80::store_operand_rows(fold.features[t], 16 * warp_index, features.groups[t]);
            } else {
                store_features<K>(fold.features, features);
            }
        }
        arch::sync_block();
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int word = i * LOLCATS_DECODE_THREADS + thread;
            arch::store_shared(fold.values.address_of(word / lanes, 8 * (word % lanes)), values[i]);
        }
        arch::sync_block();
        // A warp has 16 features, and all columns or half of them.
        constexpr int bands = 2 * F / 16, columns = D * bands / LOLCATS_DECODE_WARPS;
        const int band = warp_index % bands, first_column = warp_index / bands * columns;
        float2* at = reinterpret_cast<float2*>(sums() + (16 * band + laneid() / 4) * D +
                                               first_column + 2 * (laneid() % 4));
        rt_fl<16, columns> sum;
        const auto for_each_pair = [&](auto f) {
#pragma unroll
            for (int j = 0; j < columns / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    f(sum.tiles[0][j].data[i], at + (8 * (i % 2) * D + 16 * j + 8 * (i / 2)) / 2);
            }
        };
        for_each_pair([](float2& x, const float2* from) { x = arch::load_global(from); });
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            rt<T, 16, 16, col_l> features;
            warp::load(features, fold.features[band / 4].template subtile<16, 16>({k, band % 4}));
#pragma unroll
            for (int j = 0; j < columns / 16; ++j) {
                rt<T, 16, 16, col_l> part;
                warp::load(part, fold.values.template subtile<16, 16>({k, first_column / 16 + j}));
                add_product<true>(sum.tiles[0][j], features, part);
            }
        }
        for_each_pair([](const float2& x, float2* to) { arch::store_global(to, x); });
        if (thread < 2 * F) {
            float total = arch::load_global(denominators() + thread);
            for (int token = 0; token < CHUNK; ++token)
                total += convert<float>(fold.features[thread / 64].get(token, thread % 64));
            arch::store_global(denominators() + thread, total);
        }
    }
};

template <bool portable, class K>
__device__ __forceinline__ LolcatsDecode<K, portable> lolcats_decode_of(
    const LolcatsDecodeGlobals<typename K::T>& g, LolcatsDecodeShared<K>& shared) {
    const int index = int(blockIdx.x), b = index / g.heads, head = index % g.heads;
    const int2 tokens = g.tokens(b);
    return {g,        shared,  b, head, head / (g.heads / g.kv_heads), int(threadIdx.x),
            tokens.x, tokens.y};
}

template <class K, bool portable>
__global__ __launch_bounds__(LOLCATS_DECODE_THREADS, 2) void lolcats_decode_kernel(
    const __grid_constant__ LolcatsDecodeGlobals<typename K::T> g) {
    auto& shared = arch::static_shared<LolcatsDecodeShared<K>>();
    if constexpr (!portable) arch::launch_dependents();
    lolcats_decode_of<portable, K>(g, shared).run();
}

template <class K, bool portable>
__global__ __launch_bounds__(LOLCATS_DECODE_THREADS, 2) void lolcats_slide_kernel(
    const __grid_constant__ LolcatsDecodeGlobals<typename K::T> g) {
    auto& shared = arch::static_shared<LolcatsDecodeShared<K>>();
    auto decode = lolcats_decode_of<portable, K>(g, shared);
    if (decode.before >= WINDOW) decode.slide();
}

struct LengthsGlobals {
    int* lengths;
    int count;
};
template <class, bool portable>
__global__ __launch_bounds__(128) void lolcats_lengths_kernel(
    const __grid_constant__ LengthsGlobals g) {
    if constexpr (!portable) arch::wait_for_dependencies();
    const int i = int(blockIdx.x) * 128 + int(threadIdx.x);
    if (i < g.count) arch::store_global(g.lengths + i, arch::load_global(g.lengths + i) + 1);
}

template <class K, bool portable>
void launch_decode_kernels(const LolcatsDecodeParams& params, Stream stream) {
    const LolcatsDecodeProblem& p = params.problem;
    const LolcatsDecodeGlobals<typename K::T> globals{.q = params.q,
                                                      .k = params.k,
                                                      .v = params.v,
                                                      .out = params.out,
                                                      .q_map = params.q_map,
                                                      .k_map = params.k_map,
                                                      .alpha = params.alpha,
                                                      .beta = params.beta,
                                                      .state = params.state,
                                                      .heads = int(p.heads),
                                                      .kv_heads = int(p.kv_heads),
                                                      .sliding = params.sliding};
    if (params.sliding)
        kittens::launch(lolcats_slide_kernel<K, portable>, dim3(unsigned(p.batch * p.heads)),
                        dim3(LOLCATS_DECODE_THREADS), dim3(1), 0, stream, globals);
    kittens::launch(lolcats_decode_kernel<K, portable>, dim3(unsigned(p.batch * p.heads)),
                    dim3(LOLCATS_DECODE_THREADS), dim3(1), 0, stream, globals);
    kittens::launch({.dependent = !portable}, lolcats_lengths_kernel<typename K::T, portable>,
                    dim3(unsigned((p.batch + 127) / 128)), dim3(128), dim3(1), 0, stream,
                    LengthsGlobals{params.state.lengths, int(p.batch)});
}
template <DType dtype, int head_dim, int features>
void launch_lolcats_decode(const LolcatsDecodeParams& params, Stream stream) {
    launch_decode_kernels<LolcatsKernel<dtype, head_dim, features>, false>(params, stream);
}

}  // namespace thunderkittens::linear_attention
