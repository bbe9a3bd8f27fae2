// Swap-AB product of 16-bit activations and prepared NVFP4 weights on Hopper (mixed input), which
// are dequantized in registers.
//
// The operands are swapped: rows of the weight are the rows of a tensor core's tile, rows of a its
// columns. The weight travels to shared memory in the bits that it has; a warpgroup makes 16-bit
// fragments of it in registers, which wgmma takes as its first operand. While the products of one
// piece of 64 x 64 elements run, the fragments of the next are made, in other registers.
//
// Roles: one warp loads, row_groups * k_groups warpgroups dequantize and multiply. The warp keeps a
// ring of stages filled, all pieces of a stage by one copy. Tiles are dealt out evenly over
// persistent blocks. Where there are few tiles, split-K over a cluster: its blocks divide k, and
// each reduces the partial sums of a share of the tile's elements, in a fixed order, over the
// cluster's shared memory. Where waves of tiles would leave SMs idle, stream-K: blocks take ranges
// of the same size of all tiles' steps of k, and pass partial sums on through the workspace, also
// in a fixed order. Reruns give the same bits.
//
// The sums pass through shared memory, which transposes them back: each thread then applies the
// epilogue to four neighbouring columns of a row.
#pragma once

#include "csrc/gemm/swap_ab/nvfp4_split_k_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

template <class Traits>
__device__ __forceinline__ void produce(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    const int rank = g.multicast > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
    int slot = 0, phase = 1;
    for_each_tile<Traits>(g, [&](const Tile& tile, const int2 range) {
        if (tile.group >= g.groups || range.x >= range.y) return;
        const auto row = static_cast<int>(tile.group * g.row_pieces + tile.row_tile * C.row_groups);
        // With many rows of a, blocks begin at the same k, to find in the L2 cache what others have
        // just read.
        int k = range.x;
        if (C.tokens <= 64)
            k += static_cast<int>(tile.row_tile / g.multicast * 37u % uint32_t(range.y - range.x));
        for (int step = range.x; step < range.y; ++step) {
#pragma unroll 1
            for (int i = 0; i < Traits::step_stages; ++i) {
                auto& stage = shared.stages[slot];
                semaphore& full = shared.full[slot];
                const int first = (k * Traits::step_stages + i) * C.pieces;
                wait(shared.empty[slot], phase);
                tma::expect_bytes(full, Traits::stage_bytes);
                arch::tma_load<tma::CachePolicy::normal>(
                    stage.weight[0].address(), &g.weight,
                    arch::TmaCoordinates{0, first * Traits::lines, row, 0}, full.address());
#pragma unroll
                for (int i = 0; i < C.pieces; ++i) {
                    auto& slices =
                        reinterpret_cast<typename Traits::slice(&)[Traits::slices]>(stage.a[i]);
#pragma unroll
                    for (int j = 0; j < Traits::slices; ++j) {
                        const auto from =
                            elements(0, 0, static_cast<int>(tile.token) + j * Traits::slice_rows,
                                     (first + i) * PIECE);
                        if (g.multicast == 1) {
                            tma::load_async<2, tma::CachePolicy::evict_last>(slices[j], g.a, from,
                                                                             full);
                        } else if (rank == j) {
                            tma::cluster::load_async<2, tma::CachePolicy::evict_last>(
                                slices[j], g.a, from, full, uint16_t{(1 << Traits::slices) - 1});
                        }
                    }
                }
                if (++slot == C.stages) slot = 0, phase ^= 1;
            }
            if (++k == range.y) k = range.x;
        }
    });
}

// The main loop: the sums of a tile, from all k that fall to this block.
template <class Traits>
struct Mainloop {
    static constexpr Config C = Traits::config;
    using W = typename Traits::W;
    using T = typename Traits::T;
    int slot = 0, phase = 0;
    rt_fl<16, C.tokens> d;
    rt<T, 16, PIECE> fragments[2];

    __device__ __forceinline__ void run(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared, int steps, int row_group,
                                        int k_group) {
        constexpr int rounds = C.pieces / C.k_groups;
        static_assert(C.pieces % C.k_groups == 0 && rounds * Traits::step_stages % 2 == 0);
        int previous = -1;  // the stage before, if its products are of this tile
        // Products add to zeros: what ordinary instructions make of the sums behind the loop would
        // else come back to it, and ptxas would serialise all products.
        warp::zero(d);
        // Releases a stage, whose codes every warp has read. There is no branch around the barrier
        // of the warp, for which ptxas would serialise products. A block of a multicast cluster
        // releases to both, since each loads rows of a for both.
        const auto release = [&] {
            arch::sync_warp();
            if (previous >= 0 && laneid() == 0) arrive(shared.empty[previous]);
            if constexpr (Traits::slices > 1) {
                if (previous >= 0 && g.multicast > 1 && laneid() == 1) {
                    arrive_remote_relaxed(shared.empty[previous], arch::cluster_rank() ^ 1);
                }
            }
        };
        // One product is in flight while the fragments of the next are made.
        const auto take = [&](int piece, rt<T, 16, PIECE>& fragment) {
            auto& stage = shared.stages[slot];
            const auto words = W::load(stage.weight[row_group].address() + piece * Traits::piece,
                                       warpgroup::laneid());
            W::fragments(words, fragment);
            warpgroup::product<false, true>(d, fragment, stage.a[piece], true);
            warpgroup::mma_async_wait<1>();
        };
        const auto advance = [&] {
            previous = slot;
            if (++slot == C.stages) slot = 0, phase ^= 1;
        };
#pragma unroll 1
        for (int left = steps; left > 0; --left) {
#pragma unroll
            for (int stage = 0; stage < Traits::step_stages; ++stage) {
                wait(shared.full[slot], phase);
#pragma unroll
                for (int i = 0; i < rounds; ++i) {
                    take(i * C.k_groups + k_group, fragments[(stage * rounds + i) % 2]);
                    if (i == 0) release();
                }
                advance();
            }
        }
        warpgroup::mma_async_wait(d);
        release();
    }
};

template <class Traits>
__device__ __forceinline__ void consume(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    const int row_group = warpgroup::groupid() % C.row_groups,
              k_group = warpgroup::groupid() / C.row_groups;
    Mainloop<Traits> loop;
    TileEpilogue<Traits> epilogue;
    for_each_tile<Traits>(g, [&](const Tile& tile, const int2 range) {
        if (tile.group < g.groups) loop.run(g, shared, range.y - range.x, row_group, k_group);
        if (g.stream_k.on()) {
            if (range.y < g.k_steps) return StreamKPartials<Traits>::send(g, loop.d);
            if (range.x > 0) StreamKPartials<Traits>::receive(g, loop.d);
        }
        epilogue.tile(g, shared, loop.d, tile, row_group, k_group);
    });
    epilogue.end(g);
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void nvfp4_gemm_kernel(const __grid_constant__
                                                       typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool produces = warpgroup::groupid() == Traits::consumers;
    make_semaphores<Traits>(shared, produces, g.splits, g.multicast, [&] {
        tma::prefetch_map<typename Traits::slice>(g.a);
        arch::tma_prefetch_map(&g.weight);
    });
    // Other blocks of the cluster arrive at these semaphores when they have their sums, or with
    // rows of a.
    if (g.splits > 1) cluster::arrive();
    if (Traits::slices > 1 && g.multicast > 1) cluster::sync();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    swap_ab::run_roles<Traits>(
        g, produces, [&] { produce<Traits>(g, shared); }, [&] { consume<Traits>(g, shared); });
    // The cluster must not end early: other blocks of it read this block's shared memory and arrive
    // at its semaphores.
    if (g.splits * g.multicast > 1) cluster::sync();
}

}  // namespace sm90

template <Config C>
void launch(const Params& p, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    using Globals = typename Traits::Globals;
    const int in_cluster = p.schedule.splits * p.schedule.multicast;
    const int64_t k_steps = ceil_div(pieces(p.k), C.pieces * Traits::step_stages);
    sm90::StreamKRanges stream_k;
    if (p.schedule.stream_k) {
        const int64_t all =
            ceil_div(p.n, block_rows(C) * p.schedule.multicast) * ceil_div(p.m, C.tokens) * k_steps;
        const int clusters = p.schedule.blocks / in_cluster;
        stream_k = {static_cast<int>(all / clusters), static_cast<int>(all % clusters)};
    }
    // A stage's pieces in one copy. What is past the end of a group's rows is not stored.
    constexpr uint32_t WORDS = Traits::piece / Traits::lines / 4;
    const auto lines = uint64_t(pieces(p.k) * Traits::lines);
    const kittens::host::TensorMapSpec weight{
        .data = p.weight,
        .type = kittens::detail::tensor_map_type<float>(),
        .element_bytes = 4,
        .dims = {WORDS, lines, uint64_t(pieces(p.n) * p.groups), 1},
        .strides = {WORDS, int64_t(lines * WORDS), 0},
        .box = {WORDS, uint32_t(C.pieces * Traits::lines), uint32_t(C.row_groups), 1},
        .swizzle_bytes = 0,
    };
    Globals globals{
        .a = gemm::matrix_of<decltype(Globals::a)>(p.a, p.m, p.k, p.a_stride),
        .weight = kittens::host::encode_tensor_map(weight),
        .row_pieces = static_cast<uint32_t>(pieces(p.n)),
        .row_tiles = static_cast<uint32_t>(ceil_div(p.n, block_rows(C) * p.schedule.multicast)),
        .clusters = static_cast<uint32_t>(p.schedule.blocks / in_cluster),
        .k_steps = static_cast<int>(k_steps),
        .splits = p.schedule.splits,
        .multicast = p.schedule.multicast,
        .one_pass = p.schedule.splits > 1 && p.offs == nullptr &&
                    ceil_div(p.n, block_rows(C)) * ceil_div(p.m, C.tokens) <=
                        p.schedule.blocks / in_cluster,
        .stream_k = stream_k,
        .partials = static_cast<float4*>(p.workspace),
        .flags = reinterpret_cast<uint64_t*>(static_cast<char*>(p.workspace) +
                                             p.schedule.blocks * partial_bytes(C)),
        .epoch = p.epoch,
    };
    set_results(globals, p);
    const auto kernel = [] {
        if constexpr (Traits::splits_k)
            return sm90::nvfp4_split_k_kernel<Traits>;
        else
            return sm90::nvfp4_gemm_kernel<Traits>;
    }();
    gemm::launch_dependent<Traits>(kernel, dim3(p.schedule.blocks),
                                   dim3(in_cluster * sm90::split_k_cluster(C)), stream, globals);
}

}  // namespace thunderkittens::nvfp4_gemm
