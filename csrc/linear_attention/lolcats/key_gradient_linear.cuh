// The linear roles of LoLCATS's gradient for keys: one warpgroup for each sign of the feature map,
// with the sums of its features in fp32 registers. Both project the tokens, because a projection
// costs less than handing it over; the gradients of their projections are added in shared memory.
#pragma once

#include "csrc/linear_attention/lolcats/gradient_common.cuh"

namespace thunderkittens::linear_attention {

// Warpgroups: 0 and 1 are the linear roles.
constexpr int LOLCATS_KEY_THREADS = 4 * WARPGROUP_THREADS;
constexpr int KEY_WINDOW_ROLE = 2, KEY_PRODUCER_ROLE = 3;
// Named barriers: each linear role's is 1 + its sign.
constexpr int KEY_WINDOW_BARRIER = 3, BOTH_SIGNS_BARRIER = 4;

// Becomes the features of one sign, softmax(z) or softmax(-z).
template <class K, int sign>
__device__ __forceinline__ void make_features_of(typename K::projection& z) {
    constexpr float unit = sign == 0 ? LOG2_E : -LOG2_E;
    float2 top = {-INFINITY, -INFINITY}, sum = {0.0f, 0.0f};
    for_each_element(z, [&](float x, int, bool low) {
        float& t = low ? top.y : top.x;
        t = fmaxf(t, sign == 0 ? x : -x);
    });
    top = {quad_maximum(top.x) * LOG2_E, quad_maximum(top.y) * LOG2_E};
    for_each_element(z, [&](float& x, int, bool low) {
        x = arch::exp2_approx(fmaf(x, unit, low ? -top.y : -top.x));
        (low ? sum.y : sum.x) += x;
    });
    const float2 r = {arch::reciprocal_approx(quad_sum(sum.x)),
                      arch::reciprocal_approx(quad_sum(sum.y))};
    for_each_element(z, [&](float& x, int, bool low) { x *= low ? r.y : r.x; });
}

// phi . gradient of the two rows, for the features' gradient a g - b sums; g becomes the gradient
// of z. phi is as it was rounded for a product, because registers are few.
template <class K, int sign>
__device__ __forceinline__ float2 sign_gradient(typename K::projection& g,
                                                const rt<typename K::T, 16, K::features>& phi,
                                                const sv<float, 2 * K::features>& sums, float2 a,
                                                float2 b) {
    float2 dot = {0.0f, 0.0f};
    for_each_with_sums<K, sign>(sums, [&](int j, int i, bool low, float2 s) {
        const float ar = low ? a.y : a.x, br = low ? b.y : b.x;
        const float2 p = unpack_pair<typename K::T>(phi.tiles[0][j].data[i]);
        float2& x = g.tiles[0][j].data[i];
        x = {fmaf(ar, x.x, -br * s.x), fmaf(ar, x.y, -br * s.y)};
        float& d = low ? dot.y : dot.x;
        d = fmaf(p.x, x.x, fmaf(p.y, x.y, d));
    });
    dot = {quad_sum(dot.x), quad_sum(dot.y)};
    constexpr float factor = sign == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float d = i % 2 ? dot.y : dot.x;
            const float2 p = unpack_pair<typename K::T>(phi.tiles[0][j].data[i]);
            float2& x = g.tiles[0][j].data[i];
            x = {factor * p.x * (x.x - d), factor * p.y * (x.y - d)};
        }
    }
    return dot;
}

// One sign's part of LolcatsRunningState, in a layout of its own: a warp has 16 rows of the
// numerator, none behind the features that there are.
template <class K, int _sign>
struct SignSums {
    static constexpr int sign = _sign, features = K::features;
    static constexpr int warp_pairs = features / 8, parts = WARP_THREADS / warp_pairs;
    rt_fl<16, K::head_dim> numerator;
    float2 denominator;

    // Of the sign's.
    static __device__ __forceinline__ int own_feature() {
        return 2 * (warpgroup::warpid() * warp_pairs + laneid() % warp_pairs);
    }
    __device__ __forceinline__ void clear() {
        zero(numerator);
        denominator = {0.0f, 0.0f};
    }
    // From the sums of a head: both signs' numerators, then both signs' denominators. May be null.
    __device__ __forceinline__ void add(const float* from, const float* from_denominator) {
        if (from == nullptr) return;
        const int row = lane_row(), column = 2 * (laneid() % 4);
        if (row < features) {
#pragma unroll
            for (int j = 0; j < K::head_dim / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2& pair = numerator.tiles[0][j].data[i];
                    const float2 x = arch::load_global(reinterpret_cast<const float2*>(
                        from + (sign * features + row + 8 * (i % 2)) * K::head_dim + 16 * j +
                        8 * (i / 2) + column));
                    pair = {pair.x + x.x, pair.y + x.y};
                }
            }
        }
        const float2 x = arch::load_global(
            reinterpret_cast<const float2*>(from_denominator + sign * features + own_feature()));
        denominator = {denominator.x + x.x, denominator.y + x.y};
    }
    // Adds the sums over 64 tokens of weight(token) times their features, to the denominator.
    template <class Weight>
    __device__ __forceinline__ void add_denominator(const typename K::feature_tile& tile,
                                                    Weight weight) {
        const float2 sum = weighted_feature_sum<warp_pairs, true>(tile, own_feature(), weight);
        denominator = {denominator.x + sum.x, denominator.y + sum.y};
    }
    // Writes factor * numerator as an operand, in 16 bits.
    __device__ __forceinline__ void store_operand(typename K::state_tile& to, float factor) const {
        MatrixRows<typename K::state_tile>(to, 16 * warpgroup::warpid()).store(numerator, factor);
    }
    __device__ __forceinline__ void store_denominator(sv<float, 2 * features>& to) const {
        if (laneid() < warp_pairs)
            arch::store_shared(to.address_of(sign * features + own_feature()), denominator);
    }
};

// What both roles do.
template <class K, int _sign>
struct SignRole {
    using G = LolcatsGradient<K>;
    static constexpr int sign = _sign, barrier = 1 + sign;
    // Of both roles; each round uses the other half, so that nobody reads what a role that is ahead
    // writes.
    using Scratch = sv<float, 32>;
    using Features = rt<typename K::T, 16, K::features>;
    SignSums<K, sign> sums;

    static __device__ __forceinline__ void sync() { warpgroup::sync(barrier); }

    // A tile of 64 columns: those behind the features stay zero.
    static __device__ __forceinline__ void clear_padding(typename K::feature_tile& tile) {
        if constexpr (K::features < 64) {
            rt_fl<16, 64> nothing;
            zero(nothing);
            warpgroup::store(tile, nothing);
            arch::sync_warp();
        }
    }
    // Rounds the features times the two rows' weights, and stores them.
    static __device__ __forceinline__ void store_features(typename K::feature_tile& tile,
                                                          Features& to,
                                                          const typename K::projection& phi,
                                                          float2 weights) {
#pragma unroll
        for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = phi.tiles[0][j].data[i];
                const float w = i % 2 ? weights.y : weights.x;
                to.tiles[0][j].data[i] = pack_pair<typename K::T>(w * pair.x, w * pair.y);
            }
        }
        warpgroup::store(tile.template subtile<CHUNK, K::features>({0, 0}), to);
    }
    // x S^T for the sign's features, S its sums.
    static __device__ __forceinline__ void issue_gradient(typename K::projection& gradient,
                                                          const typename K::token_tile& x,
                                                          typename K::state_tile& state) {
        warpgroup::mm_ABt(gradient, x, state.template subtile<K::features, K::head_dim>({0, 0}));
    }
    // A power of two that brings both signs' sums in half into their range; 1 in bf16.
    __device__ __forceinline__ float range_factor(Scratch& scratch, int round) {
        if constexpr (!G::is_half) {
            return 1.0f;
        } else {
            const int first = 16 * (round % 2);
            float most = 0.0f;
            for_each_element(sums.numerator,
                             [&](float x, int, bool) { most = fmaxf(most, fabsf(x)); });
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, arch::shuffle_xor(most, distance));
            if (laneid() == 0)
                scratch.set(first + WARPGROUP_WARPS * sign + warpgroup::warpid(), most);
            group<2 * WARPGROUP_WARPS>::sync(BOTH_SIGNS_BARRIER);
#pragma unroll
            for (int w = 0; w < 2 * WARPGROUP_WARPS; ++w)
                most = fmaxf(most, scratch.get(first + w));
            const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
            // 2^13 at most, so that nothing overflows; infinities and NaN stay.
            if (exponent < -60 || exponent > 127) return 1.0f;
            return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
        }
    }
    // The first role leaves its part of dz in `place`, the second adds its own.
    static __device__ __forceinline__ void add_projected(typename G::projected_tile& place,
                                                         semaphore& half_full, int phase,
                                                         typename K::projection& g) {
        if constexpr (sign == 0) {
            warpgroup::store(place, g);
            arch::sync_warp();
            if (laneid() == 0) arrive(half_full);
        } else {
            wait(half_full, phase);
            Features first;
            warpgroup::load(first, place);
#pragma unroll
            for (int j = 0; j < K::features / 16; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2& x = g.tiles[0][j].data[i];
                    const float2 y = unpack_pair<typename K::T>(first.tiles[0][j].data[i]);
                    x = {x.x + y.x, x.y + y.y};
                }
            }
            arch::sync_warp();
            warpgroup::store(place, g);
        }
    }
};

}  // namespace thunderkittens::linear_attention
