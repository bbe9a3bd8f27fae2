// Single-wave kernels: where every block has one tile whose sums are only rounded, some
// configurations have a kernel of their own: single_wave_sm90.cuh for tiles of 128 x 256, beside
// the persistent one, and single_wave_64x64_sm90.cuh for whole tiles of 64 x 64. Here is which
// configurations have one, its resources, and which calls it computes.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

constexpr bool has_single_wave(const Config& c) {
    return kernel_of(c) == Kernel::persistent && !c.fused && c.block_n == 256;
}
constexpr bool has_single_wave_64x64(const Config& c) {
    return !c.swap_ab && !c.cluster_tile && c.block_n == 64;
}

// The producer is a single warp.
constexpr int single_wave_threads(const Config& c) { return c.consumers * 128 + 32; }
// The 64 x 64 kernel: each warp of its one consumer has a staging buffer.
constexpr int single_wave_64x64_shared_bytes(const Config& c) {
    const int bytes =
        c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 + 4 * 16 * 128 + c.stages * 16;
    return (bytes + 127) / 128 * 128;
}

// The first row of the last row of tiles, which overlaps the one before so that it is whole. TMA
// reads rows that are adjacent in memory from multiples of 16 bytes on, so there some rows may be
// outside.
TK_HOST_DEVICE constexpr uint32_t last_row(uint32_t m, uint32_t height, bool m_major) {
    const uint32_t first = m > height ? m - height : 0;
    return m_major ? (first + 7) / 8 * 8 : first;
}

// Whether TMA can store the output: its rows begin at multiples of 16 bytes and have such a length.
// TMA clips columns in steps of 16 bytes, and what lies behind the rows of a given output must not
// be written.
inline bool tma_stores(const Params& p) {
    const int64_t size = size_in_bytes(p.out_dtype);
    const int64_t columns = p.epilogue.gate == Gate::none ? p.n : p.n / 2;
    return reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride * size % 16 == 0 &&
           p.out_batch_stride * size % 16 == 0 && columns * size % 16 == 0 &&
           columns * size / 2 <= INT32_MAX;
}

// Whether sums are only rounded to the operands' type and stored by TMA, with enough steps of k for
// a deferred store: one for each subtile of 64 columns.
inline bool is_store_only(const Config& c, const Params& p) {
    return tma_stores(p) && p.out_dtype == c.dtype && p.epilogue.alpha == 1.f &&
           p.epilogue.bias == nullptr && (p.k + BLOCK_K - 1) / BLOCK_K >= (c.block_n + 63) / 64;
}

// Whether each block has one tile, in the order of the grid: tiles of a row are one raster group.
inline bool is_one_wave(const Schedule& schedule, const TileOrder& order) {
    return uint32_t(schedule.blocks) == order.total && !order.along_m &&
           order.group_tiles.value == order.matrix_tiles.value;
}
inline bool is_one_wave(const Schedule& schedule, const TwoWidthOrder& order) {
    return order.total == order.base.total && is_one_wave(schedule, order.base);
}

// Whether a single-wave kernel computes a call: the same of each block, without making the raster;
// and tiles of 64 x 64 are whole, but that the last row of them may overlap the one before.
inline bool runs_single_wave(const Config& c, const Params& p) {
    if (!is_store_only(c, p)) return false;
    const Schedule& s = p.schedule;
    const int64_t rows = (p.m + c.block_m - 1) / c.block_m;
    const int64_t columns = (p.n + c.block_n - 1) / c.block_n;
    if (s.blocks != p.batch * rows * columns || s.raster_group < rows || s.raster_along_m ||
        s.columns != 0)
        return false;
    const bool whole_rows = p.m >= c.block_m && (!c.a_m_major || p.m % 8 == 0);
    return has_single_wave(c) || (whole_rows && p.n % c.block_n == 0);
}

}  // namespace thunderkittens::gemm
