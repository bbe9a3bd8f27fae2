// Matrix product on Hopper for the smallest problems: every block has one whole tile, and its sums
// are only rounded before TMA-aligned rows of them are stored.
//
// Such a kernel runs for some 3 us, and what it has to wait for first is itself: its instructions
// and its parameters lie in memory. So this one is the kernel of one_consumer_sm90.cuh without all
// that is not needed then: tiles are not counted, nothing is clipped, sums have no other way out.
// The warp that loads initialises the semaphores of the first loads alone, issues these, and then
// initialises the others.
#pragma once

#include "csrc/gemm/dense/one_consumer_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// Values of 16 bits in a word of the output.
constexpr int WIDE = 8;

template <Config C>
struct SingleTypes : Types<C> {
    using K = Types<C>;
    static_assert(has_single(C) && C.consumers == 1 && !C.fused && !C.marked);
    static_assert(C.block_n == K::out_tile::cols);
    static constexpr int threads = one_tile_threads(C);

    struct Shared {
        typename K::Stage stages[C.stages];
        typename K::out_tile out[WARPGROUP_WARPS];
        semaphore full[C.stages], empty[C.stages];
    };
    static_assert(sizeof(Shared) == single_shared_bytes(C), "single_wave.h knows another size");

    struct Globals {
        int k_blocks;
        uint32_t last_row;  // where the last row of tiles begins
        bool a_batched, b_batched, b_once;
        // In words of 16 bytes: through a pointer to values the compiler stores four times 4 bytes.
        uint4* out;
        int64_t out_stride, out_batch_stride;
        decltype(K::Globals::a) a;
        decltype(K::Globals::b) b;
    };
    static __device__ __forceinline__ uint32_t column(const Globals&, uint32_t col, int offset) {
        return col + offset;
    }
};

template <class S>
__device__ __forceinline__ void load_single(const typename S::Globals& g,
                                            typename S::Shared& shared, bool loads) {
    constexpr Config C = S::config;
    const int m = static_cast<int>(min(blockIdx.x * C.block_m, g.last_row));
    const uint32_t n = blockIdx.y * C.block_n;
    const auto load = [&](int stage, int step) {
        tma::expect(shared.full[stage], shared.stages[stage]);
        load_step<S>(g, shared.stages[stage], shared.full[stage], blockIdx.z, m, n, step * BLOCK_K);
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
    arch::named_barrier_arrive(READY, S::threads);
    arch::launch_dependents();
    if (!loads) return;
    Ring<C.stages> ring;
    for (; step < g.k_blocks; ++step, ring.advance()) {
        wait(shared.empty[ring.stage], ring.phase);
        load(ring.stage, step);
    }
}

template <class S>
__device__ __forceinline__ void consume_single(const typename S::Globals& g,
                                               typename S::Shared& shared) {
    constexpr Config C = S::config;
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
    round_to<typename S::T>(values, d);
    auto& buffer = shared.out[kittens::warpid()];
    kittens::warp::store(buffer, values);
    arch::sync_warp();
    constexpr int lanes = C.block_n / WIDE, rows = WARP_THREADS / lanes;
    const int row = laneid() / lanes, part = laneid() % lanes;
    uint4* to = g.out + (blockIdx.z * g.out_batch_stride +
                         (min(blockIdx.x * C.block_m, g.last_row) + kittens::warpid() * 16 + row) *
                             g.out_stride +
                         blockIdx.y * lanes + part);
#pragma unroll
    for (int first = 0; first < 16; first += rows) {
        arch::store_global(to,
                           arch::load_shared<uint4>(buffer.address_of(first + row, part * WIDE)));
        to += rows * g.out_stride;
    }
}

template <class S>
__global__ __launch_bounds__(S::threads, 1) void single_gemm_kernel(const __grid_constant__
                                                                    typename S::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename S::Shared>();
    if (threadIdx.x >= WARPGROUP_THREADS) {
        const bool loads = arch::elect_one();
        if (loads) {
            tma::prefetch_map<typename S::a_part>(g.a);
            tma::prefetch_map<typename S::b_part>(g.b);
        }
        load_single<S>(g, shared, loads);
    } else {
        arch::named_barrier_sync(READY, S::threads);
        arch::wait_for_dependencies();
        consume_single<S>(g, shared);
    }
}

}  // namespace sm90

template <Config C>
void launch_single(const Params& params, Stream stream) {
    using S = sm90::SingleTypes<C>;
    const auto g = sm90::make_globals<C>(params);
    kittens::launch(
        kittens::LaunchOptions{.dependent = true}, sm90::single_gemm_kernel<S>,
        sm90::grid_of<C>(params, true), dim3(S::threads), dim3(1), sizeof(typename S::Shared),
        stream,
        typename S::Globals{
            .k_blocks = g.k_blocks,
            .last_row = last_row(static_cast<uint32_t>(params.m), C.block_m, C.a_m_major),
            .a_batched = g.a_batched,
            .b_batched = g.b_batched,
            .b_once = g.b_once,
            .out = static_cast<uint4*>(g.out),
            .out_stride = g.out_stride / sm90::WIDE,
            .out_batch_stride = g.out_batch_stride / sm90::WIDE,
            .a = g.a,
            .b = g.b,
        });
}

}  // namespace thunderkittens::gemm
