// Fast sums whose consumers take turns, for the outputs that most calls have: of a 16-bit type,
// stored by TMA, without bias or activation. fp8_turns_sm90.cuh does the rest.
//
// The values are the same, bit for bit. What this kernel leaves out is code: consumers, which are
// at different places of it at a time, then find it in the instruction caches. A warp of the
// producers per consumer copies the scales of a tile while its products run.
#pragma once

#include "csrc/gemm/fp8_turns_sm90.cuh"
#include "csrc/gemm/fp8_whole_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Semaphores that only scales of blocks need otherwise, one of each per consumer: a tile's scales
// are there, as each lane says which has copied some; and each warp of the consumer has used them.
template <Config C>
__device__ __forceinline__ semaphore& scales_there(typename Types<C>::Shared& shared,
                                                   int consumer) {
    return shared.scales_read[consumer];
}
template <Config C>
__device__ __forceinline__ semaphore& scales_used(typename Types<C>::Shared& shared, int consumer) {
    return shared.scales_read[Types<C>::consumers + consumer];
}
template <Config C>
__device__ __forceinline__ void init_scales_semaphores(typename Types<C>::Shared& shared) {
    static_assert(2 * C.consumers <= C.stages);
#pragma unroll
    for (int i = 0; i < C.consumers; ++i) {
        init_semaphore(scales_there<C>(shared, i), WARP_THREADS);
        init_semaphore(scales_used<C>(shared, i), WARPGROUP_WARPS);
    }
}

// What a warp of the producers does for a consumer: copies the scales of its tiles' rows and
// columns. Behind the last row and column there is the last one's.
template <Config C>
__device__ __forceinline__ void copy_scales_in_turns(const typename Types<C>::Globals& g,
                                                     typename Types<C>::Shared& shared,
                                                     int consumer) {
    const Place place(g);
    int phase = 1;
    for (uint32_t index = blockIdx.x + consumer * g.clusters; index < g.order.total;
         index += 2 * g.clusters) {
        const Tile tile = tile_at<C>(g, place, index);
        const uint32_t rows = shared.apart.rows[consumer].address();
        const uint32_t columns = shared.apart.columns[consumer].address();
        wait(scales_used<C>(shared, consumer), phase);
#pragma unroll 1
        for (int i = laneid(); i < C.block_m; i += WARP_THREADS) {
            const uint32_t row = tile.row + i < g.m ? tile.row + i : g.m - 1;
            arch::cp_async<4>(rows + i * 4, g.scale_a.data + int64_t(row) * g.scale_a.outer);
        }
#pragma unroll 1
        for (int i = laneid(); i < C.block_n; i += WARP_THREADS) {
            const uint32_t col = tile.col + i < g.n ? tile.col + i : g.n - 1;
            arch::cp_async<4>(columns + place_of(i) * 4,
                              g.scale_b.data + int64_t(col) * g.scale_b.outer);
        }
        arch::cp_async_mbarrier_arrive(scales_there<C>(shared, consumer).address());
        phase ^= 1;
    }
}

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
    int scales_phase = 0;
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
        const int in_tile = warpgroup::warpid() * 16;
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
        wait(scales_there<C>(shared, consumer), scales_phase);
        scales_phase ^= 1;
        const uint32_t own_rows =
            shared.apart.rows[consumer].address() + (in_tile + laneid() / 4) * sizeof(float);
        const uint32_t columns = shared.apart.columns[consumer].address();
        float rows[K::products_m][2];
#pragma unroll
        for (int i = 0; i < 2 * K::products_m; ++i) {
            const int at = i / 2 * 64 + i % 2 * 8;
            rows[i / 2][i % 2] = arch::load_shared<float>(own_rows + at * sizeof(float));
        }
        // Value by value where both are there: reading the scales of columns takes as long as
        // multiplying by both.
        if (g.scale_b.outer == 0) {
            const float scale_b = arch::load_shared<float>(columns);
#pragma unroll
            for (int i = 0; i < K::products_m; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) rows[i][r] *= scale_b;
#pragma unroll
                for (int j = 0; j < sums[i].width; ++j) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        sums[i].tiles[0][j].data[r].x *= rows[i][r % 2];
                        sums[i].tiles[0][j].data[r].y *= rows[i][r % 2];
                    }
                }
            }
        } else {
            with_columns<1, true>(sums, columns, [&](float2& x, int in_m, int r, float2 s) {
                x.x = x.x * rows[in_m][r] * s.x;
                x.y = x.y * rows[in_m][r] * s.y;
            });
        }
        arch::sync_warp();
        if (laneid() == 0) arrive(scales_used<C>(shared, consumer));
        finished.keep(g, sums, tile.row + in_tile, tile.col);
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
