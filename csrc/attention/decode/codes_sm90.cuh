// Caches of 8 and 4 bits: codes become fp16, exactly, on the way to the tensor cores. A producer's
// thread copies 16 bytes of them at a time to a place of its own in shared memory, and converts
// them when they are there. Scales stay outside of products: those of keys go to scores, those of
// values to weights (of tokens) or to the result (of heads). Those of the blocks of NVFP4 go into
// the elements: a code has two significant bits, its scale four, which fp16 holds as one number.
#pragma once

#include <cuda_fp8.h>

#include "csrc/attention/common/softmax.cuh"
#include "csrc/attention/decode/decode.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention::decode {

using namespace kittens;

// Codes of 16 elements.
struct Codes {
    uint32_t words[4];
};
// Eight elements in fp16.
struct alignas(16) Halves {
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

// Of the upper bytes of both halves, without an instruction for it, which GPUs before 8.9 do not
// have: exponent and mantissa lie one bit lower in fp16, where they are a number over 2^8. Results
// are values times E4M3_SCALE: 448 just stays finite, and NaN, whose bits would be those of 480,
// becomes an infinity, of which no_infinity makes NaN again in the sums of products.
constexpr float E4M3_SCALE = 144.0f;  // 9 * 2^12 / 2^8
__device__ __forceinline__ uint32_t upper_pair_of_e4m3(uint32_t word) {
    const uint32_t bits = (word >> 1 & 0x3f803f80u) | (word & 0x80008000u);
    return arch::bit_cast<uint32_t>(
        __hmul2(arch::bit_cast<__half2>(bits), __floats2half2_rn(36864.0f, 36864.0f)));
}
__device__ __forceinline__ float no_infinity(float x) { return fmaf(x, 0.0f, x); }

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

// What portable kernels take: of each word the pair of codes 0 and 2, then that of 1 and 3, which
// without an instruction takes less.
__device__ __forceinline__ uint2 even_and_odd_of_int8(uint32_t word) {
    const uint32_t biased = word ^ 0x80808080u;
    const __half2 offset = __floats2half2_rn(1152.0f, 1152.0f);
    const auto pair = [&](uint32_t selector) {
        const uint32_t bits = arch::permute_bytes(biased, 0x64646464u, selector);
        return arch::bit_cast<uint32_t>(__hsub2(arch::bit_cast<__half2>(bits), offset));
    };
    return {pair(0x4240), pair(0x4341)};
}
template <CacheFormat format>
__device__ __forceinline__ uint2 even_and_odd_codes(uint32_t word) {
    if constexpr (format == CacheFormat::e4m3)
        return {upper_pair_of_e4m3(word << 8), upper_pair_of_e4m3(word)};
    else if constexpr (format == CacheFormat::e5m2)
        return {arch::permute_bytes(word, 0u, 0x2404), word & 0xff00ff00u};
    else
        return even_and_odd_of_int8(word);
}
// Eight codes in the order in which the kernel's products take them.
template <bool portable, CacheFormat format>
__device__ __forceinline__ Halves halves_of(uint32_t first, uint32_t second) {
    if constexpr (portable) {
        const uint2 x = even_and_odd_codes<format>(first), y = even_and_odd_codes<format>(second);
        return {{x.x, x.y, y.x, y.y}};
    } else {
        Halves to[2];
        convert(format, {{first, second, 0u, 0u}}, to);
        return to[0];
    }
}

// The eight codes of a word of NVFP4 as bytes of e5m2, times 2^-14: the three bits of a magnitude
// are the last two of an exponent and the first of a mantissa. In the order of the elements.
__device__ __forceinline__ uint2 e5m2_of_e2m1(uint32_t word) {
    const auto upper = [](uint32_t x) { return (x & 0x80808080u) | (x >> 3 & 0x0e0e0e0eu); };
    const uint32_t even = upper(word << 4), odd = upper(word);
    return {arch::permute_bytes(even, odd, 0x5140), arch::permute_bytes(even, odd, 0x7362)};
}
// Scales of two blocks, or of one block of two rows: these bytes of two words.
template <bool portable = false>
__device__ __forceinline__ __half2 scales_of_blocks(uint32_t first, uint32_t second, uint32_t byte,
                                                    uint32_t other) {
    return arch::bit_cast<__half2>(
        portable ? upper_pair_of_e4m3(arch::permute_bytes(first, second, byte << 4 | other << 12))
                 : pair_of_e4m3(arch::permute_bytes(first, second, byte | other << 4), 0));
}
template <bool portable = false>
__device__ __forceinline__ __half2 scales_of_blocks(uint32_t scales) {
    if constexpr (portable) return scales_of_blocks<true>(scales, 0u, 0, 1);
    return arch::bit_cast<__half2>(pair_of_e4m3(scales, 0));
}
// 32 codes of NVFP4, with the scales of their two blocks in the lower half of `scales`, become
// their values times NV_UNIT, so that one product is enough. It is exact: codes of 2^-14 are
// multiples of 2^-15, scales those of 2^-9, and what comes out those of 2^-24, as all fp16 are.
constexpr float NV_UNIT = 0x1p-14f;
__device__ __forceinline__ void convert_nvfp4(const Codes& codes, uint32_t scales,
                                              Halves (&to)[4]) {
    const __half2 both = scales_of_blocks(scales);
    const __half2 of_block[] = {__low2half2(both), __high2half2(both)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 bytes = e5m2_of_e2m1(codes.words[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const auto pair =
                arch::bit_cast<__half2>(pair_of_e5m2(j < 2 ? bytes.x : bytes.y, j % 2));
            to[i].pairs[j] = arch::bit_cast<uint32_t>(__hmul2(pair, of_block[i / 2]));
        }
    }
}

// The same in another order, which takes less: pairs of codes i and i + 4 of the eight of a word,
// which may be those of two rows.
__device__ __forceinline__ Halves four_apart_of(uint32_t word, __half2 scale) {
    const auto upper = [](uint32_t x) { return (x & 0x80808080u) | (x >> 3 & 0x0e0e0e0eu); };
    const uint32_t even = upper(word << 4), odd = upper(word);
    Halves to;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t bytes = i % 2 == 0 ? even : odd;
        const uint32_t pair = arch::permute_bytes(bytes, 0u, i < 2 ? 0x2404 : 0x3414);
        to.pairs[i] = arch::bit_cast<uint32_t>(__hmul2(arch::bit_cast<__half2>(pair), scale));
    }
    return to;
}
template <bool portable = false>
__device__ __forceinline__ void convert_four_apart(const Codes& codes, uint32_t scales,
                                                   Halves (&to)[4]) {
    const __half2 both = scales_of_blocks<portable>(scales);
    const __half2 of_block[] = {__low2half2(both), __high2half2(both)};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = four_apart_of(codes.words[i], of_block[i / 2]);
}

// What a value is of the number that a kernel's products take for it.
template <class Kernel>
__device__ __forceinline__ float unit_of(CacheFormat format) {
    constexpr float of_e4m3 = Kernel::portable ? 1.0f / E4M3_SCALE : 1.0f;
    if constexpr (Kernel::nvfp4) return of_e4m3 / NV_UNIT;
    return Kernel::portable && format == CacheFormat::e4m3 ? of_e4m3 : 1.0f;
}
// Whether an infinity in sums stands for NaN.
template <bool portable, CacheFormat format>
constexpr bool has_infinities =
    portable && (format == CacheFormat::e4m3 || format == CacheFormat::nvfp4);

// Of a number that is no subnormal; and the power of two of an exponent, within those of fp32.
__device__ __forceinline__ int exponent_of(float largest) {
    return static_cast<int>(arch::bit_cast<uint32_t>(largest) >> 23 & 0xff) - 127;
}
__device__ __forceinline__ float power_of_two(int exponent) {
    return arch::bit_cast<float>(static_cast<uint32_t>(::min(::max(exponent, -126), 127) + 127)
                                 << 23);
}

// Scales of the tokens that are a tile's columns, in shared memory; a thread has two of every
// eight.
__device__ __forceinline__ float2 token_scales(const float* scales, int j, int half) {
    const int column = 16 * j + 8 * half + 2 * (laneid() % 4);
    return arch::load_shared<float2>(arch::shared_address(scales + column));
}
template <any_register_tile Tile>
__device__ __forceinline__ void scale_columns(Tile& x, const float* scales, float factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 scale = token_scales(scales, j, k / 2);
            float2& pair = x.tiles[0][j].data[k];
            pair = {pair.x * (scale.x * factor), pair.y * (scale.y * factor)};
        }
    }
}
// The weights times the scales of the values, over a power of two that these do not exceed much:
// where they grow, so does it, and what has been added up becomes less.
template <any_register_tile Weights, any_register_tile Output>
__device__ __forceinline__ void scale_weights(Weights& x, Output& o, const float* scales,
                                              int& exponent) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < Weights::width; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 scale = token_scales(scales, j, half);
            largest = fmaxf(largest, fmaxf(fabsf(scale.x), fabsf(scale.y)));
        }
    }
    largest = fmaxf(largest, arch::shuffle_xor(largest, 1));
    largest = fmaxf(largest, arch::shuffle_xor(largest, 2));
    const int needed = exponent_of(largest);
    if (needed > exponent) {
        const float factor = power_of_two(exponent - needed);
        scale_rows(o, {factor, factor});
        exponent = needed;
    }
    scale_columns(x, scales, power_of_two(-exponent));
}

}  // namespace thunderkittens::attention::decode
