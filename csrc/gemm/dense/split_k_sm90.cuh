// Matrix product on Hopper for few tiles and a long k: blocks divide the k of a tile and exchange
// sums through memory.
//
// All blocks are at work at a time: there are no more of them than SMs, and the launch is
// cooperative, or does not take place. Each multiplies its parts of k, as single_wave_sm90.cuh
// does; which ones is in a table (common/stream_k.h). What becomes of the sums is in
// common/reduce_workspace_sm90.cuh.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/reduce_workspace_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {
namespace sm90 {

// One kernel has both widths of tiles and both orders of b: only the products differ.
template <DType dtype>
struct DividedTypes {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    // Of the configurations the one with most stages, for what initialises their semaphores.
    static constexpr Config config = make_config(DIVIDED_SHAPES[0], dtype, false, false);
    static constexpr int height = config.block_m, consumers = config.consumers;
    static constexpr int threads = one_tile_threads(config), handed = 0;
    static constexpr int most_columns = DIVIDED_SHAPES[1].block_n;
    // A stage is a row of parts: the rows of a of either consumer, and columns of b.
    using part = st<T, 64, 64>;
    static constexpr int part_bytes = sizeof(part);
    template <int width, bool b_n_major>
    using b_tile = std::conditional_t<b_n_major, st<T, BLOCK_K, width>, st<T, width, BLOCK_K>>;
    // A consumer keeps its own sums where its rows of a were, a stage after the other.
    static constexpr int unit = DIVIDED_UNIT;
    static constexpr uint32_t unit_bytes = 64 * unit * 4;
    static constexpr uint32_t units_per_part = part_bytes / unit_bytes;
    static_assert(units_per_part * DIVIDED_SHAPES[1].stages * 2 >= most_columns / DIVIDED_UNIT);
    // An owner takes sums of both consumers, as many units in a stage as any has room for.
    static constexpr int units_at_once = 4, taken_bytes = units_at_once * 2 * unit_bytes;
    static_assert(taken_bytes <= (2 + DIVIDED_SHAPES[0].block_n / 64) * part_bytes);

    struct Shared {
        part parts[DIVIDED_PARTS];
        semaphore full[config.stages], empty[config.stages];
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert((sizeof(Shared) + 127) / 128 * 128 == DIVIDED_SHARED_BYTES,
                  "dense/split_k.h knows another size");

    struct Globals {
        uint32_t last_row;               // where the last row of tiles begins
        int width, stages;               // of tiles
        bool b_n_major, b_once, owners;  // owners: see has_owners()
        uint32_t tiles;
        Divisor rows;  // of tiles
        Segments segments;
        // That a block finishes where none owns its tile; the first `units_more` have one more.
        uint32_t units_each, units_more;
        CUtensorMap a, b;
        float4* parts;    // sums of tiles for other blocks
        uint64_t* marks;  // for each consumer, of every block one for each other, or of every part
        uint64_t mark;
        uint32_t* out;  // in words of two values
        int64_t out_stride;
        const void* bias;
        float alpha;
        uint32_t n;
    };
};

// Brings sums that others give into the ring.
template <class D>
__device__ __forceinline__ void load_part(const typename D::Globals& g, typename D::Shared& shared,
                                          uint32_t part, int& slot, int& phase) {
    constexpr int consumers = D::config.consumers;
    for (int i = 0; i < consumers; ++i) {
        uint64_t* mark = g.marks + (part * consumers + i);
        while (arch::load_acquire_global(mark) != g.mark) {
        }
        arch::store_global(mark, uint64_t{0});
    }
    arch::fence_async_global();
    const int in_stage = (2 + g.width / 64) * D::part_bytes;
    const char* from = reinterpret_cast<const char*>(divided_part<D>(g, part));
    for (int i = 0; i < g.width; i += D::units_at_once * DIVIDED_UNIT, from += D::taken_bytes) {
        wait(shared.empty[slot], phase);
        tma::expect_bytes(shared.full[slot], D::taken_bytes);
        arch::bulk_load(shared.parts[0].address() + slot * in_stage, from, D::taken_bytes,
                        shared.full[slot].address());
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
}

template <class D>
__device__ __forceinline__ void produce_divided(const typename D::Globals& g,
                                                typename D::Shared& shared) {
    const int in_stage = 2 + g.width / 64;
    int slot = 0, phase = 1;
    const uint32_t end = g.segments.begin[blockIdx.z + 1];
#pragma unroll 1
    for (uint32_t i = g.segments.begin[blockIdx.z]; i < end; ++i) {
        const DividedPlace<D> at(g, g.segments.list[i]);
        if (at.tile >= g.tiles) continue;  // not all groups have as many
        const int m = static_cast<int>(at.m(g)), n = static_cast<int>(at.n(g));
        for (int step = 0; step < at.segment.steps; ++step) {
            semaphore& full = shared.full[slot];
            const int k = (at.segment.first_step + step) * BLOCK_K;
            const uint32_t a = shared.parts[0].address() + slot * in_stage * D::part_bytes;
            const uint32_t b = a + 2 * D::part_bytes;
            wait(shared.empty[slot], phase);
            tma::expect_bytes(full, in_stage * D::part_bytes);
            arch::tma_load<tma::CachePolicy::normal>(a, &g.a, arch::TmaCoordinates{k, m, 0, 0},
                                                     full.address());
            // Rows of b along n come in stripes, along k at once.
            const int loads = g.b_n_major ? g.width / 64 : 1;
#pragma unroll 1
            for (int i = 0; i < loads; ++i) {
                const uint32_t to = b + i * D::part_bytes;
                const auto from = g.b_n_major ? arch::TmaCoordinates{n + i * 64, k, 0, 0}
                                              : arch::TmaCoordinates{k, n, 0, 0};
                if (g.b_once)
                    arch::tma_load<tma::CachePolicy::evict_first>(to, &g.b, from, full.address());
                else
                    arch::tma_load<tma::CachePolicy::normal>(to, &g.b, from, full.address());
            }
            if (++slot == g.stages) slot = 0, phase ^= 1;
        }
        for (int i = 0; i < at.segment.taken; ++i) load_part<D>(g, shared, at.part(i), slot, phase);
    }
}

// The products of a block, of one width and order of b.
template <class D, int width, bool b_n_major>
__device__ __forceinline__ void multiply_divided(typename D::Shared& shared, int& slot, int& phase,
                                                 int steps, rt_fl<16, D::most_columns>& d) {
    using b_tile = typename D::template b_tile<width, b_n_major>;
    constexpr int stages = DIVIDED_SHAPES[width == DIVIDED_SHAPES[0].block_n ? 0 : 1].stages;
    constexpr int in_stage = 2 + width / 64, consumers = D::config.consumers;
    static_assert(stages * in_stage <= DIVIDED_PARTS);
    constexpr int FIRST_DONE = READY + 1 + consumers;  // named barrier
    const int consumer = warpgroup::groupid();
    auto& sums = reinterpret_cast<rt_fl<16, width>&>(d);
    Ring<stages> ring{slot, phase};
    // One consumer ends after the other, see persistent_sm90.cuh.
    const int hold = consumer > 0 ? max(0, steps - (stages - 1)) : -1;
    int previous = 0;
    for (int k = 0; k < steps; ++k, ring.advance()) {
        if (k == hold) arch::named_barrier_sync(FIRST_DONE, consumers * WARPGROUP_THREADS);
        const auto* stage = &shared.parts[ring.stage * in_stage];
        wait(shared.full[ring.stage], ring.phase);
        warpgroup::product<false, !b_n_major>(sums, stage[consumer],
                                              reinterpret_cast<const b_tile&>(stage[2]), k > 0);
        warpgroup::mma_async_wait<1>();
        if (k > 0) release_stage(shared.empty[previous]);
        previous = ring.stage;
    }
    if (consumer == 0) arch::named_barrier_arrive(FIRST_DONE, consumers * WARPGROUP_THREADS);
    warpgroup::mma_async_wait(sums);
    release_stage(shared.empty[previous]);
    slot = ring.stage, phase = ring.phase;
}

template <class D>
__device__ __forceinline__ void consume_divided(const typename D::Globals& g,
                                                typename D::Shared& shared) {
    constexpr int narrow = DIVIDED_SHAPES[0].block_n, wide = DIVIDED_SHAPES[1].block_n;
    int slot = 0, phase = 0;
    rt_fl<16, D::most_columns> d;
    uint32_t i = g.segments.begin[blockIdx.z];
    const uint32_t end = g.segments.begin[blockIdx.z + 1];
#pragma unroll 1
    for (; i < end; ++i) {
        const DividedPlace<D> at(g, g.segments.list[i]);
        if (at.tile >= g.tiles) continue;
        const int steps = at.segment.steps;
        warp::zero(d);  // else ptxas serialises the products (C7515)
        if (g.width == narrow) {
            if (g.b_n_major)
                multiply_divided<D, narrow, true>(shared, slot, phase, steps, d);
            else
                multiply_divided<D, narrow, false>(shared, slot, phase, steps, d);
        } else {
            if (g.b_n_major)
                multiply_divided<D, wide, true>(shared, slot, phase, steps, d);
            else
                multiply_divided<D, wide, false>(shared, slot, phase, steps, d);
        }
        // Below, because what is in a loop keeps the registers of the sums.
        if (!g.owners) break;
        const OwnedSums<D> sums{g, at};
        if (at.segment.first_step > 0) {
            sums.give(d);
        } else {
            sums.take(shared, slot, phase, d);
            sums.store(d);
        }
    }
    if (g.owners) return;
    const DividedSums<D> sums(g, shared, DividedPlace<D>(g, g.segments.list[i]));
    sums.give(d);
    sums.take();
    sums.store();
}

template <class D>
__global__ __launch_bounds__(D::threads,
                             1) void divided_kernel(const __grid_constant__ typename D::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename D::Shared>();
    if (kittens::warpid() == D::config.consumers * WARPGROUP_WARPS) {
        if (start_loading<D>(shared, D::threads)) produce_divided<D>(g, shared);
        return;
    }
    arch::named_barrier_sync(READY, D::threads);
    arch::wait_for_dependencies();
    consume_divided<D>(g, shared);
}

}  // namespace sm90

template <DType dtype>
bool launch_divided(const Config& config, const Params& p, const Scratch& scratch, Stream stream) {
    using D = sm90::DividedTypes<dtype>;
    const int width = config.block_n;
    const bool b_n_major = config.b_n_major;
    const auto map = [](const void* data, int64_t rows, int64_t columns, int64_t stride,
                        uint32_t height) {
        return kittens::host::encode_tensor_map(
            {.data = data,
             .type = kittens::detail::tensor_map_type<typename D::T>(),
             .element_bytes = 2,
             .dims = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), 1, 1},
             .strides = {stride, 0, 0},
             .box = {64, height, 1, 1},
             .swizzle_bytes = 128});
    };
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    constexpr int height = D::config.block_m;
    const int splits = p.schedule.splits;
    const uint32_t units = width / DIVIDED_UNIT;
    const int64_t rows = ceil_div(p.m, height), tiles = tiles_of(config, p.m, p.n);
    const Segments segments =
        make_segments(p.schedule.blocks, splits, tiles, ceil_div(p.k, BLOCK_K));
    if (segments.groups == 0) return false;
    const dim3 grid(segments.groups, 1, splits);
    const int64_t sums = sums_bytes(config, p.schedule, tiles);
    return kittens::arch::launch_cooperative(
        dim3(1, 1, splits), true, sm90::divided_kernel<D>, grid, dim3(D::threads),
        sizeof(typename D::Shared), stream,
        typename D::Globals{
            .last_row = last_row(static_cast<uint32_t>(p.m), height, false),
            .width = width,
            .stages = config.stages,
            .b_n_major = b_n_major,
            .b_once = p.schedule.b_once,
            .owners = has_owners(p.schedule.blocks, splits, tiles),
            .tiles = static_cast<uint32_t>(tiles),
            .rows = Divisor(static_cast<uint32_t>(rows)),
            .segments = segments,
            .units_each = units / splits,
            .units_more = units % splits,
            .a = map(p.a, p.m, p.k, p.a_stride, height),
            .b = b_n_major ? map(p.b, p.k, p.n, p.b_stride, BLOCK_K)
                           : map(p.b, p.n, p.k, p.b_stride, width),
            .parts = static_cast<float4*>(scratch.data),
            .marks = reinterpret_cast<uint64_t*>(static_cast<char*>(scratch.data) + sums),
            .mark = scratch.mark,
            .out = static_cast<uint32_t*>(p.out),
            .out_stride = p.out_stride / 2,
            .bias = p.epilogue.bias,
            .alpha = p.epilogue.alpha,
            .n = static_cast<uint32_t>(p.n),
        });
}

}  // namespace thunderkittens::gemm
