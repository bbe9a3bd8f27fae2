// Product of 16-bit activations and prepared weights of fewer bits on Hopper.
//
// The operands change places: rows of the weight are the rows of a tensor core's tile, rows of a
// its columns. The weight travels to shared memory in the bits that it has; a warpgroup makes
// 16-bit fragments of it in registers, which wgmma takes as its first operand. While the products
// of one piece of 64 x 64 elements run, the fragments of the next are made, in other registers.
//
// A block has one warp that loads and row_groups * k_groups warpgroups that multiply. The warp
// keeps a ring of stages filled: pieces by bulk copies, a by TMA. Tiles are dealt out evenly over
// persistent blocks. Where there are few tiles, the blocks of a cluster divide k, and each sums
// the partial results of a share of the tile's elements, in a fixed order, over the cluster's
// shared memory: reruns give the same bits.
//
// The sums pass through shared memory, which turns them round: each thread then does the epilogue
// of four neighbouring columns of a row.
#pragma once

#include "csrc/gemm/mixed_tiles_sm90.cuh"

namespace thunderkittens::mixed_gemm {
namespace sm90 {

// The pieces of a stage. Past the end of k, where a is zero, the last piece takes their place:
// where it has a NaN, so has the result.
template <class K>
__device__ __forceinline__ void load_pieces(const typename K::Globals& g, uint32_t to,
                                            const uint8_t* from, int first, semaphore& full) {
    constexpr int pieces = K::config.pieces;
    if (first + pieces <= g.k_pieces) {
        arch::bulk_load(to, from + int64_t(first) * K::piece, pieces * K::piece, full.address());
        return;
    }
    for (int i = 0; i < pieces; ++i) {
        arch::bulk_load(to + i * K::piece,
                        from + int64_t(min(first + i, g.k_pieces - 1)) * K::piece, K::piece,
                        full.address());
    }
}

template <class K>
__device__ __forceinline__ void produce(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr Config C = K::config;
    const int2 range = range_of_k(g);
    const int rank = g.sharers > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
    int slot = 0, phase = 1;
    for_each_tile<K>(g, [&](const Tile& tile) {
        if (tile.group >= g.groups) return;
        // Of few rows of a, blocks begin at different k, not to read the same lines of it all at
        // once; of many, at the same, to find in the L2 cache what others have just read.
        int k = range.x;
        if (C.tokens <= 64)
            k += static_cast<int>(tile.row_tile / g.sharers * 37u % uint32_t(range.y - range.x));
        for (int step = range.x; step < range.y; ++step) {
            auto& stage = shared.stages[slot];
            semaphore& full = shared.full[slot];
            const int first = k * C.pieces;
            wait(shared.empty[slot], phase);
            tma::expect_bytes(full, K::stage_bytes);
#pragma unroll
            for (int r = 0; r < C.row_groups; ++r) {
                // A tile past the end multiplies the last rows once more; nobody stores that.
                const uint32_t row = min(tile.row_tile * C.row_groups + r, g.row_pieces - 1);
                load_pieces<K>(
                    g, stage.weight[r].address(),
                    g.weight + (int64_t(tile.group) * g.row_pieces + row) * g.k_pieces * K::piece,
                    first, full);
            }
#pragma unroll
            for (int i = 0; i < C.pieces; ++i) {
                auto& parts = reinterpret_cast<typename K::part(&)[K::parts]>(stage.a[i]);
#pragma unroll
                for (int j = 0; j < K::parts; ++j) {
                    const auto from = elements(
                        0, 0, static_cast<int>(tile.token) + j * K::part_rows, (first + i) * PIECE);
                    if (g.sharers == 1) {
                        tma::load_async<2, tma::CachePolicy::evict_last>(parts[j], g.a, from, full);
                    } else if (rank == j) {
                        tma::cluster::load_async<2, tma::CachePolicy::evict_last>(
                            parts[j], g.a, from, full, uint16_t{(1 << K::parts) - 1});
                    }
                }
            }
            if (++slot == C.stages) slot = 0, phase ^= 1;
            if (++k == range.y) k = range.x;
        }
    });
}

// The sums of a tile, from all k that fall to this block.
template <class K>
struct Mainloop {
    static constexpr Config C = K::config;
    using W = typename K::W;
    using T = typename K::T;
    int slot = 0, phase = 0;
    rt_fl<16, C.tokens> d;
    rt<T, 16, PIECE> fragments[2];

    __device__ __forceinline__ void run(const typename K::Globals& g, typename K::Shared& shared,
                                        const int2 range, int row_group, int k_group) {
        constexpr int rounds = C.pieces / C.k_groups;
        static_assert(C.pieces % C.k_groups == 0 && (rounds == 1 || rounds % 2 == 0));
        int previous = 0;
        // Every warp has read its codes. Without a branch around the barrier of the warp, for which
        // ptxas would serialise products. Who shares rows of a writes them for all.
        const auto release = [&](int stage, bool filled = true) {
            arch::sync_warp();
            if (filled && laneid() == 0) arrive(shared.empty[stage]);
            if constexpr (K::parts > 1) {
                if (filled && g.sharers > 1 && laneid() == 1) {
                    arrive_remote_relaxed(shared.empty[stage], arch::cluster_rank() ^ 1);
                }
            }
        };
        // One product is in flight while the fragments of the next are made.
        const auto take = [&](int piece, rt<T, 16, PIECE>& fragment, bool accumulate) {
            auto& stage = shared.stages[slot];
            const auto words =
                W::load(stage.weight[row_group].address() + piece * K::piece, warpgroup::laneid());
            W::fragments(words, fragment);
            warpgroup::product<false, true>(d, fragment, stage.a[piece], accumulate);
            warpgroup::mma_async_wait<1>();
        };
        const auto advance = [&] {
            previous = slot;
            if (++slot == C.stages) slot = 0, phase ^= 1;
        };
        if constexpr (rounds > 1) {
#pragma unroll 1
            for (int step = range.x; step < range.y; ++step) {
                wait(shared.full[slot], phase);
#pragma unroll
                for (int i = 0; i < rounds; ++i) {
                    take(i * C.k_groups + k_group, fragments[i % 2], step > range.x || i > 0);
                    if (i == 0) release(previous, step > range.x);
                }
                advance();
            }
        } else {
            const auto one = [&](rt<T, 16, PIECE>& fragment, bool accumulate) {
                wait(shared.full[slot], phase);
                take(k_group, fragment, accumulate);
                release(previous, accumulate);
                advance();
            };
            int step = range.x;
#pragma unroll 1
            for (; step + 1 < range.y; step += 2) {
                one(fragments[0], step > range.x);
                one(fragments[1], true);
            }
            if (step < range.y) one(fragments[0], step > range.x);
        }
        warpgroup::mma_async_wait(d);
        release(previous);
    }
};

template <class K>
__device__ __forceinline__ void consume(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr Config C = K::config;
    const int2 range = range_of_k(g);
    const int row_group = warpgroup::groupid() % C.row_groups,
              k_group = warpgroup::groupid() / C.row_groups;
    Mainloop<K> loop;
    Finish<K> finish;
    for_each_tile<K>(g, [&](const Tile& tile) {
        if (tile.group < g.groups) loop.run(g, shared, range, row_group, k_group);
        finish.tile(g, shared, loop.d, tile, row_group, k_group);
    });
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void mixed_gemm_kernel(const __grid_constant__
                                                                   typename K::Globals g) {
    constexpr Config C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool produces = warpgroup::groupid() == K::consumers;
    make_semaphores<K>(shared, produces, g.splits, g.sharers,
                       [&] { tma::prefetch_map<typename K::part>(g.a); });
    // Other blocks of the cluster arrive at the semaphores when they have their sums, or with rows
    // of a.
    if (g.splits > 1) cluster::arrive();
    if (K::parts > 1 && g.sharers > 1) cluster::sync();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (produces) {
        if constexpr (K::moves_registers) warpgroup::decrease_registers<K::producer_registers>();
        if (warpgroup::warpid() == 0 && arch::elect_one()) produce<K>(g, shared);
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        if constexpr (K::moves_registers) warpgroup::increase_registers<K::consumer_registers>();
        consume<K>(g, shared);
    }
    // A block's shared memory is read, and its semaphores are arrived at, by its cluster.
    if (g.splits * g.sharers > 1) cluster::sync();
}

}  // namespace sm90

template <Config C>
void launch(const Params& p, Stream stream) {
    using K = sm90::Types<C>;
    using A = decltype(K::Globals::a);
    const auto ceil_div = [](int64_t x, int64_t y) {
        return static_cast<uint32_t>((x + y - 1) / y);
    };
    const int64_t quad = 4 * size_in_bytes(p.out_dtype);
    const int in_cluster = p.schedule.splits * p.schedule.sharers;
    const bool quads = reinterpret_cast<uintptr_t>(p.out) % quad == 0 && p.n % 4 == 0;
    const typename K::Globals globals{
        .a = A(static_cast<typename A::T*>(const_cast<void*>(p.a)), nullptr, nullptr, p.m, p.k,
               kittens::gl_strides{0, 0, p.a_stride}),
        .weight = static_cast<const uint8_t*>(p.weight),
        .scale = p.scale,
        .bias = p.bias,
        .offs = p.offs,
        .out = p.out,
        .out_dtype = p.out_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .quads = quads,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = static_cast<uint32_t>(p.groups),
        .row_pieces = static_cast<uint32_t>(pieces(p.n)),
        .row_tiles = ceil_div(p.n, block_rows(C) * p.schedule.sharers),
        .clusters = static_cast<uint32_t>(p.schedule.blocks / in_cluster),
        .k_pieces = static_cast<int>(pieces(p.k)),
        .k_stages = static_cast<int>(ceil_div(pieces(p.k), C.pieces)),
        .splits = p.schedule.splits,
        .sharers = p.schedule.sharers,
    };
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::mixed_gemm_kernel<K>,
                    dim3(p.schedule.blocks), dim3(K::threads), dim3(in_cluster),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::mixed_gemm
