// What an fp8 GEMM kernel on Hopper works on: the types of its tiles, its shared memory, its
// parameters, and the walk over its tiles.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

using namespace kittens;
using gemm::sm90::arrive_by_warp, gemm::sm90::ClusterPosition, gemm::sm90::READY, gemm::sm90::Ring;

template <DType dtype>
using element = std::conditional_t<dtype == DType::e4m3, fp8e4m3, fp8e5m2>;

// With promoted accumulation a stage has the scales of its rows of a and then those of its blocks
// or columns of b.
template <Config C>
struct StageScales {};
template <Config C>
    requires(C.sums != Sums::fast)
struct StageScales<C> {
    kittens::sv_fl<scales_of_stage(C)> scales[C.stages];
};

// The values of columns (scales, bias), where there is room for them beside the staging buffers.
template <Config C>
struct ColumnValues {};
template <Config C>
    requires(!columns_in_staging(C) && !is_pingpong(C))
struct ColumnValues<C> {
    kittens::sv_fl<C.block_n> columns[C.consumers];
};
// The values of rows, too, see pingpong_rowwise_sm90.cuh.
template <Config C>
    requires(is_pingpong(C))
struct ColumnValues<C> {
    kittens::sv_fl<C.block_n> columns[C.consumers];
    kittens::sv_fl<C.block_m> rows[C.consumers];
};

template <Config C>
struct KernelTraits {
    static constexpr Config config = C;
    using TA = element<C.a_dtype>;
    using TB = element<C.b_dtype>;
    static constexpr int consumers = C.consumers;
    static constexpr bool fast = C.sums == Sums::fast, is_1d1d = C.sums == Sums::promoted_1d1d;
    static constexpr bool pingpong = is_pingpong(C);
    static constexpr bool groups = takes_groups(C), columns_staged = columns_in_staging(C);
    static constexpr bool store_warps = has_store_warps(C);
    // Whether the values of a tile's columns lie as its threads read them. Elsewhere a thread has
    // no registers for so many at a time.
    static constexpr bool columns_placed = !fast;
    // A consumer has products_m products of 64 rows above each other, and products_n side by side.
    // Promoted accumulation takes a second set of registers, for one product.
    static constexpr int consumers_of_tile = pingpong ? 1 : consumers;
    static constexpr int products_m = C.block_m / consumers_of_tile / 64;
    static constexpr int product_cols = fast || C.block_n <= 192 ? C.block_n : 128;
    static constexpr int products_n = C.block_n / product_cols;
    static constexpr int column_scales = (C.block_n + 127) / 128;
    static constexpr int products = products_m * products_n;

    using a_tile = st<TA, C.block_m, BLOCK_K>;
    using b_tile = st<TB, C.block_n, BLOCK_K>;
    // What one block of a multicast cluster loads of a shared tile: half of it, where they share it
    // evenly.
    static constexpr bool one_copy_each = pingpong || narrows_rowwise_only(C);
    static constexpr int a_parts = one_copy_each ? 1 : 2;
    using a_part = st<TA, C.block_m / a_parts, BLOCK_K>;
    using b_part = st<TB, shares_b(C) && !one_copy_each ? C.block_n / 2 : C.block_n, BLOCK_K>;
    // The last copy of a narrow tile of b, and the narrow tile itself.
    static constexpr bool two_widths = has_two_widths(C);
    static constexpr bool narrows_promoted = two_widths && !narrows_rowwise_only(C);
    static constexpr int narrow_by = two_widths ? int(gemm::NARROW_BY) : 0;
    using b_last = st<TB, b_part::rows - narrow_by, BLOCK_K>;
    struct narrow_b : b_tile {
        static constexpr int rows = C.block_n - narrow_by;
    };
    using b_layout = std::conditional_t<two_widths, gl<TB, -1, 1, -1, -1, b_part, b_last>,
                                        gl<TB, -1, 1, -1, -1, b_part>>;
    // Staging of a warp's output: rows of 128 bytes, whatever the type of the output. To TMA, which
    // only copies, every output is a matrix of 16-bit words.
    using out_tile = st<bf16, 16, 64>;
    // The staging of a consumer's warps together, see store_warps_sm90.cuh.
    using out_tiles = st<bf16, 64, 64>;
    using out_layout = std::conditional_t<store_warps, gl<bf16, -1, 1, -1, -1, out_tile, out_tiles>,
                                          gl<bf16, -1, 1, -1, -1, out_tile>>;

    struct Stage {
        a_tile a;
        b_tile b;
    };
    struct Shared : StageScales<C> {
        Stage stages[C.stages];
        out_tile out[consumers * WARPGROUP_WARPS][C.buffers];
        [[no_unique_address]] ColumnValues<C> apart;
        semaphore full[C.stages], empty[C.stages], scales_read[C.stages];
    };
    static_assert(sizeof(Stage) == sizeof(a_tile) + sizeof(b_tile) && sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "fp8_gemm.h knows another size");

    struct Globals {
        gl<TA, -1, 1, -1, -1, a_part> a;
        b_layout b;
        out_layout out;
        Scales scale_a, scale_b;
        const void* bias;
        const int32_t* offs;
        uint32_t m, n, groups;
        int k_blocks;
        bool blockwise;  // scales are of 128 of k
        DType out_dtype, bias_dtype;
        gemm::Activation activation;
        bool tma_store;  // rows of the output are multiples of 16 bytes
        int cluster_m, cluster_n;
        uint32_t clusters;  // of the grid
        uint32_t columns;   // of tiles
        std::conditional_t<two_widths, gemm::TwoWidthOrder, gemm::TileOrder> order;
    };

    static constexpr int threads = fp8_gemm::threads(C);
    static constexpr int producer_registers = fast ? 24 : 40;
    static constexpr int consumer_registers = fast ? 240 : 232;
    // What a block is given at its launch; asking for more than that would never return.
    static constexpr int launch_registers = 65536 / threads / 8 * 8;
    static_assert(producer_registers + consumers * consumer_registers <=
                  (consumers + 1) * launch_registers);
};

// Called by one thread.
template <class Traits>
__device__ __forceinline__ void prefetch_maps(const typename Traits::Globals& g) {
    tma::prefetch_map<typename Traits::a_part>(g.a);
    tma::prefetch_map<typename Traits::b_part>(g.b);
    tma::prefetch_map<typename Traits::out_tile>(g.out);
}

struct Tile {
    uint32_t group, row, col;
    uint32_t end;  // of the rows that are the tile's to write
    bool nothing;  // the rows belong to no group and are zero
    bool narrow = false;
};

// The group whose tiles are being worked on; `number` counts from 1.
struct Group {
    uint32_t number, begin, end, rows, last_tile;

    template <class Globals>
    __device__ __forceinline__ void next(const Globals& g, int block_m) {
        begin = end;
        end = g.m;
        if (number < g.groups) {
            const int offset = arch::load_global(g.offs + number);
            end = offset < int(begin) ? begin : offset < int(g.m) ? uint32_t(offset) : g.m;
        }
        ++number;
        rows = (end - begin + block_m - 1) / block_m;
        last_tile += rows * g.columns;
    }
};

// An element of the bias, of any of the types that an output may have.
__device__ __forceinline__ float load_any(const void* data, DType dtype, uint32_t i) {
    if (dtype == DType::fp32) return arch::load_global(static_cast<const float*>(data) + i);
    if (dtype == DType::bf16)
        return convert<float>(arch::load_global(static_cast<const bf16*>(data) + i));
    return convert<float>(arch::load_global(static_cast<const half*>(data) + i));
}

// TwoWidthOrder::in_matrix for a block's first tile, which the first load waits for: in most cases
// it is in the first raster group, which takes one division.
__device__ __forceinline__ gemm::TwoWidthPosition first_in_matrix(const gemm::TwoWidthOrder& order,
                                                                  uint32_t index) {
    const gemm::TileOrder& base = order.base;
    if (index >= base.total || index >= base.group_tiles.value) return order.in_matrix(index);
    const uint32_t step = base.height.divide(index);
    gemm::TwoWidthPosition position{};
    position.m = index - step * base.height.value, position.n = step;
    position.wide = order.wide_of_base;
    return position;
}

// The position of tile `index`, without groups; `first`: it is this block's first.
template <Config C, bool first = false, class Globals>
__device__ __forceinline__ Tile tile_at(const Globals& g, const ClusterPosition place,
                                        uint32_t index) {
    const auto at = [&] {
        if constexpr (KernelTraits<C>::two_widths && first)
            return first_in_matrix(g.order, index);
        else if constexpr (KernelTraits<C>::two_widths)
            return g.order.in_matrix(index);
        else
            return g.order.at(index);
    }();
    Tile tile{0, (at.m * g.cluster_m + place.in_m) * C.block_m,
              (at.n * g.cluster_n + place.in_n) * C.block_n, g.m, false};
    if constexpr (KernelTraits<C>::two_widths) {
        tile.col = at.column(C.block_n) * g.cluster_n + place.in_n * C.block_n;
        tile.narrow = at.narrow();
    }
    return tile;
}

// The index of a block's first tile: the blocks of a cluster share theirs.
template <class Globals>
__device__ __forceinline__ uint32_t first_index(const Globals& g) {
    return blockIdx.x >> ((g.cluster_m == 2) + (g.cluster_n == 2));
}

// Calls work(tile) for each of this block's tiles. Where the rows are grouped, tiles are counted
// group by group, as the offsets say; rows behind the last group count as one more.
template <Config C, class Globals, class Work>
__device__ __forceinline__ void for_each_tile(const Globals& g, const ClusterPosition place,
                                              Work work) {
    uint32_t index = first_index(g);
    if constexpr (!KernelTraits<C>::groups) {
        for (; index < g.order.total; index += g.clusters) work(tile_at<C>(g, place, index));
    } else {
        Group group{};
        if (g.offs != nullptr) group.next(g, C.block_m);
        for (;; index += g.clusters) {
            Tile tile;
            if (g.offs == nullptr) {
                if (index >= g.order.total) return;
                tile = tile_at<C>(g, place, index);
            } else {
                while (index >= group.last_tile) {
                    if (group.number > g.groups) return;
                    group.next(g, C.block_m);
                }
                const uint32_t in_group = index + group.rows * g.columns - group.last_tile;
                const uint32_t column = in_group / group.rows;
                tile = {group.number - 1,
                        group.begin + (in_group - column * group.rows) * C.block_m,
                        column * C.block_n, group.end, group.number > g.groups};
            }
            work(tile);
        }
    }
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
