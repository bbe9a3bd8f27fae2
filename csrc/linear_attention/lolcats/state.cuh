// What the kernels of LoLCATS share: the tiles, which tokens a block works on, the feature map, and
// the state that is carried from chunk to chunk in fp32 registers of a warpgroup.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"
#include "csrc/linear_attention/lolcats/lolcats.h"
#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

constexpr float LOG2_E = 1.44269504f;

template <DType _dtype, int _head_dim, int _features>
struct LolcatsKernel {
    using T = std::conditional_t<_dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = _head_dim, features = _features;
    static constexpr int groups = 2 * features / 64;  // of 64 features
    using token_tile = st<T, CHUNK, head_dim>;
    using map_tile = st<T, head_dim, features>;
    using feature_tile = st<T, CHUNK, 64>;
    using state_tile = st<T, 64, head_dim>;
    using token_layout = gl<T, -1, -1, -1, head_dim, token_tile>;
    using map_layout = gl<T, 1, -1, head_dim, features, map_tile>;
    using projection = rt_fl<16, features>;
    // 64 tokens: softmax(x W), then softmax(-x W).
    struct Features {
        rt<T, 16, 64> groups[LolcatsKernel::groups];
    };
};

template <class Layout>
Layout token_layout_of(const Operand& x, const LolcatsProblem& p, int64_t heads, int64_t rows) {
    using T = typename Layout::T;
    return Layout(static_cast<T*>(const_cast<void*>(x.data)), p.batch, heads, rows, nullptr,
                  gl_strides{x.batch_stride, x.head_stride, x.row_stride});
}
template <class Layout>
Layout map_layout_of(const Operand& x, int64_t heads) {
    using T = typename Layout::T;
    return Layout(static_cast<T*>(const_cast<void*>(x.data)), nullptr, heads, nullptr, nullptr,
                  gl_strides{0, x.head_stride, x.row_stride});
}
inline Operand first_rows_operand(const void* data, const LolcatsProblem& p) {
    return {data, p.kv_heads * CACHE * p.head_dim, CACHE * p.head_dim, p.head_dim};
}

// The tokens of a sequence that an op sees: those in the caches, and the new ones.
struct Terrace {
    int before;  // tokens of the sequence before the new ones
    int cached;  // of these, in the caches
    int tokens;  // cached and new

    __device__ __forceinline__ Terrace(const int* lengths, int b, int length) {
        before = lengths == nullptr ? 0 : arch::load_global_readonly(lengths + b);
        cached = before < WINDOW ? before : WINDOW + before % WINDOW;
        tokens = cached + length;
    }
    __device__ __forceinline__ int chunks() const { return (tokens + CHUNK - 1) / CHUNK; }
    // Chunks whose keys the state after the last token has.
    __device__ __forceinline__ int folded() const { return ::max(tokens / CHUNK - 1, 0); }
    // Row of a chunk's first token among the new ones, negative in the caches.
    __device__ __forceinline__ int row(int chunk) const { return chunk * CHUNK - cached; }
};

// The part of a call that a block works on: the chunks [begin, end) of one head.
struct LolcatsItem {
    int b, head, line, segment;
    Terrace terrace;
    int begin, end;

    __device__ __forceinline__ LolcatsItem(int line, int segment, int heads, int segments,
                                           const int* lengths, int length)
        : b(line / heads),
          head(line % heads),
          line(line),
          segment(segment),
          terrace(lengths, b, length) {
        const int chunks = terrace.chunks(), share = (chunks + segments - 1) / segments;
        begin = ::min(segment * share, chunks);
        end = ::min(begin + share, chunks);
    }
    __device__ __forceinline__ LolcatsItem(int index, int heads, int segments, const int* lengths,
                                           int length)
        : LolcatsItem(index / segments, index % segments, heads, segments, lengths, length) {}
    __device__ __forceinline__ bool last() const { return begin < end && end == terrace.chunks(); }
};

// Keys and values, whose first two chunks are elsewhere when there is an initial state.
template <class K>
struct KeysAndValues {
    typename K::token_layout k, v, first_k, first_v;
    int group;

    KeysAndValues(const LolcatsParams& params, const LolcatsWorkspace& w)
        : k(token_layout_of<typename K::token_layout>(
              params.k, params.problem, params.problem.kv_heads, params.problem.length)),
          v(token_layout_of<typename K::token_layout>(
              params.v, params.problem, params.problem.kv_heads, params.problem.length)),
          first_k(first(w.first_keys, params.problem, params.k)),
          first_v(first(w.first_values, params.problem, params.v)),
          group(int(params.problem.heads / params.problem.kv_heads)) {}

    // By one thread.
    template <class Tile>
    __device__ __forceinline__ void load(Tile& to_k, Tile& to_v, const LolcatsItem& item, int chunk,
                                         bool continued, semaphore& full) const {
        const int head = item.head / group;
        tma::expect(full, to_k, to_v);
        if (continued && chunk < CACHE / CHUNK) {
            const auto at = elements(item.b, head, chunk * CHUNK, 0);
            tma::load_async(to_k, first_k, at, full);
            tma::load_async(to_v, first_v, at, full);
        } else {
            const auto at = elements(item.b, head, item.terrace.row(chunk), 0);
            tma::load_async(to_k, k, at, full);
            tma::load_async(to_v, v, at, full);
        }
    }

  private:
    // A tensor map needs an address, also where nothing is read through it.
    static typename K::token_layout first(const void* rows, const LolcatsProblem& p,
                                          const Operand& otherwise) {
        if (rows == nullptr)
            return token_layout_of<typename K::token_layout>(otherwise, p, p.kv_heads, p.length);
        return token_layout_of<typename K::token_layout>(first_rows_operand(rows, p), p, p.kv_heads,
                                                         CACHE);
    }
};

__device__ __forceinline__ float quad_sum(float x) {
    x += arch::shuffle_xor(x, 1);
    return x + arch::shuffle_xor(x, 2);
}
__device__ __forceinline__ float quad_maximum(float x) {
    x = fmaxf(x, arch::shuffle_xor(x, 1));
    return fmaxf(x, arch::shuffle_xor(x, 2));
}
// Keeps the compiler from moving uses of an accumulator above a wait.
template <any_register_tile Tile>
__device__ __forceinline__ void pin_tile(Tile& tile) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            arch::pin_register(tile.tiles[0][j].data[i].x);
            arch::pin_register(tile.tiles[0][j].data[i].y);
        }
    }
}

// One softmax of the feature map, of factor * z, times `scale`, into blocks of 16 columns from
// `first` on. `top` has the maxima of the lane's two rows.
template <class K>
__device__ __forceinline__ void softmax_features(typename K::Features& features,
                                                 const typename K::projection& z, float factor,
                                                 float2 top, int first, float scale = 1.0f) {
    typename K::projection e;
    float2 sum = {0.0f, 0.0f};
    const float unit = factor * LOG2_E;
    top = {top.x * LOG2_E, top.y * LOG2_E};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float shift = i % 2 ? top.y : top.x;
            const float2 pair = z.tiles[0][j].data[i];
            const float2 x = {arch::exp2_approx(fmaf(pair.x, unit, -shift)),
                              arch::exp2_approx(fmaf(pair.y, unit, -shift))};
            e.tiles[0][j].data[i] = x;
            (i % 2 ? sum.y : sum.x) += x.x + x.y;
        }
    }
    const float2 r = {scale * arch::reciprocal_approx(quad_sum(sum.x)),
                      scale * arch::reciprocal_approx(quad_sum(sum.y))};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
        const int block = first + j;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = e.tiles[0][j].data[i];
            const float f = i % 2 ? r.y : r.x;
            features.groups[block / 4].tiles[0][block % 4].data[i] =
                pack_pair<typename K::T>(x.x * f, x.y * f);
        }
    }
}
// The largest elements of z and of -z in the lane's two rows.
template <class K>
__device__ __forceinline__ void projection_maxima(const typename K::projection& z, float2& most,
                                                  float2& least) {
    most = least = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = z.tiles[0][j].data[i];
            float &high = i % 2 ? most.y : most.x, &low = i % 2 ? least.y : least.x;
            high = fmaxf(high, fmaxf(pair.x, pair.y));
            low = fmaxf(low, fmaxf(-pair.x, -pair.y));
        }
    }
    most = {quad_maximum(most.x), quad_maximum(most.y)};
    least = {quad_maximum(least.x), quad_maximum(least.y)};
}

template <class K>
__device__ __forceinline__ void make_features(typename K::Features& features,
                                              const typename K::projection& z) {
    float2 most, least;
    projection_maxima<K>(z, most, least);
    softmax_features<K>(features, z, 1.0f, most, 0);
    softmax_features<K>(features, z, -1.0f, least, K::features / 16);
}

template <class K>
__device__ __forceinline__ void store_features(typename K::feature_tile (&to)[K::groups],
                                               const typename K::Features& features) {
#pragma unroll
    for (int t = 0; t < K::groups; ++t) warpgroup::store(to[t], features.groups[t]);
}

// The sums of phi(k) v^T and of phi(k). A warp has 16 rows of each group of 64 features of the
// former; of the latter a lane has two neighbouring features, and other lanes of the warp the same.
template <class K>
struct LolcatsSums {
    static constexpr int warp_pairs = K::features / 4, parts = WARP_THREADS / warp_pairs;
    rt_fl<16, K::head_dim> numerator[K::groups];
    float2 denominator;

    static __device__ __forceinline__ int own_feature() {
        return 2 * (warpgroup::warpid() * warp_pairs + laneid() % warp_pairs);
    }
    // Calls f(two neighbouring values, feature, column).
    template <class F>
    __device__ __forceinline__ void for_each_pair(F f) {
        const int row = 16 * warpgroup::warpid() + laneid() / 4, column = 2 * (laneid() % 4);
#pragma unroll
        for (int t = 0; t < K::groups; ++t) {
#pragma unroll
            for (int j = 0; j < K::head_dim / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    f(numerator[t].tiles[0][j].data[i], 64 * t + row + 8 * (i % 2),
                      16 * j + 8 * (i / 2) + column);
                }
            }
        }
    }
    __device__ __forceinline__ void clear() {
        for_each_pair([](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
        denominator = {0.0f, 0.0f};
    }
    // Either may be null.
    __device__ __forceinline__ void add(const float* from, const float* from_denominator) {
        if (from == nullptr) return;
        for_each_pair([&](float2& pair, int feature, int column) {
            const float2 x = arch::load_global(
                reinterpret_cast<const float2*>(from + feature * K::head_dim + column));
            pair = {pair.x + x.x, pair.y + x.y};
        });
        const float2 x =
            arch::load_global(reinterpret_cast<const float2*>(from_denominator + own_feature()));
        denominator = {denominator.x + x.x, denominator.y + x.y};
    }
    // A segment's state is in the order of a thread's registers: words of 16 bytes, each next to
    // those of the other threads; then the denominator.
    static constexpr int words = 2 * K::groups * K::head_dim / 16;
    static constexpr int state_floats = 4 * words * WARPGROUP_THREADS + 2 * K::features;

    // Calls f(word, its upper row's pair, its lower row's).
    template <class F>
    __device__ __forceinline__ void for_each_word(int first, int count, F f) {
        constexpr int blocks = K::head_dim / 16;
#pragma unroll
        for (int word = first; word < first + count; ++word) {
            auto& data = numerator[word / (2 * blocks)].tiles[0][word / 2 % blocks].data;
            f(word, data[word % 2 * 2], data[word % 2 * 2 + 1]);
        }
    }
    __device__ __forceinline__ void store_segment(float* to) {
        float4* own = reinterpret_cast<float4*>(to) + warpgroup::laneid();
        for_each_word(0, words, [&](int word, const float2& upper, const float2& lower) {
            arch::store_global(own + word * WARPGROUP_THREADS,
                               float4{upper.x, upper.y, lower.x, lower.y});
        });
        if (laneid() < warp_pairs) {
            arch::store_global(
                reinterpret_cast<float2*>(to + state_floats - 2 * K::features + own_feature()),
                denominator);
        }
    }
    // Adds `count` segments' states. Half of one is in flight, through `buffer`, which has as much
    // room: for that there are too few registers.
    __device__ __forceinline__ void add_segments(const float* from, int count, uint32_t buffer) {
        constexpr int pieces = 8, piece = words / pieces, ahead = pieces / 2;
        buffer += uint32_t(16 * warpgroup::laneid());
        const float* own = from + 4 * warpgroup::laneid();
        const auto slot = [&](int word) {
            return buffer + uint32_t(word % (piece * ahead) * 16 * WARPGROUP_THREADS);
        };
        const auto issue = [&](int segment, int p) {
#pragma unroll
            for (int word = p * piece; word < (p + 1) * piece; ++word) {
                if (segment < count)
                    arch::cp_async<16>(slot(word), own + int64_t(segment) * state_floats +
                                                       word * 4 * WARPGROUP_THREADS);
            }
            arch::cp_async_commit();
        };
#pragma unroll
        for (int p = 0; p < ahead; ++p) issue(0, p);
#pragma unroll 1
        for (int s = 0; s < count; ++s) {
            const float2 counts = arch::load_global(reinterpret_cast<const float2*>(
                from + int64_t(s + 1) * state_floats - 2 * K::features + own_feature()));
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                arch::cp_async_wait<ahead - 1>();
                for_each_word(p * piece, piece, [&](int word, float2& upper, float2& lower) {
                    const auto x = arch::load_shared<float4>(slot(word));
                    upper = {upper.x + x.x, upper.y + x.y};
                    lower = {lower.x + x.z, lower.y + x.w};
                });
                issue(p < ahead ? s : s + 1, (p + ahead) % pieces);
            }
            denominator = {denominator.x + counts.x, denominator.y + counts.y};
        }
        arch::cp_async_wait<0>();
    }
    __device__ __forceinline__ void store(float* to, float* to_denominator) {
        for_each_pair([&](const float2& pair, int feature, int column) {
            arch::store_global(reinterpret_cast<float2*>(to + feature * K::head_dim + column),
                               pair);
        });
        if (laneid() < warp_pairs) {
            arch::store_global(reinterpret_cast<float2*>(to_denominator + own_feature()),
                               denominator);
        }
    }

    // Issues the sums over a chunk, whose features are in shared memory, seen by all. The caller
    // waits.
    __device__ __forceinline__ void issue(typename K::feature_tile (&features)[K::groups],
                                          const typename K::token_tile& values) {
#pragma unroll
        for (int t = 0; t < K::groups; ++t) warpgroup::mma_AtB(numerator[t], features[t], values);
    }
    __device__ __forceinline__ void add_denominator(
        const typename K::feature_tile (&features)[K::groups]) {
        constexpr int run = 8 / parts;  // tokens; so that the parts of a warp use different banks
        const int feature = own_feature(), part = laneid() / warp_pairs;
        const auto& tile = features[K::groups > 1 ? feature / 64 : 0];
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < CHUNK / parts; ++t) {
            const int token = t / run * 8 + part * run + t % run;
            const auto word = arch::load_shared<uint32_t>(tile.address_of(token, feature % 64));
            const float2 x =
                unpack_pair<typename K::T>(arch::bit_cast<packed_type<typename K::T>>(word));
            sum = {sum.x + x.x, sum.y + x.y};
        }
#pragma unroll
        for (int distance = warp_pairs; distance < WARP_THREADS; distance *= 2) {
            sum.x += arch::shuffle_xor(sum.x, distance);
            sum.y += arch::shuffle_xor(sum.y, distance);
        }
        denominator = {denominator.x + sum.x, denominator.y + sum.y};
    }
    __device__ __forceinline__ void wait() {
#pragma unroll
        for (int t = 0; t < K::groups; ++t) {
            if (t == 0)
                warpgroup::mma_async_wait<0>(numerator[t]);
            else
                pin_tile(numerator[t]);
        }
    }
    // The largest magnitude of this lane's sums.
    __device__ __forceinline__ float largest() {
        float most = 0.0f;
        for_each_pair([&](const float2& pair, int, int) {
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        });
        return most;
    }
    // Writes factor * numerator as an operand, in 16 bits.
    __device__ __forceinline__ void publish(typename K::state_tile (&to)[K::groups],
                                            float factor) const {
#pragma unroll
        for (int t = 0; t < K::groups; ++t) {
#pragma unroll
            for (int j = 0; j < K::head_dim / 16; ++j) {
                rt_fl<16, 16> part;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = numerator[t].tiles[0][j].data[i];
                    part.tiles[0][0].data[i] = {factor * pair.x, factor * pair.y};
                }
                warp::store(to[t].template subtile<16, 16>({warpgroup::warpid(), j}), part);
            }
        }
    }
};

}  // namespace thunderkittens::linear_attention
