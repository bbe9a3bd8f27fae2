// Grouped products on Hopper: the kernel of dense/persistent_sm90.cuh, with tiles that end where
// their group does. See scheduler_sm90.cuh for how a block finds them.
//
// A tile may reach over the end of its group, and where TMA asks for it over the beginning. Rows
// and columns there are another group's: they are read, which harms nothing, because a row of the
// output needs its own row of a only, and they are not stored. The last step of k is multiplied in
// parts of 16, and what is foreign in the last part is made zero in shared memory, in both
// operands, since 0 * NaN is not 0. A sum of nothing, for an empty group of k and for what belongs
// to no group, is a part all of which is made zero.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"
#include "csrc/gemm/grouped/scheduler_sm90.cuh"

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
template <class K>
__device__ __forceinline__ void clear_outside(typename K::Stage& stage, int begin, int stop,
                                              int first, int end) {
    constexpr gemm::Config C = K::config;
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

// The product of elements [first, end) of a step, of k, in parts of 16. Of a narrow tile it is as
// wide as of others: what that adds is not stored, and a choice here costs short sums 1 %.
template <class K, class D>
__device__ __forceinline__ void multiply_part(D& d, typename K::Stage& stage, int first, int end,
                                              bool accumulate) {
    constexpr gemm::Config C = K::config;
    constexpr int part = 16, rows = K::consumer_rows, columns = C.block_n;
    constexpr bool transpose_a = C.a_m_major, transpose_b = !C.b_n_major;
    const int consumer = warpgroup::groupid();
    const int stop = max(1, (end + part - 1) / part);
    if (first > 0 || end < stop * part) clear_outside<K>(stage, 0, stop * part, first, end);
#pragma unroll 1
    for (int i = 0; i < stop; ++i, accumulate = true) {
        const auto a = [&] {
            if constexpr (transpose_a)
                return stage.a.template subtile<part, rows>({i, consumer});
            else
                return stage.a.template subtile<rows, part>({consumer, i});
        }();
        const auto b = [&] {
            if constexpr (transpose_b)
                return stage.b.template subtile<columns, part>({0, i});
            else
                return stage.b.template subtile<part, columns>({i, 0});
        }();
        warpgroup::product<transpose_a, transpose_b>(d, a, b, accumulate);
    }
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

// A piece of a finished tile, as `finished` sends it, with a number that is not a constant: short
// sums go through all of the code for each tile, and this is a quarter of it.
template <class K, class Finished>
__device__ __forceinline__ void send_piece(const typename K::Globals& g, typename K::Shared& shared,
                                           const Finished& finished, int piece) {
    auto& buffer = shared.out[kittens::warpid()][piece % 2];
    Finished::wait_for_buffer(g, piece);
#pragma unroll
    for (int i = 0; i < finished.pieces; ++i) {
        if (i == piece) finished.stage(i, buffer);
    }
    gemm::sm90::send_by_tma<K::config>(
        g, buffer, finished.at.batch, finished.at.row,
        finished.at.col + Finished::first_of(piece, finished.narrow));
}

template <class K>
__device__ __forceinline__ void consume(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr gemm::Config C = K::config;
    constexpr bool transpose_b = !C.b_n_major;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { gemm::sm90::release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    Slot slot;
    rt_fl<16, C.block_n> d;
    gemm::sm90::Finished<C> finished;
    Steps steps = steps_of(shared, slot);
    while (steps.group != Steps::none) {
        int previous = 0;
        if (K::may_begin_inside && steps.first > 0 && steps.blocks > 1) {
            wait(shared.full[ring.stage], ring.phase);
            clear_outside<K>(shared.stages[ring.stage], 0, BLOCK_K, steps.first, BLOCK_K);
        }
        const int whole_steps = steps.blocks - (steps.last_is_whole() ? 0 : 1);
        // Pieces leave in every second step where there are enough.
        const int spread = C.block_n == 256 && whole_steps > 6 ? 1 : 0;
        const auto multiply_whole = [&](bool narrow) {
            for (int k = 0; k < whole_steps; ++k, ring.advance()) {
                auto& stage = shared.stages[ring.stage];
                wait(shared.full[ring.stage], ring.phase);
                if constexpr (K::config.a_m_major) {
                    auto rows = stage.a.template subtile<BLOCK_K, K::consumer_rows>({0, consumer});
                    gemm::sm90::multiply<K, K::two_widths, true, transpose_b>(g, d, rows, stage.b,
                                                                              k > 0, narrow);
                } else {
                    auto rows = stage.a.template subtile<K::consumer_rows, BLOCK_K>({consumer, 0});
                    gemm::sm90::multiply<K, K::two_widths, false, transpose_b>(g, d, rows, stage.b,
                                                                               k > 0, narrow);
                }
                if (finished.any && (k & spread) == 0 && k >> spread < finished.pieces) {
                    send_piece<K>(g, shared, finished, k >> spread);
                }
                warpgroup::mma_async_wait<1>();
                if (k > 0) release(previous);
                previous = ring.stage;
            }
        };
        // Short sums take 1 % longer with a choice in each step; not all layouts have the registers
        // for two loops.
        if constexpr (K::two_widths && !K::may_begin_inside) {
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
            if (K::two_widths && steps.narrow) warpgroup::mma_async_wait(d);
            multiply_part<K>(d, stage, whole_steps == 0 ? steps.first : 0, steps.end,
                             whole_steps > 0);
            warpgroup::mma_async_wait<1>();
            if (whole_steps > 0) release(previous);
            previous = ring.stage;
            ring.advance();
        }
        if (finished.any) {
#pragma unroll 1
            for (int piece = whole_steps; piece < finished.pieces; ++piece) {
                send_piece<K>(g, shared, finished, piece);
            }
        }
        const Slot done = slot;
        slot.advance();
        // The next tile is asked for under the last product where sums may be short.
        Steps next;
        if constexpr (C.a_m_major) next = steps_of(shared, slot);
        warpgroup::mma_async_wait(d);
        release(previous);

        finished.template pack<typename K::T>(d);
        Area area = area_of(shared, done);
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.read[done.index]);
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
        if constexpr (!C.a_m_major) next = steps_of(shared, slot);
        steps = next;
    }
    // A warp's part of a stage holds rows of others where those are adjacent.
    if constexpr (C.a_m_major) warpgroup::sync(gemm::sm90::READY + 2 + consumer);
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
                                      p.two_widths};
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::grouped_gemm_kernel<K>,
                    dim3(p.product.schedule.blocks), dim3(K::threads), dim3(1),
                    grouped_gemm::shared_bytes(C), stream, globals);
}

}  // namespace thunderkittens::grouped_gemm
