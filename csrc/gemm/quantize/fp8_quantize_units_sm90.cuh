// What the passes of a quantisation share: units of eight elements, their largest magnitudes,
// scales and codes.
#pragma once

#include "csrc/gemm/common/fp8_codes_sm80.cuh"
#include "csrc/gemm/common/unaligned_rows_sm90.cuh"
#include "csrc/gemm/quantize/fp8_quantize.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::fp8_quantize {
namespace sm90 {

using namespace kittens;

constexpr int UNIT = 8, UNITS = 8, WARPS = THREADS / WARP_THREADS;
constexpr int LANES = GROUP / UNIT;  // that share a row of a tile

template <DType dtype>
using element = std::conditional_t<dtype == DType::fp32, float,
                                   std::conditional_t<dtype == DType::bf16, bf16, half>>;

// Eight neighbouring elements.
template <class T>
struct alignas(16) Unit {
    static constexpr int words = UNIT * int(sizeof(T)) / 4;
    uint32_t w[words];

    // Elements 2 i and 2 i + 1.
    __device__ __forceinline__ float2 pair(int i) const {
        if constexpr (sizeof(T) == 4) {
            return make_float2(arch::bit_cast<float>(w[2 * i]),
                               arch::bit_cast<float>(w[2 * i + 1]));
        } else if constexpr (std::same_as<T, bf16>) {
            return make_float2(arch::bit_cast<float>(w[i] << 16),
                               arch::bit_cast<float>(w[i] & 0xffff0000u));
        } else {
            return unpack_pair<half>(arch::bit_cast<half_2>(w[i]));
        }
    }
};

template <class T>
__device__ __forceinline__ Unit<T> load_aligned(const T* from) {
    Unit<T> unit;
    auto& to = reinterpret_cast<uint4(&)[Unit<T>::words / 4]>(unit);
#pragma unroll
    for (int i = 0; i < Unit<T>::words / 4; ++i) {
        to[i] = arch::load_global(reinterpret_cast<const uint4*>(from) + i);
    }
    return unit;
}
// Units that begin at any element: `units` of them, from element `first` of x on and `step` apart,
// of which unit i has count(i) elements. What is not there is zero.
template <int AT_ONCE = gemm::sm90::WINDOWS, class T, class Count>
__device__ __forceinline__ void load_unaligned_units(const Params& p, int64_t first, int64_t step,
                                                     int units, Count count, Unit<T> (&x)[UNITS]) {
    const auto begin = reinterpret_cast<uint64_t>(p.x);
    const int64_t elements = (p.m - 1) * p.stride + p.k;
    const gemm::sm90::Span span{begin, begin + static_cast<uint64_t>(elements) * sizeof(T)};
    const uint64_t at = begin + static_cast<uint64_t>(first) * sizeof(T);
    const uint64_t pitch = static_cast<uint64_t>(step) * sizeof(T);
    gemm::sm90::load_unaligned<UNIT * sizeof(T), sizeof(T), UNITS, AT_ONCE>(
        span, units, [&](int i) { return at + i * pitch; },
        [&](int i) { return count(i) * int{sizeof(T)}; }, [&](int i) -> auto& { return x[i].w; });
}
// Of a row, from `col` on, `lanes` units apart; few at once, for 64 registers.
template <int lanes, int AT_ONCE = 2, class T>
__device__ __forceinline__ void load_unaligned_row(const Params& p, int64_t row, int64_t col,
                                                   Unit<T> (&x)[UNITS]) {
    constexpr int step = lanes * UNIT;
    const int64_t left = row < p.m && col < p.k ? p.k - col : 0;
    const int units = static_cast<int>(min((left + step - 1) / step, int64_t{UNITS}));
    const int last = static_cast<int>(min(left - (units - 1) * step, int64_t{UNIT}));
    load_unaligned_units<AT_ONCE>(
        p, row * p.stride + col, step, units, [&](int i) { return i == units - 1 ? last : UNIT; },
        x);
}
// Of eight rows, from `row` on.
template <class T>
__device__ __forceinline__ void load_down(const Params& p, int64_t row, int64_t col,
                                          Unit<T> (&x)[UNITS]) {
    if (p.aligned) {
        const T* from = static_cast<const T*>(p.x) + (row * p.stride + col);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            x[u] = Unit<T>{};
            if (row + u < p.m && col < p.k) x[u] = load_aligned(from + u * p.stride);
        }
        return;
    }
    const int rows = static_cast<int>(min(col < p.k ? p.m - row : 0, int64_t{UNITS}));
    const int count = static_cast<int>(min(p.k - col, int64_t{UNIT}));
    load_unaligned_units(p, row * p.stride + col, p.stride, rows, [&](int) { return count; }, x);
}

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The largest magnitude of some elements, of 16-bit ones two at a time.
template <class T>
struct Largest {
    static constexpr bool packed = sizeof(T) == 2;
    uint32_t bits = 0;

    __device__ __forceinline__ void add(uint32_t word) {
        if constexpr (packed)
            bits = arch::max_unsigned_pairs(bits, word & 0x7fff7fffu);
        else
            bits = larger(bits, word & 0x7fffffffu);
    }
    __device__ __forceinline__ void add(const Unit<T>& unit) {
#pragma unroll
        for (int i = 0; i < Unit<T>::words; ++i) add(unit.w[i]);
    }
    static __device__ __forceinline__ uint32_t as_float(uint32_t element) {
        if constexpr (!packed)
            return element;
        else if constexpr (std::same_as<T, bf16>)
            return element << 16;
        else
            return arch::bit_cast<uint32_t>(unpack_pair<half>(arch::bit_cast<half_2>(element)).x);
    }
    // The magnitude, as the bits of a float.
    __device__ __forceinline__ uint32_t magnitude() const {
        return as_float(packed ? larger(bits & 0xffffu, bits >> 16) : bits);
    }
};
template <class T>
__device__ __forceinline__ uint32_t magnitude(const Unit<T>& unit) {
    Largest<T> largest;
    largest.add(unit);
    return largest.magnitude();
}
template <int lanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t x) {
#pragma unroll
    for (int i = 1; i < lanes; i *= 2) x = larger(x, arch::shuffle_xor(x, i));
    return x;
}

// The scale of a group and the factor that its elements are multiplied with. Smaller magnitudes
// than 2^-110 count as that: the factor is finite.
struct Scale {
    float scale, factor;
    __device__ __forceinline__ Scale(DType format, uint32_t amax_bits) {
        const float limit = format == DType::e4m3 ? 448.f : 57344.f;
        const float x = arch::bit_cast<float>(amax_bits);
        const float amax = x < 0x1p-110f ? 0x1p-110f : x;
        scale = amax / limit;
        factor = limit / amax;
    }
    __device__ __forceinline__ explicit Scale(float given) : scale(given), factor(1.f / given) {}
};

// The factor of all elements, from the given scale or the largest magnitude; the first thread
// stores the scale.
__device__ __forceinline__ float factor_of_matrix(const Params& p) {
    const Scale scale = p.given != nullptr ? Scale(arch::load_global(p.given))
                                           : Scale(p.out_dtype, arch::load_global(p.amax));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        arch::store_global(p.scales, scale.scale);
        if (p.scales_t != nullptr) arch::store_global(p.scales_t, scale.scale);
    }
    return scale.factor;
}

// The largest magnitudes of eight groups that 16 lanes hold together, a unit of each per lane:
// lanes 2 u and 2 u + 1 find that of group u, in bit-reversed order.
struct GroupMaximum {
    int own;  // the group whose maximum this lane has
    uint32_t bits;

    __device__ __forceinline__ explicit GroupMaximum(const uint32_t (&most)[UNITS]) {
        const int lane = laneid();
        uint32_t four[4], two[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = halve(most[i], most[i + 4], 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) two[i] = halve(four[i], four[i + 2], 4);
        const uint32_t one = halve(two[0], two[1], 2);
        bits = larger(one, arch::shuffle_xor(one, 1));
        own = (lane >> 3 & 1) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1);
    }
    static __device__ __forceinline__ int lane_of(int group) {
        return (group >> 2 & 1) << 3 | (group >> 1 & 1) << 2 | (group & 1) << 1;
    }

  private:
    // Lanes whose bit is set go on with the second, the others with the first.
    static __device__ __forceinline__ uint32_t halve(uint32_t first, uint32_t second, int bit) {
        const bool set = (laneid() & bit) != 0;
        return larger(set ? second : first, arch::shuffle_xor(set ? first : second, bit));
    }
};

// The scales of such groups, and their factors, which all lanes get.
struct GroupScales {
    int own;  // the group whose scale this lane has
    float scale;
    float factors[UNITS];

    __device__ __forceinline__ GroupScales(DType format, const uint32_t (&most)[UNITS]) {
        const GroupMaximum largest(most);
        const Scale found(format, largest.bits);
        own = largest.own, scale = found.scale;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            factors[u] = arch::shuffle(found.factor, (laneid() & 16) | GroupMaximum::lane_of(u));
        }
    }
};

// factor(i) multiplies element i.
template <class F, class T, class Factor>
__device__ __forceinline__ uint2 encode_as(const Unit<T>& unit, Factor factor) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 low = unit.pair(2 * i), high = unit.pair(2 * i + 1);
        words[i] = gemm::sm80::fp8_codes<F>(
            make_float4(low.x * factor(4 * i), low.y * factor(4 * i + 1),
                        high.x * factor(4 * i + 2), high.y * factor(4 * i + 3)));
    }
    return make_uint2(words[0], words[1]);
}
template <class T, class Factor>
__device__ __forceinline__ uint2 encode(DType format, const Unit<T>& unit, Factor factor) {
    if (format == DType::e4m3) return encode_as<fp8e4m3>(unit, factor);
    return encode_as<fp8e5m2>(unit, factor);
}

struct BlockShared {
    uint32_t warps[WARPS];
};

// The largest of a team's values; teams are `warps` warps of the block.
__device__ __forceinline__ uint32_t largest_of_team(BlockShared& shared, uint32_t x, int warps) {
    x = largest_of_lanes<WARP_THREADS>(x);
    if (warps == 1) return x;
    const uint32_t first = arch::shared_address(&shared.warps[0]);
    arch::sync_block();
    if (laneid() == 0) arch::store_shared(first + 4 * warpid(), x);
    arch::sync_block();
    const int begin = warpid() / warps * warps;
    for (int i = 0; i < warps; ++i) {
        x = larger(x, arch::load_shared<uint32_t>(first + 4 * (begin + i)));
    }
    return x;
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_quantize
