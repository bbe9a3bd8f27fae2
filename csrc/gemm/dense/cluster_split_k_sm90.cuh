// Matrix product on Hopper with small tiles and split-K over a cluster: the blocks of a cluster
// divide the k of one tile of 64 rows, and each finishes a share of its elements, reduced over the
// cluster's shared memory in the order of the blocks, so that reruns give the same bits. Roles: one
// warp loads, one warpgroup multiplies, reduces and stores.
//
// It is for few tiles and a long k, in all layouts. The ring of stages becomes the memory of the
// sums, and two blocks fit an SM.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C>
struct ClusterSplitKTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    using a_tile =
        std::conditional_t<C.a_m_major, st<T, BLOCK_K, C.block_m>, st<T, C.block_m, BLOCK_K>>;
    using b_tile =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>, st<T, C.block_n, BLOCK_K>>;
    static constexpr int threads = CLUSTER_SPLIT_K_THREADS, stages = CLUSTER_SPLIT_K_STAGES;
    static constexpr int pitch = C.block_n + 4;  // of the sums, in floats

    struct Stage {
        a_tile a;
        b_tile b;
    };
    struct Shared {
        Stage ring[stages];  // and then the sums
        semaphore full[stages], empty[stages];
    };
    static_assert(sizeof(Stage) % 1024 == 0 && C.block_m == 64 && C.consumers == 1);
    static_assert(sizeof(Stage) * stages >= C.block_m * pitch * 4);
    static_assert((sizeof(Shared) + 127) / 128 * 128 == cluster_split_k_shared_bytes(C),
                  "gemm.h knows another size");

    struct Globals {
        int k_blocks, splits;
        bool a_batched, b_batched;
        bool vec4_aligned;  // four neighbouring elements of the output are aligned
        uint32_t m, n;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        const void* bias;
        float alpha;
        gl<T, -1, 1, -1, -1, a_tile> a;
        gl<T, -1, 1, -1, -1, b_tile> b;
    };
};

// The position of a block: its tile, and the range of k that it multiplies.
struct ClusterSplitKPosition {
    uint32_t batch, m, n;
    int rank, first, end;

    template <class Traits>
    static __device__ __forceinline__ ClusterSplitKPosition of(const typename Traits::Globals& g) {
        const int rank = g.splits > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
        return {blockIdx.z / g.splits,
                blockIdx.x * Traits::config.block_m,
                blockIdx.y * Traits::config.block_n,
                rank,
                g.k_blocks * rank / g.splits,
                g.k_blocks * (rank + 1) / g.splits};
    }
};

template <class Traits>
__device__ __forceinline__ void load_range(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared,
                                           const ClusterSplitKPosition& at) {
    constexpr Config C = Traits::config;
    const int a_batch = g.a_batched ? at.batch : 0, b_batch = g.b_batched ? at.batch : 0;
    const int m = at.m, n = at.n;
    int slot = 0, phase = 1;
#pragma unroll 1
    for (int step = at.first; step < at.end; ++step) {
        auto& stage = shared.ring[slot];
        semaphore& full = shared.full[slot];
        const int k = step * BLOCK_K;
        wait(shared.empty[slot], phase);
        tma::expect(full, stage);
        tma::load_async(stage.a, g.a,
                        C.a_m_major ? elements(a_batch, 0, k, m) : elements(a_batch, 0, m, k),
                        full);
        tma::load_async(stage.b, g.b,
                        C.b_n_major ? elements(b_batch, 0, k, n) : elements(b_batch, 0, n, k),
                        full);
        if (++slot == Traits::stages) slot = 0, phase ^= 1;
    }
}

// The products of the block's range of k; the sums go to shared memory, where the stages were.
template <class Traits>
__device__ __forceinline__ void multiply_range(typename Traits::Shared& shared, int steps) {
    constexpr Config C = Traits::config;
    constexpr int SUMS = READY + 1;  // named barrier of the consumer
    Ring<Traits::stages> ring;
    rt_fl<16, C.block_n> d;
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        auto& stage = shared.ring[ring.stage];
        wait(shared.full[ring.stage], ring.phase);
        warpgroup::product<C.a_m_major, !C.b_n_major>(d, stage.a, stage.b, step > 0);
        warpgroup::mma_async_wait<1>();
        if (step > 0) release_stage(shared.empty[previous]);
        previous = ring.stage;
    }
    warpgroup::mma_async_wait(d);
    warpgroup::sync(SUMS);
    const uint32_t sums = shared.ring[0].a.address();
    const int row = warpgroup::warpid() * 16 + laneid() / 4, col = laneid() % 4 * 2;
#pragma unroll
    for (int j = 0; j < d.width; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = (row + r % 2 * 8) * Traits::pitch + j * 16 + r / 2 * 8 + col;
            arch::store_shared(sums + at * 4, d.tiles[0][j].data[r]);
        }
    }
}

// Reduces and stores the block's share of the tile: `width` neighbours of a row at a time.
template <class Traits, class O, int width>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterSplitKPosition& at) {
    constexpr Config C = Traits::config;
    using T = typename Traits::T;
    constexpr int groups = C.block_n / width;
    using Sums = std::conditional_t<width == 4, float4, float>;
    const uint32_t sums = shared.ring[0].a.address();
    O* out = static_cast<O*>(g.out) + at.batch * g.out_batch_stride;
    const int rows = min(int(g.m - at.m), C.block_m);
    const auto* bias = static_cast<const T*>(g.bias);
#pragma unroll 1
    for (int i = at.rank * WARPGROUP_THREADS + warpgroup::laneid(); i < rows * groups;
         i += g.splits * WARPGROUP_THREADS) {
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
            Sums parts[MAX_CLUSTER_SPLITS];
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_SPLITS; ++rank) {
                if (rank < g.splits) {
                    parts[rank] =
                        arch::load_cluster_shared<Sums>(arch::map_shared_rank(from, rank));
                }
            }
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_SPLITS; ++rank) {
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
        O* to = out + (int64_t(at.m + row) * g.out_stride + n);
        if constexpr (width == 4)
            store_four(to, sum, true, count);
        else
            arch::store_global(to, convert<O>(sum[0]));
    }
}
template <class Traits, class O>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterSplitKPosition& at) {
    if (g.vec4_aligned)
        finish_share<Traits, O, 4>(g, shared, at);
    else
        finish_share<Traits, O, 1>(g, shared, at);
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             2) void cluster_split_k_kernel(const __grid_constant__
                                                            typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool loads = threadIdx.x >= WARPGROUP_THREADS;
    if (threadIdx.x == WARPGROUP_THREADS) {
        for (int i = 0; i < Traits::stages; ++i) {
            init_semaphore(shared.full[i], 1);
            init_semaphore(shared.empty[i], 1);
        }
        arch::mbarrier_init_fence();
    }
    const auto at = ClusterSplitKPosition::template of<Traits>(g);
    if (loads) {
        arch::sync_warp();
        arch::named_barrier_arrive(READY, Traits::threads);
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (arch::elect_one()) load_range<Traits>(g, shared, at);
        arch::sync_warp();
        if (g.splits > 1) cluster::sync();
    } else {
        arch::named_barrier_sync(READY, Traits::threads);
        arch::wait_for_dependencies();
        multiply_range<Traits>(shared, at.end - at.first);
        if (g.splits > 1)
            cluster::sync();
        else
            warpgroup::sync(READY + 1);
        if (g.out_dtype == DType::bf16)
            finish_share<Traits, bf16>(g, shared, at);
        else if (g.out_dtype == DType::fp16)
            finish_share<Traits, half>(g, shared, at);
        else
            finish_share<Traits, float>(g, shared, at);
    }
    // The others read this block's sums.
    if (g.splits > 1) cluster::sync();
}

}  // namespace sm90

template <Config C>
void launch_cluster_split_k(const Params& p, Stream stream) {
    using Traits = sm90::ClusterSplitKTraits<C>;
    using namespace kittens;
    const auto matrix = [&]<class GL>(std::type_identity<GL>, const void* data, bool transposed,
                                      int64_t rows, int64_t cols, int64_t stride,
                                      int64_t batch_stride) {
        if (transposed) std::swap(rows, cols);
        return GL(static_cast<typename GL::T*>(const_cast<void*>(data)),
                  batch_stride != 0 ? p.batch : 1, nullptr, rows, cols,
                  gl_strides{batch_stride, 0, stride});
    };
    using Globals = typename Traits::Globals;
    const int64_t words = 4 * size_in_bytes(p.out_dtype);
    const bool vec4_aligned = reinterpret_cast<uintptr_t>(p.out) % words == 0 &&
                              p.out_stride % 4 == 0 && p.out_batch_stride % 4 == 0;
    const auto ceil = [](int64_t a, int64_t b) { return static_cast<unsigned>((a + b - 1) / b); };
    const Globals globals{
        .k_blocks = static_cast<int>(ceil(p.k, BLOCK_K)),
        .splits = p.schedule.splits,
        .a_batched = p.a_batch_stride != 0,
        .b_batched = p.b_batch_stride != 0,
        .vec4_aligned = vec4_aligned,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.out_stride,
        .out_batch_stride = p.out_batch_stride,
        .bias = p.epilogue.bias,
        .alpha = p.epilogue.alpha,
        .a = matrix(std::type_identity<decltype(Globals::a)>{}, p.a, C.a_m_major, p.m, p.k,
                    p.a_stride, p.a_batch_stride),
        .b = matrix(std::type_identity<decltype(Globals::b)>{}, p.b, !C.b_n_major, p.k, p.n,
                    p.b_stride, p.b_batch_stride),
    };
    const auto splits = static_cast<unsigned>(p.schedule.splits);
    kittens::launch(
        LaunchOptions{.dependent = true}, sm90::cluster_split_k_kernel<Traits>,
        dim3(ceil(p.m, C.block_m), ceil(p.n, C.block_n), static_cast<unsigned>(p.batch) * splits),
        dim3(Traits::threads), dim3(1, 1, splits), sizeof(typename Traits::Shared), stream,
        globals);
}

}  // namespace thunderkittens::gemm
