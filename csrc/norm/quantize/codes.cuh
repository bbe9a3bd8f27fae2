// Codes of normalised rows: types of what is read, largest magnitudes, scales, where codes and
// scales are written.
#pragma once

#include "csrc/gemm/quantize/fp8_quantize_units_sm90.cuh"
#include "csrc/gemm/quantize/nvfp4_values_sm90.cuh"
#include "csrc/norm/quantize/quantize.h"
#include "csrc/norm/units.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// Calls take.operator()<T>() for the type of the elements.
template <class Take>
__device__ __forceinline__ void with_type(DType dtype, Take&& take) {
    if (dtype == DType::bf16) {
        take.template operator()<kittens::bf16>();
    } else if (dtype == DType::fp16) {
        take.template operator()<kittens::half>();
    } else {
        take.template operator()<float>();
    }
}

template <class T>
__device__ __forceinline__ void values_of(float (&values)[UNIT], const Unit<T>& unit) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) values[i] = unit.value(i);
}
// x plus the residual, rounded as it is returned.
template <class T, class S>
__device__ __forceinline__ Unit<S> sum_of(const Unit<T>& x, const Unit<S>& residual) {
    float sums[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) sums[i] = x.value(i) + residual.value(i);
    return rounded<S>(sums);
}

// Magnitudes are compared as the integers that their bits are: NaN is larger than infinity. As
// signed ones the largest is that of the numbers above zero, as unsigned ones the largest that of
// those below, which saves to mask each.
struct Magnitude {
    int32_t above = 0;
    uint32_t below = 0;

    __device__ __forceinline__ void add(const float (&y)[UNIT]) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            above = max(above, bit_cast<int32_t>(y[i]));
            below = max(below, bit_cast<uint32_t>(y[i]));
        }
    }
    __device__ __forceinline__ uint32_t bits() const {
        return max(static_cast<uint32_t>(above), below & 0x7fffffffu);
    }
};
__device__ __forceinline__ uint32_t magnitude(const float (&y)[UNIT]) {
    Magnitude most;
    most.add(y);
    return most.bits();
}
template <int LANES>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t x) {
#pragma unroll
    for (int i = LANES / 2; i > 0; i /= 2) x = max(x, arch::shuffle_xor(x, i));
    return x;
}
// The largest of a team's, of all of its lanes.
struct LargestShared {
    uint32_t warps[WARP];
};
__device__ __forceinline__ uint32_t largest_of_team(uint32_t x, int lanes) {
#pragma unroll
    for (int i = WARP / 2; i > 0; i /= 2) {
        if (i < lanes) x = max(x, arch::shuffle_xor(x, i));
    }
    if (lanes <= WARP) return x;
    const uint32_t shared = arch::shared_address(&arch::static_shared<LargestShared>());
    const int lane = kittens::laneid();
    if (lane == 0) arch::store_shared(shared + 4 * kittens::warpid(), x);
    arch::sync_block();
    if (lane < lanes / WARP) x = arch::load_shared<uint32_t>(shared + 4 * lane);
    return largest_of_lanes<WARP>(x);
}

// The scale of fp8 elements of this largest magnitude, and their factor, as fp8_quantize has them:
// rounded quotients, amax / 448 and 448 / amax. What is divided by or into is brought to [4, 8)
// first: nothing overflows, and no slow path of a division, for which ptxas would keep a dozen
// registers, is needed.
struct Scale {
    float scale, factor;

    __device__ __forceinline__ explicit Scale(uint32_t largest) {
        constexpr uint32_t INFINITY_BITS = 0x7f800000u, LEAST = 17u << 23, FOUR = 129;
        const uint32_t bits = max(largest, LEAST), exponent = bits >> 23;
        const float m = bit_cast<float>((bits & 0x007fffffu) | FOUR << 23);
        const float up = bit_cast<float>((exponent - FOUR + 127) << 23);
        const float down = bit_cast<float>((127 + FOUR - exponent) << 23);
        float r = arch::reciprocal_approx(m);
        r = fmaf(fmaf(-m, r, 1.0f), r, r);
        float q = 448.0f * r;
        q = fmaf(fmaf(-m, q, 448.0f), r, q);
        factor = fmaf(fmaf(-m, q, 448.0f), r, q) * down;
        constexpr float INVERSE = 1.0f / 448.0f;
        q = m * INVERSE;
        scale = fmaf(fmaf(-448.0f, q, m), INVERSE, q) * up;
        if (largest >= INFINITY_BITS) {
            scale = bit_cast<float>(largest);
            factor = largest == INFINITY_BITS ? 0.0f : scale;
        }
    }
};

// Where a row's codes are written, and the scales of its blocks of 16.
struct RowOut {
    uint8_t* codes;
    uint8_t* scales = nullptr;
    bool swizzled;
    int64_t pitch;

    __device__ __forceinline__ RowOut(const QuantizeParams& q, int64_t row)
        : codes(static_cast<uint8_t*>(q.norm.out)), swizzled(q.swizzled), pitch(q.scale_pitch) {
        using namespace block_scaled::sm90;
        if (q.output != Output::nvfp4) {
            codes += row * q.norm.width;
            return;
        }
        codes += row * (q.norm.width / 2);
        scales = static_cast<uint8_t*>(q.scale);
        if (swizzled) {
            // An atom of 512 bytes has the scales of 64 columns of 128 rows.
            scales += row / GROUP * (pitch / 4) * ATOM;
            scales += place_in_atom(static_cast<int>(row % GROUP), 0);
        } else {
            scales += row * pitch;
        }
    }
    // Results, or a part of them where rows have no whole units.
    template <bool ALIGNED, class Word>
    __device__ __forceinline__ void store(int64_t at, const Word& word, int bytes) const {
        if constexpr (ALIGNED) {
            if (bytes > 0) arch::store_global(reinterpret_cast<Word*>(codes + at), word);
        } else {
            block_scaled::sm90::store_bytes(codes + at, word, false, bytes);
        }
    }
    // The scales of four blocks, from this column on.
    __device__ __forceinline__ void store_scales(int64_t column, uint32_t word) const {
        using namespace block_scaled::sm90;
        if (swizzled) {
            constexpr int BYTES = ATOM / (4 * NV_BLOCK);  // of an atom, for each column
            arch::store_global(reinterpret_cast<uint32_t*>(scales + column * BYTES), word);
        } else {
            const int64_t block = column / NV_BLOCK;
            store_bytes(scales + block, word, pitch % 4 == 0, pitch - block);
        }
    }
};
template <bool ALIGNED>
__device__ __forceinline__ void store_fp8(const RowOut& out, const float (&y)[UNIT], float factor,
                                          int64_t column, int count) {
    using kittens::fp8e4m3;
    const uint2 codes{gemm::sm80::fp8_codes<fp8e4m3>(
                          make_float4(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor)),
                      gemm::sm80::fp8_codes<fp8e4m3>(
                          make_float4(y[4] * factor, y[5] * factor, y[6] * factor, y[7] * factor))};
    out.store<ALIGNED>(column, codes, count);
}
__device__ __forceinline__ void store_scale(const QuantizeParams& q, int64_t at, float scale) {
    arch::store_global(static_cast<float*>(q.scale) + at, scale);
}

// The factors of NVFP4's blocks, for each of the 128 scales that one may have: block_scaled has the
// same for larger blocks of threads.
__device__ __forceinline__ uint32_t table_of_factors() {
    const auto& factors = arch::static_shared<block_scaled::sm90::FactorsShared>().factor;
    return arch::shared_address(&factors[0]);
}
__device__ __forceinline__ void make_factors(float inverse) {
    using namespace block_scaled::sm90;
    for (uint32_t code = threadIdx.x; code < 128; code += blockDim.x) {
        const float factor = min(1 / (e4m3_value(code) * inverse), LARGEST_FLOAT);
        arch::store_shared(table_of_factors() + 4 * code, factor);
    }
    arch::sync_block();
}
__device__ __forceinline__ float factor_of_block(uint32_t scale) {
    return arch::load_shared<float>(table_of_factors() + 4 * scale);
}
// What a scale that is given makes of elements: their factor in fp8; in NVFP4, whose blocks have
// factors, a table in shared memory, a sixth of the factor of all.
__device__ __forceinline__ float given_factor(const QuantizeParams& q) {
    if (q.given == nullptr) return 1;
    const float given = arch::load_global(q.given);
    if (q.output == Output::tensor) {
        if (blockIdx.x == 0 && threadIdx.x == 0) store_scale(q, 0, given);
        return 1.0f / given;
    }
    const auto encode = block_scaled::sm90::encode_of_scale(given);
    make_factors(encode.inverse);
    return encode.factor * (1.0f / 6.0f);
}
// Codes of a unit, of which a block has two, in neighbouring lanes. Eight lanes have the blocks
// whose scales are a word.
template <bool ALIGNED>
__device__ __forceinline__ void store_nvfp4(const RowOut& out, float sixth, const float (&y)[UNIT],
                                            int64_t column, int count) {
    using namespace block_scaled::sm90;
    const uint32_t most = largest_of_lanes<2>(count > 0 ? magnitude(y) : 0);
    const uint32_t scale = block_scale(bit_cast<float>(most), sixth);
    Chunk<float> chunk;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) chunk.words[i] = bit_cast<uint32_t>(y[i]);
    uint32_t codes = nearest_codes<true>(chunk, factor_of_block(scale));
    if (scale == 0x7f) codes = 0x77777777u;
    out.store<ALIGNED>(column / 2, codes, count / 2);
    uint32_t scales = scale << 8 * (kittens::laneid() / 2 % 4);
    scales |= arch::shuffle_xor(scales, 2);
    scales |= arch::shuffle_xor(scales, 4);
    if (kittens::laneid() % 8 == 0 && count > 0) out.store_scales(column, scales);
}

}  // namespace sm90
}  // namespace thunderkittens::norm
