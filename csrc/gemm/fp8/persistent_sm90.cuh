// Product of fp8 matrices on Hopper: out = activation(scale * (a @ b^T) + bias).
//
// A block is persistent and warp-specialised, as in dense/persistent_sm90.cuh: one thread of the
// producer warpgroup keeps a ring of stages (128 of k of a tile of a and of b) filled by TMA,
// running ahead across tiles; two consumer warpgroups multiply. This file has the producers, the
// roles, and the cooperative consumers of fast accumulation; the other consumers are in the files
// below.
//
// `fast`: the tensor cores keep the sums of all k. Cooperative consumers share a tile's rows; one
// product is in flight while a consumer releases the stage of the one before, and the store of a
// finished tile is deferred. Or each consumer has tiles of its own: pingpong_sm90.cuh.
//
// `promoted` and `promoted_1d1d`: promoted_sm90.cuh; with block-wise scales alone
// promoted_blockwise_sm90.cuh. With row-wise scales alone: promoted_rowwise_sm90.cuh, and in
// ping-pong pingpong_rowwise_sm90.cuh.
#pragma once

#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/fp8/pingpong_rowwise_sm90.cuh"
#include "csrc/gemm/fp8/pingpong_sm90.cuh"
#include "csrc/gemm/fp8/promoted_blockwise_sm90.cuh"
#include "csrc/gemm/fp8/promoted_rowwise_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Config C>
__device__ __forceinline__ void produce(const typename KernelTraits<C>::Globals& g,
                                        typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    const ClusterPosition place(g);
    const uint16_t a_blocks = place.a_blocks(g), b_blocks = place.b_blocks(g);
    Ring<C.stages> ring;
    const auto load_tile = [&](const Tile& tile) {
        if (tile.nothing) return;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect_bytes(full,
                              sizeof(stage) - (tile.narrow ? Traits::narrow_by * BLOCK_K : 0));
            auto& a_parts = reinterpret_cast<typename Traits::a_part(&)[Traits::a_parts]>(stage.a);
            constexpr int b_count = C.block_n / Traits::b_part::rows;
            auto& b_parts = reinterpret_cast<typename Traits::b_part(&)[b_count]>(stage.b);
#pragma unroll
            for (int i = 0; i < Traits::a_parts; ++i) {
                const element_coord from =
                    elements(0, 0, tile.row + i * Traits::a_part::rows, k * BLOCK_K);
                if (!Traits::fast || g.cluster_n == 1) {
                    tma::load_async(a_parts[i], g.a, from, full);
                } else if (place.in_n == uint32_t(i)) {
                    tma::cluster::load_async(a_parts[i], g.a, from, full, a_blocks);
                }
            }
#pragma unroll
            for (int i = 0; i < b_count; ++i) {
                const element_coord from =
                    elements(tile.group, 0, tile.col + i * Traits::b_part::rows, k * BLOCK_K);
                const auto load = [&](auto& part) {
                    if (!Traits::fast || g.cluster_m == 1) {
                        tma::load_async(part, g.b, from, full);
                    } else if (place.in_m == uint32_t(i)) {
                        tma::cluster::load_async(part, g.b, from, full, b_blocks);
                    }
                };
                if (Traits::two_widths && tile.narrow && i == b_count - 1)
                    load(reinterpret_cast<typename Traits::b_last&>(b_parts[i]));
                else
                    load(b_parts[i]);
            }
        }
    };
    if constexpr (Traits::pingpong) {
        uint32_t index = first_index(g);
        if (index >= g.order.total) return;
        Tile tile = tile_at<C, true>(g, place, index);
        while (true) {
            load_tile(tile);
            index += g.clusters;
            if (index >= g.order.total) return;
            tile = tile_at<C>(g, place, index);
        }
    } else {
        for_each_tile<C>(g, place, load_tile);
    }
}

// The producer of block-wise scales: one warp copies those of a stage from wherever they lie, as
// far ahead as the tiles. Rows that are not there take the scale of the last one. Where a consumer
// reads scales only before it issues the products of their stage, they are released with the stage.
template <Config C>
__device__ __forceinline__ void produce_scales(const typename KernelTraits<C>::Globals& g,
                                               typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    Ring<C.stages> ring;
    for_each_tile<C>(g, ClusterPosition(g), [&](const Tile& tile) {
        if (tile.nothing) return;
        const float* of_a = g.scale_a.data;
        const float* of_b = g.scale_b.data + int64_t(tile.group) * g.scale_b.group;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            const uint32_t to = shared.scales[ring.stage].address();
            wait(Traits::is_1d1d ? shared.scales_read[ring.stage] : shared.empty[ring.stage],
                 ring.phase ^ 1);
            // Four rows per lane, at once where they are adjacent in memory.
#pragma unroll
            for (int i = 4 * laneid(); i < C.block_m; i += 4 * WARP_THREADS) {
                const uint32_t row = tile.row + i;
                const float* four = of_a + int64_t(row) * g.scale_a.outer;
                if (g.scale_a.outer == 1 && row + 4 <= tile.end &&
                    reinterpret_cast<uintptr_t>(four) % 16 == 0) {
                    arch::cp_async<16>(to + i * 4, four);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const uint32_t there = row + j < tile.end ? row + j : tile.end - 1;
                        arch::cp_async<4>(to + (i + j) * 4,
                                          of_a + int64_t(there) * g.scale_a.outer);
                    }
                }
            }
            const uint32_t first = Traits::is_1d1d ? tile.col : tile.col / 128;
            const uint32_t count = Traits::is_1d1d ? g.n : (g.n + 127) / 128;
            constexpr int copied = Traits::is_1d1d ? C.block_n : Traits::column_scales;
#pragma unroll
            for (int i = laneid(); i < copied; i += WARP_THREADS) {
                const uint32_t col = first + i < count ? first + i : count - 1;
                arch::cp_async<4>(to + (C.block_m + i) * 4, of_b + int64_t(col) * g.scale_b.outer);
            }
            arch::cp_async_mbarrier_arrive(shared.full[ring.stage].address());
            of_a += g.scale_a.inner, of_b += g.scale_b.inner;
        }
    });
}

// The producer of row-wise scales and the bias: one warp copies those of a tile while its products
// run. Behind the last row and column there is the last one's.
template <Config C>
__device__ __forceinline__ void produce_tile_scales(const typename KernelTraits<C>::Globals& g,
                                                    typename KernelTraits<C>::Shared& shared) {
    using Where = TileScales<C>;
    const uint32_t rows = shared.scales[0].address(), columns = Where::columns(shared);
    int phase = 0;
    for_each_tile<C>(g, ClusterPosition(g), [&](const Tile& tile) {
        if (tile.nothing) return;
        const float* of_b = g.scale_b.data + int64_t(tile.group) * g.scale_b.group;
        const auto column = [&](int i) { return tile.col + i < g.n ? tile.col + i : g.n - 1; };
        wait(Where::used(shared), phase ^ 1);
        phase ^= 1;
#pragma unroll
        for (int i = laneid(); i < C.block_m; i += WARP_THREADS) {
            const uint32_t row = tile.row + i < tile.end ? tile.row + i : tile.end - 1;
            arch::cp_async<4>(rows + i * 4, g.scale_a.data + int64_t(row) * g.scale_a.outer);
        }
#pragma unroll
        for (int i = laneid(); i < C.block_n; i += WARP_THREADS) {
            arch::cp_async<4>(columns + place_of(i) * 4,
                              of_b + int64_t(column(i)) * g.scale_b.outer);
        }
        arch::cp_async_mbarrier_arrive(Where::there(shared).address());
        if (g.bias != nullptr) {
#pragma unroll 1
            for (int i = laneid(); i < C.block_n; i += WARP_THREADS) {
                arch::store_shared(Where::bias(shared) + place_of(i) * 4,
                                   load_any(g.bias, g.bias_dtype, column(i)));
            }
        }
        arrive_by_warp(Where::there(shared));
    });
}

template <Config C>
__device__ __forceinline__ void consume_cooperative(const typename KernelTraits<C>::Globals& g,
                                                    typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    const ClusterPosition place(g);
    const gemm::sm90::ClusterRelease cluster_release(g, place);
    const auto release = [&](int stage) { cluster_release(shared.empty[stage]); };
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[Traits::products];
    DeferredStore<C> deferred;
    for_each_tile<C>(g, place, [&](const Tile& tile) {
        const uint32_t row =
            tile.row + consumer * (Traits::products_m * 64) + warpgroup::warpid() * 16;
        const bool narrow = Traits::two_widths && tile.narrow;
        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            multiply<Traits>(sums, stage, consumer * Traits::products_m, k > 0, narrow);
            if (deferred.any && k < deferred.subtiles) {
#pragma unroll
                for (int subtile = 0; subtile < deferred.subtiles; ++subtile) {
                    if (k == subtile) deferred.send(g, shared, subtile);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        // The epilogue's operands are fetched here, where registers are free and the last product
        // hides the latency.
        Epilogue<C> epilogue;
        epilogue.fetch_scales(g, tile, row + laneid() / 4);
        epilogue.fetch_bias(g, tile);
#pragma unroll
        for (int i = 0; i < Traits::products_m; ++i) warpgroup::mma_async_wait(sums[i]);
        release(previous);

        if (deferred.any && g.k_blocks < deferred.subtiles) {
#pragma unroll
            for (int subtile = 1; subtile < deferred.subtiles; ++subtile) {
                if (g.k_blocks <= subtile) deferred.send(g, shared, subtile);
            }
        }
        epilogue.apply(g, shared, sums);
        if (g.out_dtype == DType::fp32 || !g.tma_store) {
#pragma unroll
            for (int i = 0; i < Traits::products_m; ++i) {
                store_now<C>(g, shared, sums[i], row + i * 64, tile.col, tile.end, i);
            }
            return;
        }
        deferred.defer(g, sums, row, tile.col);
        deferred.narrow = narrow;
    });
    deferred.send(g, shared, 0, deferred.subtiles);
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class Traits, bool rowwise>
__device__ __forceinline__ void run_tiles(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    const bool alone = g.cluster_m * g.cluster_n == 1;
    const bool copies_scales = C.blockwise_only || (!Traits::fast && g.blockwise);
    if (warpgroup::groupid() == Traits::consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                if constexpr (!Traits::pingpong) prefetch_maps<Traits>(g);
                for (int i = 0; i < C.stages; ++i) {
                    init_semaphore(shared.full[i], 1 + (copies_scales ? WARP_THREADS : 0));
                    const int blocks = Traits::fast ? g.cluster_m + g.cluster_n - 1 : 1;
                    const int warps =
                        rowwise || Traits::pingpong || Traits::fast ? 1 : WARPGROUP_WARPS;
                    init_semaphore(shared.empty[i], Traits::consumers_of_tile * warps * blocks);
                    const bool there = TileScales<C>::copied && i == 0 && !g.blockwise;
                    if constexpr (!Traits::pingpong) {
                        init_semaphore(
                            shared.scales_read[i],
                            there ? TileScales<C>::arrivals : Traits::consumers * WARPGROUP_WARPS);
                    }
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        if constexpr (Traits::pingpong) {
            if (warpgroup::warpid() == 1) {
                if (arch::elect_one()) prefetch_maps<Traits>(g);
                arch::sync_warp();
            }
        }
        if (!alone)
            cluster::sync();
        else if (!Traits::fast && warpgroup::warpid() == 1)  // which waits for semaphores too
            arch::named_barrier_sync(READY, Traits::threads);
        else
            arch::named_barrier_arrive(READY, Traits::threads);
        warpgroup::decrease_registers<Traits::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce<C>(g, shared);
        if constexpr (rowwise) {
            const int warp = warpgroup::warpid();
            if (warp == 1) produce_tile_scales<C>(g, shared);
            if (warp >= 2) run_store_warp<C, true>(g, shared, warp - 2);
        } else if constexpr (!Traits::fast) {
            if (warpgroup::warpid() == 1) {
                if (copies_scales)
                    produce_scales<C>(g, shared);
                else if constexpr (TileScales<C>::copied && !C.blockwise_only)
                    produce_tile_scales<C>(g, shared);
            }
            if constexpr (C.blockwise_only && Traits::store_warps) {
                const int warp = warpgroup::warpid();
                if (warp >= 2) run_store_warp<C, false>(g, shared, warp - 2);
            }
        }
    } else {
        if (alone)
            arch::named_barrier_sync(READY, Traits::threads);
        else
            cluster::sync();
        warpgroup::increase_registers<Traits::consumer_registers>();
        arch::wait_for_dependencies();
        if constexpr (rowwise)
            consume_rowwise_halves<C>(g, shared);
        else if constexpr (Traits::pingpong)
            consume_pingpong<C>(g, shared);
        else if constexpr (Traits::fast)
            consume_cooperative<C>(g, shared);
        else if constexpr (C.blockwise_only)
            consume_blockwise<C>(g, shared);
        else
            consume_promoted<C>(g, shared);
    }
    // The cluster must not end early: other blocks of it write this block's shared memory and
    // arrive at its semaphores.
    if (!alone) cluster::sync();
}

// The kernel for row-wise scales where a step has one product: as dense/prologue_sm90.cuh says, the
// way to the first load is short.
template <Config C>
__device__ __forceinline__ void run_rowwise_tiles(const typename KernelTraits<C>::Globals& g,
                                                  typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    // The warp that copies scales waits for semaphores, too.
    constexpr int ready_threads = C.consumers * WARPGROUP_THREADS + 2 * WARP_THREADS;
    if (warpgroup::groupid() == C.consumers) {
        const int warp = warpgroup::warpid();
        if (warp == 0) {
            if (arch::elect_one()) {
                gemm::sm90::init_stages<C.stages>(shared, 1, C.consumers);
                init_semaphore(TileScales<C>::there(shared), TileScales<C>::arrivals);
                init_semaphore(TileScales<C>::used(shared), C.consumers * WARPGROUP_WARPS);
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
            arch::named_barrier_arrive(READY, ready_threads);
        }
        if (warp == 1) {
            if (arch::elect_one()) prefetch_maps<Traits>(g);
            arch::sync_warp();
            arch::named_barrier_sync(READY, ready_threads);
        }
        warpgroup::decrease_registers<Traits::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce_rowwise<C>(g, shared);
        if (warp == 1) produce_tile_scales<C>(g, shared);
    } else {
        arch::named_barrier_sync(READY, ready_threads);
        warpgroup::increase_registers<Traits::consumer_registers>();
        arch::wait_for_dependencies();
        consume_rowwise_tiles<C>(g, shared);
    }
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__
// template over a struct's value.
template <class Traits, bool rowwise>
__global__ __launch_bounds__(Traits::threads, 1) void fp8_gemm_kernel(const __grid_constant__
                                                                      typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    if constexpr (rowwise && Traits::pingpong)
        run_pingpong_rowwise<Traits::config>(g, shared);
    else if constexpr (rowwise && !Traits::store_warps)
        run_rowwise_tiles<Traits::config>(g, shared);
    else
        run_tiles<Traits, rowwise>(g, shared);
}

template <Config C>
typename KernelTraits<C>::Globals make_globals(const Params& p, bool rowwise) {
    using Traits = KernelTraits<C>;
    using Globals = typename Traits::Globals;
    const bool tma_store = tma_stores(p);
    // Where TMA cannot store, the map is a stand-in that nobody uses.
    const int64_t map_words = tma_store ? p.n * size_in_bytes(p.out_dtype) / 2 : 64;
    const int64_t k_blocks = ceil_div(p.k, BLOCK_K);
    const Schedule& s = p.schedule;
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>(ceil_div(size, tile));
    };
    // Narrow tiles are stored by TMA alone, and begin anywhere in a block of scales.
    const bool two_widths = tma_store && p.out_dtype != DType::fp32 && !p.blockwise &&
                            p.offs == nullptr && s.cluster_n == 1 &&
                            (!narrows_rowwise_only(C) || rowwise);
    const auto order = [&] {
        const uint32_t rows = tiles(p.m, int64_t{C.block_m} * s.cluster_m);
        if constexpr (Traits::two_widths) {
            return gemm::make_two_width_order({.block_m = C.block_m * s.cluster_m,
                                               .block_n = C.block_n * s.cluster_n,
                                               .raster_group = s.raster_group,
                                               .columns = s.columns,
                                               .extra_rows = s.extra_rows},
                                              p.m, p.n, 1, two_widths);
        } else {
            return gemm::make_order(rows, tiles(p.n, int64_t{C.block_n} * s.cluster_n), 1,
                                    static_cast<uint32_t>(s.raster_group), false);
        }
    }();
    return {
        .a = gemm::matrix_of<decltype(Globals::a)>(p.a, p.m, p.k, p.a_stride),
        .b = gemm::matrix_of<decltype(Globals::b)>(p.b, p.n, p.k, p.b_stride, p.groups,
                                                   p.b_group_stride),
        .out = gemm::matrix_of<decltype(Globals::out)>(p.out, p.m, map_words, map_words),
        .scale_a = p.scale_a,
        .scale_b = p.scale_b,
        .bias = p.bias,
        .offs = p.offs,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = static_cast<uint32_t>(p.groups),
        .k_blocks = static_cast<int>(k_blocks),
        .blockwise = p.blockwise,
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .tma_store = tma_store,
        .cluster_m = s.cluster_m,
        .cluster_n = s.cluster_n,
        .clusters = static_cast<uint32_t>(s.blocks / (s.cluster_m * s.cluster_n)),
        .columns = tiles(p.n, C.block_n),
        .order = order,
    };
}

}  // namespace sm90

template <Config C, bool rowwise = false>
void launch_persistent(const Params& params, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    const Schedule& s = params.schedule;
    gemm::launch_dependent<Traits>(sm90::fp8_gemm_kernel<Traits, rowwise>, dim3(s.blocks),
                                   dim3(s.cluster_m * s.cluster_n), stream,
                                   sm90::make_globals<C>(params, rowwise));
}

template <Config C>
void launch(const Params& params, Stream stream) {
    launch_persistent<C>(params, stream);
}
template <Config C>
void launch_rowwise(const Params& params, Stream stream) {
    static_assert(has_rowwise_kernel(C));
    launch_persistent<C, true>(params, stream);
}

}  // namespace thunderkittens::fp8_gemm
