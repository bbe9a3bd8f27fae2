// Swap-AB product of skinny m with an MXFP8 weight on Hopper, which is dequantized in registers:
// its cost is to read the weight, once, in the bits that it has.
//
// As in nvfp4_sm90.cuh the operands are swapped, and a warpgroup makes bf16 fragments of the weight
// in registers. Roles: one warp loads, the other warpgroups dequantize and multiply. Here the
// weight needs no preparation: of 64 or 128 rows, 128 of k arrive by TMA as they lie in memory,
// with the 512 bytes of their scales. Of 128 codes of a row each of the four lanes that share it
// takes 32 neighbours, which are one block: two loads of 16 bytes, without bank conflicts, and one
// scale. To the tensor cores their order along k means nothing, as long as a has the same: the pass
// that dequantizes a writes it so (position_of). A step of 16 of k then takes four codes of each
// lane, one register.
#pragma once

#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"
#include "csrc/gemm/swap_ab/epilogue_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace kittens;
using swap_ab::RotatedK;

template <DequantConfig F>
struct DequantTraits {
    static constexpr nvfp4_gemm::Config config = F.tile;
    static constexpr DequantConfig dequant = F;
    using T = bf16;
    struct W {
        static constexpr float FACTOR = 1.f;
    };
    static constexpr uint32_t raster_group = 4;  // of tiles of rows of a, as with prepared weights
    static constexpr int k_groups = config.k_groups;
    static constexpr int block_rows = nvfp4_gemm::block_rows(config);
    static constexpr int pass = dequant_pass(config);
    static constexpr int pitch = block_rows + 4;  // of the sums, in floats: no bank conflicts
    static constexpr int threads = nvfp4_gemm::threads(config);
    static constexpr int consumers = nvfp4_gemm::consumers(config);
    static constexpr bool moves_registers = nvfp4_gemm::moves_registers(config);
    static constexpr int producer_registers = consumers == 2 ? 40 : 32;
    static constexpr int consumer_registers = consumers == 2 ? 232 : 112;

    // A stage has CHUNK_K of k for each group of warpgroups, side by side: one copy loads it,
    // because the warp that loads spends some hundred cycles on each.
    static constexpr int stage_k = CHUNK_K * k_groups;
    using rows = st<bf16, config.tokens, stage_k>;
    using codes = st<fp8e4m3, block_rows, stage_k>;  // e5m2 are bytes as well

    struct Stage {
        codes weight;
        rows a;
    };
    struct alignas(128) Scales {
        uint8_t bytes[k_groups * block_scaled::sm90::ATOM];
    };
    struct Shared {
        Stage stages[config.stages];
        Scales scales[config.stages];
        sv_fl<pass * pitch> sums[k_groups];
        semaphore full[config.stages], empty[config.stages];
        semaphore summed, read;  // the cluster's sums: all are there, all have been read
    };
    static_assert(sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == dequant_shared_bytes(F),
                  "mxfp8/mxfp8_gemm.h knows another size");
    static_assert(nvfp4_gemm::PIECE * config.pieces == CHUNK_K * k_groups);

    struct Globals {
        gl<bf16, 1, 1, -1, -1, rows> a;
        gl<fp8e4m3, -1, 1, -1, -1, codes> weight;
        const uint8_t* scales;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool vec4_aligned;
        uint32_t m, n, groups;
        uint32_t row_tiles, clusters;
        int k_blocks, k_chunks, k_steps, splits;
    };
};

// Loads the weight's half of a stage, and announces the bytes of both; a's is still to come.
template <class Traits>
__device__ __forceinline__ void load_weight(const typename Traits::Globals& g,
                                            typename Traits::Shared& shared, int slot, int k,
                                            const nvfp4_gemm::sm90::Tile& tile) {
    constexpr int ATOM = block_scaled::sm90::ATOM;
    auto& stage = shared.stages[slot];
    semaphore& full = shared.full[slot];
    const int row = static_cast<int>(tile.row_tile) * Traits::block_rows;
    const int64_t line = int64_t{tile.group} * ((g.n + 127) / 128) + row / 128;
    // Past the end of k codes are zero, and have no scales.
    const int first = k * Traits::k_groups;
    const int bytes = min(Traits::k_groups, g.k_chunks - first) * ATOM;
    tma::expect_bytes(full, sizeof(typename Traits::Stage) + bytes);
    tma::load_async<2, tma::CachePolicy::evict_first>(
        stage.weight, g.weight, elements(static_cast<int>(tile.group), 0, row, k * Traits::stage_k),
        full);
    arch::bulk_load(arch::shared_address(shared.scales[slot].bytes),
                    g.scales + (line * g.k_chunks + first) * ATOM, bytes, full.address());
}

template <class Traits>
__device__ __forceinline__ void produce_dequant(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    constexpr auto C = Traits::config;
    const int2 range = swap_ab::range_of_k(g);
    int slot = 0, phase = 1;
    int early = -1;  // stages whose weights are on their way; not known before the first tile
    nvfp4_gemm::sm90::for_each_tile<Traits>(g, [&](const nvfp4_gemm::sm90::Tile& tile) {
        if (tile.group >= g.groups) return;
        RotatedK walk(range, tile.row_tile);
        if (early < 0) {
            // The first weights need not wait for the pass over a: they were there before it began.
            early = min(C.stages, range.y - range.x);
            RotatedK ahead = walk;
            for (int i = 0; i < early; ++i, ahead.advance())
                load_weight<Traits>(g, shared, i, ahead.k, tile);
            arch::wait_for_dependencies();
        }
        for (int step = range.x; step < range.y; ++step, walk.advance()) {
            auto& stage = shared.stages[slot];
            semaphore& full = shared.full[slot];
            if (early > 0) {
                --early;
            } else {
                wait(shared.empty[slot], phase);
                load_weight<Traits>(g, shared, slot, walk.k, tile);
            }
            tma::load_async<2, tma::CachePolicy::evict_last>(
                stage.a, g.a,
                elements(0, 0, static_cast<int>(tile.token), walk.k * Traits::stage_k), full);
            if (++slot == C.stages) slot = 0, phase ^= 1;
        }
    });
}

// The main loop: the sums of a tile, from all k that fall to this block.
template <class Traits>
struct DequantMainloop {
    static constexpr auto C = Traits::config;
    using F = block_scaled::sm90::Fp8<int(Traits::dequant.data)>;
    int slot = 0, phase = 0;
    rt_fl<16, C.tokens> d;
    rt_bf<16, 64> fragments[2];

    static __device__ __forceinline__ bf16_2 pair(uint32_t codes, float scale) {
        const float2 value = F::values(codes & 0xffffu);
        return arch::bit_cast<bf16_2>(arch::pack_bf16(value.x * scale, value.y * scale));
    }
    // Makes the fragments of four steps from codes of rows r and r + 8.
    static __device__ __forceinline__ void make(rt_bf<16, 64>& to, const uint4& low,
                                                const uint4& high, const float (&scale)[2]) {
        const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
        const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto& data = to.tiles[0][i].data;
            data[0] = pair(lows[i], scale[0]);
            data[1] = pair(highs[i], scale[1]);
            data[2] = pair(lows[i] >> 16, scale[0]);
            data[3] = pair(highs[i] >> 16, scale[1]);
        }
    }

    __device__ __forceinline__ void run(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared,
                                        const nvfp4_gemm::sm90::Tile& tile, const int2 range,
                                        int row_group, int k_group) {
        // Every warp has read codes and scales.
        const auto release = [&](int stage) { gemm::sm90::arrive_by_warp(shared.empty[stage]); };
        const int lane = laneid(), quad = lane % 4;
        const int row = row_group * 64 + warpgroup::warpid() * 16 + lane / 4;
        // The row in the atom of scales, of which this tile's rows may be the upper half.
        const int in_atom = static_cast<int>(tile.row_tile) * Traits::block_rows % 128 + row;
        const int scale_at = block_scaled::sm90::place_in_atom(in_atom, quad);
        RotatedK walk(range, tile.row_tile);
        int previous = 0;
#pragma unroll 1
        for (int step = range.x; step < range.y; ++step, walk.advance()) {
            wait(shared.full[slot], phase);
            auto& stage = shared.stages[slot];
            const uint32_t scales = arch::shared_address(shared.scales[slot].bytes) +
                                    k_group * block_scaled::sm90::ATOM;
            // Codes past the end of k have no scale.
            const bool there = (walk.k * Traits::k_groups + k_group) * 4 + quad < g.k_blocks;
            float scale[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t byte = arch::load_shared<uint8_t>(scales + scale_at + i * 8 * 16);
                scale[i] = block_scaled::sm90::scale_of_byte(there ? byte : 127u);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = k_group * CHUNK_K + quad * 32 + half * 16;
                const auto low = arch::load_shared<uint4>(stage.weight.address_of(row, column));
                const auto high =
                    arch::load_shared<uint4>(stage.weight.address_of(row + 8, column));
                // One product is in flight while the fragments of the next are made.
                make(fragments[half], low, high, scale);
                auto rows = stage.a.template subtile<C.tokens, 64>({0, k_group * 2 + half});
                warpgroup::product<false, true>(d, fragments[half], rows,
                                                step > range.x || half > 0);
                warpgroup::mma_async_wait<1>();
                if (half == 0 && step > range.x) release(previous);
            }
            previous = slot;
            if (++slot == C.stages) slot = 0, phase ^= 1;
        }
        warpgroup::mma_async_wait(d);
        release(previous);
    }
};

template <class Traits>
__device__ __forceinline__ void consume_dequant(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared) {
    constexpr auto C = Traits::config;
    const int2 range = swap_ab::range_of_k(g);
    const int row_group = warpgroup::groupid() % C.row_groups,
              k_group = warpgroup::groupid() / C.row_groups;
    DequantMainloop<Traits> loop;
    nvfp4_gemm::sm90::TileEpilogue<Traits> epilogue;
    nvfp4_gemm::sm90::for_each_tile<Traits>(g, [&](const nvfp4_gemm::sm90::Tile& tile) {
        if (tile.group < g.groups) loop.run(g, shared, tile, range, row_group, k_group);
        epilogue.tile(g, shared, loop.d, tile, row_group, k_group);
    });
    epilogue.end(g);
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void mxfp8_dequant_kernel(const __grid_constant__
                                                          typename Traits::Globals g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool produces = warpgroup::groupid() == Traits::consumers;
    nvfp4_gemm::sm90::make_semaphores<Traits>(shared, produces, g.splits, 1, [&] {
        tma::prefetch_map<typename Traits::rows>(g.a);
        tma::prefetch_map<typename Traits::codes>(g.weight);
    });
    // Other blocks of the cluster arrive at these semaphores when they have their sums.
    if (g.splits > 1) cluster::arrive();
    if (!produces) arch::wait_for_dependencies();  // produce_dequant does by itself
    arch::launch_dependents();
    swap_ab::run_roles<Traits>(
        g, produces, [&] { produce_dequant<Traits>(g, shared); },
        [&] { consume_dequant<Traits>(g, shared); });
    // The cluster must not end early: other blocks of it read this block's shared memory and arrive
    // at its semaphores.
    if (g.splits > 1) cluster::sync();
}

}  // namespace sm90

template <DequantConfig F>
void launch_dequant(const SwapAbParams& p, Stream stream) {
    using Traits = sm90::DequantTraits<F>;
    using Globals = typename Traits::Globals;
    Globals globals{
        .a = gemm::matrix_of<decltype(Globals::a)>(p.a, p.m, round_up(p.k, CHUNK_K),
                                                   round_up(p.k, CHUNK_K)),
        .weight = gemm::matrix_of<decltype(Globals::weight)>(p.weight, p.n, p.k, p.weight_stride,
                                                             p.groups, p.group_stride),
        .scales = static_cast<const uint8_t*>(p.scales_weight),
        .row_tiles = static_cast<uint32_t>(ceil_div(p.n, Traits::block_rows)),
        .clusters = static_cast<uint32_t>(p.schedule.blocks / p.schedule.splits),
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK)),
        .k_chunks = static_cast<int>(ceil_div(p.k, CHUNK_K)),
        .k_steps = static_cast<int>(ceil_div(p.k, CHUNK_K * Traits::k_groups)),
        .splits = p.schedule.splits,
    };
    nvfp4_gemm::set_results(globals, p);
    gemm::launch_dependent<Traits>(sm90::mxfp8_dequant_kernel<Traits>, dim3(p.schedule.blocks),
                                   dim3(p.schedule.splits), stream, globals);
}

}  // namespace thunderkittens::mxfp8_gemm
