// Units of eight neighbours of a row, 16 bytes of 16-bit elements: loads, values, rounding, stores.
#pragma once

#include <type_traits>

#include "csrc/norm/norm.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::norm {
namespace sm90 {

using kittens::arch::bit_cast;
namespace arch = kittens::arch;

template <DType dtype>
using element_of =
    std::conditional_t<dtype == DType::fp32, float,
                       std::conditional_t<dtype == DType::bf16, kittens::bf16, kittens::half>>;

// Eight neighbours as 32-bit words: pairs of 16-bit elements, or fp32.
template <class T>
struct Unit {
    static constexpr bool PAIRS = sizeof(T) == 2;
    static constexpr int WORDS = PAIRS ? 4 : 8;
    uint32_t words[WORDS];

    __device__ __forceinline__ float value(int i) const {
        if constexpr (std::is_same_v<T, float>) {
            return bit_cast<float>(words[i]);
        } else if constexpr (std::is_same_v<T, kittens::bf16>) {
            return bit_cast<float>(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
        } else {
            const float2 pair = kittens::unpack_pair<kittens::half>(
                bit_cast<kittens::packed_type<kittens::half>>(words[i / 2]));
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }
};
template <class T>
__device__ __forceinline__ Unit<T> rounded(const float (&values)[UNIT]) {
    Unit<T> unit;
#pragma unroll
    for (int i = 0; i < Unit<T>::WORDS; ++i) {
        if constexpr (Unit<T>::PAIRS) {
            unit.words[i] =
                bit_cast<uint32_t>(kittens::pack_pair<T>(values[2 * i], values[2 * i + 1]));
        } else {
            unit.words[i] = bit_cast<uint32_t>(values[i]);
        }
    }
    return unit;
}

// The first `count` elements of a unit, the others zero. ALIGNED: all eight or none, 16 bytes at a
// time.
template <bool ALIGNED, class T>
__device__ __forceinline__ Unit<T> load_unit(const T* at, int count) {
    Unit<T> unit{};
    if constexpr (ALIGNED) {
        if (count > 0) {
#pragma unroll
            for (int i = 0; i < Unit<T>::WORDS / 4; ++i) {
                const uint4 v = arch::load_global(reinterpret_cast<const uint4*>(at) + i);
                unit.words[4 * i] = v.x, unit.words[4 * i + 1] = v.y;
                unit.words[4 * i + 2] = v.z, unit.words[4 * i + 3] = v.w;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            if (i >= count) continue;
            if constexpr (Unit<T>::PAIRS) {
                const uint32_t bits = arch::load_global(reinterpret_cast<const uint16_t*>(at) + i);
                unit.words[i / 2] |= bits << 16 * (i % 2);
            } else {
                unit.words[i] = arch::load_global(reinterpret_cast<const uint32_t*>(at) + i);
            }
        }
    }
    return unit;
}
template <bool ALIGNED, class T>
__device__ __forceinline__ void store_unit(T* at, const Unit<T>& unit, int count) {
    if constexpr (ALIGNED) {
        if (count > 0) {
#pragma unroll
            for (int i = 0; i < Unit<T>::WORDS / 4; ++i) {
                const auto& w = unit.words;
                arch::store_global(reinterpret_cast<uint4*>(at) + i,
                                   uint4{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]});
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            if (i >= count) continue;
            if constexpr (Unit<T>::PAIRS) {
                arch::store_global(reinterpret_cast<uint16_t*>(at) + i,
                                   static_cast<uint16_t>(unit.words[i / 2] >> 16 * (i % 2)));
            } else {
                arch::store_global(reinterpret_cast<uint32_t*>(at) + i, unit.words[i]);
            }
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::norm
