// Exchange between the lanes of a full warp, for any type of 4 or 8 bytes.
#pragma once

#include <cstdint>

#include "memory.cuh"

namespace kittens::inline on_gpu {
namespace arch {

constexpr uint32_t FULL_WARP = 0xffffffffu;

template <class T, class Exchange>
__device__ __forceinline__ T shuffle_words(const T& value, Exchange exchange) {
    if constexpr (sizeof(T) == 8) {
        uint2 words = bit_cast<uint2>(value);
        words.x = exchange(words.x);
        words.y = exchange(words.y);
        return bit_cast<T>(words);
    } else if constexpr (sizeof(T) == 4) {
        return bit_cast<T>(exchange(bit_cast<uint32_t>(value)));
    } else if constexpr (sizeof(T) == 2) {
        return bit_cast<T>(
            static_cast<uint16_t>(exchange(static_cast<uint32_t>(bit_cast<uint16_t>(value)))));
    } else {
        static_assert(sizeof(T) == 1, "shuffle moves 1, 2, 4 or 8 bytes");
        return bit_cast<T>(
            static_cast<uint8_t>(exchange(static_cast<uint32_t>(bit_cast<uint8_t>(value)))));
    }
}
template <class T>
__device__ __forceinline__ T shuffle(const T& value, int source_lane) {
    return shuffle_words(value, [=](uint32_t w) { return __shfl_sync(FULL_WARP, w, source_lane); });
}
template <class T>
__device__ __forceinline__ T shuffle_xor(const T& value, int mask) {
    return shuffle_words(value, [=](uint32_t w) { return __shfl_xor_sync(FULL_WARP, w, mask); });
}
template <class T>
__device__ __forceinline__ T shuffle_down(const T& value, int distance) {
    return shuffle_words(value,
                         [=](uint32_t w) { return __shfl_down_sync(FULL_WARP, w, distance); });
}
__device__ __forceinline__ bool any_lane(bool predicate) {
    return __any_sync(FULL_WARP, predicate);
}
__device__ __forceinline__ bool all_lanes(bool predicate) {
    return __all_sync(FULL_WARP, predicate);
}
__device__ __forceinline__ uint32_t ballot(bool predicate) {
    return __ballot_sync(FULL_WARP, predicate);
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
