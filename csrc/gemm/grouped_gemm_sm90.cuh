// Grouped products on Hopper: the kernel of gemm_sm90.cuh, with tiles that end where their group
// does. See grouped_tiles_sm90.cuh for how a block finds them.
//
// A tile may reach over the end of its group, and where TMA asks for it over the beginning. Rows
// and columns there are another group's: they are read, which harms nothing, because a row of the
// output needs its own row of a only, and they are not stored. In k they are made zero in shared
// memory, in both operands, since 0 * NaN is not 0. A sum of nothing, for an empty group of k and
// for what belongs to no group, is a step all of which is made zero.
#pragma once

#include "csrc/gemm/gemm_sm90.cuh"
#include "csrc/gemm/grouped_tiles_sm90.cuh"

namespace thunderkittens::grouped_gemm {
namespace sm90 {

using gemm::BLOCK_K;
using gemm::sm90::Ring;

template <class K>
__device__ __forceinline__ void produce(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr gemm::Config C = K::config;
    Ring<C.stages> ring;
    Slot slot;
    for (;; slot.advance()) {
        const Steps steps = steps_of(shared, slot);
        if (steps.group == Steps::none) return;
        const Area area = area_of(shared, slot);
        arrive(shared.read[slot.index]);
        const int a_batch = g.a_batched ? steps.group : 0, b_batch = g.b_batched ? steps.group : 0;
        const bool narrow = K::two_widths && steps.narrow;
        for (int i = 0; i < steps.blocks; ++i, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect_bytes(full, sizeof(stage) - (narrow ? K::less * BLOCK_K * 2 : 0));
            gemm::sm90::load_step<K, false>(g, stage, full, a_batch, b_batch, area.row, area.col,
                                            steps.begin + i * BLOCK_K, narrow);
        }
    }
}

// Makes zero, of each of `rows` rows of 64 elements, those outside of [first, end); thread `rank`
// of `threads` does its part.
template <class Tile>
__device__ __forceinline__ void clear_columns(const Tile& tile, int rows, int first, int end,
                                              int rank, int threads) {
    constexpr int chunk = 8, chunks = BLOCK_K / chunk;  // elements of 16 bytes
#pragma unroll 1
    for (int i = rank; i < rows * chunks; i += threads) {
        const int col = i % chunks * chunk;
        if (first <= col && col + chunk <= end) continue;
        const uint32_t at = tile.address_of(i / chunks, col);
        uint4 words = arch::load_shared<uint4>(at);
        const auto kept = [&](uint32_t word, int column) {
            const uint32_t low = first <= column && column < end ? 0xffffu : 0u;
            const uint32_t high = first <= column + 1 && column + 1 < end ? 0xffff0000u : 0u;
            return word & (low | high);
        };
        words = {kept(words.x, col), kept(words.y, col + 2), kept(words.z, col + 4),
                 kept(words.w, col + 6)};
        arch::store_shared(at, words);
    }
}
// The same of rows.
template <class Tile>
__device__ __forceinline__ void clear_rows(const Tile& tile, int cols, int first, int end, int rank,
                                           int threads) {
    const int chunks = cols / 8;
#pragma unroll 1
    for (int i = rank; i < (first + BLOCK_K - end) * chunks; i += threads) {
        const int row = i / chunks;
        arch::store_shared(
            tile.address_of(row < first ? row : end + row - first, (i - row * chunks) * 8),
            uint4{});
    }
}
// Makes all but elements [first, end) of k zero, in both operands of a stage; called by every
// thread of the consumers.
template <class K>
__device__ __forceinline__ void clear_outside(typename K::Stage& stage, int first, int end) {
    constexpr gemm::Config C = K::config;
    constexpr int threads = C.consumers * WARPGROUP_THREADS;
    const int rank = warpgroup::groupid() * WARPGROUP_THREADS + warpgroup::laneid();
    if constexpr (C.a_m_major)
        clear_rows(stage.a, C.block_m, first, end, rank, threads);
    else
        clear_columns(stage.a, C.block_m, first, end, rank, threads);
    if constexpr (C.b_n_major)
        clear_rows(stage.b, C.block_n, first, end, rank, threads);
    else
        clear_columns(stage.b, C.block_n, first, end, rank, threads);
    arch::fence_async_shared();
    arch::named_barrier_sync(gemm::sm90::READY + 1, threads);
}

// Stores rows [rows.first, rows.end) of a warp's 16, columns likewise: element by element, for a
// group may begin and end anywhere.
template <class K, class Finished>
__device__ __forceinline__ void send_part(const typename K::Globals& g, typename K::Shared& shared,
                                          const Finished& finished, int2 rows, int2 cols) {
    const auto& at = finished.at;
    auto* out = static_cast<uint16_t*>(g.out) +
                (at.batch * g.out_batch_stride + at.row * g.out_stride + at.col);
    constexpr int width = K::out_tile::cols;
#pragma unroll
    for (int piece = 0; piece < finished.pieces; ++piece) {
        if ((piece + 1) * width <= cols.x || piece * width >= cols.y) continue;
        auto& buffer = shared.out[kittens::warpid()][piece % 2];
        if (laneid() == 0) tma::store_async_read_wait();
        arch::sync_warp();
        finished.stage(piece, buffer);
        arch::sync_warp();
        const int col = piece * width + 2 * laneid();
        const bool low = cols.x <= col && col < cols.y;
        const bool high = cols.x <= col + 1 && col + 1 < cols.y;
#pragma unroll 4
        for (int row = 0; row < K::out_tile::rows; ++row) {
            const uint32_t pair = arch::load_shared<uint32_t>(buffer.address_of(row, 2 * laneid()));
            uint16_t* to = out + row * g.out_stride + col;
            const bool stored = rows.x <= row && row < rows.y;
            if (stored && low) arch::store_global(to, static_cast<uint16_t>(pair));
            if (stored && high) arch::store_global(to + 1, static_cast<uint16_t>(pair >> 16));
        }
    }
}

template <class K>
__device__ __forceinline__ void consume(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr gemm::Config C = K::config;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { gemm::sm90::release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    Slot slot;
    rt_fl<16, C.block_n> d;
    gemm::sm90::Finished<C> finished;
    for (;; slot.advance()) {
        const Steps steps = steps_of(shared, slot);
        if (steps.group == Steps::none) break;
        int previous = 0;
        for (int k = 0; k < steps.blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            const int first = k == 0 ? steps.first : 0;
            const int end = k == steps.blocks - 1 ? steps.end : BLOCK_K;
            if (first > 0 || end < BLOCK_K) clear_outside<K>(stage, first, end);
            if constexpr (C.a_m_major) {
                auto rows = stage.a.template subtile<BLOCK_K, K::consumer_rows>({0, consumer});
                gemm::sm90::multiply<K, K::two_widths, true, !C.b_n_major>(g, d, rows, stage.b,
                                                                           k > 0, steps.narrow);
            } else {
                auto rows = stage.a.template subtile<K::consumer_rows, BLOCK_K>({consumer, 0});
                gemm::sm90::multiply<K, K::two_widths, false, !C.b_n_major>(g, d, rows, stage.b,
                                                                            k > 0, steps.narrow);
            }
            if (finished.any && k < finished.pieces) {
#pragma unroll
                for (int piece = 0; piece < finished.pieces; ++piece) {
                    if (k == piece) finished.send(g, shared, piece);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        warpgroup::mma_async_wait(d);
        release(previous);

        if (finished.any && steps.blocks < finished.pieces) {
#pragma unroll
            for (int piece = 1; piece < finished.pieces; ++piece) {
                if (steps.blocks <= piece) finished.send(g, shared, piece);
            }
        }
        finished.template pack<typename K::T>(d);
        Area area = area_of(shared, slot);
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.read[slot.index]);
        const int offset = consumer * K::consumer_rows + warpgroup::warpid() * 16;
        finished.at = {g.grouped == Grouped::k ? uint32_t(steps.group) : 0,
                       uint32_t(area.row + offset), uint32_t(area.col)};
        const int2 rows{area.rows.first - offset, area.rows.end - offset};
        const int2 cols{area.cols.first, area.cols.end};
        const bool narrow = K::two_widths && steps.narrow;
        const int width = C.block_n - (narrow ? int(gemm::NARROWER) : 0);
        // TMA stores nothing outside of the output; within it, it cannot begin or end with a group.
        const bool any = rows.x < 16 && rows.y > 0;
        const bool whole = rows.x <= 0 && cols.x == 0 &&
                           (rows.y >= 16 || area.row + area.rows.end == int(g.m)) &&
                           (cols.y == width || area.col + cols.y == int(g.n));
        finished.any = any && whole && g.tma_store;
        finished.narrow = finished.any && narrow;
        if (any && !finished.any) send_part<K>(g, shared, finished, rows, cols);
    }
    if (finished.any) finished.send_last(g, shared);
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void grouped_gemm_kernel(const __grid_constant__
                                                                     typename K::Globals g) {
    constexpr gemm::Config C = K::config;
    using gemm::sm90::READY;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                gemm::sm90::prefetch_maps<K>(g);
                gemm::sm90::init_ring<K>(shared);
                for (int i = 0; i < TILES_AHEAD; ++i) {
                    init_semaphore(shared.described[i], 1);
                    init_semaphore(shared.read[i], K::readers);
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        arch::named_barrier_sync(READY, K::threads);
        if constexpr (C.consumers > 1) warpgroup::decrease_registers<K::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) produce<K>(g, shared);
        } else if (warpgroup::warpid() == 1) {
            schedule<K>(g, shared);
        }
    } else {
        arch::named_barrier_sync(READY, K::threads);
        if constexpr (C.consumers > 1) warpgroup::increase_registers<K::consumer_registers>();
        arch::wait_for_dependencies();
        consume<K>(g, shared);
    }
}

}  // namespace sm90

template <gemm::Config C>
void launch(const Params& p, Stream stream) {
    using K = sm90::Types<C>;
    const typename K::Globals globals{gemm::sm90::make_globals<C>(p.product),
                                      p.offs,
                                      p.grouped,
                                      static_cast<uint32_t>(p.product.batch),
                                      static_cast<uint32_t>(p.product.k),
                                      static_cast<uint32_t>(p.band),
                                      p.two_widths && p.grouped == Grouped::rows};
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::grouped_gemm_kernel<K>,
                    dim3(p.product.schedule.blocks), dim3(K::threads), dim3(1),
                    grouped_gemm::shared_bytes(C), stream, globals);
}

}  // namespace thunderkittens::grouped_gemm
