// The feature map of LoLCATS (Hedgehog): softmax(x W) and softmax(-x W) of a projection of the
// tokens, made in registers from the projection's accumulator. `make_features` always subtracts the
// maxima; `make_scaled_features` has fewer instructions, for the forward, whose time these are, and
// where the gradient's kernels have registers to spare.
#pragma once

#include "csrc/linear_attention/lolcats/types.cuh"

namespace thunderkittens::linear_attention {

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

// Whether no softmax of the warp's rows needs its maximum subtracted: exp(z) and exp(-z) are finite
// then, and so are their sums.
template <class K>
__device__ __forceinline__ bool plain_exponentials_suffice(const typename K::projection& z) {
    constexpr float limit = 40.0f;
    return !arch::any_lane(!(largest_magnitude(z) < limit));
}

// `make_features` times `scale`. The maxima, which keep exponentials finite and sums of them from
// 0, are looked for only where a warp needs them: maxima of magnitudes are half the work.
template <class K>
__device__ __forceinline__ void make_scaled_features(typename K::Features& features,
                                                     const typename K::projection& z, float scale) {
    float2 most = {0.0f, 0.0f}, least = {0.0f, 0.0f};
    if (!plain_exponentials_suffice<K>(z)) projection_maxima<K>(z, most, least);
    softmax_features<K>(features, z, 1.0f, most, 0, scale);
    softmax_features<K>(features, z, -1.0f, least, K::features / 16, scale);
}

// `store_features` by stmatrix, with fewer addresses.
template <class K>
__device__ __forceinline__ void store_feature_rows(typename K::feature_tile (&to)[K::groups],
                                                   const typename K::Features& features) {
    const MatrixRows<typename K::feature_tile> rows(to[0], 16 * warpgroup::warpid());
#pragma unroll
    for (int t = 0; t < K::groups; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            rows.store(j, features.groups[t].tiles[0][j].data, t * int(sizeof(to[0])));
    }
}

}  // namespace thunderkittens::linear_attention
