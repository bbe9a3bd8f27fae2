// Matrix product on Hopper for few tiles and a long k: blocks divide the k of a tile and exchange
// sums through memory.
//
// All blocks are at work at a time: there are no more of them than SMs, and the launch is
// cooperative, or does not take place. Each multiplies its part of k, as once_sm90.cuh does. Then
// it gives every other one of its tile the columns that this one finishes, in the order of the
// registers, and adds what it gets to its own sums, in a fixed order: reruns give the same bits.
// The two consumer warpgroups exchange rows apart from each other, so that the first does it under
// the last products of the second.
#pragma once

#include "csrc/gemm/divided.h"
#include "csrc/gemm/epilogue_sm90.cuh"
#include "csrc/gemm/start_sm90.cuh"
#include "kittens/arch/cooperative.cuh"
#include "kittens/arch/marks.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// One kernel has both widths of tiles and both orders of b: only the products differ.
template <DType dtype>
struct DividedTypes {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    // Of the configurations the one with most stages, for what initialises their semaphores.
    static constexpr Config config = make_config(DIVIDED_SHAPES[0], dtype, false, false);
    static constexpr int threads = one_tile_threads(config), handed = 0;
    static constexpr int most_columns = DIVIDED_SHAPES[1].block_n;
    // A stage is a row of parts: the rows of a of either consumer, and columns of b.
    using part = st<T, 64, 64>;
    static constexpr int part_bytes = sizeof(part);
    template <int width, bool b_n_major>
    using b_tile = std::conditional_t<b_n_major, st<T, BLOCK_K, width>, st<T, width, BLOCK_K>>;
    // A consumer keeps its own sums where its rows of a were, a stage after the other.
    static constexpr uint32_t unit_bytes = 64 * DIVIDED_UNIT * 4;
    static constexpr uint32_t units_per_part = part_bytes / unit_bytes;
    static_assert(units_per_part * DIVIDED_SHAPES[1].stages * 2 >= most_columns / DIVIDED_UNIT);

    struct Shared {
        part parts[DIVIDED_PARTS];
        semaphore full[config.stages], empty[config.stages];
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert((sizeof(Shared) + 127) / 128 * 128 == DIVIDED_SHARED_BYTES,
                  "divided.h knows another size");

    struct Globals {
        int k_each, k_more;  // steps of a block; the first `k_more` of them have one more
        uint32_t last_row;   // where the last row of tiles begins
        int width, stages;   // of tiles
        bool b_n_major, b_once;
        uint32_t units_each, units_more;  // that a block finishes, as the steps
        CUtensorMap a, b;
        float4* parts;    // a block's sums for others: unit, half, thread
        uint64_t* marks;  // of every block one for each other and consumer
        uint64_t mark;
        uint32_t* out;  // in words of two values
        int64_t out_stride;
        const void* bias;
        float alpha;
        uint32_t n;
    };
};
// What a block computes. Blocks that follow each other have the same part of k of tiles in a
// rectangle, so that they read the same lines at a time.
template <class D>
struct DividedPlace {
    uint32_t row, column, rank, splits;
    uint32_t first_block;  // the number of the tile's first block
    int first_step, steps;

    __device__ __forceinline__ explicit DividedPlace(const typename D::Globals& g)
        : row(blockIdx.x),
          column(blockIdx.y),
          rank(blockIdx.z),
          splits(gridDim.z),
          first_block((column * gridDim.x + row) * splits) {
        const int part = static_cast<int>(rank);
        first_step = part * g.k_each + min(part, g.k_more);
        steps = g.k_each + (part < g.k_more);
    }
    __device__ __forceinline__ uint32_t m(const typename D::Globals& g) const {
        return min(row * D::config.block_m, g.last_row);
    }
    __device__ __forceinline__ uint32_t n(const typename D::Globals& g) const {
        return column * static_cast<uint32_t>(g.width);
    }
};

template <class D>
__device__ __forceinline__ void produce_divided(const typename D::Globals& g,
                                                typename D::Shared& shared) {
    const DividedPlace<D> at(g);
    const int m = static_cast<int>(at.m(g)), n = static_cast<int>(at.n(g));
    const int in_stage = 2 + g.width / 64;
    int slot = 0, phase = 1;
    for (int step = 0; step < at.steps; ++step) {
        semaphore& full = shared.full[slot];
        const int k = (at.first_step + step) * BLOCK_K;
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
}

// What becomes of a consumer's sums. A thread has the same elements of a tile in every block.
template <class D>
struct DividedSums {
    static constexpr Config C = D::config;
    using T = typename D::T;
    static constexpr uint32_t THREADS = C.consumers * WARPGROUP_THREADS;
    // Units of other blocks that a thread waits for at a time.
    static constexpr int AHEAD = 8;
    const typename D::Globals& g;
    const int consumer = warpgroup::groupid();
    const DividedPlace<D> at;
    const uint32_t splits = at.splits, rank = at.rank;
    // The units that this block finishes.
    const uint32_t first = rank * g.units_each + min(rank, g.units_more);
    const uint32_t end = first + g.units_each + (rank < g.units_more);
    // Where the thread keeps its sums: a stage, and how far apart stages are.
    const uint32_t kept, stage_bytes;

    __device__ __forceinline__ DividedSums(const typename D::Globals& globals,
                                           typename D::Shared& shared, const DividedPlace<D>& place)
        : g(globals),
          at(place),
          kept(shared.parts[0].address() + warpgroup::groupid() * D::part_bytes +
               warpgroup::laneid() * uint32_t(sizeof(float4))),
          stage_bytes((2 + g.width / 64) * D::part_bytes) {}

    __device__ __forceinline__ float4* part(uint32_t block) const {
        return g.parts + (int64_t(block) * g.width * (2 * THREADS / DIVIDED_UNIT) + threadIdx.x);
    }
    __device__ __forceinline__ uint64_t* mark(uint32_t from, uint32_t to) const {
        return g.marks + (((at.first_block + from) * splits + to) * C.consumers + consumer);
    }
    __device__ __forceinline__ uint32_t kept_at(uint32_t unit) const {
        const uint32_t i = unit - first;
        return kept + i / D::units_per_part * stage_bytes + i % D::units_per_part * D::unit_bytes;
    }
    static constexpr uint32_t half_bytes = D::unit_bytes / 2;

    __device__ __forceinline__ void give(const rt_fl<16, D::most_columns>& d) const {
        float4* to = part(at.first_block + rank);
#pragma unroll
        for (uint32_t i = 0; i < D::most_columns / DIVIDED_UNIT; ++i) {
            if (int(i * DIVIDED_UNIT) >= g.width) break;
            const auto& data = d.tiles[0][i].data;
            const float4 low = make_float4(data[0].x, data[0].y, data[1].x, data[1].y);
            const float4 high = make_float4(data[2].x, data[2].y, data[3].x, data[3].y);
            if (i >= first && i < end) {
                arch::store_shared(kept_at(i), low);
                arch::store_shared(kept_at(i) + half_bytes, high);
            } else {
                arch::store_global(to + i * 2 * THREADS, low);
                arch::store_global(to + (i * 2 + 1) * THREADS, high);
            }
        }
        // One fence for the warpgroup. A lane per block.
        warpgroup::sync(READY + 1 + consumer);
        const auto other = static_cast<uint32_t>(warpgroup::laneid());
        if (other < splits && other != rank) {
            arch::store_release_mark(mark(rank, other), g.mark);
            uint64_t* there = mark(other, rank);
            while (arch::load_acquire_mark(there) != g.mark) {
            }
            arch::store_global(there, uint64_t{0});
        }
        warpgroup::sync(READY + 1 + consumer);
    }

    // Adds what the others have given, one after the other.
    __device__ __forceinline__ void take() const {
        uint32_t unit = first, other = rank == 0 ? 1 : 0;
#pragma unroll 1
        while (other < splits) {
            float4 more[AHEAD][2];
            uint32_t to[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                to[i] = 0;
                if (other < splits) {
                    to[i] = kept_at(unit);
                    const float4* from = part(at.first_block + other) + unit * 2 * THREADS;
                    more[i][0] = arch::load_global(from);
                    more[i][1] = arch::load_global(from + THREADS);
                }
                if (++unit == end) {
                    unit = first, ++other;
                    if (other == rank) ++other;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (to[i] == 0) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t at = to[i] + half * half_bytes;
                    float4 sum = arch::load_shared<float4>(at);
                    sum.x += more[i][half].x, sum.y += more[i][half].y;
                    sum.z += more[i][half].z, sum.w += more[i][half].w;
                    arch::store_shared(at, sum);
                }
            }
        }
    }

    // A thread has two neighbours in each half of a unit's columns, of two rows.
    __device__ __forceinline__ void store() const {
        const uint32_t row = at.m(g) + consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
        uint32_t col = at.n(g) + first * DIVIDED_UNIT + laneid() % 4 * 2;
        uint32_t* to = g.out + (row * g.out_stride + col / 2);
#pragma unroll 1
        for (uint32_t unit = first; unit < end; ++unit) {
#pragma unroll
            for (int half = 0; half < 2; ++half, col += 8, to += 4) {
                if (col >= g.n) continue;
                const auto sum = arch::load_shared<float4>(kept_at(unit) + half * half_bytes);
                float bias[2] = {};
                if (g.bias != nullptr) {
                    const T* from = static_cast<const T*>(g.bias) + col;
                    bias[0] = convert<float>(arch::load_global(from));
                    bias[1] = convert<float>(arch::load_global(from + 1));
                }
                const float x = g.alpha * sum.x + bias[0], y = g.alpha * sum.y + bias[1];
                const float z = g.alpha * sum.z + bias[0], w = g.alpha * sum.w + bias[1];
                arch::store_global(to, arch::bit_cast<uint32_t>(pack_pair<T>(x, y)));
                arch::store_global(to + 8 * g.out_stride,
                                   arch::bit_cast<uint32_t>(pack_pair<T>(z, w)));
            }
        }
    }
};

// The products of a block, of one width and order of b.
template <class D, int width, bool b_n_major>
__device__ __forceinline__ void multiply_divided(typename D::Shared& shared, int steps,
                                                 rt_fl<16, D::most_columns>& d) {
    using b_tile = typename D::template b_tile<width, b_n_major>;
    constexpr int stages = DIVIDED_SHAPES[width == DIVIDED_SHAPES[0].block_n ? 0 : 1].stages;
    constexpr int in_stage = 2 + width / 64, consumers = D::config.consumers;
    static_assert(stages * in_stage <= DIVIDED_PARTS);
    constexpr int FIRST_DONE = READY + 1 + consumers;  // named barrier
    const int consumer = warpgroup::groupid();
    auto& sums = reinterpret_cast<rt_fl<16, width>&>(d);
    Ring<stages> ring;
    // One consumer ends after the other, see gemm_sm90.cuh.
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
}

template <class D>
__device__ __forceinline__ void consume_divided(const typename D::Globals& g,
                                                typename D::Shared& shared) {
    constexpr int narrow = DIVIDED_SHAPES[0].block_n, wide = DIVIDED_SHAPES[1].block_n;
    const DividedPlace<D> at(g);
    rt_fl<16, D::most_columns> d;
    if (g.width == narrow) {
        if (g.b_n_major)
            multiply_divided<D, narrow, true>(shared, at.steps, d);
        else
            multiply_divided<D, narrow, false>(shared, at.steps, d);
    } else {
        if (g.b_n_major)
            multiply_divided<D, wide, true>(shared, at.steps, d);
        else
            multiply_divided<D, wide, false>(shared, at.steps, d);
    }
    const DividedSums<D> sums(g, shared, at);
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
    const int splits = p.schedule.splits, steps = static_cast<int>(ceil_div(p.k, BLOCK_K));
    const uint32_t units = width / DIVIDED_UNIT;
    const int64_t rows = ceil_div(p.m, height), columns = ceil_div(p.n, width);
    const int64_t parts = rows * columns * splits * height * width * 4;
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(columns), splits);
    return kittens::arch::launch_cooperative(
        dim3(1, 1, splits), true, sm90::divided_kernel<D>, grid, dim3(D::threads),
        sizeof(typename D::Shared), stream,
        typename D::Globals{
            .k_each = steps / splits,
            .k_more = steps % splits,
            .last_row = last_row(static_cast<uint32_t>(p.m), height, false),
            .width = width,
            .stages = config.stages,
            .b_n_major = b_n_major,
            .b_once = p.schedule.b_once,
            .units_each = units / splits,
            .units_more = units % splits,
            .a = map(p.a, p.m, p.k, p.a_stride, height),
            .b = b_n_major ? map(p.b, p.k, p.n, p.b_stride, BLOCK_K)
                           : map(p.b, p.n, p.k, p.b_stride, width),
            .parts = static_cast<float4*>(scratch.data),
            .marks = reinterpret_cast<uint64_t*>(static_cast<char*>(scratch.data) + parts),
            .mark = scratch.mark,
            .out = static_cast<uint32_t*>(p.out),
            .out_stride = p.out_stride / 2,
            .bias = p.epilogue.bias,
            .alpha = p.epilogue.alpha,
            .n = static_cast<uint32_t>(p.n),
        });
}

}  // namespace thunderkittens::gemm
