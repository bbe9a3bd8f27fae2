// Approximate and packed arithmetic, computed exactly here but for the flushing of subnormals.
#pragma once

#include "memory.cuh"

namespace kittens::inline on_cpu {
namespace arch {

namespace detail {
inline float flushed(float x) { return ::fabsf(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
}  // namespace detail
inline float exp2_approx(float x) { return detail::flushed(::exp2f(detail::flushed(x))); }
inline float log2_approx(float x) { return detail::flushed(::log2f(detail::flushed(x))); }
inline float tanh_approx(float x) { return ::tanhf(x); }
inline float multiply_rounded(float a, float b) { return a * b; }
inline float reciprocal_approx(float x) { return detail::flushed(1.0f / detail::flushed(x)); }
inline float reciprocal_sqrt(float x) { return 1.0f / ::sqrtf(x); }
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
    return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff);
}
inline __nv_bfloat162 pack_bf16(float low, float high) { return __floats2bfloat162_rn(low, high); }
inline __half2 pack_half(float low, float high) { return __floats2half2_rn(low, high); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
