// Store warps: tiles of two products side by side are stored in halves. A consumer rounds and
// stages one while it has a product running, and a store warp of the producer's warpgroup sends it,
// so that the consumers issue no copies.
#pragma once

#include "csrc/gemm/fp8/promoted_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Named barriers, one of each per consumer: half of a tile is staged, and has been stored.
constexpr int HALF_STAGED = READY + 5, HALF_STORED = READY + 7;
constexpr int STORE_THREADS = WARPGROUP_THREADS + WARP_THREADS;

// Writes half i of a finished tile, rounded, to the consumer's staging buffers.
template <Config C, int i>
__device__ __forceinline__ void stage_rounded(
    typename KernelTraits<C>::Shared& shared,
    const rt_bf<16, KernelTraits<C>::product_cols>& values, bool narrow) {
    using Traits = KernelTraits<C>;
    using F = DeferredStore<C>;
    using staging = typename Traits::out_tile;
    static_assert(F::subtiles == 2 * C.buffers);
    auto* buffers = &shared.out[warpgroup::groupid() * WARPGROUP_WARPS][0];
#pragma unroll
    for (int b = 0; b < C.buffers; ++b) {
        const int subtile = i * C.buffers + b;
        auto& buffer = buffers[b * WARPGROUP_WARPS + warpgroup::warpid()];
        constexpr int before = i * Traits::product_cols;
        F::with_first(subtile, narrow, [&](int first) {
            gemm::sm90::stage_subtile<rt_bf<16, staging::cols>>(values, first - before, buffer);
        });
    }
}

// The role of a store warp, which serves one consumer. Where right halves are `late`, a consumer
// stages one that is no tile's before its first.
template <Config C, bool late>
__device__ __forceinline__ void run_store_warp(const typename KernelTraits<C>::Globals& g,
                                               typename KernelTraits<C>::Shared& shared,
                                               int consumer) {
    using Traits = KernelTraits<C>;
    using tiles = typename Traits::out_tiles;
    const auto* buffers = &shared.out[consumer * WARPGROUP_WARPS][0];
    if (first_index(g) >= g.order.total) return;  // as the consumers do
    arch::named_barrier_arrive(HALF_STORED + consumer, STORE_THREADS);
    if constexpr (late) {
        arch::named_barrier_sync(HALF_STAGED + consumer, STORE_THREADS);
        arch::named_barrier_arrive(HALF_STORED + consumer, STORE_THREADS);
    }
    for_each_tile<C>(g, ClusterPosition(g), [&](const Tile& tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            arch::named_barrier_sync(HALF_STAGED + consumer, STORE_THREADS);
            if (laneid() == 0) {
#pragma unroll
                for (int b = 0; b < C.buffers; ++b) {
                    const auto& from = reinterpret_cast<const tiles&>(buffers[b * WARPGROUP_WARPS]);
                    const int first = DeferredStore<C>::first_of(i * C.buffers + b, tile.narrow);
                    tma::store_async(g.out, from,
                                     elements(0, 0, tile.row + consumer * 64, tile.col + first));
                }
                tma::store_async_read_wait();
            }
            arch::sync_warp();
            arch::named_barrier_arrive(HALF_STORED + consumer, STORE_THREADS);
        }
    });
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
