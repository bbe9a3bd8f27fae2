// Fp8 products in the ping-pong schedule, tiles of 128 x 176: each of the two consumer warpgroups
// has tiles of its own, and multiplies at the tensor cores' full rate while the other one scales,
// rounds and stores.
#pragma once

#include "csrc/gemm/fp8/epilogue_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Named barriers, one per consumer, at which it waits until it may multiply.
constexpr int MAY_MULTIPLY = READY + 3;

template <Config C>
__device__ __forceinline__ void consume_pingpong(const typename KernelTraits<C>::Globals& g,
                                                 typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    const ClusterPosition place(g);
    const gemm::sm90::ClusterRelease cluster_release(g, place);
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[Traits::products_m];
    uint32_t index = blockIdx.x >> ((g.cluster_m == 2) + (g.cluster_n == 2));
    const auto skip = [&] {  // skips the other consumer's tile
        ring.stage += g.k_blocks;
        const int rounds = ring.stage / C.stages;
        ring.stage -= rounds * C.stages;
        ring.phase ^= rounds & 1;
    };
    constexpr int stage_step = int(sizeof(typename Traits::Stage)) >> 4;
    constexpr int b_after_a = int(sizeof(typename Traits::a_tile)) >> 4;
    const auto first_stage =
        static_cast<uint32_t>(operand_descriptor<Traits>(shared.stages[0].a.address()));
    bool first = consumer == 0;
    if (consumer == 1) index += g.clusters, skip();
    for (; index < g.order.total; index += 2 * g.clusters, skip()) {
        const Tile tile = tile_at<C>(g, place, index);
        const uint32_t row = tile.row + warpgroup::warpid() * 16;
        Epilogue<C> epilogue;
        epilogue.fetch_scales(g, tile, row + laneid() / 4);
        if (!first) arch::named_barrier_sync(MAY_MULTIPLY + consumer, 2 * WARPGROUP_THREADS);
        first = false;
        const bool follows = index + g.clusters < g.order.total;
        const auto multiply_all = [&]<class B>() {
            const auto start = [&](bool accumulate) {
                const uint32_t at = arch::shuffle(first_stage + ring.stage * stage_step, 0);
                wait(shared.full[ring.stage], ring.phase);
                multiply_at<Traits, B>(sums, at, at + b_after_a, accumulate);
            };
            start(false);
            epilogue.publish_scales(g, shared);
            int previous = ring.stage;
            ring.advance();
            for (int k = 1; k < g.k_blocks; ++k, ring.advance()) {
                start(true);
                warpgroup::mma_async_wait<1>();
                cluster_release(shared.empty[previous]);
                previous = ring.stage;
            }
            // The hand-over comes early: a product of this consumer is still running when the other
            // one's first is issued.
            if (follows)
                arch::named_barrier_arrive(MAY_MULTIPLY + 1 - consumer, 2 * WARPGROUP_THREADS);
            epilogue.fetch_bias(g, tile);
#pragma unroll
            for (int i = 0; i < Traits::products_m; ++i) {
                warpgroup::mma_async_wait(reinterpret_cast<rt_fl<16, B::rows>&>(sums[i]));
            }
            cluster_release(shared.empty[previous]);
        };
        if (Traits::two_widths && tile.narrow)
            multiply_all.template operator()<typename Traits::narrow_b>();
        else
            multiply_all.template operator()<typename Traits::b_tile>();
        epilogue.apply(g, shared, sums);
#pragma unroll
        for (int i = 0; i < Traits::products_m; ++i) {
            store_now<C>(g, shared, sums[i], row + i * 64, tile.col, tile.end, i, tile.narrow);
        }
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
