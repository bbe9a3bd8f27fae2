// Product of 16-bit activations and prepared weights of fewer bits on Hopper.
//
// The operands change places: rows of the weight are the rows of a tensor core's tile, rows of a
// its columns. The weight travels to shared memory in the bits that it has; a warpgroup makes
// 16-bit fragments of it in registers, which wgmma takes as its first operand. While the products
// of one piece of 64 x 64 elements run, the fragments of the next are made, in other registers.
//
// A block has one warp that loads and row_groups * k_groups warpgroups that multiply. The warp
// keeps a ring of stages filled, all pieces of a stage by one copy. Tiles are dealt out evenly over
// persistent blocks. Where there are few tiles, the blocks of a cluster divide k, and each sums
// the partial results of a share of the tile's elements, in a fixed order, over the cluster's
// shared memory. Where rounds of tiles would leave SMs idle, blocks take equal ranges of all tiles'
// steps of k, and hand sums on through memory, also in a fixed order: reruns give the same bits.
//
// The sums pass through shared memory, which turns them round: each thread then does the epilogue
// of four neighbouring columns of a row.
#pragma once

#include "csrc/gemm/swap_ab/nvfp4_split_k_sm90.cuh"

namespace thunderkittens::mixed_gemm {
namespace sm90 {

template <class K>
__device__ __forceinline__ void produce(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr Config C = K::config;
    const int rank = g.sharers > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
    int slot = 0, phase = 1;
    for_each_tile<K>(g, [&](const Tile& tile, const int2 range) {
        if (tile.group >= g.groups || range.x >= range.y) return;
        // Of few rows of a, blocks begin at different k, not to read the same lines of it all at
        // once; of many, at the same, to find in the L2 cache what others have just read.
        const auto row = static_cast<int>(tile.group * g.row_pieces + tile.row_tile * C.row_groups);
        int k = range.x;
        if (C.tokens <= 64)
            k += static_cast<int>(tile.row_tile / g.sharers * 37u % uint32_t(range.y - range.x));
        for (int step = range.x; step < range.y; ++step) {
#pragma unroll 1
            for (int part = 0; part < K::step_stages; ++part) {
                auto& stage = shared.stages[slot];
                semaphore& full = shared.full[slot];
                const int first = (k * K::step_stages + part) * C.pieces;
                wait(shared.empty[slot], phase);
                tma::expect_bytes(full, K::stage_bytes);
                arch::tma_load<tma::CachePolicy::normal>(
                    stage.weight[0].address(), &g.weight,
                    arch::TmaCoordinates{0, first * K::lines, row, 0}, full.address());
#pragma unroll
                for (int i = 0; i < C.pieces; ++i) {
                    auto& parts = reinterpret_cast<typename K::part(&)[K::parts]>(stage.a[i]);
#pragma unroll
                    for (int j = 0; j < K::parts; ++j) {
                        const auto from =
                            elements(0, 0, static_cast<int>(tile.token) + j * K::part_rows,
                                     (first + i) * PIECE);
                        if (g.sharers == 1) {
                            tma::load_async<2, tma::CachePolicy::evict_last>(parts[j], g.a, from,
                                                                             full);
                        } else if (rank == j) {
                            tma::cluster::load_async<2, tma::CachePolicy::evict_last>(
                                parts[j], g.a, from, full, uint16_t{(1 << K::parts) - 1});
                        }
                    }
                }
                if (++slot == C.stages) slot = 0, phase ^= 1;
            }
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
                                        int steps, int row_group, int k_group) {
        constexpr int rounds = C.pieces / C.k_groups;
        static_assert(C.pieces % C.k_groups == 0 && rounds * K::step_stages % 2 == 0);
        int previous = -1;  // the stage before, if its products are of this tile
        // Products add to zeros: what ordinary instructions make of the sums behind the loop would
        // else come back to it, and ptxas would serialise all products.
        warp::zero(d);
        // Every warp has read its codes. Without a branch around the barrier of the warp, for which
        // ptxas would serialise products. Who shares rows of a writes them for all.
        const auto release = [&] {
            arch::sync_warp();
            if (previous >= 0 && laneid() == 0) arrive(shared.empty[previous]);
            if constexpr (K::parts > 1) {
                if (previous >= 0 && g.sharers > 1 && laneid() == 1) {
                    arrive_remote_relaxed(shared.empty[previous], arch::cluster_rank() ^ 1);
                }
            }
        };
        // One product is in flight while the fragments of the next are made.
        const auto take = [&](int piece, rt<T, 16, PIECE>& fragment) {
            auto& stage = shared.stages[slot];
            const auto words =
                W::load(stage.weight[row_group].address() + piece * K::piece, warpgroup::laneid());
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
            for (int stage = 0; stage < K::step_stages; ++stage) {
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

template <class K>
__device__ __forceinline__ void consume(const typename K::Globals& g, typename K::Shared& shared) {
    constexpr Config C = K::config;
    const int row_group = warpgroup::groupid() % C.row_groups,
              k_group = warpgroup::groupid() / C.row_groups;
    Mainloop<K> loop;
    Finish<K> finish;
    for_each_tile<K>(g, [&](const Tile& tile, const int2 range) {
        if (tile.group < g.groups) loop.run(g, shared, range.y - range.x, row_group, k_group);
        if (g.ranges.on()) {
            if (range.y < g.k_steps) return Parts<K>::send(g, loop.d);
            if (range.x > 0) Parts<K>::receive(g, loop.d);
        }
        finish.tile(g, shared, loop.d, tile, row_group, k_group);
    });
    finish.end(g);
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void mixed_gemm_kernel(const __grid_constant__
                                                                   typename K::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool produces = warpgroup::groupid() == K::consumers;
    make_semaphores<K>(shared, produces, g.splits, g.sharers, [&] {
        tma::prefetch_map<typename K::part>(g.a);
        arch::tma_prefetch_map(&g.weight);
    });
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
    const int64_t k_steps = ceil_div(pieces(p.k), C.pieces * K::step_stages);
    sm90::EqualRanges ranges;
    if (p.schedule.ranges) {
        const int64_t all = ceil_div(p.n, block_rows(C) * p.schedule.sharers) *
                            int64_t{ceil_div(p.m, C.tokens)} * k_steps;
        const int clusters = p.schedule.blocks / in_cluster;
        ranges = {static_cast<int>(all / clusters), static_cast<int>(all % clusters)};
    }
    // A stage's pieces in one copy. What is past the end of a group's rows is not stored.
    constexpr uint32_t WORDS = K::piece / K::lines / 4;
    const auto lines = uint64_t(pieces(p.k) * K::lines);
    const kittens::host::TensorMapSpec weight{
        .data = p.weight,
        .type = kittens::detail::tensor_map_type<float>(),
        .element_bytes = 4,
        .dims = {WORDS, lines, uint64_t(pieces(p.n) * p.groups), 1},
        .strides = {WORDS, int64_t(lines * WORDS), 0},
        .box = {WORDS, uint32_t(C.pieces * K::lines), uint32_t(C.row_groups), 1},
        .swizzle_bytes = 0,
    };
    const typename K::Globals globals{
        .a = A(static_cast<typename A::T*>(const_cast<void*>(p.a)), nullptr, nullptr, p.m, p.k,
               kittens::gl_strides{0, 0, p.a_stride}),
        .weight = kittens::host::encode_tensor_map(weight),
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
        .k_steps = static_cast<int>(k_steps),
        .splits = p.schedule.splits,
        .sharers = p.schedule.sharers,
        .at_once = p.schedule.splits > 1 && p.offs == nullptr &&
                   ceil_div(p.n, block_rows(C)) * int64_t{ceil_div(p.m, C.tokens)} <=
                       p.schedule.blocks / in_cluster,
        .ranges = ranges,
        .parts = static_cast<float4*>(p.scratch),
        .marks = reinterpret_cast<uint64_t*>(static_cast<char*>(p.scratch) +
                                             p.schedule.blocks * part_bytes(C)),
        .mark = p.mark,
    };
    const auto kernel = [] {
        if constexpr (K::exchanges)
            return sm90::mixed_exchange_kernel<K>;
        else
            return sm90::mixed_gemm_kernel<K>;
    }();
    kittens::launch(kittens::LaunchOptions{.dependent = true}, kernel, dim3(p.schedule.blocks),
                    dim3(K::threads), dim3(in_cluster * sm90::exchange_cluster(C)),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::mixed_gemm
