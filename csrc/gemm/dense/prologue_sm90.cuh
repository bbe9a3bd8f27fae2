// How the tiled products on Hopper begin: semaphores, tensor maps, the first tile.
//
// A kernel of a few microseconds consists to a good part of the time to its first load, and of
// waiting for instructions that are not in a cache. So the way to the first load is as short as can
// be: the warp that loads initialises the semaphores and waits for nobody, and a grid of one round
// has the shape of the tiles, so that a block's first tile needs no divisions.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/dense/types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// The index of this block's first tile. Where every block has one tile, they are the grid.
template <class Globals>
__device__ __forceinline__ uint32_t first_tile(const Globals& g) {
    return g.one_round ? blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)
                       : blockIdx.x;
}

// Calls work(tile, whether it is the last) for each of this block's tiles.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_tile(const Globals& g, Work work) {
    for (uint32_t i = first_tile(g); i < g.order.total; i += g.blocks) {
        work(g.order.at(i), i + g.blocks >= g.order.total);
    }
}

// The same for the thread that loads. What finds a tile by divisions lies behind the loads.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_loaded_tile(const Globals& g, Work work) {
    decltype(g.order.at(0)) at{blockIdx.z, blockIdx.x, blockIdx.y};
    bool known = g.one_round;
    uint32_t next = known ? g.order.total : blockIdx.x;
    while (true) {
        if (known) work(at);
        if (next >= g.order.total) return;
        at = g.order.at(next);
        next += g.blocks;
        known = true;
    }
}

// By one thread.
template <class K, class Globals>
__device__ __forceinline__ void prefetch_maps(const Globals& g) {
    tma::prefetch_map<typename K::a_part>(g.a);
    tma::prefetch_map<typename K::b_part>(g.b);
    tma::prefetch_map<typename K::out_tile>(g.out_map);
}
template <class K, class Shared>
__device__ __forceinline__ void init_ring(Shared& shared) {
    for (int i = 0; i < K::config.stages; ++i) {
        init_semaphore(shared.full[i], 1);
        init_semaphore(shared.empty[i], K::config.consumers);
    }
    for (int i = K::config.stages; i < K::config.stages + K::handed; ++i) {
        init_semaphore(shared.full[i], 1), init_semaphore(shared.empty[i], 1);
    }
}

// Loads the tiles of one step, k on, of the output's tile at (m, n). `once`: b may be a matrix that
// leaves the L2 cache first, see Schedule.
template <class K, bool once>
__device__ __forceinline__ void load_step(const typename K::Globals& g, typename K::Stage& stage,
                                          semaphore& full, int a_batch, int b_batch, int m,
                                          uint32_t n, int k, bool narrow) {
    constexpr Config C = K::config;
    auto& a_parts = reinterpret_cast<typename K::a_part(&)[K::a_parts]>(stage.a);
    auto& b_parts = reinterpret_cast<typename K::b_part(&)[K::b_parts]>(stage.b);
#pragma unroll
    for (int i = 0; i < K::a_parts; ++i) {
        const int row = m + i * K::a_part_rows;
        tma::load_async(a_parts[i], g.a,
                        C.a_m_major ? elements(a_batch, 0, k, row) : elements(a_batch, 0, row, k),
                        full);
    }
#pragma unroll
    for (int i = 0; i < K::b_parts; ++i) {
        const int col = static_cast<int>(K::column(g, n, i * K::b_part_cols));
        const element_coord from =
            C.b_n_major ? elements(b_batch, 0, k, col) : elements(b_batch, 0, col, k);
        if constexpr (K::less > 0) {
            if (narrow && i == K::b_parts - 1) {
                auto& part = reinterpret_cast<typename K::b_last&>(b_parts[i]);
                tma::load_async(part, g.b, from, full);
                continue;
            }
        }
        if (once && g.b_once)
            tma::load_async<2, tma::CachePolicy::evict_first>(b_parts[i], g.b, from, full);
        else
            tma::load_async(b_parts[i], g.b, from, full);
    }
}
template <class K>
__device__ __forceinline__ void load_step(const typename K::Globals& g, typename K::Stage& stage,
                                          semaphore& full, uint32_t batch, int m, uint32_t n, int k,
                                          bool narrow = false) {
    const int a_batch = g.a_batched ? static_cast<int>(batch) : 0;
    const int b_batch = g.b_batched ? static_cast<int>(batch) : 0;
    load_step<K, true>(g, stage, full, a_batch, b_batch, m, n, k, narrow);
}

// The same of a tile whose width varies. Of b come whole stripes where they lie along n; else the
// rows behind the first half in a box of the width's own.
template <class K>
__device__ __forceinline__ void load_varied_step(const typename K::Globals& g,
                                                 typename K::Stage& stage, semaphore& full,
                                                 const VariedPosition& at, int k) {
    constexpr Config C = K::config;
    constexpr int half = K::b_part_cols, stripe = 64;
    static_assert(K::a_parts == 2 && K::b_parts == 2 && half == 2 * stripe);
    static_assert(C.b_n_major ? narrowest(C) >= half : narrowest(C) > half);
    tma::expect_bytes(full, sizeof(stage.a) + int(at.width) * BLOCK_K * 2);
    auto& a_parts = reinterpret_cast<typename K::a_part(&)[K::a_parts]>(stage.a);
    auto& b_parts = reinterpret_cast<typename K::b_part(&)[K::b_parts]>(stage.b);
    const int row = static_cast<int>(K::first_row(g, at.m)), col = static_cast<int>(at.col);
#pragma unroll
    for (int i = 0; i < K::a_parts; ++i) {
        tma::load_async(a_parts[i], g.a, elements(0, 0, row + i * K::a_part_rows, k), full);
    }
    const auto load = [&](const CUtensorMap* map, uint32_t to, int at_col) {
        const arch::TmaCoordinates from = C.b_n_major ? arch::TmaCoordinates{at_col, k, 0, 0}
                                                      : arch::TmaCoordinates{k, at_col, 0, 0};
        if (g.b_once)
            arch::tma_load<tma::CachePolicy::evict_first>(to, map, from, full.address());
        else
            arch::tma_load<tma::CachePolicy::normal>(to, map, from, full.address());
    };
    const CUtensorMap* map = g.b.template tensor_map<typename K::b_part>();
    if constexpr (C.b_n_major) {
#pragma unroll
        for (int i = 0; i < C.block_n / stripe; ++i) {
            if (i * stripe < narrowest(C) || i * stripe < int(at.width)) {
                const uint32_t to = b_parts[i / 2].address() + i % 2 * stripe * BLOCK_K * 2;
                load(map, to, col + i * stripe);
            }
        }
    } else {
        load(map, b_parts[0].address(), col);
        load(&g.varied.maps[at.kind], b_parts[1].address(), col + half);
    }
}

// The threads that meet at READY: the consumers, the warp that loads, and those that finish.
template <class K>
constexpr int READY_THREADS =
    K::config.consumers * WARPGROUP_THREADS + (K::has_finishers ? 4 : 1) * WARP_THREADS;

// The start of the producer warpgroup; true in the warp that loads. Nothing is waited for there
// but the kernel before: the loads need semaphores that the warp itself has initialised.
template <class K, class Shared>
__device__ __forceinline__ bool start_producer(const typename K::Globals& g, Shared& shared) {
    if (warpgroup::warpid() == 0) {
        if (arch::elect_one()) {
            init_ring<K>(shared);
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, READY_THREADS<K>);
        arch::wait_for_dependencies();
        return true;
    }
    if (warpgroup::warpid() == 1) {
        if (arch::elect_one()) prefetch_maps<K>(g);
        arch::wait_for_dependencies();
        arch::launch_dependents();
    }
    if constexpr (K::has_finishers) {
        arch::named_barrier_sync(READY, READY_THREADS<K>);
        arch::wait_for_dependencies();
    }
    return false;
}

// The start of a warp that loads alone, of `threads` that meet at READY; true in the thread that
// loads.
template <class K, class Shared>
__device__ __forceinline__ bool start_loading(Shared& shared, int threads) {
    const bool loads = arch::elect_one();
    if (loads) {
        init_ring<K>(shared);
        arch::mbarrier_init_fence();
    }
    arch::sync_warp();
    arch::named_barrier_arrive(READY, threads);
    arch::wait_for_dependencies();
    arch::launch_dependents();
    return loads;
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
