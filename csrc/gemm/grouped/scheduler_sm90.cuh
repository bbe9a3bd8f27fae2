// The tile scheduler of a grouped product on Hopper. The ends of the groups are known on the GPU
// alone, so one warp of each block finds the block's tiles there, 32 groups at a time, and passes
// their descriptions to the loading thread and the consumers through a small ring in shared memory.
// It runs ahead of them: what the search costs is hidden, and they need no registers for it.
#pragma once

#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/dense/types_sm90.cuh"
#include "csrc/gemm/grouped/grouped_gemm.h"

namespace thunderkittens::grouped_gemm {
namespace sm90 {

using namespace kittens;

// The elements of a tile that are the group's: those before `first` and from `end` on are
// another's.
struct Extent {
    uint16_t first, end;
};
// The steps of k that a tile sums over, from `begin` on; the first step's elements before `first`
// and the last step's from `end` on are not of the sum.
struct Steps {
    int group;  // `none` behind the last tile
    int begin, blocks;
    uint8_t first, end;
    bool narrow;  // the tile, see common/raster.h
    static constexpr int none = -1;

    __device__ __forceinline__ bool last_is_whole() const {
        return end == gemm::BLOCK_K && (blocks > 1 || first == 0);
    }
};
struct Area {
    int row, col;
    Extent rows, cols;
};
struct GroupTile {
    Steps steps;
    Area area;
};
static_assert(sizeof(GroupTile) == 32 && sizeof(Steps) == 16);

template <gemm::Config C>
struct KernelTraits : gemm::sm90::KernelTraits<C> {
    using Base = gemm::sm90::KernelTraits<C>;
    struct Shared : Base::Shared {
        alignas(16) GroupTile tiles[TILES_AHEAD];
        semaphore described[TILES_AHEAD], read[TILES_AHEAD];
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) <= grouped_gemm::shared_bytes(C),
                  "grouped_gemm.h knows another size");
    struct Globals : Base::Globals {
        const int32_t* offs;
        Grouped grouped;
        uint32_t groups, k, raster_group;
        bool two_widths;  // allowed
    };
    // The readers of the ring of descriptions: the loading thread and the warps of the consumers.
    static constexpr int readers = 1 + C.consumers * WARPGROUP_WARPS;
    static constexpr int producer_registers = 40;
    static constexpr int consumer_registers = 232;
    // Where k is divided and adjacent in memory, a group's range of it is loaded from a multiple of
    // 16 bytes on, which may lie before its beginning.
    static constexpr bool may_begin_inside = !C.a_m_major || !C.b_n_major;
};

// A position in the ring of descriptions, and the parity of the round.
using Slot = gemm::sm90::Ring<TILES_AHEAD>;

// What the scheduling warp has written about the tile in a slot, which it waits for.
template <class Shared>
__device__ __forceinline__ Steps steps_of(Shared& shared, const Slot slot) {
    wait(shared.described[slot.stage], slot.phase);
    const uint32_t from = arch::shared_address(&shared.tiles[slot.stage].steps);
    return arch::bit_cast<Steps>(arch::load_shared<uint4>(from));
}
template <class Shared>
__device__ __forceinline__ Area area_of(Shared& shared, const Slot slot) {
    const uint32_t from = arch::shared_address(&shared.tiles[slot.stage].area);
    return arch::bit_cast<Area>(arch::load_shared<uint4>(from));
}

// Where the tiles of a group begin that begins at `begin`. TMA reads and writes from multiples of
// 16 bytes on only, so that where elements along the divided dimension are adjacent in memory the
// first tile may begin in the group before.
template <gemm::Config C>
__device__ __forceinline__ uint32_t start_of(Grouped grouped, uint32_t begin) {
    const bool aligned = grouped == Grouped::rows      ? C.a_m_major
                         : grouped == Grouped::columns ? true
                                                       : !C.a_m_major || !C.b_n_major;
    return aligned ? begin / 8 * 8 : begin;
}

// Tiles lie in lines, each with as many tiles: rows of tiles where rows or k are divided, else
// columns of tiles. With tiles of two widths, the lines from `first_extra` on have one tile more.
struct Lines {
    uint32_t tiles;  // of a line
    uint32_t first_extra = ~0u;
    uint32_t wide = ~0u, wide_of_extra = ~0u;

    // How many tiles are in the first `lines`.
    __device__ __forceinline__ uint32_t before(uint32_t lines) const {
        return lines * tiles + (lines > first_extra ? lines - first_extra : 0);
    }
};

// 32 groups, one per lane: where each begins and ends in the dimension that is divided, its lines
// of tiles, and the number of all lines up to its last one.
struct Groups {
    uint32_t begin, end, lines, last_line;

    // What is read about the group of this lane.
    template <class Globals>
    static __device__ __forceinline__ int offset_of(const Globals& g, uint32_t first) {
        const uint32_t number = first + laneid();
        return number < g.groups ? arch::load_global(g.offs + number) : 0;
    }
    // Loads the groups from `first` on, which follow on `end_before`. What is behind the last group
    // counts as one more.
    template <class Traits, class Globals>
    static __device__ __forceinline__ Groups load(const Globals& g, uint32_t first, int offset,
                                                  uint32_t end_before, uint32_t lines_before) {
        constexpr gemm::Config C = Traits::config;
        const int total = g.grouped == Grouped::rows      ? int(g.m)
                          : g.grouped == Grouped::columns ? int(g.n)
                                                          : int(g.k);
        const uint32_t number = first + laneid();
        offset = number < g.groups ? min(max(offset, 0), total) : total;
        Groups of;
        of.end = max(uint32_t(offset), end_before);
        // An end before that of an earlier group is moved there.
#pragma unroll
        for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
            const uint32_t earlier = arch::shuffle(of.end, max(laneid() - distance, 0));
            of.end = max(of.end, earlier);
        }
        const uint32_t previous = arch::shuffle(of.end, max(laneid() - 1, 0));
        of.begin = laneid() == 0 ? end_before : previous;
        const bool k = g.grouped == Grouped::k;
        const uint32_t size = k ? g.m : of.end - start_of<C>(g.grouped, of.begin);
        const int block = g.grouped == Grouped::columns ? C.block_n : C.block_m;
        of.lines = (size + block - 1) / block;
        const bool any = k ? number < g.groups : of.begin < of.end;
        if (!any) of.lines = 0;
        of.last_line = of.lines;
#pragma unroll
        for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
            const uint32_t earlier = arch::shuffle(of.last_line, max(laneid() - distance, 0));
            if (laneid() >= distance) of.last_line += earlier;
        }
        of.last_line += lines_before;
        return of;
    }
    __device__ __forceinline__ Groups of_lane(int lane) const {
        return {arch::shuffle(begin, lane), arch::shuffle(end, lane), arch::shuffle(lines, lane),
                arch::shuffle(last_line, lane)};
    }
};

// How many rows of tiles all groups have; `groups` are the first 32. For other groups than those
// the ends are read once more.
template <class Traits, class Globals>
__device__ __forceinline__ uint32_t count_rows(const Globals& g, Groups groups) {
    uint32_t first = 0, next = WARP_THREADS;
    int offset = Groups::offset_of(g, next);
    for (; next < g.groups; first = next, next += WARP_THREADS) {
        const Groups last = groups.of_lane(WARP_THREADS - 1);
        const int ahead = Groups::offset_of(g, next + WARP_THREADS);
        groups = Groups::load<Traits>(g, next, offset, last.end, last.last_line);
        offset = ahead;
    }
    return arch::shuffle(groups.last_line, int(g.groups - 1 - first));
}

// Units of NARROW_BY columns of a tile, and of a group where columns are divided.
template <class Traits>
constexpr uint32_t UNITS = Traits::config.block_n / gemm::NARROW_BY;
template <class Traits, class Globals>
__device__ __forceinline__ uint32_t units_of(const Globals& g, const Groups& of) {
    const uint32_t columns = of.end - start_of<Traits::config>(g.grouped, of.begin);
    return (columns + gemm::NARROW_BY - 1) / gemm::NARROW_BY;
}

// Balanced tiling where columns are divided: gives one more column of tiles to the first groups
// that narrow ones can divide, until the SMs have tiles in all waves. `groups` are all of them, and
// what is behind them.
template <class Traits, class Globals>
__device__ __forceinline__ void add_columns(const Globals& g, uint32_t rows, Groups& groups) {
    const uint32_t count = arch::shuffle(groups.last_line, WARP_THREADS - 1);
    const uint32_t waves = (count * rows + gridDim.x - 1) / gridDim.x;
    if (waves < 2) return;
    const uint32_t spare = waves * gridDim.x / rows - count;
    const uint32_t most =
        laneid() < g.groups ? units_of<Traits>(g, groups) / (UNITS<Traits> - 1) : 0;
    uint32_t extra = max(most, groups.lines) - groups.lines;
    const uint32_t own = extra;
#pragma unroll
    for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
        const uint32_t earlier = arch::shuffle(extra, max(laneid() - distance, 0));
        if (laneid() >= distance) extra += earlier;
    }
    groups.lines += min(extra, spare) - min(extra - own, spare);
    groups.last_line += min(extra, spare);
}

// How many lines the groups have, in tiles of which widths; `groups` are the first 32.
template <class Traits, class Globals>
__device__ __forceinline__ Lines lines_of(const Globals& g, Groups& groups) {
    constexpr gemm::Config C = Traits::config;
    const bool columns = g.grouped == Grouped::columns;
    Lines lines{columns ? (g.m + C.block_m - 1) / C.block_m : (g.n + C.block_n - 1) / C.block_n};
    if constexpr (Traits::two_widths) {
        if (!g.two_widths) return lines;
        if (columns) {
            add_columns<Traits>(g, lines.tiles, groups);
            return lines;
        }
        const uint32_t count = g.grouped == Grouped::k ? g.groups * arch::shuffle(groups.lines, 0)
                                                       : count_rows<Traits>(g, groups);
        const int n = int(g.n);
        const auto counts = gemm::count_tiles(int(count), n, C.block_n, int(gridDim.x));
        if (counts.columns == 0) return lines;
        if (C.b_n_major && gemm::cover_too_much(counts.columns, n, C.block_n)) return lines;
        lines.tiles = uint32_t(counts.columns);
        lines.wide = uint32_t(counts.wide);
        if (counts.extra_rows == 0) return lines;
        lines.first_extra = count - uint32_t(counts.extra_rows);
        lines.wide_of_extra = uint32_t(counts.wide_of_extra);
    }
    return lines;
}

// The extent [first, end) of a group within a tile of `size` elements that begins at `start`.
__device__ __forceinline__ Extent extent_of(uint32_t start, uint32_t first, uint32_t end,
                                            uint32_t size) {
    return {static_cast<uint16_t>(first > start ? first - start : 0),
            static_cast<uint16_t>(min(end - start, size))};
}

// Describes tile `index` of a group, whose tiles are walked in raster groups (common/raster.h); the
// tiles of lines with one more come after the others.
template <class Traits, class Globals>
__device__ __forceinline__ GroupTile describe(const Globals& g, uint32_t number, const Groups& of,
                                              const Lines& lines, uint32_t index) {
    constexpr gemm::Config C = Traits::config;
    uint32_t rows = of.lines, columns = lines.tiles, first_row = 0, wide = lines.wide;
    if (g.grouped == Grouped::columns) {
        rows = lines.tiles, columns = of.lines;
        if (Traits::two_widths && g.two_widths) {
            const uint32_t units = units_of<Traits>(g, of), least = columns * (UNITS<Traits> - 1);
            wide = max(units, least) - least;
        }
    } else if (Traits::two_widths && lines.first_extra < of.last_line) {
        const uint32_t before = of.last_line - of.lines;
        const uint32_t first_extra = lines.first_extra > before ? lines.first_extra - before : 0;
        if (index < first_extra * columns) {
            rows = first_extra;
        } else {
            index -= first_extra * columns;
            first_row = first_extra, rows -= first_extra, ++columns, wide = lines.wide_of_extra;
        }
    }
    const uint32_t raster_groups = (rows + g.raster_group - 1) / g.raster_group,
                   height = (rows + raster_groups - 1) / raster_groups;
    const uint32_t raster_group = index / (height * columns),
                   in_raster_group = index - raster_group * height * columns;
    const uint32_t tall = min(height, rows - raster_group * height);
    const uint32_t step = in_raster_group / tall;
    const uint32_t across = first_row + raster_group * height + in_raster_group - step * tall;
    const uint32_t along = raster_group % 2 == 0 ? step : columns - 1 - step;
    const bool narrow = Traits::two_widths && along >= wide;
    const uint32_t before = narrow ? (along - wide) * gemm::NARROW_BY : 0;
    const uint32_t width = C.block_n - (narrow ? gemm::NARROW_BY : 0);
    const uint32_t start = start_of<C>(g.grouped, of.begin);
    const uint32_t row = (g.grouped == Grouped::rows ? start : 0) + across * C.block_m;
    const uint32_t col = (g.grouped == Grouped::columns ? start : 0) + along * C.block_n - before;

    GroupTile tile;
    tile.area.row = int(row), tile.area.col = int(col);
    tile.area.rows = g.grouped == Grouped::rows ? extent_of(row, of.begin, of.end, C.block_m)
                                                : extent_of(row, 0, g.m, C.block_m);
    tile.area.cols = g.grouped == Grouped::columns ? extent_of(col, of.begin, of.end, width)
                                                   : extent_of(col, 0, g.n, width);
    tile.steps = {int(min(number, g.groups - 1)), 0, g.k_blocks, 0, gemm::BLOCK_K, narrow};
    if (g.grouped == Grouped::k) {
        const uint32_t length = of.end - start;
        const uint32_t blocks = max(1u, (length + gemm::BLOCK_K - 1) / gemm::BLOCK_K);
        tile.steps.begin = int(start), tile.steps.blocks = int(blocks);
        tile.steps.first = static_cast<uint8_t>(of.begin - start);
        tile.steps.end = static_cast<uint8_t>(length - (blocks - 1) * gemm::BLOCK_K);
    }
    // What belongs to no group is a sum of nothing.
    if (number >= g.groups) tile.steps.blocks = 1, tile.steps.first = tile.steps.end = 0;
    return tile;
}

// The scheduling warp: describes this block's tiles one after the other.
template <class Traits>
__device__ __forceinline__ void schedule(const typename Traits::Globals& g,
                                         typename Traits::Shared& shared) {
    Slot slot;
    const auto publish = [&](const GroupTile& tile) {
        wait(shared.read[slot.stage], slot.phase ^ 1);
        if (laneid() == 0) {
            const auto& to = shared.tiles[slot.stage];
            arch::store_shared(arch::shared_address(&to.steps), arch::bit_cast<uint4>(tile.steps));
            arch::store_shared(arch::shared_address(&to.area), arch::bit_cast<uint4>(tile.area));
            arrive(shared.described[slot.stage]);
        }
        arch::sync_warp();
        slot.advance();
    };
    uint32_t first = 0;
    Groups groups = Groups::load<Traits>(g, first, Groups::offset_of(g, first), 0, 0);
    const Lines lines = lines_of<Traits>(g, groups);
    for (uint32_t index = blockIdx.x;; index += gridDim.x) {
        uint32_t with_tile = arch::ballot(index < lines.before(groups.last_line));
        while (with_tile == 0) {
            first += WARP_THREADS;
            if (first > g.groups) return publish({.steps = {.group = Steps::none}});
            const Groups last = groups.of_lane(WARP_THREADS - 1);
            groups = Groups::load<Traits>(g, first, Groups::offset_of(g, first), last.end,
                                          last.last_line);
            with_tile = arch::ballot(index < lines.before(groups.last_line));
        }
        int lane = 0;
        while ((with_tile >> lane & 1) == 0) ++lane;
        const Groups of = groups.of_lane(lane);
        const uint32_t before = lines.before(of.last_line - of.lines);
        publish(describe<Traits>(g, first + lane, of, lines, index - before));
    }
}

}  // namespace sm90
}  // namespace thunderkittens::grouped_gemm
