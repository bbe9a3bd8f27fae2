// Product of fp8 matrices on Hopper: out = activation(scale * (a @ b^T) + bias).
//
// A block is persistent and warp-specialised, as in gemm_sm90.cuh: one thread of the producer
// warpgroup keeps a ring of stages (128 of k of a tile of a and of b) filled by TMA, running ahead
// across tiles; two consumer warpgroups share the tile's rows.
//
// `fast`: the tensor cores keep the sums of all k; one product is in flight while a consumer hands
// back the stage of the one before, and a finished tile leaves in the shadow of the next.
//
// `promoted` and `fine`: a product of 64 x 128 x 128 (k) goes to registers of its own and is added
// to the sums in fp32, times the scales of its 128 of k where there are such. A consumer computes
// its 64 x 256 as two such products with the same a, one after the other: the second set of
// registers is then half as large as the sums, and while one consumer adds, the other one's
// products keep the tensor cores busy.
#pragma once

#include "csrc/gemm/fp8_epilogue_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Config C>
__device__ __forceinline__ void produce(const typename Types<C>::Globals& g,
                                        typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    // Blocks in the same row of the cluster share a's tile, those in the same column b's.
    const uint16_t a_blocks =
        static_cast<uint16_t>(((1u << g.cluster_n) - 1) << (place.in_m * g.cluster_n));
    const uint16_t b_blocks =
        static_cast<uint16_t>((g.cluster_m == 2 ? 1u | 1u << g.cluster_n : 1u) << place.in_n);
    Ring<C.stages> ring;
    for_each_tile<C>(g, place, [&](const Tile& tile) {
        if (tile.nothing) return;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            if constexpr (K::fine)
                tma::expect(full, stage.a, stage.b, shared.scales[ring.stage]);
            else
                tma::expect(full, stage);
            auto& a_parts = reinterpret_cast<typename K::a_part(&)[2]>(stage.a);
            auto& b_parts = reinterpret_cast<typename K::b_part(&)[2]>(stage.b);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const element_coord from =
                    elements(0, 0, tile.row + i * K::a_part::rows, k * BLOCK_K);
                if (g.cluster_n == 1) {
                    tma::load_async(a_parts[i], g.a, from, full);
                } else if (place.in_n == uint32_t(i)) {
                    tma::cluster::load_async(a_parts[i], g.a, from, full, a_blocks);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const element_coord from =
                    elements(tile.group, 0, tile.col + i * K::b_part::rows, k * BLOCK_K);
                if (g.cluster_m == 1) {
                    tma::load_async(b_parts[i], g.b, from, full);
                } else if (place.in_m == uint32_t(i)) {
                    tma::cluster::load_async(b_parts[i], g.b, from, full, b_blocks);
                }
            }
            if constexpr (K::fine) {
                tma::load_async(shared.scales[ring.stage], g.fine_scales,
                                elements(tile.group, 0, k, tile.col), full);
            }
        }
    });
}

// Hands stages back to the blocks of the cluster that fill them: warp i to block i. One arrival
// stands for the warpgroup, which wgmma reads shared memory as; scales are read by every warp.
template <Config C>
struct Release {
    typename Types<C>::Shared& shared;
    bool hands_back, alone;
    uint32_t peer;

    __device__ __forceinline__ Release(const typename Types<C>::Globals& g,
                                       typename Types<C>::Shared& s, const Place place)
        : shared(s), alone(g.cluster_m * g.cluster_n == 1), peer(warpgroup::warpid()) {
        const uint32_t peer_m = g.cluster_n == 2 ? peer / 2 : peer,
                       peer_n = g.cluster_n == 2 ? peer % 2 : 0;
        hands_back =
            laneid() == 0 && (Types<C>::fine || (peer < g.cluster_m * g.cluster_n &&
                                                 (peer_m == place.in_m || peer_n == place.in_n)));
    }
    __device__ __forceinline__ void operator()(int stage) const {
        if constexpr (Types<C>::fine) arch::sync_warp();
        if (!hands_back) return;
        if (alone)
            arrive(shared.empty[stage]);
        else
            arrive_remote_relaxed(shared.empty[stage], peer);
    }
};

template <Config C>
__device__ __forceinline__ void consume_fast(const typename Types<C>::Globals& g,
                                             typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    const Release<C> release(g, shared, place);
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[1];
    auto& d = sums[0];
    Finished<C> finished;
    for_each_tile<C>(g, place, [&](const Tile& tile) {
        const uint32_t row = tile.row + consumer * 64 + warpgroup::warpid() * 16;
        int previous = 0;
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            auto rows = stage.a.template subtile<64, BLOCK_K>({consumer, 0});
            warpgroup::product<false, true>(d, rows, stage.b, k > 0);
            if (finished.any && k < finished.pieces) {
#pragma unroll
                for (int piece = 0; piece < finished.pieces; ++piece) {
                    if (k == piece) finished.send(g, shared, piece);
                }
            }
            warpgroup::mma_async_wait<1>();
            if (k > 0) release(previous);
            previous = ring.stage;
        }
        // Here the registers are free, and the last product hides the latency.
        Epilogue<C> epilogue;
        epilogue.fetch(g, tile, row + laneid() / 4);
        warpgroup::mma_async_wait(d);
        release(previous);

        if (finished.any && g.k_blocks < finished.pieces) {
#pragma unroll
            for (int piece = 1; piece < finished.pieces; ++piece) {
                if (g.k_blocks <= piece) finished.send(g, shared, piece);
            }
        }
        epilogue.apply(g, shared, sums);
        if (g.out_dtype == DType::fp32 || !g.tma_store) {
            store_now<C>(g, shared, d, row, tile.col, tile.end);
            return;
        }
        if (g.out_dtype == DType::bf16)
            finished.template pack<bf16>(d);
        else
            finished.template pack<half>(d);
        finished.row = row, finished.col = tile.col;
        finished.any = true;
    });
    if (finished.any) {
#pragma unroll
        for (int piece = 0; piece < finished.pieces; ++piece) finished.send(g, shared, piece);
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

// Scales of 128 of k that one thread needs: of its two rows of a, and of the blocks of b. Fetched
// before the products that they are for, which hide the latency. Rows and columns that are not
// there take the scales of the last ones.
template <Config C>
struct BlockScales {
    static constexpr int count = Types<C>::fine ? 0 : C.block_n / 128;
    uint32_t row[2], col, next_col;  // offsets for the block of k that comes next

    __device__ __forceinline__ BlockScales(const typename Types<C>::Globals& g, const Tile& tile,
                                           uint32_t first_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = first_row + 8 * i < tile.end ? first_row + 8 * i : tile.end - 1;
            row[i] = at * uint32_t(g.scale_a.outer);
        }
        col = tile.group * uint32_t(g.scale_b.group) + tile.col / 128 * uint32_t(g.scale_b.outer);
        next_col = tile.col + 128 < g.n ? uint32_t(g.scale_b.outer) : 0;
    }
    __device__ __forceinline__ void fetch(const typename Types<C>::Globals& g, float (&rows)[2],
                                          float (&cols)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rows[i] = cols[i] = 1.f;
        if (!g.blocks) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rows[i] = arch::load_global(g.scale_a.data + row[i]);
            row[i] += uint32_t(g.scale_a.inner);
            if (i < count) cols[i] = arch::load_global(g.scale_b.data + (col + i * next_col));
        }
        col += uint32_t(g.scale_b.inner);
    }
};

#ifndef ORDERED
#define ORDERED 0
#endif
template <Config C>
__device__ __forceinline__ void consume_promoted(const typename Types<C>::Globals& g,
                                                 typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    const Release<C> release(g, shared, place);
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    rt_fl<16, 128> sums[K::products], part;
    // The first stage's address, as a register that is not computed again in every step.
    const auto first_rows = shared.stages[0].a.template subtile<64, BLOCK_K>({consumer, 0});
    uint32_t stages = first_rows.base;
    arch::pin_register(stages);
    constexpr int turn = READY + 1 + K::consumers;
    if (ORDERED && consumer == 1) arch::named_barrier_arrive(turn, K::consumers * 128);

    for_each_tile<C>(g, place, [&](const Tile& tile) {
        const uint32_t row = tile.row + consumer * 64 + warpgroup::warpid() * 16;
        const uint32_t own_row = row + laneid() / 4;
#pragma unroll
        for (int i = 0; i < K::products; ++i) kittens::warp::zero(sums[i]);
        BlockScales<C> scales(g, tile, own_row);
        const int k_blocks = tile.nothing ? 0 : g.k_blocks;
        float rows[2], cols[2], next_rows[2], next_cols[2];
        if (k_blocks > 0) {
            scales.fetch(g, next_rows, next_cols);
            wait(shared.full[ring.stage], ring.phase);
        }
        int stage = ring.stage;
        for (int k = 0; k < k_blocks; ++k) {
            const int previous = stage;
            stage = ring.stage;
#pragma unroll
            for (int i = 0; i < K::products; ++i) {
                auto a = first_rows;
                a.base = stages + stage * int(sizeof(typename K::Stage));
                auto b = shared.stages[0].b.template subtile<128, BLOCK_K>({i, 0});
                b.base = a.base + uint32_t(sizeof(typename K::a_tile));
                if (ORDERED) arch::named_barrier_sync(turn + consumer, K::consumers * 128);
                warpgroup::product<false, true>(part, a, b, false);
                if (ORDERED) arch::named_barrier_arrive(turn + 1 - consumer, K::consumers * 128);
                // While the product runs: what comes before and after it.
                if (i == 0) {
                    if (k > 0) release(previous);
#pragma unroll
                    for (int r = 0; r < 2; ++r) rows[r] = next_rows[r], cols[r] = next_cols[r];
                }
                if (i == K::products - 1) {
                    ring.advance();
                    if (k + 1 < k_blocks) {
                        scales.fetch(g, next_rows, next_cols);
                        wait(shared.full[ring.stage], ring.phase);
                    }
                }
                warpgroup::mma_async_wait(part);
                float factor[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) factor[r] = K::fine ? rows[r] : rows[r] * cols[i];
                if constexpr (K::fine) {
                    with_columns(part, shared.scales[stage], i * 128,
                                 [&](float2& x, float2 s, int r) {
                                     x.x *= s.x * factor[r];
                                     x.y *= s.y * factor[r];
                                 });
                }
#pragma unroll
                for (int j = 0; j < part.width; ++j) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const float2 x = part.tiles[0][j].data[r];
                        float2& sum = sums[i].tiles[0][j].data[r];
                        const float f = K::fine ? 1.f : factor[r % 2];
                        sum = make_float2(fmaf(x.x, f, sum.x), fmaf(x.y, f, sum.y));
                    }
                }
            }
        }
        if (k_blocks > 0) release(stage);
        if (!tile.nothing) {
            Epilogue<C> epilogue;
            epilogue.fetch(g, tile, own_row);
            epilogue.apply(g, shared, sums);
        }
#pragma unroll
        for (int i = 0; i < K::products; ++i) {
            store_now<C>(g, shared, sums[i], row, tile.col + i * 128, tile.end);
        }
    });
    if (ORDERED && consumer == 0) arch::named_barrier_sync(turn, K::consumers * 128);
    if (laneid() == 0) tma::store_async_read_wait();
}

// A template over a type: nvcc 13.0 writes host code that does not compile for a __global__
// template over a struct's value.
template <class K>
__global__ __launch_bounds__(K::threads, 1) void fp8_gemm_kernel(const __grid_constant__
                                                                 typename K::Globals g) {
    constexpr Config C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool alone = g.cluster_m * g.cluster_n == 1;

    if (warpgroup::groupid() == K::consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                tma::prefetch_map<typename K::a_part>(g.a);
                tma::prefetch_map<typename K::b_part>(g.b);
                tma::prefetch_map<typename K::out_tile>(g.out);
                for (int i = 0; i < C.stages; ++i) {
                    init_semaphore(shared.full[i], 1);
                    init_semaphore(
                        shared.empty[i],
                        K::consumers * (K::fine ? WARPGROUP_WARPS : g.cluster_m + g.cluster_n - 1));
                }
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
        }
        if (alone)
            arch::named_barrier_arrive(READY, K::threads);
        else
            cluster::sync();
        warpgroup::decrease_registers<K::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce<C>(g, shared);
    } else {
        if (alone)
            arch::named_barrier_sync(READY, K::threads);
        else
            cluster::sync();
        warpgroup::increase_registers<K::consumer_registers>();
        arch::wait_for_dependencies();
        if constexpr (K::fast)
            consume_fast<C>(g, shared);
        else
            consume_promoted<C>(g, shared);
    }
    // A block's shared memory is written, and its semaphores are arrived at, by its cluster.
    if (!alone) cluster::sync();
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class GL>
GL make_matrix(const void* data, int64_t batch, int64_t rows, int64_t cols, int64_t stride,
               int64_t batch_stride) {
    return GL(static_cast<typename GL::T*>(const_cast<void*>(data)), batch, nullptr, rows, cols,
              gl_strides{batch_stride, 0, stride});
}

template <Config C>
typename Types<C>::Globals make_globals(const Params& p) {
    using K = Types<C>;
    using Globals = typename K::Globals;
    const int64_t words = p.n * size_in_bytes(p.out_dtype) / 2;
    const bool tma_store = p.n * size_in_bytes(p.out_dtype) % 16 == 0 && words <= INT32_MAX;
    // Where TMA cannot store, the map is a stand-in that nobody uses; so is that of the fine scales
    // of a kernel without.
    const int64_t map_words = tma_store ? words : 64;
    const int64_t k_blocks = ceil_div(p.k, BLOCK_K);
    const Schedule& s = p.schedule;
    const auto tiles = [](int64_t size, int64_t tile) {
        return static_cast<uint32_t>(ceil_div(size, tile));
    };
    return {
        .a = make_matrix<decltype(Globals::a)>(p.a, 1, p.m, p.k, p.a_stride, 0),
        .b = make_matrix<decltype(Globals::b)>(p.b, p.groups, p.n, p.k, p.b_stride,
                                               p.b_group_stride),
        .out = make_matrix<decltype(Globals::out)>(p.out, 1, p.m, map_words, map_words, 0),
        .fine_scales =
            K::fine ? make_matrix<decltype(Globals::fine_scales)>(
                          p.scale_b.data, p.groups, k_blocks, p.n, p.scale_b.inner, p.scale_b.group)
                    : make_matrix<decltype(Globals::fine_scales)>(p.out, 1, 1, 64, 64, 0),
        .scale_a = p.scale_a,
        .scale_b = p.scale_b,
        .bias = p.bias,
        .offs = p.offs,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = static_cast<uint32_t>(p.groups),
        .k_blocks = static_cast<int>(k_blocks),
        .blocks = p.blocks,
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .activation = p.activation,
        .tma_store = tma_store,
        .cluster_m = s.cluster_m,
        .cluster_n = s.cluster_n,
        .clusters = static_cast<uint32_t>(s.blocks / (s.cluster_m * s.cluster_n)),
        .columns = tiles(p.n, C.block_n),
        .order = gemm::make_order(tiles(p.m, int64_t{C.block_m} * s.cluster_m),
                                  tiles(p.n, int64_t{C.block_n} * s.cluster_n), 1,
                                  static_cast<uint32_t>(s.band), false),
    };
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    using K = sm90::Types<C>;
    const auto globals = sm90::make_globals<C>(params);
    const Schedule& s = params.schedule;
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::fp8_gemm_kernel<K>,
                    dim3(s.blocks), dim3(K::threads), dim3(s.cluster_m * s.cluster_n),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::fp8_gemm
