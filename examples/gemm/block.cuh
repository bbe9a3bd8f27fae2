// What the later steps build on: the ring of step 4, for tiles of any size, and the block of
// step 5.
#pragma once

#include "call.cuh"

template <class ATile, class BTile, int count>
struct Stages {
    using position = typename kittens::ring<count>::position;
    ATile a[count];
    BTile b[count];
    kittens::ring<count> ring;

    // By the producer: step k of the tile at (row, col), once the stage is finished.
    __device__ void fill(position at, const auto& g, int row, int col, int k) {
        kittens::semaphore& arrived = ring.arrived[at.stage];
        ring.wait_finished(at);
        kittens::tma::expect(arrived, a[at.stage], b[at.stage]);
        kittens::tma::load_async(a[at.stage], g.a, {row, k}, arrived);
        kittens::tma::load_async(b[at.stage], g.b, {col, k}, arrived);
    }
    // By consumer `id`: issues the product of its 64 rows, once the stage has arrived.
    __device__ void multiply(position at, int id, auto& sum, bool accumulate) {
        ring.wait_arrived(at);
        auto rows = a[at.stage].template subtile<64, ATile::cols>({id, 0});
        kittens::warpgroup::product<false, true>(sum, rows, b[at.stage], accumulate);
    }
    // By a consumer, whose product of the stage has ended.
    __device__ void release(int stage) { kittens::warpgroup::arrive(ring.finished[stage]); }
};

// The block of step 5, for the steps after it.
namespace block {

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, COLS = 256, DEPTH = 64, STAGES = 4;
constexpr int THREADS = (CONSUMERS + 1) * kittens::WARPGROUP_THREADS;
using a_tile = kittens::st_bf<ROWS, DEPTH>;
using b_tile = kittens::st_bf<COLS, DEPTH>;
using stages = Stages<a_tile, b_tile, STAGES>;

// Calls produce(shared) in one thread, and consume(shared) in two warpgroups.
template <class Shared>
__device__ void by_role(auto produce, auto consume) {
    kittens::shared_allocator<> allocator(kittens::shared_memory());
    Shared& shared = allocator.template allocate<Shared>();
    if (threadIdx.x == 0) shared.ring.init(1, CONSUMERS);
    kittens::publish_semaphores();
    if (kittens::warpgroup::groupid() == CONSUMERS) {
        kittens::warpgroup::producer_registers();
        if (kittens::warpgroup::elect_leader()) produce(shared);
    } else {
        kittens::warpgroup::consumer_registers<CONSUMERS>();
        consume(shared);
    }
}

}  // namespace block
