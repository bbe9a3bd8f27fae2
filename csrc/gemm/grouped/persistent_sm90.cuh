// Grouped products on Hopper: the kernel of dense/persistent_sm90.cuh, with tiles that end where
// their group does. Roles: one thread loads, one warp schedules (scheduler_sm90.cuh), one or two
// warpgroups multiply and store.
//
// A tile may reach over the end of its group, and where TMA asks for it over the beginning. Rows
// and columns there are another group's: they are read, which harms nothing, because a row of the
// output needs its own row of a only, and they are not stored. The last step of k is multiplied in
// slices of 16, and what is foreign in the last slice is made zero in shared memory, in both
// operands, since 0 * NaN is not 0. A sum of nothing, for an empty group of k and for what belongs
// to no group, is a slice all of which is made zero.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"
#include "csrc/gemm/grouped/scheduler_sm90.cuh"

namespace thunderkittens::grouped_gemm {
namespace sm90 {

using gemm::BLOCK_K;
using gemm::sm90::Ring;

template <class Traits>
__device__ __forceinline__ void produce(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared) {
    constexpr gemm::Config C = Traits::config;
    Ring<C.stages> ring;
    Slot slot;
    for (;; slot.advance()) {
        const Steps steps = steps_of(shared, slot);
        if (steps.group == Steps::none) return;
        const Area area = area_of(shared, slot);
        arrive(shared.read[slot.stage]);
        const int a_batch = g.a_batched ? steps.group : 0, b_batch = g.b_batched ? steps.group : 0;
        const bool narrow = Traits::two_widths && steps.narrow;
        for (int i = 0; i < steps.blocks; ++i, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect_bytes(full, sizeof(stage) - (narrow ? Traits::narrow_by * BLOCK_K * 2 : 0));
            gemm::sm90::load_step<Traits, false>(g, stage, full, a_batch, b_batch, area.row,
                                                 area.col, steps.begin + i * BLOCK_K, narrow);
        }
    }
}

// Makes zero, of elements [begin, stop) of each row, those outside of [first, end); thread `rank`
// of `threads` does its part.
template <class Tile>
__device__ __forceinline__ void clear_columns(const Tile& tile, int begin, int stop, int first,
                                              int end, int rank, int threads) {
    constexpr int chunk = 8;  // elements of 16 bytes
    const int chunks = (stop - begin) / chunk;
#pragma unroll 1
    for (int i = rank; i < Tile::rows * chunks; i += threads) {
        const int row = i / chunks, col = begin + (i - row * chunks) * chunk;
        if (first <= col && col + chunk <= end) continue;
        const uint32_t at = tile.address_of(row, col);
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
__device__ __forceinline__ void clear_rows(const Tile& tile, int begin, int stop, int first,
                                           int end, int rank, int threads) {
    constexpr int chunks = Tile::cols / 8;
    const int before = first - begin;
#pragma unroll 1
    for (int i = rank; i < (before + stop - end) * chunks; i += threads) {
        const int row = i / chunks;
        arch::store_shared(tile.address_of(row < before ? begin + row : end + row - before,
                                           (i - row * chunks) * 8),
                           uint4{});
    }
}

// Makes zero what elements [first, end) of a step, of k, have beside them in [begin, stop), in both
// operands; called by every thread of the consumers.
template <class Traits>
__device__ __forceinline__ void clear_outside(typename Traits::Stage& stage, int begin, int stop,
                                              int first, int end) {
    constexpr gemm::Config C = Traits::config;
    constexpr int threads = C.consumers * WARPGROUP_THREADS;
    const int rank = warpgroup::groupid() * WARPGROUP_THREADS + warpgroup::laneid();
    if constexpr (C.a_m_major)
        clear_rows(stage.a, begin, stop, first, end, rank, threads);
    else
        clear_columns(stage.a, begin, stop, first, end, rank, threads);
    if constexpr (C.b_n_major)
        clear_rows(stage.b, begin, stop, first, end, rank, threads);
    else
        clear_columns(stage.b, begin, stop, first, end, rank, threads);
    arch::fence_async_shared();
    arch::named_barrier_sync(gemm::sm90::READY + 1, threads);
}

// The product of elements [first, end) of a step, along k, in slices of 16. For a narrow tile it is
// as wide as for others: what that adds is not stored, and a choice here costs short sums 1 %.
template <class Traits, class D>
__device__ __forceinline__ void multiply_last_step(D& d, typename Traits::Stage& stage, int first,
                                                   int end, bool accumulate) {
    constexpr gemm::Config C = Traits::config;
    constexpr int slice = 16, rows = Traits::consumer_rows, columns = C.block_n;
    constexpr bool transpose_a = C.a_m_major, transpose_b = !C.b_n_major;
    const int consumer = warpgroup::groupid();
    const int stop = max(1, (end + slice - 1) / slice);
    if (first > 0 || end < stop * slice) clear_outside<Traits>(stage, 0, stop * slice, first, end);
#pragma unroll 1
    for (int i = 0; i < stop; ++i, accumulate = true) {
        const auto a = [&] {
            if constexpr (transpose_a)
                return stage.a.template subtile<slice, rows>({i, consumer});
            else
                return stage.a.template subtile<rows, slice>({consumer, i});
        }();
        const auto b = [&] {
            if constexpr (transpose_b)
                return stage.b.template subtile<columns, slice>({0, i});
            else
                return stage.b.template subtile<slice, columns>({i, 0});
        }();
        warpgroup::product<transpose_a, transpose_b>(d, a, b, accumulate);
    }
}

// Stores rows [rows.first, rows.end) of a warp's 16, columns likewise, element by element, because
// a group may begin and end anywhere.
template <class Traits, class DeferredStore>
__device__ __forceinline__ void store_elements(const typename Traits::Globals& g,
                                               typename Traits::Shared& shared,
                                               const DeferredStore& deferred, int2 rows,
                                               int2 cols) {
    const auto& at = deferred.at;
    auto* out = static_cast<uint16_t*>(g.out) +
                (at.batch * g.out_batch_stride + at.row * g.out_stride + at.col);
    constexpr int width = Traits::out_tile::cols;
#pragma unroll
    for (int subtile = 0; subtile < deferred.subtiles; ++subtile) {
        if ((subtile + 1) * width <= cols.x || subtile * width >= cols.y) continue;
        auto& buffer = shared.out[kittens::warpid()][subtile % 2];
        if (laneid() == 0) tma::store_async_read_wait();
        arch::sync_warp();
        deferred.stage(subtile, buffer);
        arch::sync_warp();
        const int col = subtile * width + 2 * laneid();
        const bool low = cols.x <= col && col < cols.y;
        const bool high = cols.x <= col + 1 && col + 1 < cols.y;
#pragma unroll 4
        for (int row = 0; row < Traits::out_tile::rows; ++row) {
            const uint32_t pair = arch::load_shared<uint32_t>(buffer.address_of(row, 2 * laneid()));
            uint16_t* to = out + row * g.out_stride + col;
            const bool stored = rows.x <= row && row < rows.y;
            if (stored && low) arch::store_global(to, static_cast<uint16_t>(pair));
            if (stored && high) arch::store_global(to + 1, static_cast<uint16_t>(pair >> 16));
        }
    }
}

// Stores a subtile, as `deferred` does, with a number that is not a constant: short sums go through
// all of the code for each tile, and this is a quarter of it.
template <class Traits, class DeferredStore>
__device__ __forceinline__ void send_subtile(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const DeferredStore& deferred, int subtile) {
    auto& buffer = shared.out[kittens::warpid()][subtile % 2];
    DeferredStore::wait_for_buffer(g);
#pragma unroll
    for (int i = 0; i < deferred.subtiles; ++i) {
        if (i == subtile) deferred.stage(i, buffer);
    }
    gemm::sm90::send_by_tma<Traits::config>(
        g, buffer, deferred.at.batch, deferred.at.row,
        deferred.at.col + DeferredStore::first_of(subtile, deferred.narrow));
}

template <class Traits>
__device__ __forceinline__ void consume(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared) {
    constexpr gemm::Config C = Traits::config;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { gemm::sm90::release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    Slot slot;
    rt_fl<16, C.block_n> d;
    gemm::sm90::DeferredStore<C> deferred;
    Steps steps = steps_of(shared, slot);
    while (steps.group != Steps::none) {
        int previous = 0;
        if (Traits::may_begin_inside && steps.first > 0 && steps.blocks > 1) {
            wait(shared.full[ring.stage], ring.phase);
            clear_outside<Traits>(shared.stages[ring.stage], 0, BLOCK_K, steps.first, BLOCK_K);
        }
        const int whole_steps = steps.blocks - (steps.last_is_whole() ? 0 : 1);
        // Subtiles are stored in every second step where there are enough steps.
        const int spread = C.block_n == 256 && whole_steps > 6 ? 1 : 0;
        const auto multiply_whole = [&](bool narrow) {
            for (int k = 0; k < whole_steps; ++k, ring.advance()) {
                auto& stage = shared.stages[ring.stage];
                wait(shared.full[ring.stage], ring.phase);
                gemm::sm90::multiply<Traits, Traits::two_widths>(g, d, stage, consumer, k > 0,
                                                                 narrow);
                if (deferred.any && (k & spread) == 0 && k >> spread < deferred.subtiles) {
                    send_subtile<Traits>(g, shared, deferred, k >> spread);
                }
                warpgroup::mma_async_wait<1>();
                if (k > 0) release(previous);
                previous = ring.stage;
            }
        };
        // Short sums take 1 % longer with a choice in each step; not all layouts have the registers
        // for two loops.
        if constexpr (Traits::two_widths && !Traits::may_begin_inside) {
            if (steps.narrow)
                multiply_whole(true);
            else
                multiply_whole(false);
        } else {
            multiply_whole(steps.narrow);
        }
        if (whole_steps < steps.blocks) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            // Products of two shapes must not be in flight on one sum.
            if (Traits::two_widths && steps.narrow) warpgroup::mma_async_wait(d);
            multiply_last_step<Traits>(d, stage, whole_steps == 0 ? steps.first : 0, steps.end,
                                       whole_steps > 0);
            warpgroup::mma_async_wait<1>();
            if (whole_steps > 0) release(previous);
            previous = ring.stage;
            ring.advance();
        }
        if (deferred.any) {
#pragma unroll 1
            for (int subtile = whole_steps; subtile < deferred.subtiles; ++subtile) {
                send_subtile<Traits>(g, shared, deferred, subtile);
            }
        }
        const Slot done = slot;
        slot.advance();
        // The next tile is read from the scheduler under the last product where sums may be short.
        Steps next;
        if constexpr (C.a_m_major) next = steps_of(shared, slot);
        warpgroup::mma_async_wait(d);
        release(previous);

        deferred.template pack<typename Traits::T>(d);
        Area area = area_of(shared, done);
        gemm::sm90::arrive_by_warp(shared.read[done.stage]);
        const int offset = consumer * Traits::consumer_rows + warpgroup::warpid() * 16;
        deferred.at = {g.grouped == Grouped::k ? uint32_t(steps.group) : 0,
                       uint32_t(area.row + offset), uint32_t(area.col)};
        const int2 rows{area.rows.first - offset, area.rows.end - offset};
        const int2 cols{area.cols.first, area.cols.end};
        const bool narrow = Traits::two_widths && steps.narrow;
        const int width = C.block_n - (narrow ? int(gemm::NARROW_BY) : 0);
        // TMA stores nothing outside of the output; within it, it cannot begin or end with a group.
        const bool any = rows.x < 16 && rows.y > 0;
        const bool whole = rows.x <= 0 && cols.x == 0 &&
                           (rows.y >= 16 || area.row + area.rows.end == int(g.m)) &&
                           (cols.y == width || area.col + cols.y == int(g.n));
        deferred.any = any && whole && g.tma_store;
        deferred.narrow = deferred.any && narrow;
        if (any && !deferred.any) store_elements<Traits>(g, shared, deferred, rows, cols);
        if constexpr (!C.a_m_major) next = steps_of(shared, slot);
        steps = next;
    }
    // Where a's rows are adjacent in memory, a warp's share of a stage holds rows of other warps.
    if constexpr (C.a_m_major) warpgroup::sync(gemm::sm90::READY + 2 + consumer);
    if (deferred.any) deferred.send_last(g, shared);
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void grouped_gemm_kernel(const __grid_constant__
                                                         typename Traits::Globals g) {
    constexpr gemm::Config C = Traits::config;
    using gemm::sm90::READY;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                gemm::sm90::prefetch_maps<Traits>(g);
                gemm::sm90::init_ring<Traits>(shared);
                for (int i = 0; i < TILES_AHEAD; ++i) {
                    init_semaphore(shared.described[i], 1);
                    init_semaphore(shared.read[i], Traits::readers);
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        arch::named_barrier_sync(READY, Traits::threads);
        if constexpr (C.consumers > 1) warpgroup::decrease_registers<Traits::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) produce<Traits>(g, shared);
        } else if (warpgroup::warpid() == 1) {
            schedule<Traits>(g, shared);
        }
    } else {
        arch::named_barrier_sync(READY, Traits::threads);
        if constexpr (C.consumers > 1) warpgroup::increase_registers<Traits::consumer_registers>();
        arch::wait_for_dependencies();
        consume<Traits>(g, shared);
    }
}

}  // namespace sm90

template <gemm::Config C>
void launch(const Params& p, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    const typename Traits::Globals globals{gemm::sm90::make_globals<C>(p.product),
                                           p.offs,
                                           p.grouped,
                                           static_cast<uint32_t>(p.product.batch),
                                           static_cast<uint32_t>(p.product.k),
                                           static_cast<uint32_t>(p.raster_group),
                                           p.two_widths};
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::grouped_gemm_kernel<Traits>,
                    dim3(p.product.schedule.blocks), dim3(Traits::threads), dim3(1),
                    grouped_gemm::shared_bytes(C), stream, globals);
}

}  // namespace thunderkittens::grouped_gemm
