// Who am I: thread, warp and block coordinates, and the dynamic shared memory of the block.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {

constexpr int WARP_THREADS = 32;
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS;

struct alignas(1024) alignment_dummy {
    int dummy;
};

inline int* shared_memory() {
    return reinterpret_cast<int*>(emulated::own_shared_memory() + emulated::SHARED_BASE);
}
inline int laneid() { return static_cast<int>(threadIdx.x % WARP_THREADS); }
inline int warpid() { return static_cast<int>(threadIdx.x / WARP_THREADS); }

namespace arch {

inline uint32_t shared_address(const void* pointer) { return emulated::shared_address(pointer); }
inline int warp_uniform(int value) {
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = static_cast<uint32_t>(value);
    emulated::warp_operation("warp_uniform", [](emulated::Lane* lanes) {
        for (int l = 0; l < WARP_THREADS; ++l) lanes[l].words[1] = lanes[0].words[0];
    });
    return static_cast<int>(lane.words[1]);
}
inline bool elect_one() { return emulated::elect_one(); }
template <class T, int NUMBER = 0>
inline T& static_shared() {
    static const char key = 0;
    return *static_cast<T*>(emulated::static_shared(&key, sizeof(T), alignof(T)));
}
inline uint32_t dynamic_shared_bytes() { return emulated::dynamic_shared_bytes(); }
inline void sync_warp() { emulated::synchronize_warp(); }
inline void sync_block() { emulated::use_block_barrier(0); }
inline void sleep(unsigned) { emulated::yield_turn(); }
[[noreturn]] inline void trap() { emulated::fail("trap"); }

inline int lane_again() { return kittens::laneid(); }
inline int block_again() { return static_cast<int>(blockIdx.x); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
