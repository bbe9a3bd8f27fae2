// The prologue of the tiled products on Hopper: semaphores, tensor maps, the first tile, the loads
// of a step.
//
// A kernel of a few microseconds consists to a good part of the time to its first load, and of
// waiting for instructions that are not in a cache. So the way to the first load is as short as can
// be: the warp that loads initialises the semaphores and waits for nobody, and a grid of one wave
// has the shape of the tiles, so that a block's first tile needs no divisions.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/dense/types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// The index of this block's first tile. Where every block has one tile, they are the grid.
template <class Globals>
__device__ __forceinline__ uint32_t first_tile(const Globals& g) {
    return g.one_wave ? blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) : blockIdx.x;
}

// Calls work(tile, whether it is the last) for each of this block's tiles.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_tile(const Globals& g, Work work) {
    for (uint32_t i = first_tile(g); i < g.order.total; i += g.blocks) {
        work(g.order.at(i), i + g.blocks >= g.order.total);
    }
}

// The same for the thread that loads. The divisions that find a tile come behind the loads of the
// tile before.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_loaded_tile(const Globals& g, Work work) {
    decltype(g.order.at(0)) at{blockIdx.z, blockIdx.x, blockIdx.y};
    bool known = g.one_wave;
    uint32_t next = known ? g.order.total : blockIdx.x;
    while (true) {
        if (known) work(at);
        if (next >= g.order.total) return;
        at = g.order.at(next);
        next += g.blocks;
        known = true;
    }
}

// Called by one thread.
template <class Traits, class Globals>
__device__ __forceinline__ void prefetch_maps(const Globals& g) {
    tma::prefetch_map<typename Traits::a_part>(g.a);
    tma::prefetch_map<typename Traits::b_part>(g.b);
    tma::prefetch_map<typename Traits::out_tile>(g.out_map);
}
template <class Traits, class Shared>
__device__ __forceinline__ void init_ring(Shared& shared) {
    for (int i = 0; i < Traits::config.stages; ++i) {
        init_semaphore(shared.full[i], 1);
        init_semaphore(shared.empty[i], Traits::config.consumers);
    }
    for (int i = Traits::config.stages; i < Traits::config.stages + Traits::epilogue_buffers; ++i) {
        init_semaphore(shared.full[i], 1), init_semaphore(shared.empty[i], 1);
    }
    for (int i = Traits::first_bias_row; i < Traits::semaphores; ++i) {
        init_semaphore(shared.empty[i], Traits::config.consumers * WARPGROUP_WARPS);
    }
}

// Loads the operand tiles of one step, from k on, of the output's tile at (m, n).
// `may_evict_first`: b may be loaded with evict_first, see Schedule.
template <class Traits, bool may_evict_first>
__device__ __forceinline__ void load_step(const typename Traits::Globals& g,
                                          typename Traits::Stage& stage, semaphore& full,
                                          int a_batch, int b_batch, int m, uint32_t n, int k,
                                          bool narrow) {
    constexpr Config C = Traits::config;
    auto& a_parts = reinterpret_cast<typename Traits::a_part(&)[Traits::a_parts]>(stage.a);
    auto& b_parts = reinterpret_cast<typename Traits::b_part(&)[Traits::b_parts]>(stage.b);
#pragma unroll
    for (int i = 0; i < Traits::a_parts; ++i) {
        const int row = m + i * Traits::a_part_rows;
        tma::load_async(a_parts[i], g.a,
                        C.a_m_major ? elements(a_batch, 0, k, row) : elements(a_batch, 0, row, k),
                        full);
    }
#pragma unroll
    for (int i = 0; i < Traits::b_parts; ++i) {
        const int col = static_cast<int>(Traits::column(g, n, i * Traits::b_part_cols));
        const element_coord from =
            C.b_n_major ? elements(b_batch, 0, k, col) : elements(b_batch, 0, col, k);
        if constexpr (Traits::narrow_by > 0) {
            if (narrow && i == Traits::b_parts - 1) {
                auto& part = reinterpret_cast<typename Traits::b_last&>(b_parts[i]);
                tma::load_async(part, g.b, from, full);
                continue;
            }
        }
        if (may_evict_first && g.evict_first_b)
            tma::load_async<2, tma::CachePolicy::evict_first>(b_parts[i], g.b, from, full);
        else
            tma::load_async(b_parts[i], g.b, from, full);
    }
}
template <class Traits>
__device__ __forceinline__ void load_step(const typename Traits::Globals& g,
                                          typename Traits::Stage& stage, semaphore& full,
                                          uint32_t batch, int m, uint32_t n, int k,
                                          bool narrow = false) {
    const int a_batch = g.a_batched ? static_cast<int>(batch) : 0;
    const int b_batch = g.b_batched ? static_cast<int>(batch) : 0;
    load_step<Traits, true>(g, stage, full, a_batch, b_batch, m, n, k, narrow);
}

// The threads that meet at READY: the consumers, the warp that loads, and the epilogue warps.
template <class Traits>
constexpr int READY_THREADS = Traits::config.consumers * WARPGROUP_THREADS +
                              (Traits::has_epilogue_warps ? 4 : 1) * WARP_THREADS;

// The start of the producer warpgroup; true in the warp that loads. That warp waits for the kernel
// before it alone: the loads need only semaphores that it has initialised itself.
template <class Traits, class Shared>
__device__ __forceinline__ bool start_producer(const typename Traits::Globals& g, Shared& shared) {
    if (warpgroup::warpid() == 0) {
        if (arch::elect_one()) {
            init_ring<Traits>(shared);
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, READY_THREADS<Traits>);
        arch::wait_for_dependencies();
        return true;
    }
    if (warpgroup::warpid() == 1) {
        if (arch::elect_one()) prefetch_maps<Traits>(g);
        arch::wait_for_dependencies();
        arch::launch_dependents();
    }
    if constexpr (Traits::has_epilogue_warps) {
        arch::named_barrier_sync(READY, READY_THREADS<Traits>);
        arch::wait_for_dependencies();
    }
    return false;
}

// The start of a producer that is a single warp, of `threads` that meet at READY; true in the
// thread that loads.
template <class Traits, class Shared>
__device__ __forceinline__ bool start_loading(Shared& shared, int threads) {
    const bool loads = arch::elect_one();
    if (loads) {
        init_ring<Traits>(shared);
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
