// Products of packed pairs of 16-bit floats, each rounded once; subnormals are kept. `half` says
// which element of b multiplies both of a's: the instruction selects it.
#pragma once

#include "fast_math.cuh"

namespace kittens::inline on_gpu {
namespace arch {

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

// The smaller of each pair of unsigned 16-bit numbers in two words.
__device__ __forceinline__ uint32_t min_unsigned_pairs(uint32_t a, uint32_t b) {
    return __vminu2(a, b);
}

// Two floats to one packed register as pack_bf16 does, negative ones as 0; NaN stays.
__device__ __forceinline__ __nv_bfloat162 pack_bf16_relu(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return bit_cast<__nv_bfloat162>(packed);
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
