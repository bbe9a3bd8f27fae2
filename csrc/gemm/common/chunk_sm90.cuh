// Chunks of eight neighbours of a row, as passes over memory read and write them: 16 bytes at a
// time of 16-bit elements, twice 16 of fp32.
#pragma once

#include <type_traits>

#include "csrc/common/dtype.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::block_scaled {
namespace sm90 {

using kittens::arch::bit_cast;
namespace arch = kittens::arch;

constexpr int CHUNK = 8;  // elements

template <int DTYPE>
using element_of =
    std::conditional_t<DTYPE == int(DType::fp32), float,
                       std::conditional_t<DTYPE == int(DType::bf16), kittens::bf16, kittens::half>>;

// Eight neighbours as 32-bit words: pairs of 16-bit elements, or fp32.
template <class T>
struct Chunk {
    static constexpr bool PAIRS = sizeof(T) == 2;
    static constexpr int WORDS = PAIRS ? 4 : 8;
    uint32_t words[WORDS];

    __device__ __forceinline__ float value(int i) const {
        if constexpr (std::is_same_v<T, float>) {
            return bit_cast<float>(words[i]);
        } else if constexpr (std::is_same_v<T, kittens::bf16>) {
            return bit_cast<float>(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
        } else {
            const float2 pair = __half22float2(bit_cast<__half2>(words[i / 2]));
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }
};

// Eight elements of a row, aligned to 16 bytes.
template <class T>
__device__ __forceinline__ Chunk<T> load_whole_chunk(const T* at) {
    Chunk<T> chunk;
#pragma unroll
    for (int i = 0; i < Chunk<T>::WORDS / 4; ++i) {
        const uint4 words = arch::load_global_readonly(reinterpret_cast<const uint4*>(at) + i);
        chunk.words[4 * i] = words.x;
        chunk.words[4 * i + 1] = words.y;
        chunk.words[4 * i + 2] = words.z;
        chunk.words[4 * i + 3] = words.w;
    }
    return chunk;
}

// Eight results, rounded, as words of 16 bytes.
template <class T>
struct Rounded {
    uint4 words[CHUNK * sizeof(T) / 16];
};
template <class T>
__device__ __forceinline__ Rounded<T> rounded(const float (&values)[CHUNK]) {
    uint32_t words[Chunk<T>::WORDS];
#pragma unroll
    for (int i = 0; i < Chunk<T>::WORDS; ++i) {
        if constexpr (Chunk<T>::PAIRS) {
            words[i] = bit_cast<uint32_t>(kittens::pack_pair<T>(values[2 * i], values[2 * i + 1]));
        } else {
            words[i] = bit_cast<uint32_t>(values[i]);
        }
    }
    Rounded<T> result;
#pragma unroll
    for (int i = 0; i < Chunk<T>::WORDS / 4; ++i) {
        result.words[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
    return result;
}

}  // namespace sm90
}  // namespace thunderkittens::block_scaled
