// Products of fp8 matrices whose consumers take turns: each has tiles of its own, and multiplies at
// the tensor cores' full rate while the other one scales, rounds and stores.
#pragma once

#include "csrc/gemm/fp8/epilogue_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Named barriers, one per consumer: it may multiply.
constexpr int TURN = READY + 3;

template <Config C>
__device__ __forceinline__ void consume_in_turns(const typename Types<C>::Globals& g,
                                                 typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    const gemm::sm90::HandBack hand_back(g, place);
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[K::products_m];
    uint32_t index = blockIdx.x >> ((g.cluster_m == 2) + (g.cluster_n == 2));
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
        Epilogue<C> epilogue;
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
                hand_back(shared.empty[previous]);
                previous = ring.stage;
            }
            // A product of this consumer is still running when the other one's first is there.
            if (follows) arch::named_barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP_THREADS);
            epilogue.fetch_bias(g, tile);
#pragma unroll
            for (int i = 0; i < K::products_m; ++i) {
                warpgroup::mma_async_wait(reinterpret_cast<rt_fl<16, B::rows>&>(sums[i]));
            }
            hand_back(shared.empty[previous]);
        };
        if (K::two_widths && tile.narrow)
            multiply_all.template operator()<typename K::narrow_b>();
        else
            multiply_all.template operator()<typename K::b_tile>();
        epilogue.apply(g, shared, sums);
#pragma unroll
        for (int i = 0; i < K::products_m; ++i) {
            store_now<C>(g, shared, sums[i], row + i * 64, tile.col, tile.end, i, tile.narrow);
        }
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
