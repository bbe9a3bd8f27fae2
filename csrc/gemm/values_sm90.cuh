// Activations of values in registers. Which one is chosen at run time: the branch is the same for a
// whole kernel.
#pragma once

#include "csrc/gemm/activation.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// x / (1 + 2^(slope * x)), with a slope that may depend on x.
__device__ __forceinline__ float times_sigmoid(float x, float slope) {
    namespace arch = kittens::arch;
    return x * arch::reciprocal_approx(1.f + arch::exp2_approx(slope * x));
}
// x * Phi(x), Phi the normal distribution: of erfc(|x| / sqrt(2)) / 2 in the form of Abramowitz and
// Stegun, 7.1.26, absolute error below 1.5e-7; the small side keeps its relative accuracy.
__device__ __forceinline__ float times_normal(float x) {
    namespace arch = kittens::arch;
    const float z = fabsf(x);
    const float t = arch::reciprocal_approx(1.f + 0.23164189f * z);
    float p = 0.5307027145f;
    p = p * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.127414796f;
    const float tail = p * t * arch::exp2_approx(-0.72134752f * z * z);
    return x * (x > 0.f ? 1.f - tail : tail);
}

// Replaces each of n values, value(i), by its activation.
template <int n, class Value>
__device__ __forceinline__ void activate(Activation activation, Value value) {
    const auto each = [&](auto function) {
#pragma unroll
        for (int i = 0; i < n; ++i) value(i) = function(value(i));
    };
    switch (activation) {
        case Activation::none: return;
        case Activation::relu: return each([](float x) { return x < 0.f ? 0.f : x; });
        case Activation::silu: return each([](float x) { return times_sigmoid(x, -1.44269504f); });
        case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
            return each(
                [](float x) { return times_sigmoid(x, -2.30220819f - 0.10294324f * (x * x)); });
        case Activation::gelu: return each([](float x) { return times_normal(x); });
    }
}
template <int n>
__device__ __forceinline__ void activate(Activation activation, float (&x)[n]) {
    activate<n>(activation, [&](int i) -> float& { return x[i]; });
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
