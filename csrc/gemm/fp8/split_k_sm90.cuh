// Products of fp8 matrices on Hopper with few tiles: those are as wide as the problem asks for, and
// the blocks of a cluster may divide the k of a tile.
//
// One kernel has all widths, each block one tile or part of one: a warp loads, two warpgroups
// multiply 64 rows each, which as in promoted_sm90.cuh add the sums of 128 of k in fp32 or
// leave them to the tensor cores. Instructions come from memory, too: so what follows the products
// is not unrolled. Sums go to shared memory, from where warps take 16 rows of them: those that
// other blocks of the cluster finish are copied there, and the others' added in the order of the
// blocks, so that reruns give the same bits.
#pragma once

#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/dense/prologue_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"
#include "csrc/gemm/fp8/split_k.h"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Sums sums_>
struct FittedTypes {
    using TA = fp8e4m3;
    using TB = fp8e4m3;
    static constexpr bool fast = sums_ == Sums::fast;
    static constexpr Config config = fitted_config(FITTED_WIDTHS[0], sums_);
    static constexpr int consumers = config.consumers, rows = config.block_m;
    static constexpr int own_rows = rows / consumers;
    // Promoted sums take more registers than all threads can have.
    static constexpr int threads = fitted_threads(sums_);
    static constexpr int producer_registers = 40, consumer_registers = 232;
    using a_tile = st<TA, rows, BLOCK_K>;

    struct Shared {
        st<TA, FITTED_ROWS, BLOCK_K> ring;  // of both operands
        sv_fl<rows> of_rows;
        sv_fl<FITTED_WIDTHS[0]> of_columns, bias;
        semaphore full[FITTED_STAGES], empty[FITTED_STAGES];
        semaphore there[consumers];  // what other blocks have sent
        semaphore sent[consumers];   // what this one has
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == FITTED_SHARED_BYTES, "split_k.h knows another size");

    struct Globals {
        int k_each, k_more;  // steps of a block; the first `k_more` of them have one more
        int width, stages, stage_bytes;
        // Where the last tiles may begin: where they are whole. Rows that are not there are slow.
        uint32_t last_row, last_col;
        CUtensorMap a, b;
        Scales scale_a, scale_b;
        const void* bias;
        DType out_dtype, bias_dtype;
        bool quads;  // four neighbouring elements of out are aligned
        void* out;
        uint32_t m, n;
    };
};

// Named barrier of the consumers.
constexpr int DONE = READY + 1;

// The block's tile.
template <class K>
__device__ __forceinline__ uint32_t tile_row(const typename K::Globals& g) {
    return min(blockIdx.x * K::rows, g.last_row);
}
template <class K>
__device__ __forceinline__ uint32_t tile_col(const typename K::Globals& g) {
    return min(blockIdx.y * g.width, g.last_col);
}
template <class K>
__device__ __forceinline__ int first_step(const typename K::Globals& g, int block) {
    return block * g.k_each + min(block, g.k_more);
}

template <class K>
__device__ __forceinline__ void produce_fitted(const typename K::Globals& g,
                                               typename K::Shared& shared) {
    const int m = static_cast<int>(tile_row<K>(g)), n = static_cast<int>(tile_col<K>(g));
    const int rank = static_cast<int>(blockIdx.z), end = first_step<K>(g, rank + 1);
    const int bytes = (K::rows + g.width) * BLOCK_K;
    int slot = 0, phase = 1;
    for (int step = first_step<K>(g, rank); step < end; ++step) {
        const uint32_t full = shared.full[slot].address();
        const uint32_t to = shared.ring.address() + slot * bytes;
        wait(shared.empty[slot], phase);
        tma::expect_bytes(shared.full[slot], g.stage_bytes);
        arch::tma_load<tma::CachePolicy::normal>(to, &g.a, {step * BLOCK_K, m, 0, 0}, full);
        // Few blocks read it, at the same time.
        arch::tma_load<tma::CachePolicy::evict_first>(to + sizeof(typename K::a_tile), &g.b,
                                                      {step * BLOCK_K, n, 0, 0}, full);
        if (++slot == g.stages) slot = 0, phase ^= 1;
    }
}

// Values of rows and columns, by the consumers.
template <class K>
__device__ __forceinline__ void fetch_values(const typename K::Globals& g,
                                             typename K::Shared& shared) {
    const int i = threadIdx.x;
    const bool per_column = g.scale_b.outer != 0;
    if (i < K::rows) {
        const uint32_t row = min(tile_row<K>(g) + i, g.m - 1);
        float scale = arch::load_global(g.scale_a.data + int64_t(row) * g.scale_a.outer);
        if (!per_column) scale *= arch::load_global(g.scale_b.data);
        shared.of_rows.set(i, scale);
    }
    if (i < g.width) {
        const uint32_t col = min(tile_col<K>(g) + i, g.n - 1);
        if (per_column) {
            const float* scale = g.scale_b.data + int64_t(col) * g.scale_b.outer;
            shared.of_columns.set(i, arch::load_global(scale));
        }
        if (g.bias != nullptr) shared.bias.set(i, load_any(g.bias, g.bias_dtype, col));
    }
    arch::named_barrier_sync(DONE, K::consumers * WARPGROUP_THREADS);
}

// A consumer's sums on their way to shared memory, row by row.
template <class K, int width, class D>
__device__ __forceinline__ void keep_sums(typename K::Shared& shared, const D& d) {
    constexpr int pitch = sums_pitch(width);
    const uint32_t to = shared.ring.address() + (kittens::warpid() * 16 + laneid() / 4) * pitch +
                        laneid() % 4 * sizeof(float2);
    // No product reads the ring any more.
    arch::named_barrier_sync(DONE, K::consumers * WARPGROUP_THREADS);
#pragma unroll
    for (int i = 0; i < width / 8; ++i) {
        const auto& data = d.tiles[0][i / 2].data;
        arch::store_shared(to + i * 32, data[i % 2 * 2]);
        arch::store_shared(to + i * 32 + 8 * pitch, data[i % 2 * 2 + 1]);
    }
}

template <int cols>
__device__ __forceinline__ void add_part(rt_fl<16, cols>& sum, const rt_fl<16, cols>& part) {
#pragma unroll
    for (int j = 0; j < sum.width; ++j) {
#pragma unroll
        for (int r = 0; r < sum.packed_per_base; ++r) {
            sum.tiles[0][j].data[r].x += part.tiles[0][j].data[r].x;
            sum.tiles[0][j].data[r].y += part.tiles[0][j].data[r].y;
        }
    }
}

// The products of a consumer.
template <class K, int width>
__device__ __forceinline__ void multiply_fitted(const typename K::Globals& g,
                                                typename K::Shared& shared, int steps) {
    constexpr uint32_t stage_step = (K::rows + width) * BLOCK_K >> 4;
    const int consumer = arch::shuffle(int(warpgroup::groupid()), 0);
    const auto first = static_cast<uint32_t>(operand_descriptor<K>(shared.ring.address()));
    const uint32_t first_a = first + low_word_of_rows(consumer * K::own_rows);
    const uint32_t first_b = first + low_word_of_rows(K::rows);
    int stage = 0, phase = 0;
    const auto advance = [&] {
        if (++stage == g.stages) stage = 0, phase ^= 1;
    };
    const auto release = [&](int which) { gemm::sm90::release_stage(shared.empty[which]); };
    // A product of so many columns of the stage.
    const auto start = [&]<int cols>(auto& d, int from, bool accumulate) {
        const uint32_t at = arch::shuffle(stage * stage_step, 0);
        warpgroup::mma_fence(d);
        const uint64_t rows = with_low_word<K>(first_a + at);
        const uint64_t columns = with_low_word<K>(first_b + at + low_word_of_rows(from));
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) {
            arch::wgmma<cols, float, typename K::TA, typename K::TB>::template from_shared<0, 0>(
                reinterpret_cast<float(&)[cols / 2]>(d), arch::wgmma_advance(rows, 32 * k),
                arch::wgmma_advance(columns, 32 * k), accumulate || k > 0);
        }
        warpgroup::mma_commit_group();
    };
    int left = arch::shuffle(steps, 0);
    wait(shared.full[0], 0);
    if constexpr (K::fast) {
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
        keep_sums<K, width>(shared, sums);
    } else {
        constexpr int products = width > 192 ? 2 : 1, cols = width / products;
        rt_fl<16, (cols + 15) / 16 * 16> sums[products], part;
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
                start.template operator()<cols>(part, i * cols, false);
                const int previous = stage;
                if (i == products - 1) {
                    advance();
                    if (left > 1) wait(shared.full[stage], phase);
                }
                warpgroup::mma_async_wait(part);
                if (i == products - 1) release(previous);
                add_part(sums[i], part);
            }
        }
        keep_sums<K, width>(shared, reinterpret_cast<rt_fl<16, products * part.cols>&>(sums));
    }
}
template <class K, std::size_t i = 0>
__device__ __forceinline__ void multiply_width(const typename K::Globals& g,
                                               typename K::Shared& shared, int steps) {
    constexpr int width = FITTED_WIDTHS[i];
    constexpr bool last = i + 1 == sizeof(FITTED_WIDTHS) / sizeof(int);
    if (g.width == width)
        multiply_fitted<K, width>(g, shared, steps);
    else if constexpr (!last)
        multiply_width<K, i + 1>(g, shared, steps);
}

// A warp's 16 rows of sums: where they are, where other blocks send theirs, and which of them this
// block finishes.
template <class K>
struct FittedRows {
    const int rank = blockIdx.z, splits = gridDim.z;
    const int pitch, begin, end, each;
    const uint32_t sums, received;

    __device__ __forceinline__ FittedRows(const typename K::Globals& g, typename K::Shared& shared)
        : pitch(sums_pitch(g.width)),
          begin(first_of(rank)),
          end(first_of(rank + 1)),
          each(sent_bytes(g.width, splits)),
          sums(shared.ring.address() + kittens::warpid() * 16 * pitch),
          received(shared.ring.address() + uint32_t(sizeof(shared.ring)) -
                   (kittens::warpid() + 1) * (splits - 1) * each) {}
    __device__ __forceinline__ int first_of(int block) const { return 16 * block / splits; }
};

// Sends other blocks what they finish, a lane each, and waits for what they send.
template <class K>
__device__ __forceinline__ void exchange_rows(typename K::Shared& shared,
                                              const FittedRows<K>& rows) {
    const int consumer = warpgroup::groupid(), other = laneid();
    const bool sends = other < rows.splits && other != rows.rank;
    arch::fence_async_shared();
    arch::sync_warp();
    cluster::wait();  // the others' semaphores are there
    if (sends) {
        const int begin = rows.first_of(other), count = rows.first_of(other + 1) - begin;
        const int place = rows.rank - (rows.rank > other);
        arch::bulk_copy_to_cluster(arch::map_shared_rank(rows.received + place * rows.each, other),
                                   rows.sums + begin * rows.pitch, count * rows.pitch,
                                   arch::map_shared_rank(shared.there[consumer].address(), other));
    }
    wait_cluster(shared.there[consumer], 0);
    if (sends) arrive_remote_relaxed(shared.sent[consumer], other);
    arch::sync_warp();
}

// Sums, scales, bias, rounding. Neighbouring lanes have neighbouring fours of a row.
template <class K, class O>
__device__ __forceinline__ void finish_rows(const typename K::Globals& g,
                                            typename K::Shared& shared, const FittedRows<K>& rows) {
    constexpr int count = 4;  // of fours at a time
    const int fours = g.width / 4;
    const uint32_t first_row = kittens::warpid() * 16;
    const uint32_t m = tile_row<K>(g) + first_row, n = tile_col<K>(g);
    const int rows_on = WARP_THREADS / fours, fours_on = WARP_THREADS % fours;
    int next_row = rows.begin + laneid() / fours, next_four = laneid() % fours;
#pragma unroll 1
    while (next_row < rows.end) {
        int row[count], col[count];
        float4 x[count];
        float scale[count];
#pragma unroll
        for (int j = 0; j < count; ++j) {
            row[j] = next_row, col[j] = next_four * 4;
            next_row += rows_on, next_four += fours_on;
            if (next_four >= fours) next_four -= fours, ++next_row;
        }
        const auto there = [&](int j) { return min(row[j], rows.end - 1); };
#pragma unroll
        for (int j = 0; j < count; ++j) {
            x[j] = arch::load_shared<float4>(rows.sums + there(j) * rows.pitch + col[j] * 4);
            scale[j] =
                arch::load_shared<float>(shared.of_rows.address() + (first_row + there(j)) * 4);
        }
        const auto with = [&](auto at, auto combine) {
#pragma unroll
            for (int j = 0; j < count; ++j) {
                const auto y = arch::load_shared<float4>(at(j) + col[j] * 4);
                combine(x[j].x, y.x), combine(x[j].y, y.y);
                combine(x[j].z, y.z), combine(x[j].w, y.w);
            }
        };
        const auto add = [](float& to, float y) { to += y; };
        const auto multiply = [](float& to, float y) { to *= y; };
#pragma unroll 1
        for (int i = 0; i < rows.splits - 1; ++i) {
            const uint32_t from = rows.received + i * rows.each;
            with([&](int j) { return from + (there(j) - rows.begin) * rows.pitch; }, add);
        }
#pragma unroll
        for (int j = 0; j < count; ++j) {
            x[j].x *= scale[j], x[j].y *= scale[j], x[j].z *= scale[j], x[j].w *= scale[j];
        }
        if (g.scale_b.outer != 0) {
            with([&](int) { return shared.of_columns.address(); }, multiply);
        }
        if (g.bias != nullptr) with([&](int) { return shared.bias.address(); }, add);
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const uint32_t at_m = m + row[j], at_n = n + col[j];
            if (row[j] >= rows.end || at_m >= g.m || at_n >= g.n) continue;
            const float values[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
            const int exist = g.n - at_n < 4 ? static_cast<int>(g.n - at_n) : 4;
            gemm::sm90::store_four(static_cast<O*>(g.out) + (int64_t(at_m) * g.n + at_n), values,
                                   g.quads, exist);
        }
    }
}

template <class K>
__device__ __forceinline__ void finish_fitted(const typename K::Globals& g,
                                              typename K::Shared& shared) {
    const FittedRows<K> rows(g, shared);
    arch::sync_warp();
    if (rows.splits > 1) exchange_rows<K>(shared, rows);
    if (g.out_dtype == DType::bf16)
        finish_rows<K, bf16>(g, shared, rows);
    else
        finish_rows<K, half>(g, shared, rows);
    // Until the others have it, they read this block's shared memory.
    if (rows.splits > 1) wait_cluster(shared.sent[warpgroup::groupid()], 0);
}

// By one thread, before any other block knows of the semaphores.
template <class K>
__device__ __forceinline__ void init_fitted(const typename K::Globals& g,
                                            typename K::Shared& shared) {
    const int rank = static_cast<int>(blockIdx.z), others = static_cast<int>(gridDim.z) - 1;
    for (int i = 0; i < g.stages; ++i) {
        init_semaphore(shared.full[i], 1);
        init_semaphore(shared.empty[i], K::consumers);
    }
    for (int i = 0; i < K::consumers; ++i) {
        init_semaphore(shared.there[i], 1);
        init_semaphore(shared.sent[i], WARPGROUP_WARPS * max(1, others));
    }
    arch::mbarrier_init_fence();
    if (others == 0) return;
    const int rows = 16 * (rank + 1) / (others + 1) - 16 * rank / (others + 1);
    const int bytes = WARPGROUP_WARPS * others * rows * sums_pitch(g.width);
    for (int i = 0; i < K::consumers; ++i) tma::expect_bytes(shared.there[i], bytes);
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void fp8_fitted_kernel(const __grid_constant__
                                                                   typename K::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool alone = gridDim.z == 1;
    constexpr int loading_warp = K::consumers * WARPGROUP_WARPS;
    if (kittens::warpid() >= loading_warp) {
        if constexpr (!K::fast) warpgroup::decrease_registers<K::producer_registers>();
        const bool loads = kittens::warpid() == loading_warp && arch::elect_one();
        if (loads) init_fitted<K>(g, shared);
        arch::sync_warp();
        arch::named_barrier_arrive(READY, K::threads);
        if (!alone) cluster::arrive();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (loads) produce_fitted<K>(g, shared);
        arch::sync_warp();
        if (!alone) cluster::wait();
        return;
    }
    if constexpr (!K::fast) warpgroup::increase_registers<K::consumer_registers>();
    if (threadIdx.x == 0) arch::tma_prefetch_map(&g.a), arch::tma_prefetch_map(&g.b);
    arch::named_barrier_sync(READY, K::threads);
    if (!alone) cluster::arrive();
    arch::wait_for_dependencies();
    fetch_values<K>(g, shared);
    const int rank = static_cast<int>(blockIdx.z);
    multiply_width<K>(g, shared, first_step<K>(g, rank + 1) - first_step<K>(g, rank));
    finish_fitted<K>(g, shared);
}

}  // namespace sm90

template <Sums sums>
void launch_fitted(const Config& config, const Params& p, Stream stream) {
    using K = sm90::FittedTypes<sums>;
    const auto map = [&](const void* data, int64_t rows, int64_t stride, int height) {
        return kittens::host::encode_tensor_map(
            {.data = data,
             .type = kittens::detail::tensor_map_type<typename K::TA>(),
             .element_bytes = 1,
             .dims = {static_cast<uint64_t>(p.k), static_cast<uint64_t>(rows), 1, 1},
             .strides = {stride, 0, 0},
             .box = {BLOCK_K, static_cast<uint32_t>(height), 1, 1},
             .swizzle_bytes = 128});
    };
    const int width = config.block_n, splits = p.schedule.splits;
    const int rows = static_cast<int>(std::min<int64_t>(p.m, K::rows));
    const int columns = static_cast<int>(std::min<int64_t>(p.n, width));
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    // Of more than two blocks' sums a row's place in its tile decides the order: then tiles share
    // no rows, whose bits would be those of the last one to store them.
    const int64_t last_row = splits > 2 ? p.m - 1 : p.m - rows;
    const int steps = static_cast<int>(ceil_div(p.k, BLOCK_K));
    const dim3 grid(static_cast<unsigned>(ceil_div(p.m, K::rows)),
                    static_cast<unsigned>(ceil_div(p.n, width)), splits);
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::fp8_fitted_kernel<K>, grid,
                    dim3(K::threads), dim3(1, 1, splits), sizeof(typename K::Shared), stream,
                    typename K::Globals{
                        .k_each = steps / splits,
                        .k_more = steps % splits,
                        .width = width,
                        .stages = fitted_stages(width, splits),
                        .stage_bytes = (rows + columns) * BLOCK_K,
                        .last_row = static_cast<uint32_t>(last_row),
                        .last_col = static_cast<uint32_t>(p.n - columns),
                        .a = map(p.a, p.m, p.a_stride, rows),
                        .b = map(p.b, p.n, p.b_stride, columns),
                        .scale_a = p.scale_a,
                        .scale_b = p.scale_b,
                        .bias = p.bias,
                        .out_dtype = p.out_dtype,
                        .bias_dtype = p.bias_dtype,
                        .quads = p.n % 4 == 0,
                        .out = p.out,
                        .m = static_cast<uint32_t>(p.m),
                        .n = static_cast<uint32_t>(p.n),
                    });
}

}  // namespace thunderkittens::fp8_gemm
