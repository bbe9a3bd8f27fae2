// What nvcc provides and a host compiler does not: qualifiers, built-in variables and the few
// device functions that the library uses by their CUDA names. The number formats and vector types
// are those of CUDA's own headers, which compile as plain C++.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>

#if !defined(__GNUC__) || defined(__CUDACC__)
#error "kittens: the emulated back end is compiled by g++ or clang++"
#endif

// Always inlining, as CUDA's headers define it, only costs compile time here.
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __shared__
#define __shared__ shared_variables_are_made_by_kittens_arch_static_shared

// Set for the thread that is running, before it runs.
inline constinit thread_local uint3 threadIdx{0, 0, 0};
inline constinit thread_local uint3 blockIdx{0, 0, 0};
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;

#define KITTENS_MIN_MAX(T)                                     \
    inline constexpr T min(T a, T b) { return b < a ? b : a; } \
    inline constexpr T max(T a, T b) { return a < b ? b : a; }
KITTENS_MIN_MAX(int)
KITTENS_MIN_MAX(unsigned)
KITTENS_MIN_MAX(long)
KITTENS_MIN_MAX(unsigned long)
KITTENS_MIN_MAX(long long)
KITTENS_MIN_MAX(unsigned long long)
#undef KITTENS_MIN_MAX
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }

using std::isfinite;
using std::isinf;
using std::isnan;

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }

namespace kittens::inline on_cpu {
namespace emulated {

// a * b + c of 16-bit floats with one rounding: exact in double but for the sum, whose lost bits go
// into the last bit of the float (round to odd), so that the final rounding sees them.
template <class T>
inline T fused(T a, T b, T c) {
    const double product = double(float(a)) * double(float(b)), addend = double(float(c));
    const double sum = product + addend;
    const double back = sum - product;
    const bool exact = (product - (sum - back)) + (addend - back) == 0.0;
    float rounded = static_cast<float>(sum);
    if (std::isfinite(rounded) && (!exact || double(rounded) != sum)) {
        if (std::abs(double(rounded)) > std::abs(sum)) rounded = std::nextafter(rounded, 0.0f);
        rounded = std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) | 1u);
    }
    return T(rounded);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu

inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {kittens::emulated::fused(a.x, b.x, c.x), kittens::emulated::fused(a.y, b.y, c.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {kittens::emulated::fused(a.x, b.x, c.x), kittens::emulated::fused(a.y, b.y, c.y)};
}
