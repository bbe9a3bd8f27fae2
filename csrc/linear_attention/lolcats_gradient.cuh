// What the kernels of LoLCATS's gradient share: the rows' weights, the way back through the feature
// map, and the operands in shared memory.
#pragma once

#include "csrc/linear_attention/lolcats_backward.h"
#include "csrc/linear_attention/lolcats_state.cuh"
#include "kittens/arch/discard.cuh"

namespace thunderkittens::linear_attention {

// Per chunk: float4 of each token, as LolcatsBackwardWorkspace::rows has them; float2, as weights.
using RowVector = sv<float, 4 * CHUNK>;
using WeightVector = sv<float, 2 * CHUNK>;
using RowsLayout = gl<float, 1, 1, -1, -1, RowVector>;
using WeightsLayout = gl<float, 1, 1, -1, -1, WeightVector>;

template <class K>
struct LolcatsGradient {
    using T = typename K::T;
    static constexpr int dim = K::head_dim, features = K::features;
    using projected_tile = st<T, CHUNK, features>;
    using projected_layout = gl<T, 1, -1, -1, features, projected_tile>;
    using scores = rt_fl<16, CHUNK>;
    using weights = rt<T, 16, CHUNK>;
    using output = rt_fl<16, dim>;
    static constexpr bool is_half = std::is_same_v<T, half>;
    static constexpr float scale = dim == 128 ? 0.08838834764831845f : 0.125f;  // of the scores
    static constexpr float unit = scale * LOG2_E;
    // Features of queries times their weights are small numbers in half.
    static constexpr float weight_unit = is_half ? 32.0f : 1.0f;
};

template <class K>
typename LolcatsGradient<K>::projected_layout projected_layout_of(void* data,
                                                                  const LolcatsProblem& p) {
    return typename LolcatsGradient<K>::projected_layout(static_cast<typename K::T*>(data), nullptr,
                                                         p.batch * p.heads, chunks_of(p) * CHUNK,
                                                         nullptr);
}

// The row of the lane's upper elements; the lower ones are 8 rows below.
__device__ __forceinline__ int lane_row() { return 16 * warpgroup::warpid() + laneid() / 4; }

// The same object, such that addresses in it are computed again in every round of a loop: all of
// them kept would not leave enough registers.
template <class Object>
__device__ __forceinline__ Object& recomputed(Object& object) {
    uint32_t zero = 0;
    arch::pin_register(zero);
    return *(&object + zero);
}

// By one thread of a warpgroup whose threads have synchronised, or not written anything.
__device__ __forceinline__ void signal(semaphore& s) {
    if (warpgroup::laneid() == 0) arrive(s);
}

// Before a product that overwrites the tiles.
template <any_register_tile... Tiles>
__device__ __forceinline__ void discard(Tiles&... tiles) {
    const auto discard_one = [](auto& tile) {
#pragma unroll
        for (int j = 0; j < std::remove_cvref_t<decltype(tile)>::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                arch::discard_register(tile.tiles[0][j].data[i].x);
                arch::discard_register(tile.tiles[0][j].data[i].y);
            }
        }
    };
    (discard_one(tiles), ...);
}

template <any_register_tile Tile>
__device__ __forceinline__ void scale_tile(Tile& tile, float factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& pair = tile.tiles[0][j].data[i];
            pair = {pair.x * factor, pair.y * factor};
        }
    }
}
// Calls f(value, column, true for the lower row).
template <any_register_tile Tile, class F>
__device__ __forceinline__ void for_each_element(Tile& tile, F f) {
    const int column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f(tile.tiles[0][j].data[i].x, 16 * j + 8 * (i / 2) + column, i % 2 == 1);
            f(tile.tiles[0][j].data[i].y, 16 * j + 8 * (i / 2) + column + 1, i % 2 == 1);
        }
    }
}

// dO S^T for the features of one sign, S the sums.
template <class K>
__device__ __forceinline__ void issue_feature_gradient(typename K::projection& gradient,
                                                       const typename K::token_tile& x,
                                                       typename K::state_tile (&state)[K::groups],
                                                       int sign) {
    if constexpr (K::groups == 2)
        warpgroup::mm_ABt(gradient, x, state[sign]);
    else
        warpgroup::mm_ABt(gradient, x,
                          state[0].template subtile<K::features, K::head_dim>({sign, 0}));
}

// Of one sign of the feature map: the sums of exp(sign z) and of that times the features' gradient
// a g - b s give phi . gradient; then g becomes sign phi (gradient - phi . gradient).
template <class K, int sign>
__device__ __forceinline__ float2 softmax_gradient(typename K::projection& g,
                                                   const typename K::projection& z,
                                                   const sv<float, 2 * K::features>& sums, float2 a,
                                                   float2 b) {
    constexpr float factor = sign == 0 ? LOG2_E : -LOG2_E;
    float2 top = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = z.tiles[0][j].data[i];
            float& t = i % 2 ? top.y : top.x;
            t = fmaxf(t, sign == 0 ? fmaxf(pair.x, pair.y) : fmaxf(-pair.x, -pair.y));
        }
    }
    top = {quad_maximum(top.x) * LOG2_E, quad_maximum(top.y) * LOG2_E};
    float2 sum = {0.0f, 0.0f}, dot = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
        arch::sync_warp();  // else all of the sums are loaded before, into registers
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
            const float2 s =
                arch::load_shared<float2>(sums.address_of(sign * K::features + column));
            const float top_row = i % 2 ? top.y : top.x, ar = i % 2 ? a.y : a.x,
                        br = i % 2 ? b.y : b.x;
            const float2 pair = z.tiles[0][j].data[i];
            float2& x = g.tiles[0][j].data[i];
            x = {fmaf(ar, x.x, -br * s.x), fmaf(ar, x.y, -br * s.y)};
            const float2 e = {arch::exp2_approx(fmaf(pair.x, factor, -top_row)),
                              arch::exp2_approx(fmaf(pair.y, factor, -top_row))};
            float &t = i % 2 ? sum.y : sum.x, &d = i % 2 ? dot.y : dot.x;
            t += e.x + e.y;
            d = fmaf(e.x, x.x, fmaf(e.y, x.y, d));
        }
    }
    const float2 r = {1.0f / quad_sum(sum.x), 1.0f / quad_sum(sum.y)};
    dot = {quad_sum(dot.x) * r.x, quad_sum(dot.y) * r.y};
    const float2 f = sign == 0 ? r : float2{-r.x, -r.y};
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float top_row = i % 2 ? top.y : top.x, fr = i % 2 ? f.y : f.x,
                        dr = i % 2 ? dot.y : dot.x;
            const float2 pair = z.tiles[0][j].data[i];
            float2& x = g.tiles[0][j].data[i];
            const float2 e = {arch::exp2_approx(fmaf(pair.x, factor, -top_row)),
                              arch::exp2_approx(fmaf(pair.y, factor, -top_row))};
            x = {e.x * fr * (x.x - dr), e.y * fr * (x.y - dr)};
        }
    }
    return dot;
}
// The gradient of z from that of the features, whose first half is in g, its product issued and
// waited for; returns phi . gradient of the two rows. `issue` issues the second half's product. One
// half at a time, and the first kept in `place` meanwhile, because there are not registers for both
// beside the sums. At last the result is written there.
template <class K, class Issue>
__device__ __forceinline__ float2
projection_gradient(typename LolcatsGradient<K>::projected_tile& place, typename K::projection& g,
                    const typename K::projection& z, const sv<float, 2 * K::features>& sums,
                    float2 a, float2 b, float factor, Issue issue) {
    using T = typename K::T;
    const float2 plus = softmax_gradient<K, 0>(g, z, sums, a, b);
    warpgroup::store(place, g);
    arch::sync_warp();
    issue(g);
    warpgroup::mma_async_wait<0>(g);
    const float2 minus = softmax_gradient<K, 1>(g, z, sums, a, b);
    rt<T, 16, K::features> first;
    warpgroup::load(first, place);
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& x = g.tiles[0][j].data[i];
            const float2 y = unpack_pair<T>(first.tiles[0][j].data[i]);
            x = {factor * (x.x + y.x), factor * (x.y + y.y)};
        }
    }
    arch::sync_warp();
    warpgroup::store(place, g);
    return {plus.x + minus.x, plus.y + minus.y};
}

// A power of two that brings sums in half into their range; 1 in bf16.
template <class K>
__device__ __forceinline__ float range_factor(LolcatsSums<K>& sums, sv<float, 16>& scratch,
                                              int barrier) {
    if constexpr (!LolcatsGradient<K>::is_half) {
        return 1.0f;
    } else {
        float most = sums.largest();
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            most = fmaxf(most, arch::shuffle_xor(most, distance));
        if (laneid() == 0) scratch.set(warpgroup::warpid(), most);
        warpgroup::sync(barrier);
#pragma unroll
        for (int w = 0; w < WARPGROUP_WARPS; ++w) most = fmaxf(most, scratch.get(w));
        const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
        // 2^13 at most, so that nothing overflows; infinities and NaN stay.
        if (exponent < -60 || exponent > 127) return 1.0f;
        return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
    }
}
template <class K>
__device__ __forceinline__ void store_sums_vector(sv<float, 2 * K::features>& to,
                                                  const LolcatsSums<K>& sums) {
    if (laneid() < LolcatsSums<K>::warp_pairs)
        arch::store_shared(to.address_of(LolcatsSums<K>::own_feature()), sums.denominator);
}

// Features of queries, times their weights, and the sums of these times delta.
template <class K>
__device__ __forceinline__ void make_weighted_features(typename K::Features& features,
                                                       const typename K::projection& z,
                                                       const WeightVector& weights) {
    make_features<K>(features, z);
    const int row = lane_row();
    constexpr float unit = LolcatsGradient<K>::weight_unit;
    const float2 w = {unit * weights.get(2 * row), unit * weights.get(2 * row + 16)};
#pragma unroll
    for (int t = 0; t < K::groups; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                auto& word = features.groups[t].tiles[0][j].data[i];
                const float2 pair = unpack_pair<typename K::T>(word);
                const float f = i % 2 ? w.y : w.x;
                word = pack_pair<typename K::T>(f * pair.x, f * pair.y);
            }
        }
    }
}
template <class K>
__device__ __forceinline__ void add_delta(LolcatsSums<K>& sums,
                                          const typename K::feature_tile (&features)[K::groups],
                                          const WeightVector& weights) {
    using Sums = LolcatsSums<K>;
    constexpr int run = 8 / Sums::parts;  // as LolcatsSums::add_denominator
    const int feature = Sums::own_feature(), part = laneid() / Sums::warp_pairs;
    const auto& tile = features[K::groups > 1 ? feature / 64 : 0];
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < CHUNK / Sums::parts; ++t) {
        const int token = t / run * 8 + part * run + t % run;
        const float2 x = unpack_pair<typename K::T>(
            arch::load_shared<packed_type<typename K::T>>(tile.address_of(token, feature % 64)));
        const float delta = weights.get(2 * token + 1);
        sum = {fmaf(delta, x.x, sum.x), fmaf(delta, x.y, sum.y)};
    }
#pragma unroll
    for (int distance = Sums::warp_pairs; distance < WARP_THREADS; distance *= 2) {
        sum.x += arch::shuffle_xor(sum.x, distance);
        sum.y += arch::shuffle_xor(sum.y, distance);
    }
    sums.denominator = {sums.denominator.x + sum.x, sums.denominator.y + sum.y};
}

// Stores the rows that exist of a chunk that begins at row `first`, which may be negative: TMA
// cannot store there.
template <int dim, class Out>
__device__ __forceinline__ void store_rows(Out* to, int length, int first,
                                           const rt_fl<16, dim>& tile) {
    const int row = first + lane_row();
#pragma unroll
    for (int j = 0; j < dim / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = row + 8 * (i % 2), column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
            if (at < 0 || at >= length) continue;
            const float2 pair = tile.tiles[0][j].data[i];
            arch::store_global(reinterpret_cast<packed_type<Out>*>(to + int64_t(at) * dim + column),
                               pack_pair<Out>(pair.x, pair.y));
        }
    }
}

}  // namespace thunderkittens::linear_attention
