// Single-wave matrix product on Hopper for the smallest problems: every block has one whole tile of
// 64 x 64, whose sums are only rounded and stored in rows that are aligned to 16 bytes. Roles: one
// warp loads, one warpgroup multiplies and stores.
//
// Such a kernel runs for some 3 us, and what it waits for first is its own instructions and
// parameters, which lie in memory. Every jump over a longer body waits for instructions. So it has
// nothing that is not needed: tiles are not counted, nothing is clipped, there is one way to store,
// and it has the least code between the last product and the stores. The warp that loads
// initialises the semaphores of the first loads alone, issues these loads, and then initialises the
// others.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// The elements of a vector of 16 bytes.
constexpr int VEC_ELEMENTS = 8;

template <Config C>
struct SingleWaveTraits : KernelTraits<C> {
    using Traits = KernelTraits<C>;
    static_assert(has_single_wave_64x64(C) && C.consumers == 1 && !C.fused && !C.masked);
    static_assert(C.block_n == Traits::out_tile::cols);
    static constexpr int threads = single_wave_threads(C);

    struct Shared {
        typename Traits::Stage stages[C.stages];
        typename Traits::out_tile out[WARPGROUP_WARPS];
        semaphore full[C.stages], empty[C.stages];
    };
    static_assert(sizeof(Shared) == single_wave_64x64_shared_bytes(C),
                  "single_wave.h knows another size");

    struct Globals {
        int k_blocks;
        uint32_t last_row;  // where the last row of tiles begins
        bool a_batched, b_batched, evict_first_b;
        // In vectors of 16 bytes: through a pointer to elements the compiler would store four times
        // 4 bytes.
        uint4* out;
        int64_t out_stride, out_batch_stride;
        decltype(Traits::Globals::a) a;
        decltype(Traits::Globals::b) b;
    };
    static __device__ __forceinline__ uint32_t column(const Globals&, uint32_t col, int offset) {
        return col + offset;
    }
};

template <class Traits>
__device__ __forceinline__ void produce_single_wave_64x64(const typename Traits::Globals& g,
                                                          typename Traits::Shared& shared,
                                                          bool loads) {
    constexpr Config C = Traits::config;
    const int m = static_cast<int>(min(blockIdx.x * C.block_m, g.last_row));
    const uint32_t n = blockIdx.y * C.block_n;
    const auto load = [&](int stage, int step) {
        tma::expect(shared.full[stage], shared.stages[stage]);
        load_step<Traits>(g, shared.stages[stage], shared.full[stage], blockIdx.z, m, n,
                          step * BLOCK_K);
    };
    int step = 0;
    if (loads) {
        for (semaphore& full : shared.full) init_semaphore(full, 1);
        arch::mbarrier_init_fence();
    }
    arch::wait_for_dependencies();
    if (loads) {
        const int first = min(C.stages, g.k_blocks);
#pragma unroll 1
        for (; step < first; ++step) load(step, step);
        for (semaphore& empty : shared.empty) init_semaphore(empty, 1);
    }
    arch::sync_warp();
    arch::named_barrier_arrive(READY, Traits::threads);
    arch::launch_dependents();
    if (!loads) return;
    Ring<C.stages> ring;
    for (; step < g.k_blocks; ++step, ring.advance()) {
        wait(shared.empty[ring.stage], ring.phase);
        load(ring.stage, step);
    }
}

template <class Traits>
__device__ __forceinline__ void consume_single_wave_64x64(const typename Traits::Globals& g,
                                                          typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    const auto release = [&](int stage) { release_stage(shared.empty[stage]); };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> d;
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

    rt_bf<16, C.block_n> values;
    round_to<typename Traits::T>(values, d);
    auto& buffer = shared.out[kittens::warpid()];
    kittens::warp::store(buffer, values);
    arch::sync_warp();
    constexpr int lanes = C.block_n / VEC_ELEMENTS, rows = WARP_THREADS / lanes;
    const int row = laneid() / lanes, part = laneid() % lanes;
    uint4* to = g.out + (blockIdx.z * g.out_batch_stride +
                         (min(blockIdx.x * C.block_m, g.last_row) + kittens::warpid() * 16 + row) *
                             g.out_stride +
                         blockIdx.y * lanes + part);
#pragma unroll
    for (int first = 0; first < 16; first += rows) {
        arch::store_global(
            to, arch::load_shared<uint4>(buffer.address_of(first + row, part * VEC_ELEMENTS)));
        to += rows * g.out_stride;
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void single_wave_64x64_kernel(const __grid_constant__
                                                              typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    if (threadIdx.x >= WARPGROUP_THREADS) {
        const bool loads = arch::elect_one();
        if (loads) {
            tma::prefetch_map<typename Traits::a_part>(g.a);
            tma::prefetch_map<typename Traits::b_part>(g.b);
        }
        produce_single_wave_64x64<Traits>(g, shared, loads);
    } else {
        arch::named_barrier_sync(READY, Traits::threads);
        arch::wait_for_dependencies();
        consume_single_wave_64x64<Traits>(g, shared);
    }
}

}  // namespace sm90

template <Config C>
void launch_single_wave_64x64(const Params& params, Stream stream) {
    using Traits = sm90::SingleWaveTraits<C>;
    const auto g = sm90::make_globals<C>(params);
    launch_dependent<Traits>(
        sm90::single_wave_64x64_kernel<Traits>, sm90::grid_of<C>(params, true), dim3(1), stream,
        typename Traits::Globals{
            .k_blocks = g.k_blocks,
            .last_row = last_row(static_cast<uint32_t>(params.m), C.block_m, C.a_m_major),
            .a_batched = g.a_batched,
            .b_batched = g.b_batched,
            .evict_first_b = g.evict_first_b,
            .out = static_cast<uint4*>(g.out),
            .out_stride = g.out_stride / sm90::VEC_ELEMENTS,
            .out_batch_stride = g.out_batch_stride / sm90::VEC_ELEMENTS,
            .a = g.a,
            .b = g.b,
        });
}

}  // namespace thunderkittens::gemm
