// Matrix product on Hopper, a tile per block, over a cluster: blocks with tiles beside each other
// share loads by multicast, and blocks with the same tile divide its k (split-K). Of a tile that is
// divided each block finishes a share of the elements, reduced over the cluster's shared memory in
// the order of the blocks, so that reruns give the same bits. Roles: one warp loads, one to
// three warpgroups multiply 64 rows each, reduce and store.
//
// It is for few tiles, in all layouts. The ring of stages becomes the memory of the sums.
#pragma once

#include "csrc/gemm/dense/cluster_tile_epilogue_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// Loads rows of a stripe, for the blocks of the mask, or for this one alone.
__device__ __forceinline__ void load_slice(uint32_t to, const CUtensorMap* map,
                                           arch::TmaCoordinates from, uint32_t full, bool alone,
                                           uint16_t blocks) {
    if (alone)
        arch::tma_load<tma::CachePolicy::normal>(to, map, from, full);
    else
        arch::tma_load_multicast<tma::CachePolicy::normal>(to, map, from, full, blocks);
}

// Of a tile that several blocks share, each loads as many rows, for all of them.
template <class Traits>
__device__ __forceinline__ void load_range(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared,
                                           const ClusterTilePosition& at) {
    constexpr Config C = Traits::config;
    constexpr int row_bytes = Traits::stripe * 2;
    const int a_batch = g.a_batched ? at.batch : 0, b_batch = g.b_batched ? at.batch : 0;
    const bool a_alone = g.share_n == 1, b_alone = g.share_m == 1;
    const auto a_blocks = static_cast<uint16_t>(g.a_blocks << (at.part_rank + at.in_m));
    const auto b_blocks = static_cast<uint16_t>(g.b_blocks << (at.part_rank + g.share_m * at.in_n));
    const int a_first = g.a_slice * at.in_n, b_first = g.b_slice * at.in_m;
    int slot = 0, phase = 1;
#pragma unroll 1
    for (int step = at.first; step < at.end; ++step) {
        auto& stage = shared.ring[slot];
        semaphore& full = shared.semaphores.full[slot];
        const int k = step * BLOCK_K;
        wait(shared.semaphores.empty[slot], phase);
        tma::expect(full, stage);
#pragma unroll
        for (int i = 0; i < C.consumers; ++i) {
            const int m = static_cast<int>(at.m) + i * Traits::rows;
            load_slice(stage.a[i].address() + a_first * row_bytes, &g.a,
                       C.a_m_major ? arch::TmaCoordinates{m, k + a_first, 0, a_batch}
                                   : arch::TmaCoordinates{k, m + a_first, 0, a_batch},
                       full.address(), a_alone, a_blocks);
        }
#pragma unroll
        for (int i = 0; i < Traits::b_stripes; ++i) {
            const int n = static_cast<int>(at.n) + i * Traits::stripe;
            load_slice(stage.b.address() + (i * Traits::b_rows + b_first) * row_bytes, &g.b,
                       C.b_n_major ? arch::TmaCoordinates{n, k + b_first, 0, b_batch}
                                   : arch::TmaCoordinates{k, n + b_first, 0, b_batch},
                       full.address(), b_alone, b_blocks);
        }
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
}

// Releases a stage to the blocks that fill it: lane i of a consumer's first warp arrives at block i
// of the cluster. One arrival stands for the warpgroup, because wgmma reads shared memory for all
// of it.
struct StageRelease {
    bool own, alone;

    template <class Globals>
    __device__ __forceinline__ StageRelease(const Globals& g, const ClusterTilePosition& at)
        : alone(g.share_m * g.share_n == 1) {
        const uint32_t other = laneid() - at.part_rank, in_row = g.share_m * at.in_n;
        const bool shares = other < g.share_m * g.share_n &&
                            ((other & (g.share_m - 1)) == at.in_m || other - in_row < g.share_m);
        own = warpgroup::warpid() == 0 && (alone ? laneid() == 0 : shares);
    }
    __device__ __forceinline__ void operator()(semaphore& empty) const {
        if (!own) return;
        if (alone)
            arrive(empty);
        else
            arrive_remote_relaxed(empty, laneid());
    }
};

// The products of the block's range of k.
template <class Traits>
__device__ __forceinline__ void multiply_range(const typename Traits::Globals& g,
                                               typename Traits::Shared& shared, int steps,
                                               const StageRelease release,
                                               rt_fl<16, Traits::config.block_n>& d) {
    constexpr Config C = Traits::config;
    const int consumer = warpgroup::groupid();
    auto& [full, empty] = shared.semaphores;
    int slot = 0, phase = 0, previous = 0;
    for (int step = 0; step < steps; ++step) {
        auto& stage = shared.ring[slot];
        wait(full[slot], phase);
        warpgroup::product<C.a_m_major, !C.b_n_major>(d, stage.a[consumer], stage.b, step > 0);
        warpgroup::mma_async_wait<1>();
        if (step > 0) release(empty[previous]);
        previous = slot;
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
    warpgroup::mma_async_wait(d);
}

// The blocks of a cluster whose semaphores have been initialised meet.
__device__ __forceinline__ void meet_cluster() {
    arch::cluster_arrive_relaxed();
    arch::cluster_wait();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, Traits::most_per_sm) void cluster_tile_kernel(
    const __grid_constant__ typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& semaphores = allocator.template allocate<typename Traits::Semaphores>();
    typename Traits::Shared shared{semaphores,
                                   &allocator.template allocate<typename Traits::Stage>()};
    const bool loads = threadIdx.x >= Traits::consumer_threads;
    if (loads) {
        const int lane = laneid();
        if (lane == 0) {
            arch::tma_prefetch_map(&g.a);
            arch::tma_prefetch_map(&g.b);
        }
        if (lane < g.stages) {
            init_semaphore(semaphores.full[lane], 1);
            init_semaphore(semaphores.empty[lane],
                           Traits::config.consumers * (g.share_m + g.share_n - 1));
            arch::mbarrier_init_fence();
        }
    }
    const auto at = ClusterTilePosition::template of<Traits>(g);
    const bool multicast = g.share_m * g.share_n > 1;
    const bool whole = g.splits == 1 && g.store_only;
    if (loads) {
        arch::sync_warp();
        if (multicast) meet_cluster();
        arch::named_barrier_arrive(READY, Traits::threads);
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (arch::elect_one()) load_range<Traits>(g, shared, at);
        arch::sync_warp();
        if (!whole && g.splits > 1) cluster::sync();
    } else {
        if (multicast) meet_cluster();
        arch::named_barrier_sync(READY, Traits::threads);
        arch::wait_for_dependencies();
        rt_fl<16, Traits::config.block_n> d;
        multiply_range<Traits>(g, shared, at.end - at.first, StageRelease(g, at), d);
        // The commonest store comes first and by itself, because a short kernel waits for code that
        // it jumps over.
        if (whole) {
            if (multicast) arch::cluster_arrive();
            store_tile<Traits>(g, shared, at, d);
            if (multicast) arch::cluster_wait();
            return;
        }
        share_sums<Traits>(shared, d);
        if (g.splits > 1)
            cluster::sync();
        else
            sync_consumers<Traits>();
        finish_share<Traits>(g, shared, at);
    }
    // The others read this block's sums, load into its stages and arrive at its semaphores.
    if (g.cluster_blocks() > 1) {
        arch::cluster_arrive();
        arch::cluster_wait();
    }
}

}  // namespace sm90

template <Config C>
void launch_cluster_tile(const Params& p, Stream stream) {
    using Traits = sm90::ClusterTileTraits<C>;
    using namespace kittens;
    const Schedule& schedule = p.schedule;
    const auto share_m = static_cast<unsigned>(schedule.share_m),
               share_n = static_cast<unsigned>(schedule.share_n),
               splits = static_cast<unsigned>(schedule.splits);
    // The tensor map of an operand, `rows` by `cols` as it lies in memory.
    const auto map_of = [&](const void* data, int64_t rows, int64_t cols, int64_t stride,
                            int64_t batch_stride, unsigned box_rows) {
        return host::encode_tensor_map(
            {.data = data,
             .type = kittens::detail::tensor_map_type<typename Traits::T>(),
             .element_bytes = 2,
             .dims = {uint64_t(cols), uint64_t(rows), 1, uint64_t(batch_stride != 0 ? p.batch : 1)},
             .strides = {stride, 0, batch_stride},
             .box = {Traits::stripe, box_rows, 1, 1},
             .swizzle_bytes = 128});
    };
    using Globals = typename Traits::Globals;
    const auto aligned = [&](int64_t elements) {
        return reinterpret_cast<uintptr_t>(p.out) % (elements * 2) == 0 && p.n % elements == 0 &&
               p.out_stride % elements == 0 && p.out_batch_stride % elements == 0;
    };
    const int k_blocks = static_cast<int>(ceil_div(p.k, BLOCK_K));
    // A ring of no more stages than there are steps leaves room for blocks of the next kernel.
    const int stages =
        std::clamp(static_cast<int>(ceil_div(k_blocks, schedule.splits)), Traits::least_stages,
                   cluster_tile_stages(C, std::min(schedule.per_sm, Traits::most_per_sm)));
    const bool fused = p.epilogue.aux != nullptr || p.epilogue.residual != nullptr ||
                       p.epilogue.activation != Activation::none;
    unsigned a_blocks = 0;
    for (unsigned n = 0; n < share_n; ++n) a_blocks |= 1u << n * share_m;
    const Globals globals{
        .a = map_of(p.a, C.a_m_major ? p.k : p.m, C.a_m_major ? p.m : p.k, p.a_stride,
                    p.a_batch_stride, Traits::a_rows / share_n),
        .b = map_of(p.b, C.b_n_major ? p.k : p.n, C.b_n_major ? p.n : p.k, p.b_stride,
                    p.b_batch_stride, Traits::b_rows / share_m),
        .stages = stages,
        .splits = schedule.splits,
        .share_m = share_m,
        .share_n = share_n,
        .a_blocks = a_blocks,
        .b_blocks = (1u << share_m) - 1,
        .a_slice = Traits::a_rows / schedule.share_n,
        .b_slice = Traits::b_rows / schedule.share_m,
        .part = k_blocks / schedule.splits,
        .longer = k_blocks % schedule.splits,
        .a_batched = p.a_batch_stride != 0,
        .b_batched = p.b_batch_stride != 0,
        .vec4_aligned =
            is_vec4_aligned(p.out, p.out_stride, p.out_dtype) && p.out_batch_stride % 4 == 0 &&
            (p.epilogue.aux == nullptr || is_vec4_aligned(p.epilogue.aux, p.n, p.out_dtype)) &&
            (p.epilogue.residual == nullptr ||
             (is_vec4_aligned(p.epilogue.residual, p.epilogue.residual_stride, p.out_dtype) &&
              p.epilogue.residual_batch_stride % 4 == 0)),
        .store_only = p.out_dtype == C.dtype && p.epilogue.bias == nullptr &&
                      p.epilogue.alpha == 1.f && !fused,
        .vec8_aligned = aligned(8),
        .vec2_aligned = aligned(2),
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .epilogue = p.epilogue,
    };
    const auto clusters = [&](int64_t size, int block, unsigned blocks) {
        return static_cast<unsigned>(round_up(ceil_div(size, block), blocks));
    };
    kittens::launch(LaunchOptions{.dependent = true}, sm90::cluster_tile_kernel<Traits>,
                    dim3(clusters(p.m, C.block_m, share_m), clusters(p.n, C.block_n, share_n),
                         static_cast<unsigned>(p.batch) * splits),
                    dim3(Traits::threads), dim3(share_m, share_n, splits),
                    1024 + stages * sizeof(typename Traits::Stage), stream, globals);
}

}  // namespace thunderkittens::gemm
