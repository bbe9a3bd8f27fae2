// The running softmax of attention: per row a maximum and a sum, in the fragment layout of the
// tensor cores' accumulator, where a thread holds parts of two rows (x: row lane/4, y: 8 below) and
// four neighbouring threads share them.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// Calls f(value, column in the tile, true for the lower row) on every element of a 16-row tile.
template <any_register_tile Tile, class F>
__device__ __forceinline__ void for_each_element(Tile& tile, F f) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            f(tile.tiles[0][j].data[k].x, 16 * j + 8 * (k / 2), k % 2 == 1);
            f(tile.tiles[0][j].data[k].y, 16 * j + 8 * (k / 2) + 1, k % 2 == 1);
        }
    }
}

template <any_register_tile Tile>
__device__ __forceinline__ void zero_tile(Tile& tile) {
    for_each_element(tile, [](float& x, int, bool) { x = 0.0f; });
}

template <any_register_tile Tile>
__device__ __forceinline__ void scale_rows(Tile& tile, float2 factor) {
    for_each_element(tile, [&](float& x, int, bool low) { x *= low ? factor.y : factor.x; });
}

// Keeps the compiler from moving uses of the tile above this point.
template <any_register_tile Tile>
__device__ __forceinline__ void pin(Tile& tile) {
    for_each_element(tile, [](float& x, int, bool) { arch::pin_register(x); });
}

template <any_register_tile To, any_register_tile From>
__device__ __forceinline__ void convert_scores(To& to, const From& from) {
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 pair = from.tiles[0][j].data[k];
            to.tiles[0][j].data[k] = pack_pair<typename To::T>(pair.x, pair.y);
        }
    }
}

struct OnlineSoftmax {
    float2 max = {-INFINITY, -INFINITY};  // of the scores
    // Weights are relative to 2^base: max * scale_log2, rounded.
    float2 base = {-INFINITY, -INFINITY};
    float2 sum = {0.0f, 0.0f};

    // Turns the logits s of a new block of keys into weights relative to the new maximum, and
    // returns the factor by which everything accumulated so far must be multiplied. `scale_log2` is
    // the softmax scale times log2(e), positive. MASKED: rows may have seen no key yet.
    template <bool MASKED, any_register_tile Tile>
    __device__ __forceinline__ float2 update(Tile& s, float scale_log2) {
        float2 top = max;
        for_each_element(s, [&](float& x, int, bool low) {
            float& t = low ? top.y : top.x;
            t = fmaxf(t, x);
        });
        top.x = over_quad(top.x, [](float a, float b) { return fmaxf(a, b); });
        top.y = over_quad(top.y, [](float a, float b) { return fmaxf(a, b); });
        const float2 last = base;
        base = {arch::multiply_rounded(top.x, scale_log2),
                arch::multiply_rounded(top.y, scale_log2)};
        // -inf minus -inf would be NaN.
        const float2 next = {MASKED && top.x == -INFINITY ? 0.0f : base.x,
                             MASKED && top.y == -INFINITY ? 0.0f : base.y};
        // Exactly 1 where the maximum stays: the rest that a fused product leaves would add up over
        // the blocks.
        const float2 rescale = {arch::exp2_approx(last.x - next.x),
                                arch::exp2_approx(last.y - next.y)};
        max = top;
        sum = {sum.x * rescale.x, sum.y * rescale.y};
        for_each_element(s, [&](float& x, int, bool low) {
            x = arch::exp2_approx(fmaf(x, scale_log2, low ? -next.y : -next.x));
            (low ? sum.y : sum.x) += x;
        });
        return rescale;
    }
    // Each thread has summed its own columns; call once before the results below.
    __device__ __forceinline__ void reduce_sum() {
        sum.x = over_quad(sum.x, [](float a, float b) { return a + b; });
        sum.y = over_quad(sum.y, [](float a, float b) { return a + b; });
    }
    // One more key per row, of this logit times log2(e), whose value is zero: after reduce_sum.
    // Returns the factor for what has been accumulated.
    __device__ __forceinline__ float2 add_sink(float2 logit) {
        return {add_sink(base.x, sum.x, logit.x), add_sink(base.y, sum.y, logit.y)};
    }
    // A row that has seen no key gets weight 0 and LSE -inf.
    __device__ __forceinline__ float2 reciprocal_sum() const {
        return {sum.x == 0.0f ? 0.0f : 1.0f / sum.x, sum.y == 0.0f ? 0.0f : 1.0f / sum.y};
    }
    __device__ __forceinline__ float2 lse() const {
        return {lse_of(base.x, sum.x), lse_of(base.y, sum.y)};
    }

  private:
    static __device__ __forceinline__ float add_sink(float& base, float& sum, float logit) {
        const float top = fmaxf(base, logit);
        if (top == -INFINITY) return 0.0f;
        const float factor = arch::exp2_approx(base - top);
        sum = fmaf(sum, factor, arch::exp2_approx(logit - top));
        base = top;
        return factor;
    }
    static __device__ __forceinline__ float lse_of(float base, float sum) {
        constexpr float ln2 = 0.6931471805599453f;
        return sum == 0.0f ? -INFINITY : fmaf(base, ln2, logf(sum));
    }
    template <class F>
    static __device__ __forceinline__ float over_quad(float x, F combine) {
        x = combine(x, arch::shuffle_xor(x, 2));
        return combine(x, arch::shuffle_xor(x, 1));
    }
};

}  // namespace thunderkittens::attention
