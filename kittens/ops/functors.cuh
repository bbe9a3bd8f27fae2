// Scalar functors of the maps and reductions: `apply` on floats, and `packed` on pairs of 16-bit
// floats where the hardware computes them with one rounding. The _rn intrinsics keep the compiler
// from fusing two operations, which would skip a rounding.
#pragma once

#include "../types/scalar.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <class P>
concept packed_16bit = std::same_as<P, bf16_2> || std::same_as<P, half_2>;

namespace functor {

struct zero {
    static constexpr float value = 0.0f;
};
struct one {
    static constexpr float value = 1.0f;
};
struct pos_infty {
    static constexpr float value = __builtin_inff();
};
struct neg_infty {
    static constexpr float value = -__builtin_inff();
};

struct exp {
    static __device__ __forceinline__ float apply(float x) { return ::expf(x); }
};
struct exp2 {
    static __device__ __forceinline__ float apply(float x) { return arch::exp2_approx(x); }
};
struct log {
    static __device__ __forceinline__ float apply(float x) { return ::logf(x); }
};
struct log2 {
    static __device__ __forceinline__ float apply(float x) { return ::log2f(x); }
};
struct sqrt {
    static __device__ __forceinline__ float apply(float x) { return ::sqrtf(x); }
};
struct rsqrt {
    static __device__ __forceinline__ float apply(float x) { return arch::reciprocal_sqrt(x); }
};
struct rcp {
    static __device__ __forceinline__ float apply(float x) { return 1.0f / x; }
};
struct tanh {
    static __device__ __forceinline__ float apply(float x) { return ::tanhf(x); }
};
struct tanh_approx {
    static __device__ __forceinline__ float apply(float x) { return arch::tanh_approx(x); }
};
struct sigmoid {
    static __device__ __forceinline__ float apply(float x) { return 1.0f / (1.0f + ::expf(-x)); }
};
struct abs {
    static __device__ __forceinline__ float apply(float x) { return ::fabsf(x); }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& x) {
        return __habs2(x);
    }
};
struct neg {
    static __device__ __forceinline__ float apply(float x) { return -x; }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& x) {
        return __hneg2(x);
    }
};
struct relu {
    static __device__ __forceinline__ float apply(float x) { return ::fmaxf(x, 0.0f); }
};

struct add {
    static constexpr float identity = 0.0f;
    static __device__ __forceinline__ float apply(float a, float b) { return a + b; }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b) {
        return __hadd2_rn(a, b);
    }
};
struct sub {
    static __device__ __forceinline__ float apply(float a, float b) { return a - b; }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b) {
        return __hsub2_rn(a, b);
    }
};
struct mul {
    static constexpr float identity = 1.0f;
    static __device__ __forceinline__ float apply(float a, float b) { return a * b; }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b) {
        return __hmul2_rn(a, b);
    }
};
struct div {
    static __device__ __forceinline__ float apply(float a, float b) { return a / b; }
};
struct max {
    static constexpr float identity = -__builtin_inff();
    static __device__ __forceinline__ float apply(float a, float b) { return ::fmaxf(a, b); }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b) {
        return __hmax2(a, b);
    }
};
struct min {
    static constexpr float identity = __builtin_inff();
    static __device__ __forceinline__ float apply(float a, float b) { return ::fminf(a, b); }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b) {
        return __hmin2(a, b);
    }
};

// a * b + c
struct fma {
    static __device__ __forceinline__ float apply(float a, float b, float c) {
        return ::fmaf(a, b, c);
    }
    template <packed_16bit P>
    static __device__ __forceinline__ P packed(const P& a, const P& b, const P& c) {
        return __hfma2(a, b, c);
    }
};

}  // namespace functor
}  // namespace kittens::inline KITTENS_BACKEND
