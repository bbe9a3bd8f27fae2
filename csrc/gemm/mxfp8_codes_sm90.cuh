// Product of few rows of MXFP8 matrices on Hopper from their codes, on the fp8 tensor cores: it
// needs no pass before it, and costs what it is to read the weight.
//
// The walk and the epilogue are those of mixed_sm90.cuh: 64 rows of the weight are the rows of a
// tensor core's tile, up to 32 rows of a its columns, and the warpgroups of a block divide k. A
// product takes 32 of k, one block of either operand, as the codes lie in memory; in registers it
// is multiplied by the scales of both and added, in fp32. Nothing is re-based, and no scale is too
// far from another; what is lost is that the tensor cores keep 13 bits of a sum of 32 products.
//
// Copies are few: one of each operand and of its scales for all warpgroups, because the warp that
// loads spends some hundred cycles on each. While the products of a stage run, each thread of a
// warpgroup makes floats of the scales of one row.
#pragma once

#include "csrc/gemm/mixed_tiles_sm90.cuh"
#include "csrc/gemm/mxfp8_gemm.h"
#include "csrc/gemm/mxfp8_quantize_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace kittens;
using mixed_gemm::sm90::range_of_k;
using mixed_gemm::sm90::READY;

template <CodesShape S>
struct CodesTypes {
    static constexpr mixed_gemm::Config config = tile_of(S);
    using T = bf16;  // of the bias
    struct W {
        static constexpr float FACTOR = 1.f;
    };
    static constexpr uint32_t band = 4;
    static constexpr int k_groups = config.k_groups;
    static constexpr int block_rows = mixed_gemm::block_rows(config);
    static constexpr int pass = few_pass(config);
    static constexpr int pitch = block_rows + 4;  // of the sums, in floats: no bank conflicts
    static constexpr int consumers = mixed_gemm::consumers(config);
    static constexpr int threads = codes_threads(S);
    static constexpr int BLOCKS = FEW_K / BLOCK;
    // Products, as many as there are registers for.
    static constexpr int in_flight = consumers * config.tokens <= 64 ? BLOCKS : 2;
    static constexpr int factors = block_rows + config.tokens;  // of a block of k
    static_assert(block_rows == 64 && factors <= WARPGROUP_THREADS);

    // A stage has FEW_K of k for each warpgroup, side by side.
    static constexpr int stage_k = FEW_K * k_groups;
    using rows = st<fp8e4m3, config.tokens, stage_k>;
    using codes = st<fp8e4m3, block_rows, stage_k>;

    struct Stage {
        codes weight;
        rows a;
    };
    struct alignas(128) Scales {
        uint8_t weight[k_groups * block_scaled::sm90::ATOM], a[k_groups * block_scaled::sm90::ATOM];
    };
    struct Shared {
        Stage stages[config.stages];
        Scales scales[config.stages];
        // Of each block of a stage: rows of the weight, then those of a. For every other stage.
        sv_fl<BLOCKS * factors> factors_of[k_groups][2];
        sv_fl<pass * pitch> sums[k_groups];
        semaphore full[config.stages], empty[config.stages];
        semaphore summed, read;  // the cluster's sums: all are there, all have been read
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == codes_shared_bytes(S), "mxfp8_gemm.h knows another size");

    struct Globals {
        gl<fp8e4m3, 1, 1, -1, -1, rows> a;
        gl<fp8e4m3, 1, 1, -1, -1, codes> weight;
        const uint8_t *scales_a, *scales_weight;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool quads;
        uint32_t m, n, groups;
        uint32_t row_tiles, clusters;
        int k_blocks, k_chunks, k_stages, splits;
    };
};

// The k of the stages of a tile, one after the other. Blocks begin at different k: not all of them
// read the same lines of a at the same time.
template <class Work>
__device__ __forceinline__ void for_each_k(const int2 range, uint32_t row_tile, Work work) {
    int k = range.x + static_cast<int>(row_tile * 37u % uint32_t(range.y - range.x));
#pragma unroll 1
    for (int step = range.x; step < range.y; ++step) {
        work(k);
        if (++k == range.y) k = range.x;
    }
}

template <class K>
__device__ __forceinline__ void load_codes(const typename K::Globals& g,
                                           typename K::Shared& shared) {
    constexpr int ATOM = block_scaled::sm90::ATOM;
    const int2 range = range_of_k(g);
    int slot = 0, phase = 1;
    mixed_gemm::sm90::for_each_tile<K>(g, [&](const mixed_gemm::sm90::Tile& tile) {
        const int row = static_cast<int>(tile.row_tile) * K::block_rows;
        const int token = static_cast<int>(tile.token);
        for_each_k(range, tile.row_tile, [&](int k) {
            auto& stage = shared.stages[slot];
            auto& scales = shared.scales[slot];
            semaphore& full = shared.full[slot];
            // Past the end of k codes are zero, and have no scales.
            const int first = k * K::k_groups;
            const int bytes = min(K::k_groups, g.k_chunks - first) * ATOM;
            wait(shared.empty[slot], phase);
            tma::expect_bytes(full, sizeof(typename K::Stage) + 2 * bytes);
            tma::load_async<2, tma::CachePolicy::evict_first>(
                stage.weight, g.weight, elements(0, 0, row, k * K::stage_k), full);
            tma::load_async<2, tma::CachePolicy::evict_last>(
                stage.a, g.a, elements(0, 0, token, k * K::stage_k), full);
            const auto load = [&](const uint8_t* to, const uint8_t* from, int line) {
                from += (line / 128 * int64_t{g.k_chunks} + first) * ATOM;
                arch::bulk_load(arch::shared_address(to), from, bytes, full.address());
            };
            load(scales.weight, g.scales_weight, row);
            load(scales.a, g.scales_a, token);
            if (++slot == K::config.stages) slot = 0, phase ^= 1;
        });
    });
}

// The sums of a tile, from all k that fall to this block.
template <class K>
struct CodesMainloop {
    static constexpr auto C = K::config;
    static constexpr int FACTORS = 3;  // named barriers, one per warpgroup
    int slot = 0, phase = 0, parity = 0;
    rt_fl<16, C.tokens> d, parts[K::in_flight];

    // The scales of one row of the stage as floats, of which `blocks` are there.
    __device__ __forceinline__ void convert(const typename K::Scales& scales, uint32_t to,
                                            const mixed_gemm::sm90::Tile& tile, int k_group,
                                            int blocks) const {
        const int thread = warpgroup::laneid();
        if (thread >= K::factors) return;
        const bool of_a = thread >= K::block_rows;
        const uint32_t row =
            of_a ? tile.token + thread - K::block_rows : tile.row_tile * K::block_rows + thread;
        const uint32_t from = arch::shared_address(of_a ? scales.a : scales.weight) +
                              k_group * block_scaled::sm90::ATOM;
        const auto word = arch::load_shared<uint32_t>(
            from + block_scaled::sm90::place_in_atom(static_cast<int>(row % 128), 0));
#pragma unroll
        for (int j = 0; j < K::BLOCKS; ++j) {
            const uint32_t byte = j < blocks ? word >> 8 * j & 255u : 127u;
            arch::store_shared(to + (j * K::factors + thread) * 4,
                               block_scaled::sm90::scale_of_byte(byte));
        }
    }

    // d += part, times the scales of its block.
    __device__ __forceinline__ void promote(const rt_fl<16, C.tokens>& part, uint32_t factors) {
        const int row = warpgroup::warpid() * 16 + laneid() / 4;
        const float weight[2] = {arch::load_shared<float>(factors + row * 4),
                                 arch::load_shared<float>(factors + (row + 8) * 4)};
        const uint32_t of_a = factors + (K::block_rows + laneid() % 4 * 2) * 4;
#pragma unroll
        for (int i = 0; i < C.tokens / 16; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto a = arch::load_shared<float2>(of_a + (i * 16 + half * 8) * 4);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float2 x = part.tiles[0][i].data[2 * half + r];
                    float2& sum = d.tiles[0][i].data[2 * half + r];
                    sum.x = fmaf(x.x, a.x * weight[r], sum.x);
                    sum.y = fmaf(x.y, a.y * weight[r], sum.y);
                }
            }
        }
    }

    __device__ __forceinline__ void run(const typename K::Globals& g, typename K::Shared& shared,
                                        const mixed_gemm::sm90::Tile& tile, const int2 range,
                                        int k_group) {
        kittens::warp::zero(d);
        for_each_k(range, tile.row_tile, [&](int k) {
            auto& stage = shared.stages[slot];
            const uint32_t factors = shared.factors_of[k_group][parity].address();
            wait(shared.full[slot], phase);
#pragma unroll
            for (int first = 0; first < K::BLOCKS; first += K::in_flight) {
#pragma unroll
                for (int i = 0; i < K::in_flight; ++i) {
                    const int2 at{0, k_group * K::BLOCKS + first + i};
                    auto weights = stage.weight.template subtile<64, BLOCK>(at);
                    auto rows = stage.a.template subtile<C.tokens, BLOCK>(at);
                    warpgroup::product<false, true>(parts[i], weights, rows, false);
                }
                if (first == 0) {
                    // Those of the stage before the last have been read.
                    convert(shared.scales[slot], factors, tile, k_group,
                            g.k_blocks - (k * K::k_groups + k_group) * K::BLOCKS);
                    warpgroup::sync(FACTORS + k_group);
                }
                warpgroup::mma_async_wait();
                if (first + K::in_flight == K::BLOCKS && laneid() == 0) {
                    arrive(shared.empty[slot]);
                }
#pragma unroll
                for (int i = 0; i < K::in_flight; ++i) {
                    warpgroup::mma_async_wait(parts[i]);
                    promote(parts[i], factors + (first + i) * K::factors * 4);
                }
            }
            if (++slot == C.stages) slot = 0, phase ^= 1;
            parity ^= 1;
        });
    }
};

template <class K>
__global__ __launch_bounds__(K::threads, 1) void mxfp8_codes_kernel(const __grid_constant__
                                                                    typename K::Globals g) {
    constexpr auto C = K::config;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename K::Shared>();
    const bool produces = warpgroup::groupid() == K::consumers;
    if (produces) {
        if (arch::elect_one()) {
            tma::prefetch_map<typename K::rows>(g.a);
            tma::prefetch_map<typename K::codes>(g.weight);
            for (int i = 0; i < C.stages; ++i) {
                init_semaphore(shared.full[i], 1);
                init_semaphore(shared.empty[i], K::consumers * WARPGROUP_WARPS);
            }
            init_semaphore(shared.summed, K::consumers * WARPGROUP_WARPS * g.splits);
            init_semaphore(shared.read, K::consumers * WARPGROUP_WARPS * g.splits);
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, K::threads);
    } else {
        arch::named_barrier_sync(READY, K::threads);
    }
    // Other blocks of the cluster arrive at the semaphores when they have their sums.
    if (g.splits > 1) cluster::arrive();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (produces) {
        if (arch::elect_one()) load_codes<K>(g, shared);
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        const int2 range = range_of_k(g);
        const int k_group = warpgroup::groupid();
        CodesMainloop<K> loop;
        mixed_gemm::sm90::Finish<K> finish;
        mixed_gemm::sm90::for_each_tile<K>(g, [&](const mixed_gemm::sm90::Tile& tile) {
            loop.run(g, shared, tile, range, k_group);
            finish.tile(g, shared, loop.d, tile, 0, k_group);
        });
    }
    // A block's shared memory is read, and its semaphores are arrived at, by its cluster.
    if (g.splits > 1) cluster::sync();
}

}  // namespace sm90

template <CodesShape S>
void launch_codes(const CodesParams& p, Stream stream) {
    using K = sm90::CodesTypes<S>;
    const auto ceil_div = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
    const auto matrix = [&]<class GL>(const void* data, int64_t rows, int64_t stride) {
        return GL(static_cast<typename GL::T*>(const_cast<void*>(data)), nullptr, nullptr, rows,
                  p.k, kittens::gl_strides{0, 0, stride});
    };
    const int64_t quad = 4 * size_in_bytes(p.out_dtype);
    const typename K::Globals globals {
        .a = matrix.template operator()<decltype(K::Globals::a)>(p.a, p.m, p.a_stride),
        .weight = matrix.template operator()<decltype(K::Globals::weight)>(p.weight, p.n,
                                                                           p.weight_stride),
        .scales_a = static_cast<const uint8_t*>(p.scales_a),
        .scales_weight = static_cast<const uint8_t*>(p.scales_weight),
        .scale = nullptr,
        .bias = p.bias,
        .offs = nullptr,
        .out = p.out,
        .out_dtype = p.out_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .quads = reinterpret_cast<uintptr_t>(p.out) % quad == 0 && p.n % 4 == 0,
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .groups = 1,
        .row_tiles = static_cast<uint32_t>(ceil_div(p.n, K::block_rows)),
        .clusters = static_cast<uint32_t>(p.schedule.blocks / p.schedule.splits),
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK)),
        .k_chunks = static_cast<int>(ceil_div(p.k, FEW_K)),
        .k_stages = static_cast<int>(ceil_div(p.k, FEW_K * K::k_groups)),
        .splits = p.schedule.splits,
    };
    kittens::launch(kittens::LaunchOptions{.dependent = true}, sm90::mxfp8_codes_kernel<K>,
                    dim3(p.schedule.blocks), dim3(K::threads), dim3(p.schedule.splits),
                    sizeof(typename K::Shared), stream, globals);
}

}  // namespace thunderkittens::mxfp8_gemm
