// Fast sums whose consumers take turns, for the outputs that most calls have: of a 16-bit type,
// stored by TMA, without bias or activation. fp8_turns_sm90.cuh does the rest.
//
// The values are the same, bit for bit. What this kernel leaves out is code: consumers, which are
// at different places of it at a time, then find it in the instruction caches.
#pragma once

#include "csrc/gemm/fp8_turns_sm90.cuh"
#include "csrc/gemm/fp8_whole_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Config C>
__device__ __forceinline__ void consume_whole_in_turns(const typename Types<C>::Globals& g,
                                                       typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    // The same in all lanes, as the compiler then knows: a tile's place stays in uniform registers.
    const int consumer = arch::shuffle(int(warpgroup::groupid()), 0);
    // One arrival stands for the warpgroup, which wgmma reads shared memory as.
    const bool hands_back = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (hands_back) arrive(shared.empty[stage]);
    };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[K::products_m];
    Finished<C> finished;
    Epilogue<C> epilogue;
    uint32_t index = blockIdx.x;
    const auto skip = [&] {  // the other one's tile
        ring.stage += g.k_blocks;
        const int rounds = ring.stage / C.stages;
        ring.stage -= rounds * C.stages;
        ring.phase ^= rounds & 1;
    };
    constexpr int stage_step = int(sizeof(typename K::Stage)) >> 4;
    constexpr int b_after_a = int(sizeof(typename K::a_tile)) >> 4;
    const auto first_stage =
        static_cast<uint32_t>(operand_descriptor<K>(shared.stages[0].a.address()));
    bool first = consumer == 0;
    if (consumer == 1) index += g.clusters, skip();
    for (; index < g.order.total; index += 2 * g.clusters, skip()) {
        const Tile tile = tile_at<C>(g, place, index);
        const uint32_t row = tile.row + warpgroup::warpid() * 16;
        epilogue.fetch_scales(g, tile, row + laneid() / 4);
        if (!first) arch::named_barrier_sync(TURN + consumer, 2 * WARPGROUP_THREADS);
        first = false;
        const bool follows = index + g.clusters < g.order.total;
        const auto multiply_all = [&]<class B>() {
            const auto start = [&](bool accumulate) {
                const uint32_t at = arch::shuffle(first_stage + ring.stage * stage_step, 0);
                wait(shared.full[ring.stage], ring.phase);
                multiply_at<K, B>(sums, at, at + b_after_a, accumulate);
            };
            start(false);
            epilogue.publish_scales(g, shared);
            int previous = ring.stage;
            ring.advance();
            for (int k = 1; k < g.k_blocks; ++k, ring.advance()) {
                start(true);
                warpgroup::mma_async_wait<1>();
                release(previous);
                previous = ring.stage;
            }
            // A product of this consumer is still running when the other one's first is there.
            if (follows) arch::named_barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP_THREADS);
#pragma unroll
            for (int i = 0; i < K::products_m; ++i) {
                warpgroup::mma_async_wait(reinterpret_cast<rt_fl<16, B::rows>&>(sums[i]));
            }
            release(previous);
        };
        if (K::two_widths && tile.narrow)
            multiply_all.template operator()<typename K::narrow_b>();
        else
            multiply_all.template operator()<typename K::b_tile>();
        epilogue.scale(g, shared, sums);
        finished.keep(g, sums, row, tile.col);
        finished.narrow = tile.narrow;
#pragma unroll
        for (int piece = 0; piece < finished.pieces; ++piece) {
            finished.send(g, shared, piece);
        }
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
