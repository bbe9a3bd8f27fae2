// Tiles of 128 rows for fp8 products on Hopper, one for each block, over a cluster: the tile N, 64
// to 256, is known at run time, blocks with tiles beside each other may share loads by multicast,
// and blocks with the same tile its k (split-K).
//
// Roles: one warp loads, two warpgroups multiply 64 rows each, with promoted accumulation as in
// promoted_sm90.cuh, where scales may be block-wise ones (1D2D), or fast accumulation. Instructions
// come from memory, too: so what follows the products is not unrolled. Sums go to shared memory,
// and each warp reduces 16 rows of them: it copies to the other blocks with the same tile the rows
// that they finish, and adds what they send in the order of the blocks, so that reruns give the
// same bits.
#pragma once

#include "csrc/gemm/fp8/split_k_epilogue_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Of a tile that several blocks share, each loads as many rows, for all of them.
template <class Traits>
__device__ __forceinline__ void produce_split_k(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    const SharePlace place(g);
    const int m = static_cast<int>(tile_row<Traits>(g)), n = static_cast<int>(tile_col<Traits>(g));
    const int rank = static_cast<int>(blockIdx.z), end = first_step<Traits>(g, rank + 1);
    const int bytes = (Traits::rows + g.width) * BLOCK_K;
    const int a_first = place.in_n * g.a_slice, b_first = place.in_m * g.b_slice;
    // Blocks of the cluster count along m first.
    uint32_t a_blocks = 0;
    for (uint32_t i = 0; i < g.share_n; ++i) a_blocks |= 1u << i * g.share_m;
    const auto to_a = static_cast<uint16_t>(a_blocks << (place.first + place.in_m));
    const auto to_b =
        static_cast<uint16_t>(((1u << g.share_m) - 1) << (place.first + g.share_m * place.in_n));
    int slot = 0, phase = 1;
#pragma unroll 1
    for (int step = first_step<Traits>(g, rank); step < end; ++step) {
        const uint32_t full = shared.full[slot].address();
        const uint32_t a = shared.ring.address() + slot * bytes + a_first * BLOCK_K;
        const uint32_t b =
            shared.ring.address() + slot * bytes + (Traits::rows + b_first) * BLOCK_K;
        const int k = step * BLOCK_K;
        wait(shared.empty[slot], phase);
        tma::expect_bytes(shared.full[slot], g.stage_bytes);
        if (g.share_n == 1)
            arch::tma_load<tma::CachePolicy::normal>(a, &g.a, {k, m, 0, 0}, full);
        else
            arch::tma_load_multicast<tma::CachePolicy::normal>(a, &g.a, {k, m + a_first, 0, 0},
                                                               full, to_a);
        // Few blocks read b's tile, at the same time.
        if (g.share_m == 1)
            arch::tma_load<tma::CachePolicy::evict_first>(b, &g.b, {k, n, 0, 0}, full);
        else
            arch::tma_load_multicast<tma::CachePolicy::evict_first>(b, &g.b, {k, n + b_first, 0, 0},
                                                                    full, to_b);
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
}

// The consumers fetch the scales of rows and columns and the bias.
template <class Traits>
__device__ __forceinline__ void fetch_values(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared) {
    const int i = threadIdx.x;
    if (i < Traits::rows) {
        const uint32_t row = min(tile_row<Traits>(g) + i, g.m - 1);
        float scale = 1.f;
        if (!g.blockwise) {
            scale = arch::load_global(g.scale_a.data + int64_t(row) * g.scale_a.outer);
            if (!g.per_column) scale *= arch::load_global(g.scale_b.data);
        }
        shared.of_rows.set(i, scale);
    }
    if (i < g.width) {
        const uint32_t col = min(tile_col<Traits>(g) + i, g.n - 1);
        if (g.per_column) {
            const float* scale = g.scale_b.data + int64_t(col) * g.scale_b.outer;
            shared.of_columns.set(i, arch::load_global(scale));
        }
        if (g.bias != nullptr) shared.bias.set(i, load_any(g.bias, g.bias_dtype, col));
    }
    arch::named_barrier_sync(DONE, Traits::consumers * WARPGROUP_THREADS);
}

template <int cols>
__device__ __forceinline__ void add_product(rt_fl<16, cols>& sum, const rt_fl<16, cols>& product) {
#pragma unroll
    for (int j = 0; j < sum.width; ++j) {
#pragma unroll
        for (int r = 0; r < sum.packed_per_base; ++r) {
            sum.tiles[0][j].data[r].x += product.tiles[0][j].data[r].x;
            sum.tiles[0][j].data[r].y += product.tiles[0][j].data[r].y;
        }
    }
}

// The products of a consumer.
template <class Traits, int width, bool blockwise = false>
__device__ __forceinline__ void multiply_split_k(const typename Traits::Globals& g,
                                                 typename Traits::Shared& shared, int steps) {
    constexpr uint32_t stage_step = (Traits::rows + width) * BLOCK_K >> 4;
    const int consumer = arch::shuffle(int(warpgroup::groupid()), 0);
    const auto first = static_cast<uint32_t>(operand_descriptor<Traits>(shared.ring.address()));
    const uint32_t first_a = first + low_word_of_rows(consumer * Traits::own_rows);
    const uint32_t first_b = first + low_word_of_rows(Traits::rows);
    int stage = 0, phase = 0;
    const auto advance = [&] {
        if (++stage == g.stages) stage = 0, phase ^= 1;
    };
    const ShareRelease release_stage(g);
    const auto release = [&](int which) { release_stage(shared.empty[which]); };
    // Starts a product of `cols` columns of the stage.
    const auto start = [&]<int cols>(auto& d, int from, bool accumulate) {
        const uint32_t at = arch::shuffle(stage * stage_step, 0);
        warpgroup::mma_fence(d);
        const uint64_t rows = with_low_word<Traits>(first_a + at);
        const uint64_t columns = with_low_word<Traits>(first_b + at + low_word_of_rows(from));
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) {
            arch::wgmma<cols, float, typename Traits::TA, typename Traits::TB>::
                template from_shared<0, 0>(
                    reinterpret_cast<float(&)[cols / 2]>(d), arch::wgmma_advance(rows, 32 * k),
                    arch::wgmma_advance(columns, 32 * k), accumulate || k > 0);
        }
        warpgroup::mma_commit_group();
    };
    int left = arch::shuffle(steps, 0);
    wait(shared.full[0], 0);
    if constexpr (Traits::fast) {
        rt_fl<16, (width + 15) / 16 * 16> sums;
        start.template operator()<width>(sums, 0, false);
        for (--left; left > 0; --left) {
            const int previous = stage;
            advance();
            wait(shared.full[stage], phase);
            start.template operator()<width>(sums, 0, true);
            warpgroup::mma_async_wait<1>();
            release(previous);
        }
        warpgroup::mma_async_wait(sums);
        stage_sums<Traits, width>(shared, sums);
    } else if constexpr (blockwise) {
        constexpr int products = width > 192 ? 2 : 1, cols = width / products;
        static_assert(takes_blocks(width));
        rt_fl<16, cols> sums[products], product;
#pragma unroll
        for (int i = 0; i < products; ++i) kittens::warp::zero(sums[i]);
        const int own_row = consumer * Traits::own_rows + warpgroup::warpid() * 16 + laneid() / 4;
        StepScales<Traits, products> scales(g, own_row);
        for (; left > 0; --left) {
#pragma unroll
            for (int i = 0; i < products; ++i) {
                start.template operator()<cols>(product, i * cols, false);
                if (i == 0) scales.fetch(left > 1);
                const int previous = stage;
                if (i == products - 1) {
                    advance();
                    if (left > 1) wait(shared.full[stage], phase);
                }
                warpgroup::mma_async_wait(product);
                if (i == products - 1) release(previous);
                scales.add(sums[i], product, i);
            }
            scales.advance();
        }
        stage_sums<Traits, width>(shared,
                                  reinterpret_cast<rt_fl<16, products * product.cols>&>(sums));
    } else {
        constexpr int products = width > 192 ? 2 : 1, cols = width / products;
        rt_fl<16, (cols + 15) / 16 * 16> sums[products], product;
#pragma unroll
        for (int i = 0; i < products; ++i) {
            start.template operator()<cols>(sums[i], i * cols, false);
        }
        advance();
        if (left > 1) wait(shared.full[stage], phase);
#pragma unroll
        for (int i = 0; i < products; ++i) warpgroup::mma_async_wait(sums[i]);
        release(0);
        for (--left; left > 0; --left) {
#pragma unroll
            for (int i = 0; i < products; ++i) {
                start.template operator()<cols>(product, i * cols, false);
                const int previous = stage;
                if (i == products - 1) {
                    advance();
                    if (left > 1) wait(shared.full[stage], phase);
                }
                warpgroup::mma_async_wait(product);
                if (i == products - 1) release(previous);
                add_product(sums[i], product);
            }
        }
        stage_sums<Traits, width>(shared,
                                  reinterpret_cast<rt_fl<16, products * product.cols>&>(sums));
    }
}
template <class Traits, std::size_t i = 0>
__device__ __forceinline__ void multiply_width(const typename Traits::Globals& g,
                                               typename Traits::Shared& shared, int steps) {
    constexpr int width = SPLIT_K_WIDTHS[i];
    constexpr bool last = i + 1 == sizeof(SPLIT_K_WIDTHS) / sizeof(int);
    if (g.width == width) {
        if constexpr (!Traits::fast && takes_blocks(width)) {
            if (g.blockwise) return multiply_split_k<Traits, width, true>(g, shared, steps);
        }
        multiply_split_k<Traits, width>(g, shared, steps);
    } else if constexpr (!last) {
        multiply_width<Traits, i + 1>(g, shared, steps);
    }
}

// Called by one thread, before any other block knows of the semaphores.
template <class Traits>
__device__ __forceinline__ void init_semaphores(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    const int rank = static_cast<int>(blockIdx.z), others = static_cast<int>(gridDim.z) - 1;
    for (int i = 0; i < g.stages; ++i) {
        init_semaphore(shared.full[i], 1);
        init_semaphore(shared.empty[i], Traits::consumers * (g.share_m + g.share_n - 1));
    }
    for (int i = 0; i < Traits::consumers; ++i) {
        init_semaphore(shared.there[i], 1);
        init_semaphore(shared.sent[i], WARPGROUP_WARPS * max(1, others));
    }
    arch::mbarrier_init_fence();
    if (others == 0) return;
    const int rows = 16 * (rank + 1) / (others + 1) - 16 * rank / (others + 1);
    const int bytes = WARPGROUP_WARPS * others * rows * sums_pitch(g.width);
    for (int i = 0; i < Traits::consumers; ++i) tma::expect_bytes(shared.there[i], bytes);
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void fp8_split_k_kernel(const __grid_constant__
                                                        typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool multicasts = g.multicasts(), alone = gridDim.z == 1 && !multicasts;
    constexpr int loading_warp = Traits::consumers * WARPGROUP_WARPS;
    if (kittens::warpid() >= loading_warp) {
        if constexpr (!Traits::fast) warpgroup::decrease_registers<Traits::producer_registers>();
        const bool loads = kittens::warpid() == loading_warp && arch::elect_one();
        if (loads) init_semaphores<Traits>(g, shared);
        arch::sync_warp();
        arch::named_barrier_arrive(READY, Traits::threads);
        if (!alone) cluster::arrive();
        if (multicasts) cluster::wait();  // before it loads for others
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (loads) produce_split_k<Traits>(g, shared);
        arch::sync_warp();
        if (multicasts) cluster::arrive();
        if (!alone) cluster::wait();
        return;
    }
    if constexpr (!Traits::fast) warpgroup::increase_registers<Traits::consumer_registers>();
    if (threadIdx.x == 0) arch::tma_prefetch_map(&g.a), arch::tma_prefetch_map(&g.b);
    arch::named_barrier_sync(READY, Traits::threads);
    if (!alone) cluster::arrive();
    if (multicasts) cluster::wait();
    arch::wait_for_dependencies();
    fetch_values<Traits>(g, shared);
    const int rank = static_cast<int>(blockIdx.z);
    multiply_width<Traits>(g, shared,
                           first_step<Traits>(g, rank + 1) - first_step<Traits>(g, rank));
    // Others load into this block's stages and arrive at its semaphores.
    if (multicasts) cluster::arrive();
    reduce_and_store<Traits>(g, shared);
    if (multicasts) cluster::wait();
}

}  // namespace sm90

template <Sums sums>
void launch_split_k(const Config& config, const Params& p, Stream stream) {
    using Traits = sm90::SplitKTraits<sums>;
    const Schedule& schedule = p.schedule;
    const int width = config.block_n, splits = schedule.splits;
    const int rows = static_cast<int>(std::min<int64_t>(p.m, Traits::rows));
    const int columns = static_cast<int>(std::min<int64_t>(p.n, width));
    // Slices of shared tiles begin at the swizzle's period of 8 rows.
    const auto slice = [](int size, int blocks) {
        return blocks == 1 ? size : static_cast<int>(round_up(ceil_div(size, blocks), 8));
    };
    const int a_slice = slice(rows, schedule.cluster_n),
              b_slice = slice(columns, schedule.cluster_m);
    // With more than two splits the order of the additions depends on a row's place in its tile. So
    // tiles share no rows then: the bits of a shared row would be those of the tile that stores it
    // last.
    // Tiles with scales of blocks begin with a block.
    const auto last_row = splits > 2 ? UINT32_MAX : static_cast<uint32_t>(p.m - rows);
    const int steps = static_cast<int>(ceil_div(p.k, BLOCK_K));
    const auto tiles = [](int64_t size, int tile, int blocks) {
        return static_cast<unsigned>(round_up(ceil_div(size, tile), blocks));
    };
    const auto share_m = static_cast<unsigned>(schedule.cluster_m),
               share_n = static_cast<unsigned>(schedule.cluster_n);
    const dim3 grid(tiles(p.m, Traits::rows, schedule.cluster_m),
                    tiles(p.n, width, schedule.cluster_n), splits);
    const typename Traits::Globals globals{
        .k_each = steps / splits,
        .k_extra = steps % splits,
        .width = width,
        .stages = split_k_stages(width, splits),
        .stage_bytes = (a_slice * schedule.cluster_n + b_slice * schedule.cluster_m) * BLOCK_K,
        .share_m = share_m,
        .share_n = share_n,
        .a_slice = a_slice,
        .b_slice = b_slice,
        .last_row = last_row,
        .last_col = p.blockwise ? UINT32_MAX : static_cast<uint32_t>(p.n - columns),
        .a = gemm::map_of_lines<typename Traits::TA>(p.a, p.m, p.k, p.a_stride, a_slice),
        .b = gemm::map_of_lines<typename Traits::TB>(p.b, p.n, p.k, p.b_stride, b_slice),
        .scale_a = p.scale_a,
        .scale_b = p.scale_b,
        .bias = p.bias,
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .vec4_aligned = p.n % 4 == 0,
        .blockwise = p.blockwise,
        .per_column = !p.blockwise && p.scale_b.outer != 0,
        .out = p.out,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
    };
    gemm::launch_dependent<Traits>(sm90::fp8_split_k_kernel<Traits>, grid,
                                   dim3(share_m, share_n, splits), stream, globals);
}

}  // namespace thunderkittens::fp8_gemm
