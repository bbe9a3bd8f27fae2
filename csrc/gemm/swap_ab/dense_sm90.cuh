// Swap-AB matrix product on Hopper for skinny m (up to 64 rows of a, or more with a long k): its
// cost is to read b, a weight, once.
//
// The operands are swapped: 64 columns of b are the rows of a tensor core's tile, up to 64 rows of
// a its columns, so that little of the tile is empty. Roles: one warp loads, one warpgroup
// multiplies. The warp keeps a ring of large stages filled by TMA; nearly all of the shared memory
// is bytes on their way. Tiles are dealt out evenly over persistent blocks. Where there are fewer
// tiles than SMs, split-K over a cluster: its blocks divide k, and each reduces the partial sums of
// a share of the tile's elements, in a fixed order, over the cluster's shared memory, so that
// reruns give the same bits.
//
// The finished sums pass through shared memory, which transposes them back: rounded already where
// the epilogue is short, else in fp32, and each thread then applies the epilogue to four
// neighbouring columns of a row.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/swap_ab/skeleton_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

template <Config C>
struct SwapAbTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int products = C.block_n / 64;
    static constexpr int pitch = C.block_n + 4;  // of the sums, in floats: without bank conflicts
    using weights = std::conditional_t<C.b_n_major, st<T, C.block_k, 64>, st<T, 64, C.block_k>>;
    using rows = st<T, C.block_m, C.block_k>;
    // 16-bit results on their way out, to TMA words.
    using out_tile = st<bf16, C.block_m, 64>;

    struct Stage {
        weights b[products];
        rows a;
    };
    struct Shared {
        Stage stages[C.stages];
        sv_fl<C.block_m * pitch> sums;
        semaphore full[C.stages], empty[C.stages];
        semaphore summed, read;  // the cluster's sums: all are there, all have been read
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "dense/gemm.h knows another size");

    struct Globals {
        gl<T, 1, 1, -1, -1, rows> a;
        gl<T, 1, 1, -1, -1, weights> b;
        gl<bf16, 1, 1, -1, -1, out_tile> out_map;
        void* out;
        int64_t out_stride;
        DType out_dtype;
        bool store_by_tma;   // the transposed store: 16-bit results of a short epilogue
        bool evict_first_b;  // see Schedule
        bool vec4_aligned;   // four neighbouring elements of out, residual and aux are aligned
        Epilogue epilogue;
        uint32_t m, n, out_n;
        uint32_t tiles, clusters;
        Divisor m_tiles;
        int k_steps, splits;
    };

    static constexpr int threads = gemm::threads(C);
};

// The position of a block's tile. With a blocked gate the tile's second half is as far away as z's.
template <Config C>
struct SwapAbTile {
    uint32_t n_tile, row, col;

    template <class Globals>
    __device__ __forceinline__ SwapAbTile(const Globals& g, uint32_t index) {
        n_tile = g.m_tiles.divide(index);
        row = (index - n_tile * g.m_tiles.value) * C.block_m;
        col = n_tile * (C.fused && g.epilogue.gate == Gate::blocked ? 64 : C.block_n);
    }
    template <class Globals>
    __device__ __forceinline__ uint32_t part(const Globals& g, int i) const {
        const bool apart = C.fused && g.epilogue.gate == Gate::blocked;
        return col + i * (apart ? g.out_n : 64);
    }
};

template <class Globals, class Work>
__device__ __forceinline__ void for_each_swap_ab_tile(const Globals& g, Work work) {
    for (uint32_t i = blockIdx.x / g.splits; i < g.tiles; i += g.clusters) work(i);
}

template <Config C, tma::CachePolicy policy>
__device__ __forceinline__ void load_weights(const typename SwapAbTraits<C>::Globals& g,
                                             typename SwapAbTraits<C>::Stage& stage,
                                             const SwapAbTile<C> tile, int k, semaphore& full) {
#pragma unroll
    for (int i = 0; i < SwapAbTraits<C>::products; ++i) {
        const int col = static_cast<int>(tile.part(g, i));
        tma::load_async<2, policy>(
            stage.b[i], g.b, C.b_n_major ? elements(0, 0, k, col) : elements(0, 0, col, k), full);
    }
}

template <Config C>
__device__ __forceinline__ void produce_swap_ab(const typename SwapAbTraits<C>::Globals& g,
                                                typename SwapAbTraits<C>::Shared& shared) {
    const int2 range = swap_ab::range_of_k(g, swap_ab::rank_in_cluster(g));
    int slot = 0, phase = 1;
    for_each_swap_ab_tile(g, [&](uint32_t index) {
        const SwapAbTile<C> tile(g, index);
        // Where b's rows lie along n each block reads a little of all rows, and memory is fast
        // where neighbouring columns are read together: tiles begin at the same k, or few at
        // others.
        swap_ab::RotatedK at(range, !C.b_n_major ? tile.n_tile : C.fused ? tile.n_tile / 4 : 0);
        for (int step = range.x; step < range.y; ++step, at.advance()) {
            auto& stage = shared.stages[slot];
            semaphore& full = shared.full[slot];
            wait(shared.empty[slot], phase);
            tma::expect(full, stage);
            const int k = at.k * C.block_k;
            if (g.evict_first_b)
                load_weights<C, tma::CachePolicy::evict_first>(g, stage, tile, k, full);
            else
                load_weights<C, tma::CachePolicy::normal>(g, stage, tile, k, full);
            tma::load_async<2, tma::CachePolicy::evict_last>(
                stage.a, g.a, elements(0, 0, static_cast<int>(tile.row), k), full);
            if (++slot == C.stages) slot = 0, phase ^= 1;
        }
    });
}

// The epilogue of a tile whose sums lie in the shared memory of the cluster's blocks.
template <Config C, class O>
__device__ __forceinline__ void swap_ab_epilogue(const typename SwapAbTraits<C>::Globals& g,
                                                 const ClusterReduce<SwapAbTraits<C>::pitch>& sums,
                                                 const SwapAbTile<C> tile, int rank) {
    using Traits = SwapAbTraits<C>;
    using T = typename Traits::T;
    const Epilogue& e = g.epilogue;
    const Gate gate = C.fused ? e.gate : Gate::none;
    // Four neighbouring columns of z, reduced over the cluster in the order of its blocks.
    const auto four = [&](int row, int col, float(&z)[4]) {
        sums.total(z, row, col);
        const uint32_t n = tile.part(g, col / 64) + col % 64;
        float bias[4] = {};
        if (e.bias != nullptr) {
            load_four(bias, static_cast<const T*>(e.bias) + n, false, int(g.n) - int(n));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = e.alpha * z[i] + bias[i];
        if (C.fused && e.aux != nullptr) {
            O* to = static_cast<O*>(e.aux) + (int64_t(tile.row + row) * g.n + n);
            const int limit = gate == Gate::blocked && col < 64 ? int(g.out_n) : int(g.n);
            store_four(to, z, g.vec4_aligned, limit - int(n));
        }
    };
    const uint32_t first = gate == Gate::interleaved ? tile.col / 2 : tile.col;
    constexpr int fours = C.block_n / 4;
    const int halved = gate == Gate::none ? 0 : 1;
#pragma unroll 2
    for (int i = rank * WARPGROUP_THREADS + warpgroup::laneid(); i < C.block_m * fours >> halved;
         i += g.splits * WARPGROUP_THREADS) {
        const int row = (i << halved) / fours, col = (i & ((fours >> halved) - 1)) * 4;
        const uint32_t m = tile.row + row, n = first + col;
        if (m >= g.m || n >= g.out_n) continue;
        float x[4];
        if (gate == Gate::interleaved) {
            float low[4], high[4];
            four(row, 2 * col, low);
            four(row, 2 * col + 4, high);
            x[0] = low[0], x[1] = low[2], x[2] = high[0], x[3] = high[2];
            activate(e.activation, x);
            x[0] *= low[1], x[1] *= low[3], x[2] *= high[1], x[3] *= high[3];
        } else {
            four(row, col, x);
            if constexpr (C.fused) activate(e.activation, x);
            if (gate == Gate::blocked) {
                float value[4];
                four(row, 64 + col, value);
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j] *= value[j];
            }
        }
        const int count = int(g.out_n) - int(n);
        if (C.fused && e.residual != nullptr) {
            float residual[4];
            load_four(residual, static_cast<const O*>(e.residual) + (m * e.residual_stride + n),
                      g.vec4_aligned, count);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] += e.beta * residual[j];
        }
        store_four(static_cast<O*>(g.out) + (m * g.out_stride + n), x, g.vec4_aligned, count);
    }
}

// The transposed store, with the short epilogue: in registers, from there by transposing stores
// through shared memory to TMA.
template <Config C>
struct TransposedStore {
    using Traits = SwapAbTraits<C>;
    float bias[Traits::products][2];

    // A thread has two columns of each product.
    __device__ __forceinline__ void fetch(const typename Traits::Globals& g,
                                          const SwapAbTile<C> tile) {
        const auto* from = static_cast<const typename Traits::T*>(g.epilogue.bias);
#pragma unroll
        for (int i = 0; i < Traits::products; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t n = tile.part(g, i) + swap_ab::column_of_thread(half);
                bias[i][half] =
                    from != nullptr && n < g.n ? convert<float>(arch::load_global(from + n)) : 0.f;
            }
        }
    }
    __device__ __forceinline__ void values(const Epilogue& e, const rt_fl<16, C.block_m>& d,
                                           int part, int j, float (&x)[8]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float2 pair = d.tiles[0][j].data[r];
            x[2 * r] = e.alpha * pair.x + bias[part][r % 2];
            x[2 * r + 1] = e.alpha * pair.y + bias[part][r % 2];
        }
    }
    __device__ __forceinline__ void store(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared,
                                          const rt_fl<16, C.block_m> (&d)[Traits::products],
                                          const SwapAbTile<C> tile, int barrier) const {
        const Epilogue& e = g.epilogue;
        const bool gated = C.fused && e.gate == Gate::blocked;
        auto& buffers =
            reinterpret_cast<typename Traits::out_tile(&)[Traits::products]>(shared.sums);
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
        warpgroup::sync(barrier);
#pragma unroll
        for (int i = 0; i < Traits::products; ++i) {
            if (gated && i > 0) break;
            rt_bf<C.block_m, 16, col_l> out;
#pragma unroll
            for (int j = 0; j < C.block_m / 16; ++j) {
                float x[8];
                values(e, d[i], i, j, x);
                if constexpr (C.fused) activate(e.activation, x);
                if (C.fused && gated) {
                    float y[8];
                    values(e, d[Traits::products - 1], Traits::products - 1, j, y);
#pragma unroll
                    for (int r = 0; r < 8; ++r) x[r] *= y[r];
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float low = x[2 * r], high = x[2 * r + 1];
                    out.tiles[j][0].data[r] =
                        g.out_dtype == DType::bf16
                            ? arch::pack_bf16(low, high)
                            : arch::bit_cast<bf16_2>(arch::pack_half(low, high));
                }
            }
            auto columns = buffers[i].template subtile<C.block_m, 16>({0, warpgroup::warpid()});
            kittens::warp::store(columns, out);
        }
        arch::fence_async_shared();
        warpgroup::sync(barrier);
        if (warpgroup::laneid() == 0) {
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) {
                if (gated && i > 0) break;
                tma::store_async(g.out_map, buffers[i],
                                 elements(0, 0, static_cast<int>(tile.row),
                                          static_cast<int>(tile.col + i * 64)));
            }
        }
    }
};

template <Config C>
__device__ __forceinline__ void consume_swap_ab(const typename SwapAbTraits<C>::Globals& g,
                                                typename SwapAbTraits<C>::Shared& shared) {
    using Traits = SwapAbTraits<C>;
    constexpr int SUMS = 2;  // named barrier of the consumer
    const int rank = swap_ab::rank_in_cluster(g);
    const int2 range = swap_ab::range_of_k(g, rank);
    ClusterReduce<Traits::pitch> sums{shared.sums.address(), g.splits, SUMS, shared.summed,
                                      shared.read};
    int slot = 0, phase = 0;
    rt_fl<16, C.block_m> d[Traits::products];
    TransposedStore<C> transposed;
    for_each_swap_ab_tile(g, [&](uint32_t index) {
        const SwapAbTile<C> tile(g, index);
        if (g.store_by_tma) transposed.fetch(g, tile);
        int previous = 0;
        for (int k = range.x; k < range.y; ++k) {
            auto& stage = shared.stages[slot];
            wait(shared.full[slot], phase);
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) {
                warpgroup::product<C.b_n_major, true>(d[i], stage.b[i], stage.a, k > range.x);
            }
            warpgroup::mma_async_wait<Traits::products>();
            if (k > range.x) release_stage(shared.empty[previous]);
            previous = slot;
            if (++slot == C.stages) slot = 0, phase ^= 1;
        }
#pragma unroll
        for (int i = 0; i < Traits::products; ++i) warpgroup::mma_async_wait(d[i]);
        release_stage(shared.empty[previous]);

        if (g.store_by_tma) return transposed.store(g, shared, d, tile, SUMS);
        sums.begin();
#pragma unroll
        for (int i = 0; i < Traits::products; ++i) sums.store(d[i], i * 64);
        sums.sync_cluster();
        with_type(g.out, g.out_dtype,
                  [&]<class O>(O*) { swap_ab_epilogue<C, O>(g, sums, tile, rank); });
        sums.end();
    });
    if (g.store_by_tma && warpgroup::laneid() == 0) tma::store_async_read_wait();
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, 1) void swap_ab_kernel(const __grid_constant__
                                                                     typename Traits::Globals g) {
    constexpr Config C = Traits::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool produces = warpgroup::groupid() == 1;
    if (produces) {
        if (arch::elect_one()) {
            tma::prefetch_map<typename Traits::weights>(g.b);
            tma::prefetch_map<typename Traits::rows>(g.a);
            init_stages<C.stages>(shared, 1, 1);
            init_semaphore(shared.summed, WARPGROUP_WARPS * g.splits);
            init_semaphore(shared.read, WARPGROUP_WARPS * g.splits);
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(1, Traits::threads);
    } else {
        arch::named_barrier_sync(1, Traits::threads);
    }
    // Other blocks of the cluster arrive at these semaphores when they have their sums.
    if (g.splits > 1) cluster::arrive();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (produces) {
        if (arch::elect_one()) produce_swap_ab<C>(g, shared);
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        consume_swap_ab<C>(g, shared);
    }
    // The cluster must not end early: other blocks of it read this block's shared memory and arrive
    // at its semaphores.
    if (g.splits > 1) cluster::sync();
}

}  // namespace sm90

template <Config C>
void launch_swap_ab(const Params& p, Stream stream) {
    using Traits = sm90::SwapAbTraits<C>;
    using Globals = typename Traits::Globals;
    const Epilogue& e = p.epilogue;
    const int64_t out_n = e.gate == Gate::none ? p.n : p.n / 2;
    const int64_t covered = e.gate == Gate::blocked ? 64 : C.block_n;
    const int64_t columns = e.gate == Gate::blocked ? out_n : p.n;
    const auto m_tiles = static_cast<uint32_t>(ceil_div(p.m, C.block_m));
    const auto aligned = [&](const void* data, int64_t stride) {
        return data == nullptr || is_vec4_aligned(data, stride, p.out_dtype);
    };
    const bool vec4_aligned = aligned(p.out, p.out_stride) &&
                              aligned(e.residual, e.residual_stride) &&
                              aligned(e.aux, p.n / (1 + (e.gate == Gate::blocked)));
    const int64_t words = size_in_bytes(p.out_dtype) / 2;
    const bool store_by_tma = words == 1 && p.schedule.splits == 1 && !e.residual && !e.aux &&
                              e.gate != Gate::interleaved && p.out_stride % 8 == 0 &&
                              out_n % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
    const Globals globals{
        .a = matrix_of<decltype(Globals::a)>(p.a, p.m, p.k, p.a_stride),
        .b = matrix_of<decltype(Globals::b)>(p.b, C.b_n_major ? p.k : p.n, C.b_n_major ? p.n : p.k,
                                             p.b_stride),
        .out_map = output_of<decltype(Globals::out_map)>(store_by_tma, p.out, p.m, out_n,
                                                         p.out_stride, p.a),
        .out = p.out,
        .out_stride = p.out_stride,
        .out_dtype = p.out_dtype,
        .store_by_tma = store_by_tma,
        .evict_first_b = p.schedule.evict_first_b,
        .vec4_aligned = vec4_aligned,
        .epilogue = e,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .out_n = static_cast<uint32_t>(out_n),
        .tiles = m_tiles * static_cast<uint32_t>(ceil_div(columns, covered)),
        .clusters = static_cast<uint32_t>(p.schedule.blocks / p.schedule.splits),
        .m_tiles = Divisor(m_tiles),
        .k_steps = static_cast<int>(ceil_div(p.k, C.block_k)),
        .splits = p.schedule.splits,
    };
    launch_dependent<Traits>(sm90::swap_ab_kernel<Traits>, dim3(p.schedule.blocks),
                             dim3(p.schedule.splits), stream, globals);
}

}  // namespace thunderkittens::gemm
