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
inline uint32_t max_unsigned_pairs(uint32_t a, uint32_t b) {
    const uint32_t high = max(a >> 16, b >> 16), low = max(a & 0xffffu, b & 0xffffu);
    return high << 16 | low;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}
// A product of two 16-bit floats is exact in float.
template <int half>
inline uint32_t multiply_by_half_bf16(uint32_t a, uint32_t b) {
    const float2 x = __bfloat1622float2(bit_cast<__nv_bfloat162>(a));
    const float2 y = __bfloat1622float2(bit_cast<__nv_bfloat162>(b));
    const float factor = half == 0 ? y.x : y.y;
    return bit_cast<uint32_t>(__floats2bfloat162_rn(x.x * factor, x.y * factor));
}
template <int half>
inline uint32_t multiply_by_half_fp16(uint32_t a, uint32_t b) {
    const float2 x = __half22float2(bit_cast<__half2>(a));
    const float2 y = __half22float2(bit_cast<__half2>(b));
    const float factor = half == 0 ? y.x : y.y;
    return bit_cast<uint32_t>(__floats2half2_rn(x.x * factor, x.y * factor));
}
inline __nv_bfloat162 pack_bf16(float low, float high) { return __floats2bfloat162_rn(low, high); }
inline __half2 pack_half(float low, float high) { return __floats2half2_rn(low, high); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
