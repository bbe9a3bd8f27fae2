// The arithmetic of NVFP4: scales of matrices and blocks, elements to codes, rounded to nearest
// even or at random, and back. It is, operation by operation in fp32, that of NVIDIA's Transformer
// Engine.
#pragma once

#include "csrc/gemm/common/fp8_codes_sm80.cuh"
#include "csrc/gemm/quantize/block_scaled_sm90.cuh"

namespace thunderkittens::block_scaled {
namespace sm90 {

constexpr int NV_BLOCK = 16;
constexpr float NV_RANGE = 448.0f * 6.0f;  // of the largest scale and the largest element
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// e4m3 of a number that is not negative, saturated, and back.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
    return gemm::sm80::fp8_codes<kittens::fp8e4m3>(x);
}
__device__ __forceinline__ float e4m3_value(uint32_t code) {
    return __half2float(gemm::sm80::half_of_fp8<kittens::fp8e4m3>(code));
}

// The factor of a matrix, and its inverse.
struct Encode {
    float factor, inverse;
};
__device__ __forceinline__ bool is_positive(float x) { return x > 0 && x <= LARGEST_FLOAT; }
__device__ __forceinline__ Encode encode_by(float factor) {
    if (!(factor > 0)) factor = 1;
    return {factor, 1 / factor};
}
__device__ __forceinline__ Encode encode_of_largest(float largest) {
    return encode_by(is_positive(largest) ? min(NV_RANGE / largest, LARGEST_FLOAT) : 1);
}
__device__ __forceinline__ Encode encode_of_scale(float scale) {
    return encode_by(is_positive(scale) ? min(1 / scale, LARGEST_FLOAT) : 1);
}

// The scale of a block with this largest magnitude; `sixth` is a sixth of the matrix's factor.
// Infinity and what is too large make it the largest scale, NaN makes it NaN.
__device__ __forceinline__ uint32_t block_scale(float largest, float sixth) {
    return e4m3_code(largest * sixth);
}

// The factor of the elements of a block, for each of the 128 scales that it may have: a division
// per thread of the block, instead of one per eight elements.
struct FactorsShared {
    float factor[128];
};
__device__ __forceinline__ uint32_t make_factors(const Encode& encode) {
    const uint32_t shared = arch::shared_address(&arch::static_shared<FactorsShared>());
    const auto code = static_cast<uint32_t>(threadIdx.x);
    if (code < 128) {
        const float factor = min(1 / (e4m3_value(code) * encode.inverse), LARGEST_FLOAT);
        arch::store_shared(shared + 4 * code, factor);
    }
    arch::sync_block();
    return shared;
}

// The code of a magnitude x, which is less than 7, plus the bits of place_zero(), rounded to
// nearest even. The codes are the integers of min(2 x, x + 2, x / 2 + 4), a line for each distance
// between neighbours, which begin at even codes. Added to 2^23, whose successor is 2^23 + 1, each
// line is rounded once.
__device__ __forceinline__ constexpr float place_zero() { return 0x1p23f; }
__device__ __forceinline__ uint32_t e2m1_place(float x) {
    constexpr float ZERO = place_zero();
    const uint32_t near = bit_cast<uint32_t>(__fmaf_rn(x, 2, ZERO));
    const uint32_t middle = bit_cast<uint32_t>(x + (ZERO + 2));
    const uint32_t far = bit_cast<uint32_t>(__fmaf_rn(x, 0.5f, ZERO + 4));
    return min(min(near, middle), far);
}
// The values of a word of eight codes, times 2^-14, as pairs of fp16: in the order 0 4, 1 5, 2 6,
// 3 7. The three bits of a magnitude are an fp16 number of that value.
struct E2m1Values {
    float2 pair[4];
};
__device__ __forceinline__ E2m1Values e2m1_values(uint32_t codes) {
    E2m1Values values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t c = codes >> 4 * i;
        const uint32_t bits = (c << 9 & 0x0e000e00u) | (c << 12 & 0x80008000u);
        values.pair[i] = __half22float2(bit_cast<__half2>(bits));
    }
    return values;
}

// Philox4x32 with 10 rounds: four random words of a counter and a key (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3"). The keys of the rounds are the same everywhere, and are in
// shared memory.
constexpr int PHILOX_ROUNDS = 10;
struct KeysShared {
    uint2 rounds[PHILOX_ROUNDS];
};
__device__ __forceinline__ uint32_t make_keys(uint2 key) {
    const uint32_t shared = arch::shared_address(&arch::static_shared<KeysShared>());
    const auto i = static_cast<uint32_t>(threadIdx.x);
    if (i < PHILOX_ROUNDS) {
        arch::store_shared(shared + 8 * i, uint2{key.x + i * 0x9e3779b9u, key.y + i * 0xbb67ae85u});
    }
    return shared;
}
__device__ __forceinline__ uint4 random_words(const uint3& counter, uint32_t keys) {
    uint32_t x[4] = {counter.x, counter.y, counter.z, 0};
#pragma unroll
    for (int i = 0; i < PHILOX_ROUNDS; ++i) {
        const auto key = arch::load_shared<uint2>(keys + 8 * i);
        const uint64_t a = uint64_t{0xd2511f53u} * x[0], b = uint64_t{0xcd9e8d57u} * x[2];
        x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ key.x;
        x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ key.y;
        x[1] = static_cast<uint32_t>(b);
        x[3] = static_cast<uint32_t>(a);
    }
    return {x[0], x[1], x[2], x[3]};
}

// The sign bits of the eight elements of a chunk: those of the even ones are the top bits of the
// bytes of the first word, those of the odd ones of the second.
template <class T>
__device__ __forceinline__ uint2 signs(const Chunk<T>& chunk) {
    const auto& w = chunk.words;
    if constexpr (Chunk<T>::PAIRS) {
        const uint32_t a = arch::permute_bytes(w[0], w[1], 0x7351);
        const uint32_t b = arch::permute_bytes(w[2], w[3], 0x7351);
        return {arch::permute_bytes(a, b, 0x5410), arch::permute_bytes(a, b, 0x7632)};
    } else {
        const auto top = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
            return arch::permute_bytes(arch::permute_bytes(a, b, 0x0073),
                                       arch::permute_bytes(c, d, 0x0073), 0x5410);
        };
        return {top(w[0], w[2], w[4], w[6]), top(w[1], w[3], w[5], w[7])};
    }
}
// The low bytes of four words.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return arch::permute_bytes(arch::permute_bytes(a, b, 0x0040), arch::permute_bytes(c, d, 0x0040),
                               0x5410);
}

template <class T>
__device__ __forceinline__ uint32_t sign_word(const Chunk<T>& chunk) {
    const uint2 sign = signs(chunk);
    return (sign.x & 0x80808080u) >> 4 | (sign.y & 0x80808080u);
}

// The codes of a chunk in a word, the first in the lowest four bits, rounded to nearest even.
// Unless elements are known to be less than 7, they are CUT off; so is a product of 0 and infinity.
template <bool CUT, class T>
__device__ __forceinline__ uint32_t nearest_codes(const Chunk<T>& chunk, float factor) {
    uint32_t sum = 0, zeros = 0;
#pragma unroll
    for (int i = CHUNK - 1; i >= 0; --i) {
        float x = fabsf(chunk.value(i)) * factor;
        if (CUT) x = fminf(x, 6.0f);
        sum = sum * 16 + e2m1_place(x);
        zeros = zeros * 16 + bit_cast<uint32_t>(place_zero());
    }
    return sum + (sign_word(chunk) - zeros);
}

// The same, rounded up with a probability that is the place between two codes, in steps of 2^-9.
// The bits of an fp16 number are a piecewise linear function of it: those of x * 2^-14 are 2^9
// times the place of x among the codes, rounded to nearest even. Nine random bits are added, and
// what is behind the point is dropped. `low` has those of elements 0, 1, 4 and 5, `high` of 2, 3, 6
// and 7, which begin at bits 0, 7, 16 and 23: two elements share two bits, one's highest and the
// other's lowest.
constexpr float PLACE_SCALE = 0x1p-14f;
template <class T>
__device__ __forceinline__ uint32_t random_codes(const Chunk<T>& chunk, float factor, uint32_t low,
                                                 uint32_t high) {
    constexpr uint32_t LAST = 7 << 9, PAIR = 0x10001;
    const uint32_t dice[4] = {low & 0x1ff * PAIR, low >> 7 & 0x1ff * PAIR, high & 0x1ff * PAIR,
                              high >> 7 & 0x1ff * PAIR};
    uint32_t sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t places = bit_cast<uint32_t>(
            arch::pack_half(fabsf(chunk.value(i)) * factor, fabsf(chunk.value(i + 4)) * factor));
        // Past 6, at infinity and NaN, there is nothing to round up to.
        sum[i] = arch::min_unsigned_pairs(places, LAST * PAIR) + dice[i];
    }
    return (sum[0] >> 9 & 7 * PAIR) | (sum[1] >> 5 & 0x70 * PAIR) | (sum[2] >> 1 & 0x700 * PAIR) |
           (sum[3] << 3 & 0x7000 * PAIR) | sign_word(chunk);
}

// The largest magnitudes of blocks, of which each of two neighbouring lanes has a half, of two rows
// at a time.
template <class T>
__device__ __forceinline__ void largest_of_blocks(const Chunk<T> (&chunks)[CHUNK_ROWS],
                                                  float (&largest)[CHUNK_ROWS]) {
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i += 2) {
        const uint32_t a = largest_word(chunks[i]), b = largest_word(chunks[i + 1]);
        if constexpr (Chunk<T>::PAIRS) {
            uint32_t both =
                larger<T>(arch::permute_bytes(a, b, 0x5410), arch::permute_bytes(a, b, 0x7632));
            both = larger<T>(both, arch::shuffle_xor(both, 1));
            largest[i] = magnitude_value<T>(both, 0);
            largest[i + 1] = magnitude_value<T>(both, 1);
        } else {
            largest[i] = bit_cast<float>(max(a, arch::shuffle_xor(a, 1)));
            largest[i + 1] = bit_cast<float>(max(b, arch::shuffle_xor(b, 1)));
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::block_scaled
