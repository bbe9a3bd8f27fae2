// Softcap as a polynomial, by FMAs. tanh costs as much of the unit for exponentials as the
// exponential, so that where all scores of a warp are small against the cap, an odd polynomial
// takes its place.
#pragma once

#include "csrc/attention/common/attention.h"
#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/common/softmax.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// softcap * tanh(scale * score / softcap) * log2(e) of a score.
template <int TERMS>
struct TanhPolynomial {
    float limit = -1.0f;  // of |score|; negative: not applicable
    float factors[TERMS] = {};

    // tanh(x) is the sum of terms[i] * x^(2 i + 1) up to `largest`.
    TanhPolynomial(const ScoreOptions& s, double largest, const double (&terms)[TERMS]) {
        if (!(s.softcap > 0.0f) || s.alibi_slopes != nullptr) return;
        const double by_cap = double(s.scale) / s.softcap;
        double power = double(s.scale) * LOG2_E;
        for (int i = 0; i < TERMS; ++i, power *= by_cap * by_cap) {
            factors[i] = static_cast<float>(terms[i] * power);
            if (!std::isfinite(factors[i])) return;
        }
        limit = static_cast<float>(largest / by_cap);
    }
    __device__ __forceinline__ float operator()(float x, float plus) const {
        const float square = x * x;
        float sum = factors[TERMS - 1];
#pragma unroll
        for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(sum, square, factors[i]);
        return fmaf(sum, x, plus);
    }
};

// The same with two terms, whose factors each thread fits to the largest of its own scores. tanh(x)
// / x is nearly linear in x^2, and taken as the line that meets its series at the square of the
// largest x, which may outweigh all others, and at 3/8 of it, which makes the error elsewhere the
// least: at most (largest x)^5 / 94, of both signs.
struct FittedTanhPolynomial {
    float limit = -1.0f;  // of |score|; negative: not applicable

    explicit FittedTanhPolynomial(const ScoreOptions& s) {
        if (!(s.softcap > 0.0f) || s.alibi_slopes != nullptr) return;
        constexpr double third = 1.0 / 3, fifth = 2.0 / 15, seventh = 17.0 / 315;
        constexpr double sum = 11.0 / 8, product = 3.0 / 8;  // of the two, over the largest x^2
        const double scale = double(s.scale) * LOG2_E, cap = double(s.scale) / s.softcap;
        const double cubic = scale * cap * cap;
        by_cap = static_cast<float>(cap);
        constant[0] = static_cast<float>(scale);
        constant[1] = static_cast<float>(-scale * fifth * product);
        constant[2] = static_cast<float>(scale * seventh * product * sum);
        slope[0] = static_cast<float>(-cubic * third);
        slope[1] = static_cast<float>(cubic * fifth * sum);
        slope[2] = static_cast<float>(-cubic * seventh * (sum * sum - product));
        if (!std::isfinite(scale) || !std::isnormal(by_cap) || !std::isnormal(slope[0])) return;
        const float largest = static_cast<float>(0.24 / cap);
        if (std::isfinite(largest * largest)) limit = largest;
    }

    struct Line {
        float constant, slope;
        __device__ __forceinline__ float operator()(float x, float plus) const {
            return fmaf(fmaf(x * x, slope, constant), x, plus);
        }
    };
    __device__ __forceinline__ Line fit(float largest) const {
        const float x = largest * by_cap, square = x * x;
        return {fmaf(square * square, fmaf(square, constant[2], constant[1]), constant[0]),
                fmaf(square, fmaf(square, slope[2], slope[1]), slope[0])};
    }

  private:
    float by_cap = 0.0f;                    // scale / softcap
    float constant[3] = {}, slope[3] = {};  // of the line, in powers of the largest x^2
};

// Polynomials in two sizes. For bf16, where the tanh of softcap_tanh has a relative error of 2^-11:
// two terms, fitted, up to where they err by 2^-14.8, and three with 2^-16.7. For half three and
// four, with less than 2^-23 absolutely.
template <class T>
struct SoftcapPolynomial {
    static constexpr bool coarse = std::is_same_v<T, bf16>;
    // How many powers of two a weight may be above 1.
    static constexpr float RESCALE_THRESHOLD = coarse ? 24.0f : 14.0f;

    std::conditional_t<coarse, FittedTanhPolynomial, TanhPolynomial<3>> short_form;
    TanhPolynomial<coarse ? 3 : 4> long_form;
    float slope;  // no logit times log2(e) is larger than this times its score

    explicit SoftcapPolynomial(const ScoreOptions& s)
        : short_form(make_short_form(s)), long_form(make_long_form(s)), slope(s.scale * LOG2_E) {}

    // OnlineSoftmax::update of unmasked scores, if all of the warp are small enough for a
    // polynomial and none can exceed the base by too much; otherwise it does nothing and returns
    // false. What has been accumulated is not rescaled.
    template <any_register_tile Tile>
    __device__ __forceinline__ bool update(Tile& s, OnlineSoftmax& softmax) const {
        if (!(short_form.limit > 0.0f)) return false;
        const float2 top = largest_of(s);
        const float largest = fmaxf(top.x, top.y);
        const float above =
            fmaxf(fmaf(top.x, slope, -softmax.base.x), fmaf(top.y, slope, -softmax.base.y));
        const int bounded = above <= RESCALE_THRESHOLD;
        if (arch::all_lanes(bounded & static_cast<int>(largest <= short_form.limit))) {
            add_weights(s, softmax, fit(largest));
            return true;
        }
        if (!arch::all_lanes(bounded & static_cast<int>(largest <= long_form.limit))) return false;
        add_weights(s, softmax, long_form);
        return true;
    }

    // The same in parts, for a kernel that has something else to do between them.
    struct Bound {
        float largest = 0.0f;     // magnitude of this thread's scores
        int in_reach = 0;         // of the base
        bool short_form = false;  // the short polynomial serves all of the warp
    };
    template <any_register_tile Tile>
    __device__ __forceinline__ Bound bound_of(const Tile& s, const OnlineSoftmax& softmax) const {
        const float2 top = largest_of(s);
        const float largest = fmaxf(top.x, top.y);
        const float above =
            fmaxf(fmaf(top.x, slope, -softmax.base.x), fmaf(top.y, slope, -softmax.base.y));
        const int in_reach = above <= RESCALE_THRESHOLD;
        return {largest, in_reach,
                arch::all_lanes(in_reach & static_cast<int>(largest <= short_form.limit))};
    }
    // `short_form`, as add_weights takes it.
    __device__ __forceinline__ auto fit(float largest) const {
        if constexpr (coarse)
            return short_form.fit(largest);
        else
            return short_form;
    }
    // Of the base tiles begin to end.
    template <int begin, int end, any_register_tile Tile, class Polynomial>
    static __device__ __forceinline__ void add_weights(Tile& s, OnlineSoftmax& softmax,
                                                       const Polynomial& polynomial) {
        using part = rt_fl<16, 16 * (end - begin)>;
        add_weights(reinterpret_cast<part&>(s.tiles[0][begin]), softmax, polynomial);
    }
    // Where `short_form` does not serve; false if no polynomial does.
    template <any_register_tile Tile>
    __device__ __forceinline__ bool update_by_long_form(Tile& s, OnlineSoftmax& softmax,
                                                        const Bound& bound) const {
        if (!arch::all_lanes(bound.in_reach & static_cast<int>(bound.largest <= long_form.limit)))
            return false;
        add_weights(s, softmax, long_form);
        return true;
    }

  private:
    static auto make_short_form(const ScoreOptions& s) {
        if constexpr (coarse)
            return FittedTanhPolynomial(s);
        else
            return TanhPolynomial<3>(s, 0.25, {0.999999604, -0.333219082, 0.128416134});
    }
    static auto make_long_form(const ScoreOptions& s) {
        if constexpr (coarse)
            return TanhPolynomial<3>(s, 0.43, {0.999990505, -0.332401753, 0.119551381});
        else
            return TanhPolynomial<4>(s, 0.45,
                                     {0.999999757, -0.333294672, 0.132363691, -0.046028194});
    }
    // The largest magnitude in each row, of this thread's columns.
    template <any_register_tile Tile>
    static __device__ __forceinline__ float2 largest_of(const Tile& s) {
        float2 top[2] = {};
#pragma unroll
        for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 pair = s.tiles[0][j].data[k];
                float& t = k % 2 == 1 ? top[k / 2].y : top[k / 2].x;
                t = fmaxf(fmaxf(t, fabsf(pair.x)), fabsf(pair.y));
            }
        }
        return {fmaxf(top[0].x, top[1].x), fmaxf(top[0].y, top[1].y)};
    }
    template <any_register_tile Tile, class Polynomial>
    static __device__ __forceinline__ void add_weights(Tile& s, OnlineSoftmax& softmax,
                                                       const Polynomial& polynomial) {
        const float2 from = {-softmax.base.x, -softmax.base.y};
        for_each_element(s, [&](float& x, int, bool low) {
            x = arch::exp2_approx(polynomial(x, low ? from.y : from.x));
            (low ? softmax.sum.y : softmax.sum.x) += x;
        });
    }
};

}  // namespace thunderkittens::attention
