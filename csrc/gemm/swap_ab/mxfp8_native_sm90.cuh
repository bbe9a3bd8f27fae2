// Swap-AB product of MXFP8 matrices for skinny m on Hopper, on the native fp8 tensor cores: it
// needs no pass over the operands, and its cost is to read the weight.
//
// As in fp8_sm90.cuh 64 rows of the weight are the rows of a tensor core's tile, up to 64 rows of a
// its columns. Roles: one warp loads, the warpgroups of a block divide the k of a stage. Promoted
// accumulation: a product takes 32 of k, one block of either operand, as the codes lie in memory;
// in registers it is multiplied by the scales of both and added, in fp32. No operand is rescaled,
// and no scale is too far from another; what is lost is that the tensor cores keep 13 bits of a sum
// of 32 products.
//
// Copies are few: one of each operand and of its scales for all warpgroups, because the warp that
// loads spends some hundred cycles on each. While the first products of a stage run, the threads of
// a warpgroup make floats of its scales.
//
// At the end of a tile its last stage is not released at once: the other warpgroups leave their
// sums there for the first one, which adds them, and the result passes through it too. Where there
// are few tiles, split-K over a cluster: its blocks divide k and send their sums to the first.
#pragma once

#include <stdexcept>

#include "csrc/gemm/swap_ab/mxfp8_native_types_sm90.cuh"

namespace thunderkittens::mxfp8_gemm {
namespace sm90 {

using namespace kittens;

template <class Traits>
__device__ __forceinline__ void load_stage(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared, int which,
                                           const NativeTile<Traits>& tile, int k) {
    constexpr int ATOM = block_scaled::sm90::ATOM;
    auto& stage = shared.stages[which];
    auto& scales = shared.scales[which];
    semaphore& full = shared.full[which];
    // Past the end of k codes are zero, and have no scales.
    const int first = k * Traits::atoms;
    const int bytes = min(Traits::atoms, g.k_chunks - first) * ATOM;
    tma::expect_bytes(full, sizeof(typename Traits::Stage) + 2 * bytes);
    swap_ab::load_weight(g, stage.weight, g.weight, tile.col, k * Traits::shape.stage_k, full);
    const auto load = [&](const uint8_t* to, const uint8_t* from, int line) {
        from += (line / 128 * int64_t{g.k_chunks} + first) * ATOM;
        arch::bulk_load(arch::shared_address(to), from, bytes, full.address());
    };
    load(scales.weight, g.scales_weight, tile.col);
    tma::load_async<2, tma::CachePolicy::evict_last>(
        stage.a, g.a, elements(0, 0, tile.row, k * Traits::shape.stage_k), full);
    load(scales.a, g.scales_a, tile.row);
}

// The main loop: the sums of a tile, from all k that fall to this warpgroup.
template <class Traits>
struct NativeMainloop {
    static constexpr int STEP = 3;  // named barriers, one per warpgroup
    gemm::sm90::Ring<Traits::shape.stages> ring;
    int parity = 0;
    rt_fl<16, Traits::tokens> d, in_flight_products[Traits::in_flight];

    // Converts the scales of a stage to floats; past the end of k there are none.
    __device__ __forceinline__ void convert(const typename Traits::Scales& scales, uint32_t to,
                                            const NativeTile<Traits>& tile, int atom,
                                            int blocks) const {
        constexpr int ROWS = Traits::ROWS + Traits::tokens,
                      ITEMS = Traits::products / Traits::BLOCKS * ROWS;
#pragma unroll
        for (int first = 0; first < ITEMS; first += WARPGROUP_THREADS) {
            const int item = first + warpgroup::laneid();
            if (ITEMS % WARPGROUP_THREADS != 0 && item >= ITEMS) break;
            const int which = item / ROWS, i = item % ROWS;
            const bool of_a = i >= Traits::ROWS;
            const int row = of_a ? tile.row + i - Traits::ROWS : tile.col + i;
            const uint32_t from = arch::shared_address(of_a ? scales.a : scales.weight) +
                                  (atom + which) * block_scaled::sm90::ATOM;
            const auto word =
                arch::load_shared<uint32_t>(from + block_scaled::sm90::place_in_atom(row % 128, 0));
            const int place =
                of_a ? Traits::place_of_token(i - Traits::ROWS) : Traits::place_of_row(i);
            to_floats(word, to + (which * Traits::BLOCKS * Traits::factors + place) * 4,
                      blocks - which * Traits::BLOCKS);
        }
    }
    static __device__ __forceinline__ void to_floats(uint32_t word, uint32_t to, int blocks) {
        constexpr uint32_t ONES = 0x01010101, TOPS = 0x80808080, EXPONENT = 0x7f800000;
        const auto store = [&](int j, float x) {
            arch::store_shared(to + j * Traits::factors * 4, x);
        };
        // A byte of 0 or 255 is no exponent of a normal number.
        const uint32_t some = ((word - ONES) & ~word) | ((~word - ONES) & word);
        if ((some & TOPS) != 0 || blocks < Traits::BLOCKS) {
#pragma unroll 1
            for (int j = 0; j < Traits::BLOCKS; ++j, word >>= 8) {
                store(j, block_scaled::sm90::scale_of_byte(j < blocks ? word & 255u : 127u));
            }
            return;
        }
        store(0, arch::bit_cast<float>(word << 23 & EXPONENT));
        store(1, arch::bit_cast<float>(word << 15 & EXPONENT));
        store(2, arch::bit_cast<float>(word << 7 & EXPONENT));
        store(3, arch::bit_cast<float>(word >> 1 & EXPONENT));
    }

    // The factors of a thread's elements, for one block of k.
    struct Factors {
        float2 weight;
        float4 a[Traits::of_lane / 4];

        __device__ __forceinline__ void load(uint32_t from) {
            weight = arch::load_shared<float2>(
                from + Traits::place_of_row(warpgroup::warpid() * 16 + laneid() / 4) * 4);
            from += (Traits::ROWS + laneid() % 4 * Traits::lane_pitch) * 4;
#pragma unroll
            for (int i = 0; i < Traits::of_lane / 4; ++i)
                a[i] = arch::load_shared<float4>(from + i * 16);
        }
    };
    // d += product, times the scales of its block.
    __device__ __forceinline__ void promote(const rt_fl<16, Traits::tokens>& product,
                                            const Factors& factors) {
        const float weight[2] = {factors.weight.x, factors.weight.y};
#pragma unroll
        for (int i = 0; i < Traits::tokens / 16; ++i) {
            const float4 a = factors.a[i];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float2 x = product.tiles[0][i].data[r];
                float2& sum = d.tiles[0][i].data[r];
                sum.x = fmaf(x.x, (r < 2 ? a.x : a.z) * weight[r % 2], sum.x);
                sum.y = fmaf(x.y, (r < 2 ? a.y : a.w) * weight[r % 2], sum.y);
            }
        }
    }

    // Multiplies a tile. All stages but the last are released.
    __device__ __forceinline__ void run(const typename Traits::Globals& g,
                                        typename Traits::Shared& shared,
                                        const NativeTile<Traits>& tile, int group) {
        kittens::warp::zero(d);
        const swap_ab::RotatedK& ks = tile.ks;
        int k = ks.k;
#pragma unroll 1
        for (int step = ks.begin; step < ks.end; ++step, k = ks.after(k)) {
            if (step > ks.begin) {
                if (laneid() == 0) arrive(shared.empty[ring.stage]);
                ring.advance();
            }
            auto& stage = shared.stages[ring.stage];
            wait(shared.full[ring.stage], ring.phase);
            const uint32_t factors = shared.factors_of[group][parity].address();
            start<0, Traits::in_flight>(stage, group);
            // The factors of the step before the last have been read.
            convert(shared.scales[ring.stage], factors, tile,
                    group * (Traits::products / Traits::BLOCKS),
                    g.k_blocks - k * Traits::atoms * Traits::BLOCKS - group * Traits::products);
            warpgroup::sync(STEP + group);
            Factors first;
            first.load(factors);
            accumulate(stage, group, first, factors);
            parity ^= 1;
        }
    }

  private:
    template <int first, int count>
    __device__ __forceinline__ void start(typename Traits::Stage& stage, int group) {
#pragma unroll
        for (int i = first; i < first + count; ++i) {
            const int2 at{0, group * Traits::products + i};
            auto weights = stage.weight.template subtile<Traits::ROWS, BLOCK>(at);
            auto rows = stage.a.template subtile<Traits::tokens, BLOCK>(at);
            warpgroup::product<false, true>(in_flight_products[i % Traits::in_flight], weights,
                                            rows, false);
        }
    }
    template <int i = 0>
    __device__ __forceinline__ void accumulate(typename Traits::Stage& stage, int group,
                                               const Factors& factors, uint32_t all) {
        constexpr int left = Traits::products - i;
        auto& product = in_flight_products[i % Traits::in_flight];
        warpgroup::mma_async_wait<(left < Traits::in_flight ? left : Traits::in_flight) - 1>(
            product);
        Factors next;
        if constexpr (left > 1) next.load(all + (i + 1) * Traits::factors * 4);
        promote(product, factors);
        if constexpr (left > Traits::in_flight) start<i + Traits::in_flight, 1>(stage, group);
        if constexpr (left > 1) accumulate<i + 1>(stage, group, next, all);
    }
};

template <class Traits>
__global__ __launch_bounds__(Traits::threads,
                             1) void mxfp8_native_kernel(const __grid_constant__
                                                         typename Traits::Globals g) {
    constexpr int READY = 1;  // named barrier
    constexpr int WARPS = Traits::consumers * WARPGROUP_WARPS;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const bool produces = warpgroup::groupid() == Traits::consumers;
    const int rank = swap_ab::rank_in_cluster(g);
    using Tile = NativeTile<Traits>;
    const auto load = [&](int stage, const Tile& tile, int k) {
        load_stage<Traits>(g, shared, stage, tile, k);
    };
    if (produces) {
        if (warpgroup::warpid() == 0 && arch::elect_one()) {
            tma::prefetch_map<typename Traits::rows>(g.a);
            tma::prefetch_map<typename Traits::codes>(g.weight);
            gemm::sm90::init_stages<Traits::shape.stages>(shared, 1, WARPS);
            init_semaphore(shared.summed, WARPGROUP_WARPS * max(1, g.splits - 1));
            arch::mbarrier_init_fence();
            if (g.splits == 1) {
                arch::wait_for_dependencies();
                swap_ab::load_first_stages<Traits::shape.stages, Tile>(g, load);
            }
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, Traits::threads);
    } else {
        arch::named_barrier_sync(READY, Traits::threads);
    }
    // Other blocks of the cluster arrive at the first one's semaphore when they have sent their
    // sums.
    if (g.splits > 1) cluster::arrive();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if (produces) {
        if constexpr (Traits::moves_registers)
            warpgroup::decrease_registers<Traits::producer_registers>();
        if (warpgroup::warpid() == 0 && arch::elect_one())
            swap_ab::load_stages<Traits::shape.stages, Tile>(g, shared.empty, rank, load);
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        if constexpr (Traits::moves_registers)
            warpgroup::increase_registers<Traits::consumer_registers>();
        const int group = Traits::consumers > 1 ? warpgroup::groupid() : 0;
        NativeMainloop<Traits> loop;
        swap_ab::for_each_tile<Tile>(g, rank, [&](const Tile tile) {
            loop.run(g, shared, tile, group);
            const int slot = loop.ring.stage;
            loop.ring.advance();
            NativeEpilogue<Traits>::tile(g, shared, loop.d, tile, slot, rank, group);
        });
        if (g.splits > 1 && group > 0) cluster::wait();
    }
}

}  // namespace sm90

template <NativeShape S>
void launch_native(const SwapAbParams& p, Stream stream) {
    using Traits = sm90::NativeTraits<S>;
    using Globals = typename Traits::Globals;
    const int64_t bytes = size_in_bytes(p.out_dtype);
    const auto address = reinterpret_cast<uintptr_t>(p.out);
    const bool stores_by_tma = bytes == 2 && p.activation == 0 && p.n % 8 == 0 && address % 16 == 0;
    const auto m_tiles = static_cast<uint32_t>(ceil_div(p.m, Traits::tokens));
    const auto all_tiles = m_tiles * static_cast<uint32_t>(ceil_div(p.n, Traits::ROWS));
    const auto clusters = static_cast<uint32_t>(p.schedule.blocks / p.schedule.splits);
    if (p.schedule.splits > 1 &&
        (all_tiles > clusters || p.schedule.splits > native_senders(S) + 1)) {
        throw std::invalid_argument("mxfp8_gemm: blocks divide k only of one tile per cluster");
    }
    const Globals globals{
        .a = gemm::matrix_of<decltype(Globals::a)>(p.a, p.m, p.k, p.a_stride),
        .weight = gemm::matrix_of<decltype(Globals::weight)>(p.weight, p.n, p.k, p.weight_stride),
        .out_map = gemm::output_of<decltype(Globals::out_map)>(stores_by_tma, p.out, p.m, p.n, p.n,
                                                               p.weight),
        .scales_a = static_cast<const uint8_t*>(p.scales_a),
        .scales_weight = static_cast<const uint8_t*>(p.scales_weight),
        .bias = static_cast<const kittens::bf16*>(p.bias),
        .out = p.out,
        .out_dtype = p.out_dtype,
        .activation = static_cast<gemm::Activation>(p.activation),
        .stores_by_tma = stores_by_tma,
        .vec4_aligned = gemm::is_vec4_aligned(p.out, p.n, p.out_dtype),
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .tiles = all_tiles,
        .clusters = clusters,
        .m_tiles = gemm::Divisor(m_tiles),
        .k_blocks = static_cast<int>(ceil_div(p.k, BLOCK)),
        .k_chunks = static_cast<int>(ceil_div(p.k, CHUNK_K)),
        .k_steps = static_cast<int>(ceil_div(p.k, S.stage_k)),
        .splits = p.schedule.splits,
    };
    gemm::launch_dependent<Traits>(sm90::mxfp8_native_kernel<Traits>, dim3(p.schedule.blocks),
                                   dim3(p.schedule.splits), stream, globals);
}

}  // namespace thunderkittens::mxfp8_gemm
