// Products of packed pairs of 16-bit floats: they are exact in float, and rounded once.
#pragma once

#include "fast_math.cuh"

namespace kittens::inline on_cpu {
namespace arch {

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

inline uint32_t min_unsigned_pairs(uint32_t a, uint32_t b) {
    const uint32_t high = min(a >> 16, b >> 16), low = min(a & 0xffffu, b & 0xffffu);
    return high << 16 | low;
}

// Two floats to one packed register as pack_bf16 does, negative ones as 0; NaN stays.
inline __nv_bfloat162 pack_bf16_relu(float low, float high) {
    const auto rectified = [](float x) { return x < 0.0f ? 0.0f : x; };
    return pack_bf16(rectified(low), rectified(high));
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
