// Functions that an epilogue applies to every element, in fp32.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::activation {

// As the ops' code of an activation: its place in ("none", "relu", "gelu", "gelu_tanh", "silu").
enum Code : int { none, relu, gelu, gelu_tanh, silu };

// x / (1 + e^-x): x times the logistic function.
__device__ __forceinline__ float times_logistic(float x, float argument) {
    constexpr float log2_e = 1.4426950408889634f;
    return x *
           kittens::arch::reciprocal_approx(1.f + kittens::arch::exp2_approx(-log2_e * argument));
}

template <int code>
__device__ __forceinline__ float apply(float x) {
    if constexpr (code == relu) {
        return x < 0.f ? 0.f : x;
    } else if constexpr (code == gelu) {
        return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    } else if constexpr (code == gelu_tanh) {
        // (1 + tanh(u)) / 2 is the logistic function of 2 u.
        return times_logistic(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
    } else if constexpr (code == silu) {
        return times_logistic(x, x);
    } else {
        return x;
    }
}

// Calls visit(function) with the activation as a function of one float.
template <class Visit>
__device__ __forceinline__ void dispatch(int code, Visit visit) {
    switch (code) {
        case relu: return visit([](float x) { return apply<relu>(x); });
        case gelu: return visit([](float x) { return apply<gelu>(x); });
        case gelu_tanh: return visit([](float x) { return apply<gelu_tanh>(x); });
        case silu: return visit([](float x) { return apply<silu>(x); });
        default: return;
    }
}

}  // namespace thunderkittens::activation
