// Single-wave matrix product on Hopper: every block has one tile of 128 x 256, whose sums are only
// rounded. It is the kernel of persistent_sm90.cuh without what a second tile would need. Roles:
// one warp loads, two warpgroups multiply and store.
//
// What such a kernel saves is time at its start. With three warps less, no exchange of registers
// and a fifth of the code, the first load is issued earlier. Before that the consumers, who have
// nothing to do yet, prefetch the lines of the first step into L2, each block its share of what a
// row or a column of blocks reads. Until that step is there only the next one is loaded: loads
// farther ahead would delay it.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// An operand as the prefetch sees it: where its rows lie in memory, and how many lines a block
// prefetches.
struct Lines {
    const void* data;
    int64_t stride, batch_stride;  // in bytes
    uint32_t rows, row_bytes;
    uint32_t share;
};

template <Config C>
struct SingleWaveGlobals {
    Lines a, b;
    uint32_t last_row;  // where the last row of tiles begins
    typename KernelTraits<C>::Globals product;
};

template <class Traits>
constexpr int SINGLE_WAVE_THREADS = single_wave_threads(Traits::config);

// Prefetches a share of a tile's first step into L2; called by a warpgroup. The tile has `width`
// rows or columns, from `first` on. The kernel before may still be writing them, which it does in
// L2 as well.
constexpr int LINE = 128;
template <int width, bool along_k>
__device__ __forceinline__ void prefetch_lines(const Lines& lines, uint32_t batch, uint32_t first,
                                               uint32_t part) {
    constexpr int per_row = (along_k ? BLOCK_K : width) * 2 / LINE;
    const char* data = static_cast<const char*>(lines.data) + batch * lines.batch_stride;
#pragma unroll 1
    for (uint32_t i = warpgroup::laneid(); i < lines.share; i += WARPGROUP_THREADS) {
        const uint32_t line = part * lines.share + i;
        const uint32_t row = line / per_row + (along_k ? first : 0);
        const uint32_t byte = line % per_row * LINE + (along_k ? 0 : first * 2);
        if (row < lines.rows && byte < lines.row_bytes) {
            arch::prefetch_global(data + row * lines.stride + byte);
        }
    }
}

template <Config C>
__device__ __forceinline__ void produce_single_wave(const typename KernelTraits<C>::Globals& g,
                                                    typename KernelTraits<C>::Shared& shared,
                                                    uint32_t m) {
    static_assert(C.stages >= 3);
    Ring<C.stages> ring;
    for (int step = 0; step < g.k_blocks; ++step, ring.advance()) {
        auto& stage = shared.stages[ring.stage];
        semaphore& full = shared.full[ring.stage];
        wait(shared.empty[ring.stage], ring.phase ^ 1);
        if (step == 2) wait(shared.full[0], 0);
        tma::expect(full, stage);
        load_step<KernelTraits<C>>(g, stage, full, blockIdx.z, static_cast<int>(m),
                                   blockIdx.y * C.block_n, step * BLOCK_K);
    }
}

template <Config C>
__device__ __forceinline__ void consume_single_wave(const typename KernelTraits<C>::Globals& g,
                                                    typename KernelTraits<C>::Shared& shared,
                                                    uint32_t m) {
    using Traits = KernelTraits<C>;
    const int consumer = warpgroup::groupid();
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    constexpr int TAIL = READY + 1 + C.consumers;  // named barrier
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
    // Staggered tail, see persistent_sm90.cuh.
    const int tail_begin = consumer > 0 ? max(0, g.k_blocks - (C.stages - 1)) : -1;
    int previous = 0;
    for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
        if (k == tail_begin) arch::named_barrier_sync(TAIL, C.consumers * WARPGROUP_THREADS);
        auto& stage = shared.stages[ring.stage];
        wait(shared.full[ring.stage], ring.phase);
        if constexpr (C.a_m_major) {
            auto rows = stage.a.template subtile<BLOCK_K, Traits::consumer_rows>({0, consumer});
            warpgroup::product<true, !C.b_n_major>(d, rows, stage.b, k > 0);
        } else {
            auto rows = stage.a.template subtile<Traits::consumer_rows, BLOCK_K>({consumer, 0});
            warpgroup::product<false, !C.b_n_major>(d, rows, stage.b, k > 0);
        }
        warpgroup::mma_async_wait<1>();
        if (k > 0) release(previous);
        previous = ring.stage;
    }
    if (consumer == 0) {
        arch::named_barrier_arrive(TAIL, C.consumers * WARPGROUP_THREADS);
    }
    warpgroup::mma_async_wait(d);
    // Where a's rows are adjacent in memory, a warp's share of a stage holds rows of other warps.
    if constexpr (C.a_m_major) warpgroup::sync(READY + 1 + consumer);
    const uint32_t row = m + consumer * Traits::consumer_rows + warpgroup::warpid() * 16;
    DeferredStore<C>::template send_last<typename Traits::T>(
        g, shared, d, {blockIdx.z, row, blockIdx.y * C.block_n});
    if (laneid() == 0) tma::store_async_read_wait();
}

template <class Traits>
__global__ __launch_bounds__(SINGLE_WAVE_THREADS<Traits>, 1) void single_wave_kernel(
    const __grid_constant__ SingleWaveGlobals<Traits::config> g) {
    constexpr Config C = Traits::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const uint32_t m = min(blockIdx.x * C.block_m, g.last_row);

    if (kittens::warpid() == C.consumers * WARPGROUP_WARPS) {
        if (start_loading<Traits>(shared, SINGLE_WAVE_THREADS<Traits>))
            produce_single_wave<C>(g.product, shared, m);
        return;
    }
    if (warpgroup::groupid() == 0) {
        prefetch_lines<C.block_m, !C.a_m_major>(g.a, g.product.a_batched ? blockIdx.z : 0, m,
                                                blockIdx.y);
    } else {
        prefetch_lines<C.block_n, !C.b_n_major>(g.b, g.product.b_batched ? blockIdx.z : 0,
                                                blockIdx.y * C.block_n, blockIdx.x);
    }
    arch::named_barrier_sync(READY, SINGLE_WAVE_THREADS<Traits>);
    arch::wait_for_dependencies();
    consume_single_wave<C>(g.product, shared, m);
}

// `readers`: the blocks that read the same tile of the operand.
inline Lines lines_of(const void* data, bool along_k, int64_t outer, int64_t k, int64_t stride,
                      int64_t batch_stride, int width, int64_t readers) {
    return {data,
            stride * 2,
            batch_stride * 2,
            static_cast<uint32_t>(along_k ? outer : k),
            static_cast<uint32_t>((along_k ? k : outer) * 2),
            static_cast<uint32_t>(ceil_div(width * BLOCK_K * 2 / LINE, readers))};
}

}  // namespace sm90

template <Config C>
void launch_single_wave(const Params& p, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    static_assert(has_single_wave(C) && C.consumers == 2);
    const sm90::SingleWaveGlobals<C> g{
        .a = sm90::lines_of(p.a, !C.a_m_major, p.m, p.k, p.a_stride, p.a_batch_stride, C.block_m,
                            ceil_div(p.n, C.block_n)),
        .b = sm90::lines_of(p.b, !C.b_n_major, p.n, p.k, p.b_stride, p.b_batch_stride, C.block_n,
                            ceil_div(p.m, C.block_m)),
        .last_row = last_row(static_cast<uint32_t>(p.m), C.block_m, C.a_m_major),
        .product = sm90::make_globals<C>(p)};
    const dim3 grid = sm90::grid_of<C>(p, g.product.one_wave);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::single_wave_kernel<Traits>,
                    grid, dim3(sm90::SINGLE_WAVE_THREADS<Traits>), dim3(1),
                    sizeof(typename Traits::Shared), stream, g);
}

}  // namespace thunderkittens::gemm
