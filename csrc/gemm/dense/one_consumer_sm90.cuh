// Matrix product on Hopper where a block mostly has a single tile: the kernel of
// persistent_sm90.cuh for tiles of 64 rows, with one consumer warpgroup.
//
// There is no next tile then in whose shadow the last could leave, and the code that would do it is
// in the way: a kernel that runs for a few microseconds behind other work finds its instructions in
// memory, and every jump over a longer body waits for them. So a finished tile leaves at once, and
// the way from the last product to the stores has the least code.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// Calls work(tile) for each of this block's tiles. Where every block has one, they are the grid;
// else that has one dimension, and the same formula holds for the first tile. With a choice between
// the two, or a branch in `work` that is not the same for a whole block, the number of the stage is
// not kept in a uniform register, where wgmma wants it, but moved there sixteen times a step.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_small_tile(const Globals& g, Work work) {
    const uint32_t first = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    for (uint32_t i = first; i < g.order.total; i += g.blocks) work(g.order.at(i));
}

template <Config C>
__device__ __forceinline__ void consume_small(const typename Types<C>::Globals& g,
                                              typename Types<C>::Shared& shared) {
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    Finished<C> finished;
    Bias<C> bias;
    for_each_small_tile(g, [&](const TilePosition at) {
        const uint32_t col = at.n * C.block_n;
        const uint32_t row = Types<C>::first_row(g, at.m) + warpgroup::warpid() * 16;
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

        finished.at = {at.batch, row, col};
        // The usual way first and by itself.
        if (g.plain) {
            finished.template pack<typename Types<C>::T>(d);
            return finished.send_soon(g, shared);
        }
        if (g.epilogue.alpha != 1.f) scale(d, g.epilogue.alpha);
        if (g.epilogue.bias != nullptr) bias.add(shared.bias[0], d);
        if (g.out_dtype == DType::fp32) {
            return store_wide<C>(g, shared, d, at.batch, row, col);
        }
        if (g.out_dtype == DType::bf16)
            finished.template pack<bf16>(d);
        else
            finished.template pack<half>(d);
        finished.send_now(g, shared);
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
        if (warpgroup::warpid() > 0) return;
        if (start_loading<K>(shared, READY_THREADS<K>)) produce<C>(g, shared);
    } else {
        arch::named_barrier_sync(READY, READY_THREADS<K>);
        arch::wait_for_dependencies();
        consume_small<C>(g, shared);
    }
}

}  // namespace sm90

template <Config C>
void launch_small(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    const auto globals = sm90::make_globals<C>(params);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::small_gemm_kernel<K>,
                    sm90::grid_of<C>(params, globals.one_round), dim3(K::threads), dim3(1),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::gemm
