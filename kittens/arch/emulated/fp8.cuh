// Conversions between fp32, fp16 and the 8-bit floats, by CUDA's functions for the host.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "fast_math.cuh"

namespace kittens::inline on_cpu {
namespace arch {

// A CPU has no instructions for them: kernels take the way of GPUs before sm_89.
constexpr bool CONVERTS_FP8 = false;

template <class F>
constexpr __nv_fp8_interpretation_t fp8_format =
    std::is_same_v<F, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;

// To codes of F, rounded to nearest even, saturated to the largest finite value; NaN stays. The
// first is in the lowest byte.
template <class F>
inline uint32_t to_fp8(float x) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, fp8_format<F>);
}
template <class F>
inline uint32_t to_fp8(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, fp8_format<F>);
}
template <class F>
inline uint32_t to_fp8(const __half2& x) {
    return __nv_cvt_halfraw2_to_fp8x2(bit_cast<__half2_raw>(x), __NV_SATFINITE, fp8_format<F>);
}
template <class F>
inline uint32_t to_fp8(const float4& x) {
    if constexpr (std::is_same_v<F, __nv_fp8_e4m3>)
        return bit_cast<uint32_t>(__nv_fp8x4_e4m3(x));
    else
        return bit_cast<uint32_t>(__nv_fp8x4_e5m2(x));
}
// The values of the codes in the two lowest bytes, and in the lowest one.
template <class F>
inline __half2 pair_of_fp8(uint32_t codes) {
    return bit_cast<__half2>(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), fp8_format<F>));
}
template <class F>
inline __half half_of_fp8(uint32_t code) {
    return bit_cast<__half>(
        __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), fp8_format<F>));
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
