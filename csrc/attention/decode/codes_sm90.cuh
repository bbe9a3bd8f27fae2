// Caches of 8 bits: codes become fp16, exactly, on the way to the tensor cores. A producer's thread
// copies 16 of them at a time to a place of its own in shared memory, and converts them when they
// are there. Scales stay outside of products: those of keys go to scores, those of values to
// weights (of tokens) or to the result (of heads).
#pragma once

#include <cuda_fp8.h>

#include "csrc/attention/decode/decode.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention::decode {

using namespace kittens;

// Codes of 16 elements.
struct Codes {
    uint32_t words[4];
};
// Eight elements in fp16.
struct Halves {
    uint32_t pairs[4];
};

// Of int8: 1024 + 128 + x is an fp16 whose last bits are x + 128.
__device__ __forceinline__ uint32_t pair_of_int8(uint32_t word, int half) {
    const uint32_t biased = word ^ 0x80808080u;
    const uint32_t bits = arch::permute_bytes(biased, 0x64646464u, half == 0 ? 0x4140 : 0x4342);
    const __half2 offset = __floats2half2_rn(1152.0f, 1152.0f);
    return arch::bit_cast<uint32_t>(__hsub2(arch::bit_cast<__half2>(bits), offset));
}
// Of e5m2: the upper byte of an fp16.
__device__ __forceinline__ uint32_t pair_of_e5m2(uint32_t word, int half) {
    return arch::permute_bytes(word, 0u, half == 0 ? 0x1404 : 0x3424);
}
__device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t word, int half) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(half == 0 ? word & 0xffffu : word >> 16);
    return arch::bit_cast<uint32_t>(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
}

template <class F>
__device__ __forceinline__ void convert_by(const Codes& codes, Halves (&to)[2], F pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[i / 2].pairs[i % 2 * 2] = pair(codes.words[i], 0);
        to[i / 2].pairs[i % 2 * 2 + 1] = pair(codes.words[i], 1);
    }
}
__device__ __forceinline__ void convert(CacheFormat format, const Codes& codes, Halves (&to)[2]) {
    if (format == CacheFormat::e4m3)
        convert_by(codes, to, pair_of_e4m3);
    else if (format == CacheFormat::e5m2)
        convert_by(codes, to, pair_of_e5m2);
    else
        convert_by(codes, to, pair_of_int8);
}

// Of a number that is no subnormal; and the power of two of an exponent, within those of fp32.
__device__ __forceinline__ int exponent_of(float largest) {
    return static_cast<int>(arch::bit_cast<uint32_t>(largest) >> 23 & 0xff) - 127;
}
__device__ __forceinline__ float power_of_two(int exponent) {
    return arch::bit_cast<float>(static_cast<uint32_t>(::min(::max(exponent, -126), 127) + 127)
                                 << 23);
}

}  // namespace thunderkittens::attention::decode
