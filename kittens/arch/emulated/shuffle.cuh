// Exchange between the lanes of a full warp, for any type of up to 8 bytes.
#pragma once

#include "memory.cuh"

namespace kittens::inline on_cpu {
namespace arch {

constexpr uint32_t FULL_WARP = 0xffffffffu;

namespace detail {
template <class T, class Source>
inline T exchange_lanes(const char* name, const T& value, int argument, Source source) {
    static_assert(sizeof(T) <= 8, "shuffle moves 1, 2, 4 or 8 bytes");
    emulated::Lane& lane = emulated::own_lane();
    std::memcpy(lane.words, &value, sizeof(T));
    lane.words[2] = static_cast<uint32_t>(argument);
    emulated::warp_operation(name, [source](emulated::Warp& w) {
        for (int l = 0; l < 32; ++l) {
            emulated::Lane& to = w.lanes[size_t(l)];
            const int from = source(l, static_cast<int>(to.words[2]));
            to.words[4] = w.lanes[size_t(from)].words[0];
            to.words[5] = w.lanes[size_t(from)].words[1];
        }
    });
    T result;
    std::memcpy(static_cast<void*>(&result), lane.words + 4, sizeof(T));
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
    emulated::warp_operation("a vote", [](emulated::Warp& w) {
        uint32_t bits = 0;
        for (int l = 0; l < 32; ++l) bits |= w.lanes[size_t(l)].words[0] << l;
        for (auto& l : w.lanes) l.words[1] = bits;
    });
    return lane.words[1];
}
inline bool any_lane(bool predicate) { return ballot(predicate) != 0; }
inline bool all_lanes(bool predicate) { return ballot(predicate) == FULL_WARP; }

}  // namespace arch
}  // namespace kittens::inline on_cpu
