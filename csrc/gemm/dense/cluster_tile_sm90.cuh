// Matrix product on Hopper, a tile per block, over a cluster: blocks with tiles beside each other
// share loads by multicast, and blocks with the same tile divide its k (split-K). Of a tile that is
// divided each block finishes a share of the elements, reduced over the cluster's shared memory in
// the order of the blocks, so that reruns give the same bits. Roles: one warp loads, one to
// three warpgroups multiply 64 rows each, reduce and store.
//
// It is for few tiles, in all layouts. The ring of stages becomes the memory of the sums.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C>
struct ClusterTileTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int rows = C.block_m / C.consumers;  // of a consumer
    using a_tile = std::conditional_t<C.a_m_major, st<T, BLOCK_K, rows>, st<T, rows, BLOCK_K>>;
    using b_tile =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>, st<T, C.block_n, BLOCK_K>>;
    static constexpr int threads = gemm::threads(C), stages = C.stages;
    static constexpr int consumer_threads = C.consumers * WARPGROUP_THREADS;
    static constexpr int pitch = C.block_n + 4;  // of the sums, in floats
    static constexpr int stage_bytes = (C.block_m + C.block_n) * BLOCK_K * 2;
    static constexpr int most_per_sm = most_cluster_tiles_per_sm(C);
    // What the sums, or the tile that is stored, needs.
    static constexpr int least_stages =
        std::max(C.block_n / 64, (C.block_m * pitch * 4 + stage_bytes - 1) / stage_bytes);
    struct Stage {
        a_tile a[C.consumers];
        b_tile b;
    };
    struct Semaphores {
        semaphore full[stages], empty[stages];
    };
    struct Shared {
        Semaphores& semaphores;
        Stage* ring;  // and then the sums
    };
    static_assert(sizeof(Stage) % 1024 == 0 && rows == 64 && stages <= WARP_THREADS);
    static_assert(sizeof(Stage) == stage_bytes &&
                  least_stages <= cluster_tile_stages(C, most_per_sm));
    static_assert(sizeof(Semaphores) <= 1024 && 1024 + sizeof(Stage) * stages == shared_bytes(C),
                  "gemm.h knows another size");

    // What one copy of TMA brings: 64 elements, 128 bytes, of some rows as they lie in memory. The
    // tile of a consumer in a has one such stripe; that in b has several where its rows lie along
    // n.
    static constexpr int stripe = 64;
    static constexpr int b_stripes = C.b_n_major ? C.block_n / stripe : 1;
    static constexpr int a_rows = 64, b_rows = C.b_n_major ? BLOCK_K : C.block_n;  // of a stripe

    struct Globals {
        CUtensorMap a, b;
        int stages, splits;
        uint32_t share_m, share_n;    // blocks that share b's and a's tiles: the cluster along m, n
        uint32_t a_blocks, b_blocks;  // masks of those of the cluster's first block
        int a_slice, b_slice;         // rows of a stripe that a block loads for those
        int part, longer;             // steps of k of a block, and blocks that have one more
        bool a_batched, b_batched;
        bool vec4_aligned;                // four neighbouring elements of the output are aligned
        bool store_only;                  // sums are only rounded, to the operands' type
        bool vec8_aligned, vec2_aligned;  // the same of eight of them, and of two
        uint32_t m, n;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        const void* bias;
        float alpha;

        __device__ __forceinline__ uint32_t cluster_blocks() const {
            return share_m * share_n * splits;
        }
    };
};

// The position of a block: its tile, its place in the cluster, whose sizes along m and n are powers
// of two, and the range of k that it multiplies. Divisions would delay the first load.
struct ClusterTilePosition {
    uint32_t batch, m, n;
    uint32_t in_m, in_n, part_rank;  // of the first block that has this block's part of k
    int rank, first, end;

    template <class Traits>
    static __device__ __forceinline__ ClusterTilePosition of(const typename Traits::Globals& g) {
        ClusterTilePosition at{.batch = blockIdx.z,
                               .m = blockIdx.x * Traits::config.block_m,
                               .n = blockIdx.y * Traits::config.block_n,
                               .in_m = blockIdx.x & (g.share_m - 1),
                               .in_n = blockIdx.y & (g.share_n - 1)};
        if (g.splits > 1) {
            at.batch = blockIdx.z / g.splits;
            at.rank = static_cast<int>(blockIdx.z - at.batch * g.splits);
            at.part_rank = at.rank * g.share_m * g.share_n;
        }
        at.first = at.rank * g.part + min(at.rank, g.longer);
        at.end = at.first + g.part + (at.rank < g.longer);
        return at;
    }
};

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

template <class Traits>
__device__ __forceinline__ void sync_consumers() {
    arch::named_barrier_sync(READY + 1, Traits::consumer_threads);
}

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

// The sums go to shared memory, where the stages were.
template <class Traits>
__device__ __forceinline__ void share_sums(typename Traits::Shared& shared,
                                           const rt_fl<16, Traits::config.block_n>& d) {
    sync_consumers<Traits>();
    const uint32_t sums = shared.ring[0].a[0].address();
    const int row = kittens::warpid() * 16 + laneid() / 4, col = laneid() % 4 * 2;
#pragma unroll
    for (int j = 0; j < d.width; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = (row + r % 2 * 8) * Traits::pitch + j * 16 + r / 2 * 8 + col;
            arch::store_shared(sums + at * 4, d.tiles[0][j].data[r]);
        }
    }
}

// Stores a tile that is not divided, by warp, through shared memory where the consumer's rows of a
// were: 16 bytes per lane, or neighbouring words where rows are not aligned.
template <class Traits>
__device__ __forceinline__ void store_tile(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared,
                                           const ClusterTilePosition& at,
                                           const rt_fl<16, Traits::config.block_n>& d) {
    constexpr Config C = Traits::config;
    using staging = st<bf16, 16, 64>;
    constexpr int subtiles = C.block_n / staging::cols;
    static_assert(subtiles <= Traits::least_stages);
    const int consumer = warpgroup::groupid();
    // Where a's rows are adjacent in memory, a warp's share of a stage holds rows of other warps.
    if constexpr (C.a_m_major) warpgroup::sync(READY + 2 + consumer);
    const auto buffer = [&](int subtile) -> staging& {
        auto& buffers =
            reinterpret_cast<staging(&)[WARPGROUP_WARPS]>(shared.ring[subtile].a[consumer]);
        return buffers[warpgroup::warpid()];
    };
#pragma unroll
    for (int subtile = 0; subtile < subtiles; ++subtile) {
        rt_fl<16, staging::cols> sums;
        rt_bf<16, staging::cols> values;
        take_subtile(sums, d, subtile * staging::cols);
        round_to<typename Traits::T>(values, sums);
        kittens::warp::store(buffer(subtile), values);
    }
    arch::sync_warp();
    if (!g.vec8_aligned) {
        const uint32_t row = at.m + kittens::warpid() * 16;
        if (row >= g.m) return;
#pragma unroll 1
        for (uint32_t subtile = 0; subtile < subtiles; ++subtile) {
            const uint32_t n = at.n + subtile * staging::cols;
            if (n >= g.n) return;
            auto* to = static_cast<bf16*>(g.out) +
                       (at.batch * g.out_batch_stride + int64_t(row) * g.out_stride + n);
            if (g.vec2_aligned) {
                copy_rows(buffer(subtile), reinterpret_cast<uint32_t*>(to), g.out_stride / 2,
                          g.m - row, (g.n - n) / 2);
            } else {
                copy_rows(buffer(subtile), reinterpret_cast<uint16_t*>(to), g.out_stride, g.m - row,
                          g.n - n);
            }
        }
        return;
    }
    const int first = laneid() / 8, col = laneid() % 8 * 8;
    const uint32_t m = at.m + kittens::warpid() * 16 + first, n = at.n + col;
    auto* to =
        static_cast<bf16*>(g.out) + (at.batch * g.out_batch_stride + int64_t(m) * g.out_stride + n);
#pragma unroll
    for (int row = 0; row < 16; row += 4) {
        if (m + row < g.m) {
#pragma unroll
            for (int subtile = 0; subtile < subtiles; ++subtile) {
                if (n + subtile * staging::cols < g.n) {
                    arch::store_global_whole(
                        to + subtile * staging::cols,
                        arch::load_shared<uint4>(buffer(subtile).address_of(first + row, col)));
                }
            }
        }
        to += 4 * g.out_stride;
    }
}

// Stores neighbouring values as the output's type, those of them that the output has.
template <int width>
__device__ __forceinline__ void store_values(DType type, void* out, int64_t at,
                                             const float (&values)[width], int count) {
    if (type == DType::fp32) {
        auto* to = static_cast<float*>(out) + at;
        if constexpr (width == 4)
            store_four(to, values, true, count);
        else
            arch::store_global(to, values[0]);
        return;
    }
    uint16_t words[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
        words[i] = type == DType::bf16 ? arch::bit_cast<uint16_t>(convert<bf16>(values[i]))
                                       : arch::bit_cast<uint16_t>(convert<half>(values[i]));
    }
    auto* to = static_cast<uint16_t*>(out) + at;
    if (width == 4 && count >= 4) {
        arch::store_global(reinterpret_cast<uint2*>(to),
                           uint2{words[0] | uint32_t{words[1 % width]} << 16,
                                 words[2 % width] | uint32_t{words[3 % width]} << 16});
        return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
        if (i < count) arch::store_global(to + i, words[i]);
    }
}

// Reduces and stores the block's share of the tile: `width` neighbours of a row at a time.
template <class Traits, int width>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterTilePosition& at) {
    constexpr Config C = Traits::config;
    using T = typename Traits::T;
    constexpr int groups = C.block_n / width;
    using Sums = std::conditional_t<width == 4, float4, float>;
    const uint32_t sums = shared.ring[0].a[0].address();
    const int rows = min(int(g.m) - int(at.m), C.block_m);
    const auto* bias = static_cast<const T*>(g.bias);
    const uint32_t block = at.in_m + g.share_m * at.in_n, next = g.share_m * g.share_n;
#pragma unroll 1
    for (int i = at.rank * Traits::consumer_threads + int(threadIdx.x); i < rows * groups;
         i += g.splits * Traits::consumer_threads) {
        const int row = i / groups, col = i % groups * width;
        const uint32_t n = at.n + col;
        if (n >= g.n) continue;
        const uint32_t from = sums + (row * Traits::pitch + col) * 4;
        float sum[width] = {};
        const auto add = [&](const Sums& part) {
            const auto values = arch::bit_cast<detail::elements<float, width>>(part);
#pragma unroll
            for (int j = 0; j < width; ++j) sum[j] += values.v[j];
        };
        if (g.splits == 1) {
            add(arch::load_shared<Sums>(from));
        } else {
            Sums parts[MAX_CLUSTER_BLOCKS];
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < g.splits) {
                    parts[rank] = arch::load_cluster_shared<Sums>(
                        arch::map_shared_rank(from, block + next * rank));
                }
            }
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < g.splits) add(parts[rank]);
            }
        }
        const int count = min(int(g.n - n), width);
#pragma unroll
        for (int j = 0; j < width; ++j) {
            sum[j] *= g.alpha;
            if (bias != nullptr && j < count)
                sum[j] += convert<float>(arch::load_global(bias + n + j));
        }
        store_values(g.out_dtype, g.out,
                     at.batch * g.out_batch_stride + int64_t(at.m + row) * g.out_stride + n, sum,
                     count);
    }
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
        if (g.vec4_aligned)
            finish_share<Traits, 4>(g, shared, at);
        else
            finish_share<Traits, 1>(g, shared, at);
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
            is_vec4_aligned(p.out, p.out_stride, p.out_dtype) && p.out_batch_stride % 4 == 0,
        .store_only =
            p.out_dtype == C.dtype && p.epilogue.bias == nullptr && p.epilogue.alpha == 1.f,
        .vec8_aligned = aligned(8),
        .vec2_aligned = aligned(2),
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .bias = p.epilogue.bias,
        .alpha = p.epilogue.alpha,
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
