// Approximate and packed arithmetic: one instruction each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "memory.cuh"

namespace kittens::inline on_gpu {
namespace arch {

// 2^x on the MUFU pipe; relative error about 2^-22, exact at -inf (gives 0).
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / sqrt(x) within 2 ulp.
__device__ __forceinline__ float reciprocal_sqrt(float x) { return ::rsqrtf(x); }
// A product that the compiler must not fuse with a sum.
__device__ __forceinline__ float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
// The larger of each pair of unsigned 16-bit numbers in two words.
__device__ __forceinline__ uint32_t max_unsigned_pairs(uint32_t a, uint32_t b) {
    return __vmaxu2(a, b);
}
// Four of the eight bytes of b and a, b's the upper ones: byte i is the one that digit i of the
// selector names.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}
// Products of packed pairs, each rounded once; subnormals are kept. `half` says which element of b
// multiplies both of a's: the instruction selects it.
template <int half>
__device__ __forceinline__ uint32_t multiply_by_half_bf16(uint32_t a, uint32_t b) {
    const auto pair = bit_cast<__nv_bfloat162>(b);
    const auto factor = half == 0 ? __low2bfloat162(pair) : __high2bfloat162(pair);
    return bit_cast<uint32_t>(__hmul2(bit_cast<__nv_bfloat162>(a), factor));
}
template <int half>
__device__ __forceinline__ uint32_t multiply_by_half_fp16(uint32_t a, uint32_t b) {
    const auto pair = bit_cast<__half2>(b);
    const auto factor = half == 0 ? __low2half2(pair) : __high2half2(pair);
    return bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(a), factor));
}
// Two floats to one packed register, first argument in the low half, round to nearest even.
__device__ __forceinline__ __nv_bfloat162 pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return bit_cast<__nv_bfloat162>(packed);
}
__device__ __forceinline__ __half2 pack_half(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return bit_cast<__half2>(packed);
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
