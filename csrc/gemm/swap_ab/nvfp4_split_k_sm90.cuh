// Of nvfp4_sm90.cuh: tiles whose k is divided by blocks that exchange sums through memory. That is
// what a product of up to 64 rows takes where tiles are a quarter of the SMs: tall ones, which read
// a seldom, and no clusters, of which those of four would not fill the GPU.
#pragma once

#include "csrc/gemm/swap_ab/epilogue_sm90.cuh"

namespace thunderkittens::mixed_gemm {
namespace sm90 {

// The main loop of a block that has one tile. What a thread finds where in the first stage is
// computed once, and pinned, because the compiler would else do it for every stage: conversion,
// products and addresses share the issue slots of four warps, of which this loop has none to spare.
template <class K>
struct ExchangeLoop {
    static constexpr Config C = K::config;
    using W = typename K::W;
    using T = typename K::T;
    using rows = typename K::rows;
    static constexpr int STAGE = sizeof(typename K::Stage);
    static_assert(C.k_groups == 1 && C.pieces == 2 && K::step_stages == 1);
    rt_fl<16, C.tokens> d;

    __device__ __forceinline__ void run(typename K::Shared& shared, int stages) {
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
                words[i] =
                    W::load_words(codes + stage + i * K::piece, scales + stage + i * K::piece);
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
    // Hands the stage back whose products are done.
    static __device__ __forceinline__ void release(uint32_t empty, int slot) {
        arch::sync_warp();
        if (slot >= 0 && laneid() == 0) arch::mbarrier_arrive(empty + slot * sizeof(semaphore));
    }
};

// What a launch says of blocks that wait for each other: a GPU has all of them at a time, the
// emulator those of a cluster.
constexpr int exchange_cluster([[maybe_unused]] const Config& c) {
#if defined(__CUDACC__)
    return 1;
#else
    return c.exchange;
#endif
}

// The sums of blocks that divide the k of a tile, of which each finishes some rows of a: it gives
// the others theirs, in the order of the registers, and adds what it gets. All blocks of a tile
// wait for each other; they have this tile alone, and their numbers follow one another, so that the
// GPU starts them together.
template <class K>
struct Exchange {
    static constexpr Config C = K::config;
    static constexpr int THREADS = K::consumers * WARPGROUP_THREADS;
    static constexpr int PIECES = C.tokens / 8;  // of 16 bytes, of a thread
    static constexpr int OWN = PIECES / C.exchange;

    static __device__ __forceinline__ Tile tile(const typename K::Globals& g) {
        return {0, blockIdx.x / C.exchange, 0, g.m};
    }
    static __device__ __forceinline__ int2 range(const typename K::Globals& g) {
        const int rank = blockIdx.x % C.exchange;
        return {g.k_steps * rank / C.exchange, g.k_steps * (rank + 1) / C.exchange};
    }
    static __device__ __forceinline__ float4 piece(const rt_fl<16, C.tokens>& d, int i) {
        const auto& data = d.tiles[0][i / 2].data;
        const float2 low = data[i % 2 * 2], high = data[i % 2 * 2 + 1];
        return make_float4(low.x, low.y, high.x, high.y);
    }
    static __device__ __forceinline__ float4* place(const typename K::Globals& g, uint32_t block) {
        return g.parts + (int64_t(block) * PIECES * THREADS + threadIdx.x);
    }
    // That block `from` has written what the tile's block `to` is to finish.
    static __device__ __forceinline__ uint64_t* mark(const typename K::Globals& g, uint32_t from,
                                                     uint32_t to) {
        return g.marks + (from * C.exchange + to);
    }

    static __device__ __forceinline__ void finish(const typename K::Globals& g,
                                                  typename K::Shared& shared,
                                                  const rt_fl<16, C.tokens>& d) {
        const uint32_t rank = blockIdx.x % C.exchange, first = blockIdx.x - rank;
        const Tile tile = Exchange::tile(g);
        const float scale = scale_of(g, tile.group);
        const float4 bias = Finish<K>::bias_of(g, tile);
        float4 own[OWN];
        float4* to = place(g, blockIdx.x);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            if (i / OWN == rank)
                own[i % OWN] = piece(d, i);
            else
                arch::store_global(to + i * THREADS, piece(d, i));
        }
        // One fence for the block, because those of sixteen warps take longer. A lane per block.
        arch::named_barrier_sync(SUMS, THREADS);
        const uint32_t other = threadIdx.x;
        if (other < C.exchange && other != rank) {
            arch::store_release_global(mark(g, blockIdx.x, other), g.mark);
            uint64_t* there = mark(g, first + other, rank);
            while (arch::load_acquire_global(there) != g.mark) {
            }
            arch::store_global(there, uint64_t{0});
        }
        arch::named_barrier_sync(SUMS, THREADS);
        float4 more[C.exchange - 1][OWN];
        const float4* from = place(g, first) + rank * OWN * THREADS;
#pragma unroll
        for (int i = 0; i < C.exchange - 1; ++i) {
            const uint32_t at = (i + (i >= rank)) * uint32_t(PIECES * THREADS);
#pragma unroll
            for (int j = 0; j < OWN; ++j) more[i][j] = arch::load_global(from + at + j * THREADS);
        }
        const uint32_t sums = shared.sums[0].address();
        const int column = threadIdx.x / WARP_THREADS * 16 + laneid() / 4;
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
#pragma unroll
            for (int i = 0; i < C.exchange - 1; ++i) {
                own[j].x += more[i][j].x, own[j].y += more[i][j].y;
                own[j].z += more[i][j].z, own[j].w += more[i][j].w;
            }
            const uint32_t at = sums + ((j * 8 + laneid() % 4 * 2) * K::pitch + column) * 4;
            arch::store_shared(at, own[j].x);
            arch::store_shared(at + K::pitch * 4, own[j].y);
            arch::store_shared(at + 32, own[j].z);
            arch::store_shared(at + 32 + K::pitch * 4, own[j].w);
        }
        arch::named_barrier_sync(SUMS, THREADS);
        Finish<K>::rows(g, tile, scale, bias, rank * OWN * 8, OWN * 8, sums);
    }
};

// The thread that loads.
template <class K>
__device__ __forceinline__ void load_exchanged(const typename K::Globals& g,
                                               typename K::Shared& shared) {
    constexpr Config C = K::config;
    const Tile tile = Exchange<K>::tile(g);
    const int2 range = Exchange<K>::range(g);
    const auto steps = static_cast<uint32_t>(range.y - range.x);
    const int row = static_cast<int>(tile.row_tile) * C.row_groups;
    // Blocks begin at different k, not to read the same lines of a all at once.
    const uint64_t place = tile.row_tile * 0x9e3779b9u;  // as a fraction of 2^32
    int k = range.x + static_cast<int>(place * steps >> 32);
    int slot = 0, phase = 1;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
        auto& stage = shared.stages[slot];
        semaphore& full = shared.full[slot];
        const int first = k * C.pieces;
        wait(shared.empty[slot], phase);
        tma::expect_bytes(full, K::stage_bytes);
        arch::tma_load<tma::CachePolicy::normal>(stage.weight[0].address(), &g.weight,
                                                 arch::TmaCoordinates{0, first * K::lines, row, 0},
                                                 full.address());
#pragma unroll
        for (int i = 0; i < C.pieces; ++i) {
            tma::load_async<2, tma::CachePolicy::evict_last>(
                stage.a[i], g.a, elements(0, 0, 0, (first + i) * PIECE), full);
        }
        if (++slot == C.stages) slot = 0, phase ^= 1;
        if (++k == range.y) k = range.x;
    }
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void mixed_exchange_kernel(const __grid_constant__
                                                                       typename K::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const int group = arch::warp_uniform(warpgroup::groupid());
    // Two branches and not one with an else, so that ptxas lays what comes before the first copy at
    // the kernel's beginning: elsewhere it would be fetched from memory on its own.
    if (group == K::consumers) {
        make_semaphores<K>(shared, true, 1, 1, [&] {
            tma::prefetch_map<typename K::part>(g.a);
            arch::tma_prefetch_map(&g.weight);
        });
        warpgroup::decrease_registers<K::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::warpid() == 0 && arch::elect_one()) load_exchanged<K>(g, shared);
        arch::sync_warp();
    }
    if (group < K::consumers) {
        warpgroup::increase_registers<K::consumer_registers>();
        make_semaphores<K>(shared, false, 1, 1, [] {});
        arch::wait_for_dependencies();
        arch::launch_dependents();
        const int2 range = Exchange<K>::range(g);
        ExchangeLoop<K> loop;
        // A loop, once round: of products in no loop but that over k ptxas serialises all (C7515).
#pragma unroll 1
        for (uint32_t tile = Exchange<K>::tile(g).row_tile; tile < g.row_tiles;
             tile += g.clusters) {
            loop.run(shared, range.y - range.x);
            Exchange<K>::finish(g, shared, loop.d);
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::mixed_gemm
