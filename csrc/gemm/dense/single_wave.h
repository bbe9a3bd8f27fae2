// Where every block has one tile whose sums are only rounded, some configurations have a kernel of
// their own beside the one for all cases: single_wave_sm90.cuh for tiles of 128 x 256,
// single_wave_64x64_sm90.cuh for whole ones of 64 x 64. Which configurations, the kernels'
// resources, and which calls they run.
#pragma once

#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/dense/tile_order.h"

namespace thunderkittens::gemm {

enum class OneTile { no, once, single };

constexpr bool has_once(const Config& c) {
    const bool plain = !c.streamed && !c.fused && !c.marked && !c.varied;
    return plain && c.block_m == 128 && c.block_n == 256;
}
constexpr bool has_single(const Config& c) { return !c.streamed && c.block_n == 64; }

// A warp loads.
constexpr int one_tile_threads(const Config& c) { return c.consumers * 128 + 32; }
// Of the single kernel: the warps of one warpgroup have a staging buffer each.
constexpr int single_shared_bytes(const Config& c) {
    const int bytes =
        c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 + 4 * 16 * 128 + c.stages * 16;
    return (bytes + 127) / 128 * 128;
}

// Where the last of several tiles begins: where it is whole. TMA reads rows that are adjacent in
// memory from multiples of 16 bytes on, so there some may be outside.
TK_HOST_DEVICE constexpr uint32_t last_row(uint32_t m, uint32_t height, bool m_major) {
    const uint32_t first = m > height ? m - height : 0;
    return m_major ? (first + 7) / 8 * 8 : first;
}

// Whether TMA can store rows of the output: they lie at multiples of 16 bytes, and are such. It
// clips columns in steps of 16 bytes, and what is behind the rows of a given output is not ours.
inline bool tma_stores(const Params& p) {
    const int64_t size = size_in_bytes(p.out_dtype);
    const int64_t columns = p.epilogue.gate == Gate::none ? p.n : p.n / 2;
    return reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride * size % 16 == 0 &&
           p.out_batch_stride * size % 16 == 0 && columns * size % 16 == 0 &&
           columns * size / 2 <= INT32_MAX;
}

// Whether sums are only rounded to the operands' type, and TMA stores them, at the latest in the
// shadow of a next tile: a piece of 64 columns in each step.
inline bool is_plain(const Config& c, const Params& p) {
    return tma_stores(p) && p.out_dtype == c.dtype && p.epilogue.alpha == 1.f &&
           p.epilogue.bias == nullptr && (p.k + BLOCK_K - 1) / BLOCK_K >= (c.block_n + 63) / 64;
}

// Whether each block has one tile, in the order of the grid: tiles of a row are a band.
inline bool in_one_round(const Schedule& schedule, const TileOrder& order) {
    return uint32_t(schedule.blocks) == order.total && !order.along_m &&
           order.band_tiles.value == order.matrix_tiles.value;
}
inline bool in_one_round(const Schedule& schedule, const UnevenOrder& order) {
    return order.total == order.fewer.total && in_one_round(schedule, order.fewer);
}

// The kernel that a configuration's launcher takes.
inline OneTile one_tile(const Config& c, const Params& p) {
    if ((!has_once(c) && !has_single(c)) || !is_plain(c, p)) return OneTile::no;
    const bool one_round =
        has_two_widths(c)
            ? in_one_round(p.schedule, make_uneven_order(c, p.schedule, p.m, p.n, p.batch, true))
            : in_one_round(p.schedule, make_order(c, p.schedule, p.m, p.n, p.batch));
    if (!one_round) return OneTile::no;
    if (has_once(c)) return OneTile::once;
    const bool whole_rows = p.m >= c.block_m && (!c.a_m_major || p.m % 8 == 0);
    return whole_rows && p.n % c.block_n == 0 ? OneTile::single : OneTile::no;
}

}  // namespace thunderkittens::gemm
