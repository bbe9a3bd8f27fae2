// Split-K and stream-K matrix product on Hopper, for few tiles of 128 x 128 or 128 x 192 and a long
// k: blocks share the k of a tile and exchange partial sums through a workspace. Roles: one warp
// loads, two warpgroups multiply, reduce and store.
//
// All blocks run at the same time: there are no more of them than SMs, and the launch is
// cooperative, or does not take place. Each multiplies its ranges of k as single_wave_sm90.cuh
// does, in the order of a schedule that the host makes (common/stream_k.h). The reduction is in
// common/reduce_workspace_sm90.cuh.
#pragma once

#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/reduce_workspace_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {
namespace sm90 {

// One kernel has both widths of tiles and both orders of b, because only the products differ.
template <DType dtype>
struct SplitKTraits {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    // The configuration with most stages, for the initialisation of their semaphores.
    static constexpr Config config = make_config(SPLIT_K_SHAPES[0], dtype, false, false);
    static constexpr int height = config.block_m, consumers = config.consumers;
    static constexpr int threads = single_wave_threads(config), epilogue_buffers = 0;
    static constexpr int first_bias_row = 0, semaphores = 0;
    static constexpr int max_n = SPLIT_K_SHAPES[1].block_n;
    // A stage is a sequence of tiles of 64 x 64: the rows of a of either consumer, then columns of
    // b.
    using tile64 = st<T, 64, 64>;
    static constexpr int tile64_bytes = sizeof(tile64);
    template <int width, bool b_n_major>
    using b_tile = std::conditional_t<b_n_major, st<T, BLOCK_K, width>, st<T, width, BLOCK_K>>;
    // A consumer keeps its own sums where its rows of a were, one stage after the other.
    static constexpr int unit = SPLIT_K_UNIT;
    static constexpr uint32_t unit_bytes = 64 * unit * 4;
    static constexpr uint32_t units_per_tile64 = tile64_bytes / unit_bytes;
    static_assert(units_per_tile64 * SPLIT_K_SHAPES[1].stages * 2 >= max_n / SPLIT_K_UNIT);
    // The finishing peer receives the partial sums of both consumers, as many units in a stage as
    // every stage has room for.
    static constexpr int units_at_a_time = 4, received_bytes = units_at_a_time * 2 * unit_bytes;
    static_assert(received_bytes <= (2 + SPLIT_K_SHAPES[0].block_n / 64) * tile64_bytes);

    struct Shared {
        tile64 tiles64[SPLIT_K_RING_TILES];
        semaphore full[config.stages], empty[config.stages];
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert((sizeof(Shared) + 127) / 128 * 128 == SPLIT_K_SHARED_BYTES,
                  "dense/split_k.h knows another size");

    struct Globals {
        uint32_t last_row;                        // where the last row of tiles begins
        int width, stages;                        // of tiles
        bool b_n_major, evict_first_b, stream_k;  // see is_stream_k()
        uint32_t tiles;
        Divisor rows;  // of tiles
        StreamKSegments segments;
        // Split-K: the units of columns that a block finishes; the first `units_more` blocks have
        // one more.
        uint32_t units_each, units_more;
        CUtensorMap a, b;
        float4* partials;  // the workspace
        uint64_t* flags;   // of each consumer: a block's for each peer, or a partial sum's
        uint64_t epoch;
        uint32_t* out;  // in words of two values
        int64_t out_stride;
        const void* bias;
        float alpha;
        uint32_t n;
    };
};

// The fix-up's loads: brings a partial sum of a helping peer into the ring.
template <class Traits>
__device__ __forceinline__ void load_partial(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared, uint32_t partial,
                                             int& slot, int& phase) {
    constexpr int consumers = Traits::config.consumers;
    for (int i = 0; i < consumers; ++i) {
        uint64_t* flag = g.flags + (partial * consumers + i);
        while (arch::load_acquire_global(flag) != g.epoch) {
        }
        arch::store_global(flag, uint64_t{0});
    }
    arch::fence_async_global();
    const int in_stage = (2 + g.width / 64) * Traits::tile64_bytes;
    const char* from = reinterpret_cast<const char*>(partial_at<Traits>(g, partial));
    for (int i = 0; i < g.width;
         i += Traits::units_at_a_time * SPLIT_K_UNIT, from += Traits::received_bytes) {
        wait(shared.empty[slot], phase);
        tma::expect_bytes(shared.full[slot], Traits::received_bytes);
        arch::bulk_load(shared.tiles64[0].address() + slot * in_stage, from, Traits::received_bytes,
                        shared.full[slot].address());
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
}

template <class Traits>
__device__ __forceinline__ void produce_split_k(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    const int in_stage = 2 + g.width / 64;
    int slot = 0, phase = 1;
    const uint32_t end = g.segments.begin[blockIdx.z + 1];
#pragma unroll 1
    for (uint32_t i = g.segments.begin[blockIdx.z]; i < end; ++i) {
        const SegmentPosition<Traits> at(g, g.segments.list[i]);
        if (at.tile >= g.tiles) continue;  // not all groups have as many
        const int m = static_cast<int>(at.m(g)), n = static_cast<int>(at.n(g));
        for (int step = 0; step < at.segment.steps; ++step) {
            semaphore& full = shared.full[slot];
            const int k = (at.segment.first_step + step) * BLOCK_K;
            const uint32_t a = shared.tiles64[0].address() + slot * in_stage * Traits::tile64_bytes;
            const uint32_t b = a + 2 * Traits::tile64_bytes;
            wait(shared.empty[slot], phase);
            tma::expect_bytes(full, in_stage * Traits::tile64_bytes);
            arch::tma_load<tma::CachePolicy::normal>(a, &g.a, arch::TmaCoordinates{k, m, 0, 0},
                                                     full.address());
            // b's rows come in stripes of 64 columns where they lie along n, at once where they lie
            // along k.
            const int loads = g.b_n_major ? g.width / 64 : 1;
#pragma unroll 1
            for (int i = 0; i < loads; ++i) {
                const uint32_t to = b + i * Traits::tile64_bytes;
                const auto from = g.b_n_major ? arch::TmaCoordinates{n + i * 64, k, 0, 0}
                                              : arch::TmaCoordinates{k, n, 0, 0};
                if (g.evict_first_b)
                    arch::tma_load<tma::CachePolicy::evict_first>(to, &g.b, from, full.address());
                else
                    arch::tma_load<tma::CachePolicy::normal>(to, &g.b, from, full.address());
            }
            if (++slot == g.stages) slot = 0, phase ^= 1;
        }
        for (int i = 0; i < at.segment.received; ++i)
            load_partial<Traits>(g, shared, at.partial(i), slot, phase);
    }
}

// The products of a segment, for one width and order of b.
template <class Traits, int width, bool b_n_major>
__device__ __forceinline__ void multiply_split_k(typename Traits::Shared& shared, int& slot,
                                                 int& phase, int steps,
                                                 rt_fl<16, Traits::max_n>& d) {
    using b_tile = typename Traits::template b_tile<width, b_n_major>;
    constexpr int stages = SPLIT_K_SHAPES[width == SPLIT_K_SHAPES[0].block_n ? 0 : 1].stages;
    constexpr int in_stage = 2 + width / 64, consumers = Traits::config.consumers;
    static_assert(stages * in_stage <= SPLIT_K_RING_TILES);
    constexpr int TAIL = READY + 1 + consumers;  // named barrier
    const int consumer = warpgroup::groupid();
    auto& sums = reinterpret_cast<rt_fl<16, width>&>(d);
    Ring<stages> ring{slot, phase};
    // Staggered tail, see persistent_sm90.cuh.
    const int tail_begin = consumer > 0 ? max(0, steps - (stages - 1)) : -1;
    int previous = 0;
    for (int k = 0; k < steps; ++k, ring.advance()) {
        if (k == tail_begin) arch::named_barrier_sync(TAIL, consumers * WARPGROUP_THREADS);
        const auto* stage = &shared.tiles64[ring.stage * in_stage];
        wait(shared.full[ring.stage], ring.phase);
        warpgroup::product<false, !b_n_major>(sums, stage[consumer],
                                              reinterpret_cast<const b_tile&>(stage[2]), k > 0);
        warpgroup::mma_async_wait<1>();
        if (k > 0) release_stage(shared.empty[previous]);
        previous = ring.stage;
    }
    if (consumer == 0) arch::named_barrier_arrive(TAIL, consumers * WARPGROUP_THREADS);
    warpgroup::mma_async_wait(sums);
    release_stage(shared.empty[previous]);
    slot = ring.stage, phase = ring.phase;
}

template <class Traits>
__device__ __forceinline__ void consume_split_k(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    constexpr int narrow = SPLIT_K_SHAPES[0].block_n, wide = SPLIT_K_SHAPES[1].block_n;
    int slot = 0, phase = 0;
    rt_fl<16, Traits::max_n> d;
    uint32_t i = g.segments.begin[blockIdx.z];
    const uint32_t end = g.segments.begin[blockIdx.z + 1];
#pragma unroll 1
    for (; i < end; ++i) {
        const SegmentPosition<Traits> at(g, g.segments.list[i]);
        if (at.tile >= g.tiles) continue;
        const int steps = at.segment.steps;
        warp::zero(d);  // else ptxas serialises the products (C7515)
        if (g.width == narrow) {
            if (g.b_n_major)
                multiply_split_k<Traits, narrow, true>(shared, slot, phase, steps, d);
            else
                multiply_split_k<Traits, narrow, false>(shared, slot, phase, steps, d);
        } else {
            if (g.b_n_major)
                multiply_split_k<Traits, wide, true>(shared, slot, phase, steps, d);
            else
                multiply_split_k<Traits, wide, false>(shared, slot, phase, steps, d);
        }
        // Split-K continues below: inside of the loop its code would keep the registers of the
        // sums.
        if (!g.stream_k) break;
        const StreamKFixup<Traits> sums{g, at};
        if (at.segment.first_step > 0) {
            sums.send(d);
        } else {
            sums.receive(shared, slot, phase, d);
            sums.store(d);
        }
    }
    if (g.stream_k) return;
    const SplitKReduce<Traits> sums(g, shared, SegmentPosition<Traits>(g, g.segments.list[i]));
    sums.send(d);
    sums.receive();
    sums.store();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, 1) void split_k_kernel(const __grid_constant__
                                                                     typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    if (kittens::warpid() == Traits::config.consumers * WARPGROUP_WARPS) {
        if (start_loading<Traits>(shared, Traits::threads)) produce_split_k<Traits>(g, shared);
        return;
    }
    arch::named_barrier_sync(READY, Traits::threads);
    arch::wait_for_dependencies();
    consume_split_k<Traits>(g, shared);
}

}  // namespace sm90

template <DType dtype>
bool launch_split_k(const Config& config, const Params& p, const Workspace& workspace,
                    Stream stream) {
    using Traits = sm90::SplitKTraits<dtype>;
    using T = typename Traits::T;
    const int width = config.block_n;
    const bool b_n_major = config.b_n_major;
    constexpr int height = Traits::config.block_m;
    const int splits = p.schedule.splits;
    const uint32_t units = width / SPLIT_K_UNIT;
    const int64_t rows = ceil_div(p.m, height), tiles = tiles_of(config, p.m, p.n);
    const StreamKSegments segments =
        make_stream_k_segments(p.schedule.blocks, splits, tiles, ceil_div(p.k, BLOCK_K));
    if (segments.groups == 0) return false;
    const dim3 grid(segments.groups, 1, splits);
    const int64_t sums = sums_bytes(config, p.schedule, tiles);
    return kittens::arch::launch_cooperative(
        dim3(1, 1, splits), true, sm90::split_k_kernel<Traits>, grid, dim3(Traits::threads),
        sizeof(typename Traits::Shared), stream,
        typename Traits::Globals{
            .last_row = last_row(static_cast<uint32_t>(p.m), height, false),
            .width = width,
            .stages = config.stages,
            .b_n_major = b_n_major,
            .evict_first_b = p.schedule.evict_first_b,
            .stream_k = is_stream_k(p.schedule.blocks, splits, tiles),
            .tiles = static_cast<uint32_t>(tiles),
            .rows = Divisor(static_cast<uint32_t>(rows)),
            .segments = segments,
            .units_each = units / splits,
            .units_more = units % splits,
            .a = map_of_lines<T>(p.a, p.m, p.k, p.a_stride, height),
            .b = b_n_major ? map_of_lines<T>(p.b, p.k, p.n, p.b_stride, BLOCK_K)
                           : map_of_lines<T>(p.b, p.n, p.k, p.b_stride, width),
            .partials = static_cast<float4*>(workspace.data),
            .flags = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace.data) + sums),
            .epoch = workspace.epoch,
            .out = static_cast<uint32_t*>(p.out),
            .out_stride = p.out_stride / 2,
            .bias = p.epilogue.bias,
            .alpha = p.epilogue.alpha,
            .n = static_cast<uint32_t>(p.n),
        });
}

}  // namespace thunderkittens::gemm
