// A ring of stages between those who fill slots of shared memory and those who use them. Each slot
// has two semaphores: `arrived` (filled) and `finished` (free again). Both sides walk the ring with
// a position of their own, and never count phases by hand.
//
//   filling side                                   using side
//   ring.wait_finished(at);                        ring.wait_arrived(at);
//   tma::expect(ring.arrived[at.stage], slot);     ... use slot[at.stage] ...
//   tma::load_async(slot, ..., arrived);           arrive(ring.finished[at.stage]);
//   at.advance();                                  at.advance();
#pragma once

#include "../ops/thread/semaphore.cuh"

namespace kittens::inline KITTENS_BACKEND {

// A position in a ring: the stage, and the parity of the number of times that the ring was gone
// round. The package's own kernels walk with it as well. Most of them keep a ring's semaphores in
// arrays of their own, because a stage there has others than one pair: several that fill parts of a
// stage which is freed as one (attention's backward, the scales of fp8), or further ones for what
// is handed over besides. Those of the matrix products are initialised by the warp that loads, so
// that it waits for nobody before its first load; publish_semaphores is for the whole block.
template <int stages>
struct pipeline_state {
    static_assert(stages >= 1, "a ring has at least one stage");
    int stage = 0;
    int phase = 0;

    __device__ __forceinline__ void advance() {
        if constexpr (stages == 1) {
            phase ^= 1;
        } else if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Skips `count` stages at once, for sides that take turns.
    __device__ __forceinline__ void advance(int count) {
        stage += count;
        phase ^= (stage / stages) & 1;
        stage %= stages;
    }
};

template <int stages>
struct ring {
    using position = pipeline_state<stages>;
    semaphore arrived[stages];
    semaphore finished[stages];

    // By one thread; the block must synchronise after it (see publish_semaphores).
    __device__ __forceinline__ void init(int arrivals_to_fill, int arrivals_to_finish) {
        for (int i = 0; i < stages; ++i) {
            init_semaphore(arrived[i], arrivals_to_fill);
            init_semaphore(finished[i], arrivals_to_finish);
        }
    }
    __device__ __forceinline__ void wait_arrived(position at) { wait(arrived[at.stage], at.phase); }
    // Returns at once in the first round: every slot starts free.
    __device__ __forceinline__ void wait_finished(position at) {
        wait(finished[at.stage], at.phase ^ 1);
    }
};

// By every thread of the block, or of the cluster, after one thread has initialised the semaphores:
// from here on all threads, the other blocks and the copy engine may use them.
template <int cluster_blocks = 1>
__device__ __forceinline__ void publish_semaphores() {
    arch::mbarrier_init_fence();
    if constexpr (cluster_blocks > 1) {
        arch::cluster_arrive();
        arch::cluster_wait();
    } else {
        arch::sync_block();
    }
}

}  // namespace kittens::inline KITTENS_BACKEND
