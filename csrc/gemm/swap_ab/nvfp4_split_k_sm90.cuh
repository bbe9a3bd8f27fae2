// Split-K through the workspace, for nvfp4_sm90.cuh: tiles of 256 rows of the weight and up to 64
// rows of a, whose k several blocks share. That is best where tiles are a quarter of the SMs: tall
// tiles read a seldom, and clusters of four would not fill the GPU.
#pragma once

#include "csrc/gemm/swap_ab/epilogue_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

// The main loop of a block that has one tile. The addresses at which a thread finds its operands in
// the first stage are computed once, and pinned, because the compiler would else do it for every
// stage: conversion, products and addresses share the issue slots of four warps, of which this loop
// has none to spare.
template <class Traits>
struct SplitKMainloop {
    static constexpr Config C = Traits::config;
    using W = typename Traits::W;
    using T = typename Traits::T;
    using rows = typename Traits::rows;
    static constexpr int STAGE = sizeof(typename Traits::Stage);
    static_assert(C.k_groups == 1 && C.pieces == 2 && Traits::step_stages == 1);
    rt_fl<16, C.tokens> d;

    __device__ __forceinline__ void run(typename Traits::Shared& shared, int stages) {
        const int lane = laneid();
        const uint32_t full = arch::warp_uniform(arch::shared_address(&shared.full[0]));
        const uint32_t empty = arch::warp_uniform(arch::shared_address(&shared.empty[0]));
        const uint32_t a = arch::warp_uniform(arch::shared_address(&shared.stages[0].a));
        const uint64_t first =
            arch::wgmma_descriptor(a, 16, 8 * rows::swizzle_bytes, rows::swizzle_bytes);
        const uint32_t strip = shared.stages[0].weight[warpgroup::groupid()].address() +
                               warpgroup::warpid() * W::STRIP;
        uint32_t codes = strip + lane * W::LANE_CODES, scales = strip + W::scales_of(lane);
        arch::pin_register(codes);
        arch::pin_register(scales);
        rt<T, 16, PIECE> fragments[C.pieces];
        warp::zero(d);
        int slot = 0, phase = 0, previous = -1;
#pragma unroll 1
        for (; stages > 0; --stages) {
            arch::mbarrier_wait(full + slot * sizeof(semaphore), phase);
            const uint32_t stage = slot * STAGE;
            typename W::Words words[C.pieces];
#pragma unroll
            for (int i = 0; i < C.pieces; ++i) {
                words[i] = W::load_words(codes + stage + i * Traits::piece,
                                         scales + stage + i * Traits::piece);
            }
            // One product is in flight while the fragments of the next are made.
#pragma unroll
            for (int i = 0; i < C.pieces; ++i) {
                W::fragments(words[i], fragments[i]);
                multiply(fragments[i], arch::wgmma_advance(first, stage + i * sizeof(rows)));
                warpgroup::mma_async_wait<1>();
                if (i == 0) release(empty, previous);
            }
            previous = slot;
            if (++slot == C.stages) slot = 0, phase ^= 1;
        }
        warpgroup::mma_async_wait(d);
    }

  private:
    __device__ __forceinline__ void multiply(const rt<T, 16, PIECE>& weight, uint64_t piece) {
        auto& sums = reinterpret_cast<float(&)[C.tokens / 2]>(d);
        warpgroup::mma_fence(d);
#pragma unroll
        for (int k = 0; k < PIECE / 16; ++k) {
            const auto& words = reinterpret_cast<const uint32_t(&)[4]>(weight.tiles[0][k].data);
            arch::wgmma<C.tokens, float, T, T>::template from_registers<false>(
                sums, words, arch::wgmma_advance(piece, k * 32), true);
        }
        warpgroup::mma_commit_group();
    }
    // Releases the stage whose products are done.
    static __device__ __forceinline__ void release(uint32_t empty, int slot) {
        arch::sync_warp();
        if (slot >= 0 && laneid() == 0) arch::mbarrier_arrive(empty + slot * sizeof(semaphore));
    }
};

// The cluster size of the launch, for blocks that wait for each other: a GPU has all of them at a
// time, the emulator those of a cluster.
constexpr int split_k_cluster([[maybe_unused]] const Config& c) {
#if defined(__CUDACC__)
    return 1;
#else
    return c.split_k;
#endif
}

// Reduce-scatter among the blocks that share the k of a tile: each finishes some rows of a, stores
// for the others the partial sums of theirs, in the order of the registers, and adds what it gets.
// All blocks of a tile wait for each other; they have this tile alone, and their numbers follow one
// another, so that the GPU starts them together.
template <class Traits>
struct SplitKReduce {
    static constexpr Config C = Traits::config;
    static constexpr int THREADS = Traits::consumers * WARPGROUP_THREADS;
    static constexpr int VEC4S = C.tokens / 8;  // of a thread's sums, 16 bytes each
    static constexpr int OWN = VEC4S / C.split_k;

    static __device__ __forceinline__ Tile tile(const typename Traits::Globals& g) {
        return {0, blockIdx.x / C.split_k, 0, g.m};
    }
    static __device__ __forceinline__ int2 range(const typename Traits::Globals& g) {
        const int rank = blockIdx.x % C.split_k;
        return {g.k_steps * rank / C.split_k, g.k_steps * (rank + 1) / C.split_k};
    }
    // The flag by which block `from` says that it has stored what block `to` of the tile finishes.
    static __device__ __forceinline__ uint64_t* flag(const typename Traits::Globals& g,
                                                     uint32_t from, uint32_t to) {
        return g.flags + (from * C.split_k + to);
    }

    static __device__ __forceinline__ void epilogue(const typename Traits::Globals& g,
                                                    typename Traits::Shared& shared,
                                                    const rt_fl<16, C.tokens>& d) {
        const uint32_t rank = blockIdx.x % C.split_k, first = blockIdx.x - rank;
        const Tile tile = SplitKReduce::tile(g);
        const float scale = scale_of(g, tile.group);
        const float4 bias = TileEpilogue<Traits>::bias_of(g, tile);
        float4 own[OWN];
        float4* to = partials_of<Traits>(g, blockIdx.x);
#pragma unroll
        for (int i = 0; i < VEC4S; ++i) {
            if (i / OWN == rank)
                own[i % OWN] = gemm::sm90::vec4_of(d, i);
            else
                arch::store_global(to + i * THREADS, gemm::sm90::vec4_of(d, i));
        }
        // One release for the block, because those of sixteen warps take longer; each lane raises
        // the flag for one block, and waits for its flag.
        arch::named_barrier_sync(SUMS, THREADS);
        const uint32_t other = threadIdx.x;
        if (other < C.split_k && other != rank) {
            arch::store_release_global(flag(g, blockIdx.x, other), g.epoch);
            uint64_t* there = flag(g, first + other, rank);
            while (arch::load_acquire_global(there) != g.epoch) {
            }
            arch::store_global(there, uint64_t{0});
        }
        arch::named_barrier_sync(SUMS, THREADS);
        float4 more[C.split_k - 1][OWN];
        const float4* from = partials_of<Traits>(g, first) + rank * OWN * THREADS;
#pragma unroll
        for (int i = 0; i < C.split_k - 1; ++i) {
            const uint32_t at = (i + (i >= rank)) * uint32_t(VEC4S * THREADS);
#pragma unroll
            for (int j = 0; j < OWN; ++j) more[i][j] = arch::load_global(from + at + j * THREADS);
        }
        const uint32_t sums = shared.sums[0].address();
        const int column = threadIdx.x / WARP_THREADS * 16 + laneid() / 4;
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
#pragma unroll
            for (int i = 0; i < C.split_k - 1; ++i) {
                own[j].x += more[i][j].x, own[j].y += more[i][j].y;
                own[j].z += more[i][j].z, own[j].w += more[i][j].w;
            }
            const uint32_t at = sums + ((j * 8 + laneid() % 4 * 2) * Traits::pitch + column) * 4;
            arch::store_shared(at, own[j].x);
            arch::store_shared(at + Traits::pitch * 4, own[j].y);
            arch::store_shared(at + 32, own[j].z);
            arch::store_shared(at + 32 + Traits::pitch * 4, own[j].w);
        }
        arch::named_barrier_sync(SUMS, THREADS);
        TileEpilogue<Traits>::rows(g, tile, scale, bias, rank * OWN * 8, OWN * 8, sums);
    }
};

// The thread that loads.
template <class Traits>
__device__ __forceinline__ void produce_split_k(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    const Tile tile = SplitKReduce<Traits>::tile(g);
    const int2 range = SplitKReduce<Traits>::range(g);
    const auto steps = static_cast<uint32_t>(range.y - range.x);
    const int row = static_cast<int>(tile.row_tile) * C.row_groups;
    // Blocks begin at different k, so that not all of them read the same lines of a at the same
    // time.
    const uint64_t place = tile.row_tile * 0x9e3779b9u;  // as a fraction of 2^32
    int k = range.x + static_cast<int>(place * steps >> 32);
    int slot = 0, phase = 1;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
        auto& stage = shared.stages[slot];
        semaphore& full = shared.full[slot];
        const int first = k * C.pieces;
        wait(shared.empty[slot], phase);
        tma::expect_bytes(full, Traits::stage_bytes);
        arch::tma_load<tma::CachePolicy::normal>(
            stage.weight[0].address(), &g.weight,
            arch::TmaCoordinates{0, first * Traits::lines, row, 0}, full.address());
#pragma unroll
        for (int i = 0; i < C.pieces; ++i) {
            tma::load_async<2, tma::CachePolicy::evict_last>(
                stage.a[i], g.a, elements(0, 0, 0, (first + i) * PIECE), full);
        }
        if (++slot == C.stages) slot = 0, phase ^= 1;
        if (++k == range.y) k = range.x;
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void nvfp4_split_k_kernel(const __grid_constant__
                                                          typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const int group = arch::warp_uniform(warpgroup::groupid());
    // Two branches and not one with an else, so that ptxas lays what comes before the first copy at
    // the kernel's beginning: elsewhere it would be fetched from memory on its own.
    if (group == Traits::consumers) {
        make_semaphores<Traits>(shared, true, 1, 1, [&] {
            tma::prefetch_map<typename Traits::slice>(g.a);
            arch::tma_prefetch_map(&g.weight);
        });
        warpgroup::decrease_registers<Traits::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::warpid() == 0 && arch::elect_one()) produce_split_k<Traits>(g, shared);
        arch::sync_warp();
    }
    if (group < Traits::consumers) {
        warpgroup::increase_registers<Traits::consumer_registers>();
        make_semaphores<Traits>(shared, false, 1, 1, [] {});
        arch::wait_for_dependencies();
        arch::launch_dependents();
        const int2 range = SplitKReduce<Traits>::range(g);
        SplitKMainloop<Traits> loop;
        // A loop, once round: of products in no loop but that over k ptxas serialises all (C7515).
#pragma unroll 1
        for (uint32_t tile = SplitKReduce<Traits>::tile(g).row_tile; tile < g.row_tiles;
             tile += g.clusters) {
            loop.run(shared, range.y - range.x);
            SplitKReduce<Traits>::epilogue(g, shared, loop.d);
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::nvfp4_gemm
