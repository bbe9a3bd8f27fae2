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

// What of a block's logits is not in the scores: a term per row.
struct Shift {
    bool shifted = false;
    float2 rows = {0.0f, 0.0f};
};

// Online softmax with conditional rescaling. Weights are relative to 2^base, where base is a
// maximum of the row's logits: of the first block of keys, and a later one only once the logits
// have grown by more than a factor of 2^RESCALE_THRESHOLD beyond it. So what has been accumulated
// is rarely rescaled, and most blocks need no exchange between threads. The quotient of the two
// sums does not depend on base.
struct OnlineSoftmax {
    static constexpr float RESCALE_THRESHOLD = 8.0f;
    static constexpr float NO_KEY = -3e38f;  // finite: -inf minus it is no NaN

    float2 base = {NO_KEY, NO_KEY};
    float2 sum = {0.0f, 0.0f};

    // Turns the logits s + shift of a new block of keys into weights. `scale_log2` is the softmax
    // scale times log2(e), positive. Returns whether everything accumulated so far must be
    // multiplied by `rescale`, for all threads of the warp.
    template <any_register_tile Tile>
    __device__ __forceinline__ bool update(Tile& s, float scale_log2, const Shift& shift,
                                           float2& rescale) {
        const float2 top = thread_maximum(s, shift);
        const bool grown = arch::any_lane(outgrown(top, scale_log2));
        if (grown) rescale = raise(top, scale_log2);
        add_weights(s, scale_log2, shift);
        return grown;
    }
    // The steps of update(), for kernels that do something in between: the largest logits of this
    // thread, whether these ask for another base, and that base, after which everything
    // accumulated so far must be multiplied by the result.
    template <any_register_tile Tile>
    static __device__ __forceinline__ float2 thread_maximum(const Tile& s, const Shift& shift) {
        // Two partial maxima per row shorten the chain of dependent instructions.
        float2 top[2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
        for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 pair = s.tiles[0][j].data[k];
                float& t = k % 2 == 1 ? top[k / 2].y : top[k / 2].x;
                t = fmaxf(fmaxf(t, pair.x), pair.y);
            }
        }
        float2 result = {fmaxf(top[0].x, top[1].x), fmaxf(top[0].y, top[1].y)};
        if (shift.shifted) result = {result.x + shift.rows.x, result.y + shift.rows.y};
        return result;
    }
    __device__ __forceinline__ bool outgrown(float2 top, float scale_log2) const {
        return top.x * scale_log2 > base.x + RESCALE_THRESHOLD ||
               top.y * scale_log2 > base.y + RESCALE_THRESHOLD;
    }
    __device__ __forceinline__ float2 raise(float2 top, float scale_log2) {
        const float2 last = base;
        raise_base(top, scale_log2);
        const float2 rescale = {arch::exp2_approx(last.x - base.x),
                                arch::exp2_approx(last.y - base.y)};
        sum = {sum.x * rescale.x, sum.y * rescale.y};
        return rescale;
    }
    // Makes weights of logits, of all of a block's keys or of some.
    template <any_register_tile Tile>
    __device__ __forceinline__ void add_weights(Tile& s, float scale_log2, const Shift& shift) {
        float2 from = {-base.x, -base.y};
        if (shift.shifted) {
            from = {fmaf(shift.rows.x, scale_log2, from.x), fmaf(shift.rows.y, scale_log2, from.y)};
        }
        for_each_element(s, [&](float& x, int, bool low) {
            x = arch::exp2_approx(fmaf(x, scale_log2, low ? from.y : from.x));
            (low ? sum.y : sum.x) += x;
        });
    }
    // The first block of keys.
    template <any_register_tile Tile>
    __device__ __forceinline__ void start(Tile& s, float scale_log2, const Shift& shift) {
        base = {NO_KEY, NO_KEY};
        raise_base(thread_maximum(s, shift), scale_log2);
        add_weights(s, scale_log2, shift);
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
    __device__ __forceinline__ void raise_base(float2 top, float scale_log2) {
        top.x = over_quad(top.x, [](float a, float b) { return fmaxf(a, b); });
        top.y = over_quad(top.y, [](float a, float b) { return fmaxf(a, b); });
        base = {fmaxf(base.x, arch::multiply_rounded(top.x, scale_log2)),
                fmaxf(base.y, arch::multiply_rounded(top.y, scale_log2))};
    }
    static __device__ __forceinline__ float add_sink(float& base, float& sum, float logit) {
        const float top = fmaxf(base, logit);
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
