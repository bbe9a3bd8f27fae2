// Matrix product on Hopper for small problems: tiles of 64 x 128 and 64 x 64 with one consumer
// warpgroup, of which a block mostly has a single one. Roles: one warp loads, one warpgroup
// multiplies and stores.
//
// A deferred store has no next tile to overlap with then, and its code would be in the way: a
// kernel that runs for a few microseconds behind other work finds its instructions in memory, and
// every jump over a longer body waits for them. So a finished tile is stored at once, and the way
// from the last product to the stores has the least code.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// Calls work(tile) for each of this block's tiles. Where every block has one, the tiles are the
// grid; else the grid has one dimension, and the same formula holds for the first tile. With a
// choice between the two, or a branch in `work` that is not the same for a whole block, the
// compiler does not keep the number of the stage in a uniform register, where wgmma wants it, but
// moves it there sixteen times a step.
template <class Globals, class Work>
__device__ __forceinline__ void for_each_one_consumer_tile(const Globals& g, Work work) {
    const uint32_t first = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    for (uint32_t i = first; i < g.order.total; i += g.blocks) work(g.order.at(i));
}

template <Config C>
__device__ __forceinline__ void consume_one_consumer(const typename KernelTraits<C>::Globals& g,
                                                     typename KernelTraits<C>::Shared& shared) {
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    DeferredStore<C> deferred;
    Bias<C> bias;
    for_each_one_consumer_tile(g, [&](const TilePosition at) {
        const uint32_t col = at.n * C.block_n;
        const uint32_t row = KernelTraits<C>::first_row(g, at.m) + warpgroup::warpid() * 16;
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

        deferred.at = {at.batch, row, col};
        // The commonest store comes first and by itself, because a short kernel waits for code that
        // it jumps over.
        if (g.store_only) {
            deferred.template pack<typename KernelTraits<C>::T>(d);
            return deferred.store_one_tile(g, shared);
        }
        if (g.epilogue.alpha != 1.f) scale(d, g.epilogue.alpha);
        if (g.epilogue.bias != nullptr) bias.add(shared.bias[0], d);
        if (g.out_dtype == DType::fp32) {
            return store_wide<C>(g, shared, d, at.batch, row, col);
        }
        if (g.out_dtype == DType::bf16)
            deferred.template pack<bf16>(d);
        else
            deferred.template pack<half>(d);
        deferred.store_now(g, shared);
    });
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void one_consumer_kernel(const __grid_constant__
                                                         typename Traits::Globals g) {
    constexpr Config C = Traits::config;
    static_assert(C.consumers == 1 && !C.fused && !C.masked);
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() > 0) return;
        if (start_loading<Traits>(shared, READY_THREADS<Traits>)) produce<C>(g, shared);
    } else {
        arch::named_barrier_sync(READY, READY_THREADS<Traits>);
        arch::wait_for_dependencies();
        consume_one_consumer<C>(g, shared);
    }
}

}  // namespace sm90

template <Config C>
void launch_one_consumer(const Params& params, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    const auto globals = sm90::make_globals<C>(params);
    launch_dependent<Traits>(sm90::one_consumer_kernel<Traits>,
                             sm90::grid_of<C>(params, globals.one_wave), dim3(1), stream, globals);
}

}  // namespace thunderkittens::gemm
