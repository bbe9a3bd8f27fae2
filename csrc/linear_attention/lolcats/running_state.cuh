// The state that LoLCATS's kernels carry from chunk to chunk, in fp32 registers of a warpgroup: the
// sums of phi(k) v^T (the numerator) and of phi(k) (the denominator).
#pragma once

#include "csrc/linear_attention/lolcats/types.cuh"

namespace thunderkittens::linear_attention {

// The sums of phi(k) v^T and of phi(k). A warp has 16 rows of each group of 64 features of the
// former; of the latter a lane has two neighbouring features, and other lanes of the warp the same.
template <class K>
struct LolcatsRunningState {
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
    __device__ __forceinline__ void wait() {
#pragma unroll
        for (int t = 0; t < K::groups; ++t) {
            if (t == 0)
                warpgroup::mma_async_wait<0>(numerator[t]);
            else
                pin(numerator[t]);
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
    __device__ __forceinline__ void store_operand(typename K::state_tile (&to)[K::groups],
                                                  float factor) const {
        const MatrixRows<typename K::state_tile> rows(to[0], 16 * warpgroup::warpid());
#pragma unroll
        for (int t = 0; t < K::groups; ++t)
            rows.store(numerator[t], factor, t * int(sizeof(to[0])));
    }
};

// The state before a segment: sums of all of its predecessors', or a scan has left them.
template <class K>
__device__ __forceinline__ void add_segments_before(LolcatsRunningState<K>& sums,
                                                    const float* states,
                                                    const LolcatsWorkTile& work, int segments,
                                                    uint32_t buffer) {
    constexpr int64_t size = int64_t(2 * K::features) * (K::head_dim + 1);
    const bool scanned = segments > ADDED_SEGMENTS;
    const int first = work.batch_head * segments + (scanned ? work.segment : 0);
    sums.add_segments(states + first * size, scanned ? 1 : work.segment, buffer);
}

// Adds a chunk's features to the denominator, on the tensor cores, by a product with ones: fewer
// instructions than sums of the elements.
template <class K>
__device__ __forceinline__ void count_features(
    LolcatsRunningState<K>& total, const typename K::feature_tile (&features)[K::groups]) {
    using T = typename K::T;
    constexpr int warp_pairs = LolcatsRunningState<K>::warp_pairs;
    constexpr int tiles = warp_pairs / 4;  // of 8 features
    const int first = 2 * warp_pairs * warpgroup::warpid();
    const auto& tile = features[K::groups > 1 ? first / 64 : 0];
    const uint32_t one = arch::bit_cast<uint32_t>(pack_pair<T>(1.0f, 1.0f));
    const uint32_t ones[4] = {one, one, one, one};
    float sums[tiles][4] = {};
#pragma unroll
    for (int j = 0; j < tiles / 2; ++j) {
        const uint32_t place =
            kittens::detail::matrix_row_address<typename rt<T, 16, 16, col_l>::base>(
                tile, 0, first % 64 + 16 * j);
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            uint32_t words[4];
            arch::load_matrix_x4_transposed(words[0], words[1], words[2], words[3],
                                            place + uint32_t(2048 * k));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                auto& sum = sums[2 * j + n];
                const uint32_t pair[2] = {words[n], words[n + 2]};
                const float before[4] = {sum[0], sum[1], sum[2], sum[3]};
                arch::mma_sync<T, T>::fma(sum, ones, pair, before);
            }
        }
    }
    const int own = laneid() % warp_pairs / 4;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        total.denominator.x += own == t ? sums[t][0] : 0.0f;
        total.denominator.y += own == t ? sums[t][1] : 0.0f;
    }
}

}  // namespace thunderkittens::linear_attention
