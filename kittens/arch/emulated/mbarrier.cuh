// mbarrier objects: arrival counts, transaction bytes, phases.
#pragma once

#include "calls.h"
#include "cluster.cuh"

namespace kittens::inline on_cpu {
namespace arch {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    emulated::initialize_barrier(barrier, arrivals);
}
inline void mbarrier_invalidate(uint32_t barrier) { emulated::invalidate_barrier(barrier); }
inline void mbarrier_init_fence() { emulated::fence_initialized_barriers(); }
inline void mbarrier_arrive(uint32_t barrier, uint32_t count = 1) {
    emulated::arrive_at_barrier(barrier, count);
}
inline void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank, uint32_t count = 1) {
    mbarrier_arrive(map_shared_rank(barrier, rank), count);
}
inline void mbarrier_arrive_remote_relaxed(uint32_t barrier, uint32_t rank, uint32_t count = 1) {
    emulated::arrive_relaxed(map_shared_rank(barrier, rank), count);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    emulated::arrive_expecting(barrier, bytes);
}
inline void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    emulated::expect_bytes(barrier, bytes);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t phase) {
    return emulated::poll_barrier(barrier, phase, "mbarrier_try_wait");
}
inline bool mbarrier_try_wait_cluster(uint32_t barrier, uint32_t phase) {
    return mbarrier_try_wait(barrier, phase);
}
inline bool mbarrier_test_wait(uint32_t barrier, uint32_t phase) {
    return emulated::poll_barrier(barrier, phase, "mbarrier_test_wait");
}
inline void mbarrier_wait(uint32_t barrier, uint32_t phase) {
    emulated::wait_for_barrier(barrier, phase);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t phase) {
    mbarrier_wait(barrier, phase);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
