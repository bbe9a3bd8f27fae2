// Matrix product on Hopper with fused dequantization: the kernel itself dequantizes operands of few
// bits to 16 bits in a workspace, just ahead of their use. It is the kernel of
// dense/persistent_sm90.cuh, in which the three idle warps of the producer's warpgroup dequantize.
// Roles: one warp loads, three dequantize, two warpgroups multiply and store.
//
// A region of 128 x 256 elements has a counter of its items, 16 rows each. A warp claims an item,
// whichever is the next in the order in which the tiles need them, dequantizes it, and counts it;
// the warp that loads a tile waits until its regions are complete. Warps that dequantize wait for
// nobody, so that every item that has been claimed is finished, whatever blocks are on the GPU. At
// the start the consumers may dequantize, too.
//
// Order of memory: the lanes that have written fence their writes, which TMA of any block will read
// (generic to async proxy); the warp meets, and one lane releases them to the GPU and counts. The
// lanes of the warp that loads read a counter each, one region ahead, acquire and meet, and one
// fences again, as its copies belong to the async proxy, and issues those. All fences are of the
// kinds that do not wait for what the SM has on its way to memory, but for the release.
#pragma once

#include "csrc/gemm/dense/persistent_sm90.cuh"
#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/quantize/mxfp8_quantize_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

struct DequantItem {
    int row, column;  // of its first element
    int k;            // of the operand
};

// The scales of a row by four blocks are a word.
__device__ __forceinline__ const uint32_t* scales_at(const Mxfp8Source& from, int row, int atom,
                                                     int atoms) {
    return reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(from.scales) +
                                             (int64_t(row / 128) * atoms + atom) *
                                                 block_scaled::sm90::ATOM +
                                             row % 32 * 16 + row % 128 / 32 * 4);
}

// 16 x 256 codes; a lane has eight neighbours of each row. Calls all_read() when the last are on
// their way.
template <int DATA, int AT_A_TIME, class AllRead>
__device__ __forceinline__ void dequantize_mxfp8(const Mxfp8Source& from, bf16* to, int pitch,
                                                 const DequantItem& item, AllRead all_read) {
    using block_scaled::sm90::scale_of_byte;
    constexpr int CHUNK = 8;
    const int lane = arch::lane_again();
    const int atoms = (item.k + 127) / 128;
    const uint32_t scales = arch::load_global_readonly(scales_at(
        from, item.row + lane % 16, min(item.column / 128 + lane / 16, atoms - 1), atoms));
    // Lanes past the end of k repeat what is before it.
    const int in_item = min(lane * CHUNK, item.k - CHUNK - item.column);
    const int source = in_item / 128 * 16, shift = in_item % 128 / 32 * 8;
    const auto* codes = static_cast<const uint8_t*>(from.codes) + int64_t{item.row} * from.stride +
                        item.column + in_item;
    to += int64_t{item.row} * pitch + item.column + in_item;
#pragma unroll 1
    for (int first = 0; first < ITEM_ROWS; first += AT_A_TIME) {
        uint2 words[AT_A_TIME];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
            words[i] = arch::load_global_readonly(reinterpret_cast<const uint2*>(codes));
            codes += static_cast<uint32_t>(from.stride);
        }
        if (first + AT_A_TIME == ITEM_ROWS) all_read();
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
            const uint32_t four = arch::shuffle(scales, source + first + i);
            const float scale = scale_of_byte(four >> shift & 255);
            uint32_t out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t word = j < 2 ? words[i].x : words[i].y;
                const float2 pair =
                    block_scaled::sm90::Fp8<DATA>::values(word >> 16 * (j % 2) & 0xffffu);
                out[j] = arch::bit_cast<uint32_t>(pack_pair<bf16>(pair.x * scale, pair.y * scale));
            }
            const uint4 eight{out[0], out[1], out[2], out[3]};
            if constexpr (AT_A_TIME > 8)
                arch::store_global_whole(to, eight);
            else
                arch::store_global(reinterpret_cast<uint4*>(to), eight);
            to += static_cast<uint32_t>(pitch);
        }
    }
}

// What a kernel knows of its sources: whether a is dequantized too (`both`), the multiple of rows
// that there is of each, the factor of the sums, how an item is dequantized, and how much of it is
// in flight at a time, with many registers (`early`; 0: never) and with few (`late`).
template <class Sources>
struct Dequantizer;

template <>
struct Dequantizer<Mxfp8Sources> {
    static constexpr bool both = true;
    static constexpr int rows = 1;
    using Factor = HostFactor;
    static __device__ __forceinline__ Factor factor(const Mxfp8Sources&) { return {}; }
    static constexpr int early = 16, late = 8;  // rows
    template <int AT_A_TIME, class T, class AllRead>
    static __device__ __forceinline__ void dequantize(const Mxfp8Sources& sources, bool of_b, T* to,
                                                      int pitch, const DequantItem& item,
                                                      AllRead all_read) {
        const auto dequantize_from = [&](const Mxfp8Source& from) {
            if (from.e5m2)
                dequantize_mxfp8<int(DType::e5m2), AT_A_TIME>(from, to, pitch, item, all_read);
            else
                dequantize_mxfp8<int(DType::e4m3), AT_A_TIME>(from, to, pitch, item, all_read);
        };
        if (of_b)
            dequantize_from(sources.b);
        else
            dequantize_from(sources.a);
    }
};

template <class T, class Sources>
struct DequantPlan {
    DequantOrder order;
    Sources sources;
    T *a, *b;
    int pitch_a, pitch_b;
    int m, n, k;
    int items, early;  // how many, and up to where consumers take part
    int* counters;
};

// The position of an item.
struct ItemPlace {
    bool of_b;
    int row, column, counter;
};
template <class Plan>
__device__ __forceinline__ ItemPlace place_of(const Plan& p, int index) {
    const auto region = p.order.at(static_cast<uint32_t>(index) / REGION_ITEMS);
    return {region.of_b,
            static_cast<int>(region.row) * REGION_ROWS + index % REGION_ITEMS * ITEM_ROWS,
            static_cast<int>(region.column) * REGION_K,
            static_cast<int>(p.order.counter(region.of_b, region.row, region.column))};
}

// Dequantizes items; with EARLY as long as the first p.early are not all claimed.
template <int AT_A_TIME, bool EARLY, class T, class Sources>
__device__ __forceinline__ void dequantize_items(const DequantPlan<T, Sources>& p) {
    using E = Dequantizer<Sources>;
    if (EARLY && p.early == 0) return;
    int index = p.items;
    if (laneid() == 0) index = arch::claim_global(p.counters);
    index = arch::shuffle(index, 0);
    while (index < p.items) {
        const ItemPlace at = place_of(p, index);
        // One register carries the next item in the first lane, and this one's counter in the
        // others.
        int carried = laneid() == 0 ? p.items : at.counter;
        bool read = false;
        const auto all_read = [&] {
            if (laneid() == 0 && (!EARLY || index < p.early)) {
                carried = arch::claim_global(p.counters);
            }
            read = true;
        };
        // Each branch has constants of the kernel, not registers. The last rows are dequantized
        // twice, to the same values, where they are not 16.
        if (at.of_b) {
            if (at.row < p.n) {
                E::template dequantize<AT_A_TIME>(p.sources, true, p.b, p.pitch_b,
                                                  {min(at.row, p.n - ITEM_ROWS), at.column, p.k},
                                                  all_read);
            }
        } else if (E::both) {
            if (at.row < p.m) {
                E::template dequantize<AT_A_TIME>(p.sources, false, p.a, p.pitch_a,
                                                  {min(at.row, p.m - ITEM_ROWS), at.column, p.k},
                                                  all_read);
            }
        }
        if (!read) all_read();
        index = arch::shuffle(carried, 0);
        const int counter = arch::shuffle(carried, 1);
        arch::fence_async_global();
        arch::sync_warp();
        if (laneid() == 0) {
            arch::fence_release_gpu();
            arch::count_global(p.counters + counter);
            arch::count_global(p.counters + 1);
        }
    }
}

// Called by a whole warp, whose lanes wait for a region each; one of them loads.
template <class Traits, class Plan>
__device__ __forceinline__ void produce_dequantized(const typename Traits::Globals& g,
                                                    const Plan& plan,
                                                    typename Traits::Shared& shared) {
    constexpr Config C = Traits::config;
    Ring<C.stages> ring;
    bool all = false;  // has been dequantized
    for_each_tile(g, [&](const TilePosition at, bool) {
        const uint32_t m = at.m * C.block_m, n = at.n * C.block_n;
        const uint32_t end = min(n + C.block_n, g.n);
        // A region per lane: one after the other would take longer than a stage.
        const uint32_t row = n / REGION_ROWS + laneid() - 1;
        const bool of_b = laneid() > 0;
        const bool mine = of_b ? row * REGION_ROWS < end : plan.order.rows_a != 0;
        const int* counter =
            plan.counters + plan.order.counter(of_b, of_b ? row : m / REGION_ROWS, 0);
        if (!all) {
            all = arch::warp_uniform(arch::load_acquire_global(plan.counters + 1)) == plan.items;
            arch::sync_warp();
            arch::fence_async_global();
        }
        // Asked for one region ahead: the answer costs nothing where that is complete.
        int count = REGION_ITEMS;
        if (!all && mine) count = arch::load_relaxed_global(counter);
        for (int step = 0; step < g.k_blocks; ++step, ring.advance()) {
            const int k = step * BLOCK_K;
            if (!all && k % REGION_K == 0) {
                while (count < REGION_ITEMS) count = arch::load_relaxed_global(counter);
                arch::fence_acquire_gpu();
                arch::sync_warp();
                arch::fence_async_global();
                ++counter;
                if (mine && step + REGION_K / BLOCK_K < g.k_blocks) {
                    count = arch::load_relaxed_global(counter);
                }
            }
            auto& stage = shared.stages[ring.stage];
            semaphore& full = shared.full[ring.stage];
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            if (!arch::elect_one()) continue;
            tma::expect(full, stage);
            load_step<Traits>(g, stage, full, 0, static_cast<int>(m), n, k);
        }
    });
}

template <class Traits, class Sources>
__global__ __launch_bounds__(Traits::threads, 1) void fused_dequant_kernel(
    const __grid_constant__ typename Traits::Globals g,
    const __grid_constant__ DequantPlan<typename Traits::T, Sources> plan) {
    constexpr Config C = Traits::config;
    static_assert(C.consumers == 2 && !C.fused && !C.masked && C.block_m == REGION_ROWS);
    // Three warps that dequantize need more registers than one that loads; accumulators of a
    // narrower tile leave them enough for a whole item in flight.
    constexpr bool narrow = C.block_n <= 192;
    constexpr int consumer_registers = narrow ? 208 : 232, producer_registers = narrow ? 88 : 40;
    using E = Dequantizer<Sources>;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();

    if (warpgroup::groupid() == C.consumers) {
        warpgroup::decrease_registers<producer_registers>();
        if (start_producer<Traits>(g, shared)) {
            produce_dequantized<Traits>(g, plan, shared);
        } else {
            arch::wait_for_dependencies();
            dequantize_items<narrow ? E::early : E::late, false>(plan);
        }
    } else {
        arch::named_barrier_sync(READY, READY_THREADS<Traits>);
        warpgroup::increase_registers<consumer_registers>();
        arch::wait_for_dependencies();
        if constexpr (E::early > 0) dequantize_items<E::early, true>(plan);
        consume<C, true>(g, shared, E::factor(plan.sources));
    }
}

}  // namespace sm90

template <Config C, class Sources>
void launch_fused_dequant(const FusedDequantParams<Sources>& p, Stream stream) {
    using Traits = sm90::KernelTraits<C>;
    using E = sm90::Dequantizer<Sources>;
    using T = typename Traits::T;
    Params product = p.product;
    Schedule& s = product.schedule;
    s.columns = 0;  // tiles of one width, which is what DequantOrder counts in
    const auto globals = sm90::make_globals<C>(product);
    const DequantOrder order = dequant_order(C, s, product.m, product.n, product.k, E::both);
    const sm90::DequantPlan<T, Sources> plan{
        .order = order,
        .sources = p.sources,
        .a = static_cast<T*>(const_cast<void*>(product.a)),
        .b = static_cast<T*>(const_cast<void*>(product.b)),
        .pitch_a = static_cast<int>(product.a_stride),
        .pitch_b = static_cast<int>(product.b_stride),
        .m = static_cast<int>(product.m),
        .n = static_cast<int>(ceil_div(product.n, E::rows) * E::rows),
        .k = static_cast<int>(product.k),
        .items = static_cast<int>(order.total()) * REGION_ITEMS,
        .early = static_cast<int>(
            early_items(C, order, globals.order.total, s.blocks, globals.k_blocks)),
        .counters = p.counters};
    launch_dependent<Traits>(sm90::fused_dequant_kernel<Traits, Sources>, dim3(s.blocks), dim3(1),
                             stream, globals, plan);
}

}  // namespace thunderkittens::gemm
