// Exchange between the lanes of a full warp, for any type of up to 8 bytes.
#pragma once

#include "memory.cuh"

namespace kittens::inline on_cpu {
namespace arch {

constexpr uint32_t FULL_WARP = 0xffffffffu;

namespace detail {
template <class T>
inline T exchange_lanes(const char* name, const T& value, int argument,
                        int (*source)(int lane, int argument)) {
    static_assert(sizeof(T) <= 8, "shuffle moves 1, 2, 4 or 8 bytes");
    T result = value;
    emulated::shuffle(name, &result, sizeof(T), argument, source);
    return result;
}
}  // namespace detail

template <class T>
inline T shuffle(const T& value, int source_lane) {
    return detail::exchange_lanes("shuffle", value, source_lane,
                                  [](int, int from) { return from & 31; });
}
template <class T>
inline T shuffle_xor(const T& value, int mask) {
    return detail::exchange_lanes("shuffle_xor", value, mask,
                                  [](int lane, int mask) { return (lane ^ mask) & 31; });
}
template <class T>
inline T shuffle_down(const T& value, int distance) {
    return detail::exchange_lanes("shuffle_down", value, distance, [](int lane, int distance) {
        return lane + distance < 32 ? lane + distance : lane;
    });
}
inline uint32_t ballot(bool predicate) {
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = predicate;
    emulated::warp_operation("a vote", [](emulated::Lane* lanes) {
        uint32_t bits = 0;
        for (int l = 0; l < 32; ++l) bits |= lanes[l].words[0] << l;
        for (int l = 0; l < 32; ++l) lanes[l].words[1] = bits;
    });
    return lane.words[1];
}
inline bool any_lane(bool predicate) { return ballot(predicate) != 0; }
inline bool all_lanes(bool predicate) { return ballot(predicate) == FULL_WARP; }

}  // namespace arch
}  // namespace kittens::inline on_cpu
