// Who am I: thread, warp and block coordinates, and the dynamic shared memory of the block.
#pragma once

#include "barriers.h"

namespace kittens::inline on_cpu {

constexpr int WARP_THREADS = 32;
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS;

struct alignas(1024) alignment_dummy {
    int dummy;
};

inline int* shared_memory() {
    return reinterpret_cast<int*>(emulated::self().block->shared + emulated::SHARED_BASE);
}
inline int laneid() { return static_cast<int>(threadIdx.x % WARP_THREADS); }
inline int warpid() { return static_cast<int>(threadIdx.x / WARP_THREADS); }

namespace arch {

inline uint32_t shared_address(const void* pointer) {
    const emulated::Block& block = *emulated::self().block;
    const auto offset = static_cast<const uint8_t*>(pointer) - block.shared;
    if (offset < 0 || offset > static_cast<std::ptrdiff_t>(block.shared_end)) {
        emulated::fail("an object that should lie in the block's shared memory lies outside: at " +
                       std::to_string(offset) + " of " + std::to_string(block.shared_end) +
                       " bytes");
    }
    return static_cast<uint32_t>(offset);
}
inline int warp_uniform(int value) {
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = static_cast<uint32_t>(value);
    emulated::warp_operation("warp_uniform", [](emulated::Warp& w) {
        for (auto& l : w.lanes) l.words[1] = w.lanes[0].words[0];
    });
    return static_cast<int>(lane.words[1]);
}
inline bool elect_one() {
    emulated::warp_operation("elect_one", [](emulated::Warp&) {});
    return emulated::self().lane == 0;
}
template <class T, int NUMBER = 0>
inline T& static_shared() {
    static const char key = 0;
    emulated::Block& block = *emulated::self().block;
    const auto [at, is_new] = block.statics.try_emplace(&key, 0u);
    if (is_new) at->second = emulated::reserve_static_shared(block, sizeof(T), alignof(T));
    return *reinterpret_cast<T*>(block.shared + at->second);
}
inline uint32_t dynamic_shared_bytes() { return emulated::machine->grid->shared_bytes; }
inline void sync_warp() { emulated::synchronize_warp(); }
inline void sync_block() { emulated::use_block_barrier(0); }
inline void sleep(unsigned) { emulated::yield_turn(); }
[[noreturn]] inline void trap() { emulated::fail("trap"); }

inline int lane_again() { return kittens::laneid(); }

}  // namespace arch
}  // namespace kittens::inline on_cpu
