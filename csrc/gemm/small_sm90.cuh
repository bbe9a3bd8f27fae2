// Matrix product on Hopper where a block mostly has a single tile: the kernel of gemm_sm90.cuh for
// tiles of 64 rows, with one consumer warpgroup.
//
// There is no next tile then in whose shadow the last could leave, and the code that would do it is
// in the way: a kernel that runs for a few microseconds behind other work finds its instructions in
// memory, and every jump over a longer body waits for them. So a finished tile leaves at once, the
// way from the last product to the stores has the least code, and there are no clusters.
#pragma once

#include <stdexcept>

#include "csrc/gemm/gemm_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C, class Work>
__device__ __forceinline__ void for_each_small_tile(const typename Types<C>::Globals& g,
                                                    Work work) {
    for (uint32_t i = blockIdx.x; i < g.order.total; i += g.clusters) work(g.order.at(i));
}

template <Config C>
__device__ __forceinline__ void produce_small(const typename Types<C>::Globals& g,
                                              typename Types<C>::Shared& shared) {
    using K = Types<C>;
    Ring<C.stages> ring;
    for_each_small_tile<C>(g, [&](const TilePosition at) {
        const int m = static_cast<int>(at.m) * C.block_m, n = static_cast<int>(at.n) * C.block_n;
        const int a_batch = g.a_batched ? static_cast<int>(at.batch) : 0;
        const int b_batch = g.b_batched ? static_cast<int>(at.batch) : 0;
        for (int step = 0; step < g.k_blocks; ++step, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            const int k = step * BLOCK_K;
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect(full, stage);
            static_assert(K::a_parts == 1);
            tma::load_async(reinterpret_cast<typename K::a_part&>(stage.a), g.a,
                            C.a_m_major ? elements(a_batch, 0, k, m) : elements(a_batch, 0, m, k),
                            full);
            auto& b_parts = reinterpret_cast<typename K::b_part(&)[K::b_parts]>(stage.b);
#pragma unroll
            for (int i = 0; i < K::b_parts; ++i) {
                const int col = n + i * K::b_part_cols;
                tma::load_async(
                    b_parts[i], g.b,
                    C.b_n_major ? elements(b_batch, 0, k, col) : elements(b_batch, 0, col, k),
                    full);
            }
        }
    });
}

template <Config C>
__device__ __forceinline__ void consume_small(const typename Types<C>::Globals& g,
                                              typename Types<C>::Shared& shared) {
    // One arrival stands for the warpgroup, which wgmma reads shared memory as.
    const auto release = [&](int stage) {
        if (warpgroup::laneid() == 0) arrive(shared.empty[stage]);
    };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    Finished<C> finished;
    Bias<C> bias;
    for_each_small_tile<C>(g, [&](const TilePosition at) {
        const uint32_t col = at.n * C.block_n;
        const uint32_t row = at.m * C.block_m + warpgroup::warpid() * 16;
        if (g.epilogue.bias != nullptr) bias.fetch(g, col);

        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            warpgroup::product<C.a_m_major, !C.b_n_major>(d, stage.a, stage.b, k > 0);
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        warpgroup::mma_async_wait(d);
        release(previous);

        if (g.epilogue.alpha != 1.f) scale(d, g.epilogue.alpha);
        if (g.epilogue.bias != nullptr) bias.add(shared.bias[0], d);
        if (g.out_dtype == DType::fp32) {
            return store_wide<C>(g, shared, d, at.batch, row, col);
        }
        if (g.out_dtype == DType::bf16)
            finished.template pack<bf16>(d);
        else
            finished.template pack<half>(d);
        finished.at = {at.batch, row, col};
        if (!g.tma_store) return finished.send_by_warp(g, shared);
#pragma unroll
        for (int piece = 0; piece < finished.pieces; ++piece) finished.send(g, shared, piece);
    });
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void small_gemm_kernel(const __grid_constant__
                                                                   typename K::Globals g) {
    constexpr Config C = K::config;
    static_assert(C.consumers == 1 && !C.fused && !C.marked);
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                tma::prefetch_map<typename K::a_part>(g.a);
                tma::prefetch_map<typename K::b_part>(g.b);
                tma::prefetch_map<typename K::out_tile>(g.out_map);
                for (int i = 0; i < C.stages; ++i) {
                    init_semaphore(shared.full[i], 1);
                    init_semaphore(shared.empty[i], 1);
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        arch::named_barrier_arrive(READY, K::threads);
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce_small<C>(g, shared);
    } else {
        arch::named_barrier_sync(READY, K::threads);
        arch::wait_for_dependencies();
        consume_small<C>(g, shared);
    }
}

}  // namespace sm90

template <Config C>
void launch_small(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    if (params.schedule.cluster_m * params.schedule.cluster_n > 1) {
        throw std::invalid_argument("gemm: kernels with tiles of 64 rows have no clusters");
    }
    const auto globals = sm90::make_globals<C>(params);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::small_gemm_kernel<K>,
                    dim3(params.schedule.blocks), dim3(K::threads), dim3(1),
                    sizeof(typename K::Shared), stream, globals);
}

// The launcher of a configuration, in place of the one in gemm_sm90.cuh.
#define TK_LAUNCH_SMALL(...)                                   \
    template <>                                                \
    void launch<__VA_ARGS__>(const Params& p, Stream stream) { \
        launch_small<__VA_ARGS__>(p, stream);                  \
    }

}  // namespace thunderkittens::gemm
