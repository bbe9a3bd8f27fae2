// Tiles of two products side by side, which leave in halves: a consumer rounds and stages one while
// it has a product running, and a warp of the producers sends it, so that the consumers issue no
// copies.
#pragma once

#include "csrc/gemm/fp8/promoted_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Named barriers, one of each per consumer: half of a tile is staged; and has left the buffers.
constexpr int STAGED = READY + 5, SENT = READY + 7;
constexpr int SENDING_THREADS = WARPGROUP_THREADS + WARP_THREADS;

// Writes half i of a finished tile, rounded, to the consumer's staging buffers.
template <Config C, int i>
__device__ __forceinline__ void stage_rounded(typename Types<C>::Shared& shared,
                                              const rt_bf<16, Types<C>::product_cols>& values,
                                              bool narrow) {
    using K = Types<C>;
    using F = Finished<C>;
    using staging = typename K::out_tile;
    static_assert(F::pieces == 2 * C.buffers);
    auto* buffers = &shared.out[warpgroup::groupid() * WARPGROUP_WARPS][0];
#pragma unroll
    for (int b = 0; b < C.buffers; ++b) {
        const int piece = i * C.buffers + b;
        auto& buffer = buffers[b * WARPGROUP_WARPS + warpgroup::warpid()];
        const auto stage = [&](int first) {
            gemm::sm90::stage_piece<rt_bf<16, staging::cols>>(values, first, buffer);
        };
        constexpr int before = i * K::product_cols;
        if (K::two_widths && narrow && piece == F::across - 1)
            stage(F::first_of(piece, true) - before);
        else
            stage(F::first_of(piece, false) - before);
    }
}

// What a warp of the producers does for a consumer: sends what that has staged. Where right halves
// are `late`, a consumer stages one that is no tile's before its first.
template <Config C, bool late>
__device__ __forceinline__ void send_staged(const typename Types<C>::Globals& g,
                                            typename Types<C>::Shared& shared, int consumer) {
    using K = Types<C>;
    using tiles = typename K::out_tiles;
    const auto* buffers = &shared.out[consumer * WARPGROUP_WARPS][0];
    if (first_index(g) >= g.order.total) return;  // as the consumers do
    arch::named_barrier_arrive(SENT + consumer, SENDING_THREADS);
    if constexpr (late) {
        arch::named_barrier_sync(STAGED + consumer, SENDING_THREADS);
        arch::named_barrier_arrive(SENT + consumer, SENDING_THREADS);
    }
    for_each_tile<C>(g, Place(g), [&](const Tile& tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            arch::named_barrier_sync(STAGED + consumer, SENDING_THREADS);
            if (laneid() == 0) {
#pragma unroll
                for (int b = 0; b < C.buffers; ++b) {
                    const auto& from = reinterpret_cast<const tiles&>(buffers[b * WARPGROUP_WARPS]);
                    const int first = Finished<C>::first_of(i * C.buffers + b, tile.narrow);
                    tma::store_async(g.out, from,
                                     elements(0, 0, tile.row + consumer * 64, tile.col + first));
                }
                tma::store_async_read_wait();
            }
            arch::sync_warp();
            arch::named_barrier_arrive(SENT + consumer, SENDING_THREADS);
        }
    });
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
