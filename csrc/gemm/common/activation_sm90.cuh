// Activations of values in registers, with the accuracy of fp32. Which one is chosen at run time:
// the branch is the same for a whole kernel.
#pragma once

#include "csrc/gemm/common/epilogue.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// c[0] + c[1] * x + ..., and with x^n behind it.
template <int n>
__device__ __forceinline__ float polynomial(float x, const float (&c)[n]) {
    float sum = c[n - 1];
#pragma unroll
    for (int i = n - 2; i >= 0; --i) sum = sum * x + c[i];
    return sum;
}
template <int n>
__device__ __forceinline__ float monic(float x, const float (&c)[n]) {
    float sum = x + c[n - 1];
#pragma unroll
    for (int i = n - 2; i >= 0; --i) sum = sum * x + c[i];
    return sum;
}
// The share of x in an activation, from the smaller of the shares of x and -x, which add up to one:
// each keeps its relative accuracy, and infinities and NaN become what PyTorch makes of them.
__device__ __forceinline__ float share_of(float x, float smaller) {
    return fabsf((x > 0.f ? 1.f : 0.f) - smaller);
}

// 1 / (1 + exp(-u)) and the rest, 1 / (1 + exp(u)), both with a relative error of about 2^-22: the
// exponential is that of CUDA's library, as an argument of the hardware's would have to be rounded,
// and the reciprocal takes a step of Newton's.
struct Sigmoid {
    float value, rest;
};
__device__ __forceinline__ Sigmoid sigmoid(float u) {
    const float exponential = expf(-fabsf(u)), sum = 1.f + exponential;
    float larger = kittens::arch::reciprocal_approx(sum);
    larger = fmaf(larger, fmaf(-sum, larger, 1.f), larger);
    const float smaller = exponential * larger;
    return u > 0.f ? Sigmoid{larger, smaller} : Sigmoid{smaller, larger};
}
// The normal distribution at x: of z = |x|, log2(erfc(z / sqrt(2)) / 2) is a polynomial, fitted so
// that the result's error is below 1e-8 on either side, and its relative error below 2^-11 as long
// as it is a normal number. Farther out the polynomial falls to minus infinity.
__device__ __forceinline__ float normal(float x) {
    constexpr float c[] = {
        -1.f,           -1.1511052f,    -0.45921025f,  -0.052478753f,   0.0070086694f,
        -5.355422e-05f, -0.0002546245f, 7.073103e-05f, -1.0713838e-05f, 1.0090657e-06f,
        -5.853971e-08f, 1.9137658e-09f, -2.696439e-11f};
    return share_of(x, kittens::arch::exp2_approx(polynomial(fabsf(x), c)));
}
// 2 u of gelu's tanh form, (1 + tanh(u)) / 2 being 1 / (1 + exp(-2 u)).
__device__ __forceinline__ float gelu_tanh_argument(float x) {
    return x * (1.5957691f + 0.071354816f * (x * x));
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
        case Activation::silu: return each([](float x) { return x * sigmoid(x).value; });
        case Activation::gelu_tanh:
            return each([](float x) { return x * sigmoid(gelu_tanh_argument(x)).value; });
        case Activation::gelu: return each([](float x) { return x * normal(x); });
    }
}
template <int n>
__device__ __forceinline__ void activate(Activation activation, float (&x)[n]) {
    activate<n>(activation, [&](int i) -> float& { return x[i]; });
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
