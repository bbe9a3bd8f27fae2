// mbarrier objects: arrival counts, transaction bytes, phases.
#pragma once

#include "barriers.h"
#include "cluster.cuh"

namespace kittens::inline on_cpu {
namespace arch {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    emulated::initialize_barrier(barrier, arrivals);
}
inline void mbarrier_invalidate(uint32_t barrier) {
    emulated::Barrier& b = emulated::barrier_at(barrier, "mbarrier_invalidate");
    if (b.in_flight != 0) {
        emulated::fail("mbarrier_invalidate of " + emulated::describe(b) +
                       " while copies that signal it are in flight");
    }
    b.valid = false;
}
inline void mbarrier_init_fence() { emulated::fence_initialized_barriers(); }
inline void mbarrier_arrive(uint32_t barrier, uint32_t count = 1) {
    emulated::Barrier& b = emulated::barrier_at(barrier, "mbarrier_arrive");
    emulated::release_to(b.arriving, emulated::self());
    emulated::hand_back_products(b.arriving, emulated::self());
    emulated::arrive_at(b, count, "mbarrier_arrive");
}
inline void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank, uint32_t count = 1) {
    mbarrier_arrive(map_shared_rank(barrier, rank), count);
}
inline void mbarrier_arrive_remote_relaxed(uint32_t barrier, uint32_t rank, uint32_t count = 1) {
    const uint32_t address = map_shared_rank(barrier, rank);
    emulated::Barrier& b = emulated::barrier_at(address, "mbarrier_arrive");
    emulated::Thread& t = emulated::self();
    // Tells of the copies that the thread has waited for, not of its own writes.
    if (emulated::machine->check_order) {
        b.arriving.join_from(t.clock, emulated::machine->dependency_entry());
    }
    emulated::hand_back_products(b.arriving, t);
    emulated::arrive_at(b, count, "mbarrier_arrive");
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    emulated::Barrier& b = emulated::barrier_at(barrier, "mbarrier_arrive_expect");
    emulated::release_to(b.arriving, emulated::self());
    emulated::hand_back_products(b.arriving, emulated::self());
    // Expects first, so that the arrival cannot complete the phase in between.
    b.bytes += bytes;
    emulated::arrive_at(b, 1, "mbarrier_arrive_expect");
}
inline void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    emulated::change_bytes(emulated::barrier_at(barrier, "mbarrier_expect"), bytes);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t phase) {
    return emulated::poll_phase(emulated::barrier_at(barrier, "mbarrier_try_wait"), phase);
}
inline bool mbarrier_try_wait_cluster(uint32_t barrier, uint32_t phase) {
    return mbarrier_try_wait(barrier, phase);
}
inline bool mbarrier_test_wait(uint32_t barrier, uint32_t phase) {
    return emulated::poll_phase(emulated::barrier_at(barrier, "mbarrier_test_wait"), phase);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t phase) {
    emulated::wait_for_phase(emulated::barrier_at(barrier, "mbarrier_wait"), phase);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t phase) {
    mbarrier_wait(barrier, phase);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
