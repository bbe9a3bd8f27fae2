// Swap-AB product of fp8 matrices on Hopper for skinny m (up to 64 rows of a): its cost is to read
// b, a weight, once.
//
// As in dense_sm90.cuh, 64 columns of the output are the rows of a tensor core's tile, up to 64
// rows of a its columns. Roles: one warp loads, one copies scales, one warpgroup multiplies; nearly
// all of the shared memory is bytes on their way. Where there are far fewer tiles than SMs, split-K
// over a cluster. 16-bit results are gathered: the others send their sums in registers to the first
// block, and it adds them; other results are reduced by all blocks over the cluster's shared
// memory. The order is fixed: reruns give the same bits.
//
// Promoted accumulation always: a product of 128 of k goes to registers of its own and is added in
// fp32, times its block-wise scales where there are such. It costs nothing here.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/fp8/types_sm90.cuh"
#include "csrc/gemm/swap_ab/skeleton_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Config C>
struct SwapAbTraits {
    static constexpr Config config = C;
    using TA = element<C.a_dtype>;
    using TB = element<C.b_dtype>;
    static constexpr int products = C.block_k / BLOCK_K;  // products of a stage
    static constexpr int pitch = C.block_n + 4;  // of the sums, in floats: no bank conflicts
    static_assert(C.block_n == 64);
    using weights = st<TB, C.block_n, C.block_k>;
    using rows = st<TA, C.block_m, C.block_k>;
    using out_tile = st<bf16, C.block_m, C.block_n>;  // 16-bit results on their way out

    struct Stage {
        weights b;
        rows a;
    };
    struct Shared {
        Stage stages[C.stages];
        sv_fl<C.block_m * std::max(pitch, senders(C) * C.block_n)> sums;
        // For each product of a stage, scales of rows of a; then of b's block, or of its columns.
        sv_fl<products*(C.block_m + C.block_n)> scales[C.stages];
        semaphore full[C.stages], empty[C.stages];
        semaphore summed, read;  // the cluster's sums: all are there, all have been read
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "fp8/fp8_gemm.h knows another size");

    struct Globals {
        gl<TA, 1, 1, -1, -1, rows> a;
        gl<TB, 1, 1, -1, -1, weights> b;
        gl<bf16, 1, 1, -1, -1, out_tile> out_map;
        void* out;
        Scales scale_a, scale_b;
        const void* bias;
        uint32_t m, n;
        DType out_dtype, bias_dtype;
        gemm::Activation activation;
        bool blockwise, is_1d1d;  // scales are of 128 of k; those of b of one column
        bool store_by_tma;        // the transposed store: 16-bit results
        bool vec4_aligned;        // four neighbouring elements of out are aligned
        uint32_t tiles, clusters;
        gemm::Divisor m_tiles;
        int k_blocks, k_steps, splits;  // blocks of 128, and stages
    };

    static constexpr int threads = fp8_gemm::threads(C);
};

template <Config C>
using SwapAbTile = swap_ab::Tile<C.block_m, C.block_n>;

template <Config C>
__device__ __forceinline__ void load_stage(const typename SwapAbTraits<C>::Globals& g,
                                           typename SwapAbTraits<C>::Shared& shared, int which,
                                           const SwapAbTile<C>& tile, int k) {
    auto& stage = shared.stages[which];
    semaphore& full = shared.full[which];
    tma::expect(full, stage);
    swap_ab::load_weight(g, stage.b, g.b, static_cast<int>(tile.col), k * C.block_k, full);
    tma::load_async<2, tma::CachePolicy::evict_last>(
        stage.a, g.a, elements(0, 0, static_cast<int>(tile.row), k * C.block_k), full);
}

// The producer of block-wise scales: a second warp copies those of a stage from wherever they lie,
// as far ahead as the tiles. Rows and columns that are not there take the scales of the last ones;
// blocks of k that are not there have none, which is zero.
template <Config C>
__device__ __forceinline__ void produce_scales_swap_ab(const typename SwapAbTraits<C>::Globals& g,
                                                       typename SwapAbTraits<C>::Shared& shared,
                                                       int rank) {
    using Traits = SwapAbTraits<C>;
    Ring<C.stages> ring;
    swap_ab::for_each_tile<SwapAbTile<C>>(g, rank, [&](const SwapAbTile<C> tile) {
        const swap_ab::RotatedK& ks = tile.ks;
        int k = ks.k;
        for (int step = ks.begin; step < ks.end; ++step, ring.advance(), k = ks.after(k)) {
            const uint32_t to = shared.scales[ring.stage].address();
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            const auto copy = [&](const Scales& from, uint32_t at, int product, uint32_t first,
                                  uint32_t count) {
                const int block = k * Traits::products + product;
                const uint32_t i = first < count ? first : count - 1;
                const float* source = from.data + int64_t(i) * from.outer;
                arch::cp_async<4>(at, source + int64_t(block) * from.inner, block < g.k_blocks);
            };
#pragma unroll
            for (int i = laneid(); i < Traits::products * C.block_m; i += WARP_THREADS) {
                copy(g.scale_a, to + i * 4, i / C.block_m, tile.row + i % C.block_m, g.m);
            }
            const uint32_t columns = to + Traits::products * C.block_m * 4;
            if (g.is_1d1d) {
#pragma unroll
                for (int i = laneid(); i < Traits::products * C.block_n; i += WARP_THREADS) {
                    copy(g.scale_b, columns + i * 4, i / C.block_n, tile.col + i % C.block_n, g.n);
                }
            } else if (laneid() < Traits::products) {
                copy(g.scale_b, columns + laneid() * 4, laneid(), tile.col / 128,
                     (g.n + 127) / 128);
            }
            arch::cp_async_mbarrier_arrive(shared.full[ring.stage].address());
        }
    });
}

// sums += product, times its block-wise scales.
template <Config C>
__device__ __forceinline__ void promote(const typename SwapAbTraits<C>::Globals& g, uint32_t scales,
                                        rt_fl<16, C.block_m>& sums,
                                        const rt_fl<16, C.block_m>& product, int which) {
    using Traits = SwapAbTraits<C>;
    float column[2] = {1.f, 1.f};
    if (g.blockwise) {
        const uint32_t columns = scales + Traits::products * C.block_m * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = static_cast<int>(swap_ab::column_of_thread(i));
            column[i] =
                arch::load_shared<float>(columns + (g.is_1d1d ? which * C.block_n + n : which) * 4);
        }
    }
#pragma unroll
    for (int j = 0; j < C.block_m / 16; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 row = make_float2(1.f, 1.f);
            if (g.blockwise) {
                const int m = j * 16 + half * 8 + laneid() % 4 * 2;
                row = arch::load_shared<float2>(scales + (which * C.block_m + m) * 4);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 x = product.tiles[0][j].data[2 * half + i];
                float2& sum = sums.tiles[0][j].data[2 * half + i];
                sum.x = fmaf(x.x, row.x * column[i], sum.x);
                sum.y = fmaf(x.y, row.y * column[i], sum.y);
            }
        }
    }
}

// The epilogue of a tile whose sums lie in the shared memory of the cluster's blocks.
template <Config C, class O>
__device__ __forceinline__ void swap_ab_epilogue(
    const typename SwapAbTraits<C>::Globals& g,
    const gemm::sm90::ClusterReduce<SwapAbTraits<C>::pitch>& sums, const SwapAbTile<C> tile,
    int rank) {
    constexpr int fours = C.block_n / 4;
#pragma unroll 1
    for (int i = rank * WARPGROUP_THREADS + warpgroup::laneid(); i < C.block_m * fours;
         i += g.splits * WARPGROUP_THREADS) {
        const int row = i / fours, col = i % fours * 4;
        const uint32_t m = tile.row + row, n = tile.col + col;
        if (m >= g.m || n >= g.n) continue;
        float x[4];
        sums.total(x, row, col);
        const int count = g.n - n < 4 ? int(g.n - n) : 4;
        if (!g.blockwise) {
            const float of_a = arch::load_global(g.scale_a.data + int64_t(m) * g.scale_a.outer);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t column = j < count ? n + j : n;
                x[j] *=
                    of_a * arch::load_global(g.scale_b.data + int64_t(column) * g.scale_b.outer);
            }
        }
        if (g.bias != nullptr) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] += load_any(g.bias, g.bias_dtype, j < count ? n + j : n);
            }
        }
        gemm::sm90::activate(g.activation, x);
        gemm::sm90::store_four(static_cast<O*>(g.out) + (int64_t(m) * g.n + n), x, g.vec4_aligned,
                               count);
    }
}

// The transposed store: scales and bias in registers, from there by transposing stores through
// shared memory to TMA.
template <Config C>
struct TransposedStore {
    using Traits = SwapAbTraits<C>;
    static constexpr int rows = C.block_m / 4;
    float row[rows], column[2], bias[2];

    // Called before the products, which hide the latency. A thread has C.block_m / 4 rows and two
    // columns.
    __device__ __forceinline__ void fetch(const typename Traits::Globals& g,
                                          const SwapAbTile<C> tile) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const uint32_t m = tile.row + i / 2 * 8 + laneid() % 4 * 2 + i % 2;
            row[i] = !g.blockwise && m < g.m
                         ? arch::load_global(g.scale_a.data + int64_t(m) * g.scale_a.outer)
                         : 1.f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t n = tile.col + swap_ab::column_of_thread(i);
            column[i] = !g.blockwise && n < g.n
                            ? arch::load_global(g.scale_b.data + int64_t(n) * g.scale_b.outer)
                            : 1.f;
            bias[i] = g.bias != nullptr && n < g.n ? load_any(g.bias, g.bias_dtype, n) : 0.f;
        }
    }
    __device__ __forceinline__ void store(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared,
                                          const rt_fl<16, C.block_m>& d, const SwapAbTile<C> tile,
                                          int barrier) const {
        auto& buffer = reinterpret_cast<typename Traits::out_tile&>(shared.sums);
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
        warpgroup::sync(barrier);
        swap_ab::store_transposed<C.block_m>(buffer, g.out_dtype, [&](int j, int r) {
            const float2 pair = d.tiles[0][j].data[r];
            const int i = 4 * j + r / 2 * 2;
            return make_float2(pair.x * (row[i] * column[r % 2]) + bias[r % 2],
                               pair.y * (row[i + 1] * column[r % 2]) + bias[r % 2]);
        });
        arch::fence_async_shared();
        warpgroup::sync(barrier);
        if (warpgroup::laneid() == 0) {
            tma::store_async(
                g.out_map, buffer,
                elements(0, 0, static_cast<int>(tile.row), static_cast<int>(tile.col)));
        }
    }
};

template <Config C>
__device__ __forceinline__ void consume_swap_ab(const typename SwapAbTraits<C>::Globals& g,
                                                typename SwapAbTraits<C>::Shared& shared,
                                                int rank) {
    using Traits = SwapAbTraits<C>;
    constexpr int SUMS = 2;  // named barrier of the consumer
    Ring<C.stages> ring;
    gemm::sm90::ClusterReduce<Traits::pitch> reduce{shared.sums.address(), g.splits, SUMS,
                                                    shared.summed, shared.read};
    rt_fl<16, C.block_m> sums, products[Traits::products];
    TransposedStore<C> transposed;
    swap_ab::for_each_tile<SwapAbTile<C>>(g, rank, [&](const SwapAbTile<C> tile) {
        kittens::warp::zero(sums);
        if (g.store_by_tma) transposed.fetch(g, tile);
        for (int step = tile.ks.begin; step < tile.ks.end; ++step, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) {
                auto weights = stage.b.template subtile<C.block_n, BLOCK_K>({0, i});
                auto rows = stage.a.template subtile<C.block_m, BLOCK_K>({0, i});
                warpgroup::product<false, true>(products[i], weights, rows, false);
            }
            warpgroup::mma_async_wait();
            if (!g.blockwise && laneid() == 0) arrive(shared.empty[ring.stage]);
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) {
                warpgroup::mma_async_wait(products[i]);
                promote<C>(g, shared.scales[ring.stage].address(), sums, products[i], i);
            }
            // Each warp has read the scales itself.
            if (g.blockwise) arrive_by_warp(shared.empty[ring.stage]);
        }

        if (g.store_by_tma) {
            if (g.splits > 1) {
                const gemm::sm90::ClusterGather<C.block_m> sent{shared.sums.address(),
                                                                shared.summed};
                if (rank > 0) return sent.send(sums, rank);
                sent.receive(sums, g.splits);
            }
            return transposed.store(g, shared, sums, tile, SUMS);
        }
        reduce.begin();
        reduce.store(sums, 0);
        reduce.sync_cluster();
        gemm::sm90::with_type(g.out, g.out_dtype,
                              [&]<class O>(O*) { swap_ab_epilogue<C, O>(g, reduce, tile, rank); });
        reduce.end();
    });
    if (g.store_by_tma && warpgroup::laneid() == 0) tma::store_async_read_wait();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void fp8_swap_ab_kernel(const __grid_constant__
                                                        typename Traits::Globals g) {
    constexpr Config C = Traits::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool produces = warpgroup::groupid() == 1;
    const int rank = swap_ab::rank_in_cluster(g);
    using Tile = SwapAbTile<C>;
    const auto load = [&](int stage, const Tile& tile, int k) {
        load_stage<Traits::config>(g, shared, stage, tile, k);
    };
    if (produces) {
        if (warpgroup::warpid() == 0 && arch::elect_one()) {
            tma::prefetch_map<typename Traits::weights>(g.b);
            tma::prefetch_map<typename Traits::rows>(g.a);
            gemm::sm90::init_stages<C.stages>(shared, 1 + (g.blockwise ? WARP_THREADS : 0),
                                              WARPGROUP_WARPS);
            init_semaphore(shared.summed, WARPGROUP_WARPS * max(1, g.splits - int(g.store_by_tma)));
            init_semaphore(shared.read, WARPGROUP_WARPS * g.splits);
            arch::mbarrier_init_fence();
            if (g.splits == 1) {
                arch::wait_for_dependencies();
                swap_ab::load_first_stages<C.stages, Tile>(g, load);
            }
        }
        arch::sync_warp();
        if (warpgroup::warpid() == 1)  // which waits for semaphores too
            arch::named_barrier_sync(READY, Traits::threads);
        else
            arch::named_barrier_arrive(READY, Traits::threads);
    } else {
        arch::named_barrier_sync(READY, Traits::threads);
    }
    // Other blocks of the cluster arrive at these semaphores when they have their sums.
    if (g.splits > 1) cluster::arrive();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (produces) {
        if (warpgroup::warpid() == 1) {
            if (g.blockwise) produce_scales_swap_ab<C>(g, shared, rank);
        } else if (arch::elect_one()) {
            swap_ab::load_stages<C.stages, Tile>(g, shared.empty, rank, load);
        }
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        consume_swap_ab<C>(g, shared, rank);
    }
    // The cluster must not end early: other blocks of it read this block's shared memory and arrive
    // at its semaphores. With the gather the first block has waited for what is sent.
    if (g.splits > 1 && !g.store_by_tma) cluster::sync();
}

}  // namespace sm90

template <Config C>
void launch_swap_ab(const Params& p, Stream stream) {
    using Traits = sm90::SwapAbTraits<C>;
    using Globals = typename Traits::Globals;
    const int64_t bytes = size_in_bytes(p.out_dtype);
    const auto m_tiles = static_cast<uint32_t>(ceil_div(p.m, C.block_m));
    const auto all_tiles = m_tiles * static_cast<uint32_t>(ceil_div(p.n, C.block_n));
    const auto clusters = static_cast<uint32_t>(p.schedule.blocks / p.schedule.splits);
    // The gather works for one tile per cluster.
    const bool sent = all_tiles <= clusters && p.schedule.splits <= senders(C) + 1;
    const bool store_by_tma =
        bytes == 2 && (p.schedule.splits == 1 || sent) && p.activation == 0 && p.n % 8 == 0;
    const Globals globals{
        .a = gemm::matrix_of<decltype(Globals::a)>(p.a, p.m, p.k, p.a_stride),
        .b = gemm::matrix_of<decltype(Globals::b)>(p.b, p.n, p.k, p.b_stride),
        .out_map =
            gemm::output_of<decltype(Globals::out_map)>(store_by_tma, p.out, p.m, p.n, p.n, p.out),
        .out = p.out,
        .scale_a = p.scale_a,
        .scale_b = p.scale_b,
        .bias = p.bias,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .blockwise = p.blockwise,
        .is_1d1d = p.is_1d1d,
        .store_by_tma = store_by_tma,
        .vec4_aligned = p.n % 4 == 0,
        .tiles = all_tiles,
        .clusters = clusters,
        .m_tiles = gemm::Divisor(m_tiles),
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK_K)),
        .k_steps = static_cast<int>(ceil_div(p.k, C.block_k)),
        .splits = p.schedule.splits,
    };
    gemm::launch_dependent<Traits>(sm90::fp8_swap_ab_kernel<Traits>, dim3(p.schedule.blocks),
                                   dim3(p.schedule.splits), stream, globals);
}

}  // namespace thunderkittens::fp8_gemm
