// A ring of stages that two blocks of a cluster fill for each other, each a half of every tile, as
// the wide gradient of attention does: one thread's relaxed arrival hands a stage back for its
// whole warpgroup, behind the wait for the products that have read it. That is legal, and no alarm.
#pragma once

#include "defect.h"

namespace defects {

constexpr int RING_STAGES = 2, RING_STEPS = 7, RING_THREADS = 160;
using ring_half = st_bf<32, 64>;
struct RingGlobals {
    gl<bf16, 1, 1, 64, 64> a;
    gl<bf16, 1, 1, -1, 64, ring_half> b;
    gl<float, 1, 1, 128, 64> c;
};
struct RingShared {
    st_bf<64, 64> b[RING_STAGES];
    semaphore full[RING_STAGES], empty[RING_STAGES];
};

template <Defect D>
__device__ void load_halves(const RingGlobals& g, RingShared& shared, int rank) {
    for (int k = 0; k < RING_STEPS; ++k) {
        const int s = k % RING_STAGES, phase = k / RING_STAGES % 2;
        wait(shared.empty[s], phase ^ 1);
        tma::expect(shared.full[s], shared.b[s]);
        auto& half = reinterpret_cast<ring_half&>(shared.b[s].data[rank * 32 * 64]);
        tma::cluster::load_async(half, g.b, {2 * k + rank, 0}, shared.full[s], 0b11);
    }
}
template <Defect D>
__device__ void multiply_ring(const RingGlobals& g, RingShared& shared, int rank) {
    const auto release = [&](int stage) {
        if (warpgroup::laneid() != 0) return;
        arrive(shared.empty[stage]);
        if constexpr (D != Defect::stage_of_one_block) {
            arrive_remote_relaxed(shared.empty[stage], 1 - rank);
        }
    };
    rt_bf<16, 64> a;
    rt_fl<16, 64> sum;
    warpgroup::load(a, g.a, {0, 0});
    warp::zero(sum);
    for (int k = 0; k < RING_STEPS; ++k) {
        const int s = k % RING_STAGES;
        wait(shared.full[s], k / RING_STAGES % 2);
        warpgroup::mma_AB(sum, a, shared.b[s]);
        if constexpr (D == Defect::stage_of_a_product_in_flight) {
            release(s);
            warpgroup::mma_async_wait<1>();
        } else {
            warpgroup::mma_async_wait<1>();
            if (k > 0) release((k - 1) % RING_STAGES);
        }
    }
    warpgroup::mma_async_wait(sum);
    warpgroup::store(g.c, sum, {rank, 0});
}
template <Defect D>
__global__ void ring_kernel(const __grid_constant__ RingGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<RingShared>();
    const int rank = cluster::rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < RING_STAGES; ++s) {
            init_semaphore(shared.full[s], 1);
            init_semaphore(shared.empty[s], D == Defect::stage_of_one_block ? 1 : 2);
        }
        arch::mbarrier_init_fence();
    }
    cluster::sync();
    if (warpid() < 4)
        multiply_ring<D>(g, shared, rank);
    else if (laneid() == 0)
        load_halves<D>(g, shared, rank);
    arch::sync_warp();
    cluster::sync();
}

}  // namespace defects
