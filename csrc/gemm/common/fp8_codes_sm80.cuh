// Floats to codes of 8 bits and back, on every GPU: by the conversions of sm_89 and later where
// there are some, else by operations on the bits, with the same results.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

namespace arch = kittens::arch;
using kittens::fp8e4m3, kittens::fp8e5m2;

template <class F>
struct Fp8Codes {
    static constexpr bool is_e4m3 = std::same_as<F, fp8e4m3>;
    static constexpr int mantissa = is_e4m3 ? 3 : 2;
    static constexpr int bias = is_e4m3 ? 7 : 15;
    static constexpr float largest = is_e4m3 ? 448.f : 57344.f;
    static constexpr uint32_t nan = 0x7f;

    // Added to a power of two whose neighbours lie as far apart as the codes around it, a magnitude
    // is rounded once, to the nearest code or to the even one.
    static __device__ __forceinline__ uint32_t code(float x) {
        constexpr uint32_t exponents = 0x7f800000, up = 23 - mantissa;
        constexpr uint32_t least =
            127 + 1 - bias;  // exponent of the normal codes, as floats have it
        const float magnitude = fminf(fabsf(x), largest);
        const uint32_t bits = arch::bit_cast<uint32_t>(magnitude) & exponents;
        const uint32_t power = (bits > least << 23 ? bits : least << 23) + (up << 23);
        const uint32_t sum = arch::bit_cast<uint32_t>(magnitude + arch::bit_cast<float>(power));
        const uint32_t rounded =
            sum - power + (power >> (23 - mantissa)) - ((least + up) << mantissa);
        const uint32_t sign = arch::bit_cast<uint32_t>(x) >> 24 & 0x80;
        return x == x ? rounded | sign : nan;
    }
    // As pairs of fp16, whose exponents are 8 too small where they are those of e4m3.
    static __device__ __forceinline__ __half2 pair(uint32_t codes) {
        const uint32_t upper = arch::permute_bytes(codes, 0, 0x1404);
        if constexpr (!is_e4m3) return arch::bit_cast<__half2>(upper);
        constexpr uint32_t two_to_8 = 0x5c005c00;
        const uint32_t magnitude = upper >> 1 & 0x3f803f80u, sign = upper & 0x80008000u;
        const uint32_t is_nan = (magnitude + 0x00800080u) & 0x40004000u;
        const uint32_t value = arch::multiply_by_half_fp16<0>(magnitude | sign, two_to_8);
        return arch::bit_cast<__half2>(value | (is_nan * 2 - (is_nan >> 14)));
    }
};

// Rounded to nearest even, saturated to the largest finite value; NaN stays. The first code is in
// the lowest byte.
template <class F>
__device__ __forceinline__ uint32_t fp8_codes(float x) {
    if constexpr (arch::CONVERTS_FP8) return arch::to_fp8<F>(x);
    return Fp8Codes<F>::code(x);
}
template <class F>
__device__ __forceinline__ uint32_t fp8_codes(float low, float high) {
    if constexpr (arch::CONVERTS_FP8) return arch::to_fp8<F>(low, high);
    return Fp8Codes<F>::code(low) | Fp8Codes<F>::code(high) << 8;
}
template <class F>
__device__ __forceinline__ uint32_t fp8_codes(const float4& x) {
    if constexpr (arch::CONVERTS_FP8) return arch::to_fp8<F>(x);
    const uint32_t low = fp8_codes<F>(x.x, x.y), high = fp8_codes<F>(x.z, x.w);
    return low | high << 16;
}
template <class F>
__device__ __forceinline__ uint32_t fp8_codes(const __half2& x) {
    if constexpr (arch::CONVERTS_FP8) return arch::to_fp8<F>(x);
    const float2 pair = __half22float2(x);
    return fp8_codes<F>(pair.x, pair.y);
}
// The values of the codes in the two lowest bytes, and in the lowest one.
template <class F>
__device__ __forceinline__ __half2 pair_of_fp8(uint32_t codes) {
    if constexpr (arch::CONVERTS_FP8) return arch::pair_of_fp8<F>(codes);
    return Fp8Codes<F>::pair(codes);
}
template <class F>
__device__ __forceinline__ __half half_of_fp8(uint32_t code) {
    if constexpr (arch::CONVERTS_FP8) return arch::half_of_fp8<F>(code);
    return __low2half(Fp8Codes<F>::pair(code));
}

}  // namespace sm80
}  // namespace thunderkittens::gemm
