// Tiles whose size is known at run time (runtime_tile_sm90.cuh): which there are, and which calls
// the kernel computes. Host C++ only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/common/math.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

// The two consumers of a block have tiles of rows * width each, one above the other or side by
// side. With `swap_ab` the operands change places: rows count columns of the result.
struct RuntimeTile {
    int rows = 64;  // 64, 128 or 192, for each of which there is a kernel
    int width = 64;
    bool side_by_side = false;

    bool operator==(const RuntimeTile&) const = default;
    constexpr int block_rows() const { return side_by_side ? rows : 2 * rows; }
    constexpr int block_width() const { return side_by_side ? 2 * width : width; }
};
constexpr int RUNTIME_TILE_ROWS[] = {64, 128, 192};
constexpr int LEAST_RUNTIME_WIDTH = 64, RUNTIME_WIDTH_STEP = 16;
constexpr int MOST_RUNTIME_SHARE = 4;  // blocks of a cluster, of up to eight, along a dimension
// The accumulators of a consumer stay in registers.
constexpr int most_runtime_width(int rows) { return rows == 64 ? 256 : rows == 128 ? 160 : 112; }
// Of tiles side by side: the producer issues at most eight boxes for each stage.
constexpr int most_runtime_width(int rows, bool side_by_side) {
    return rows == 64 && side_by_side ? 192 : most_runtime_width(rows);
}

// A block's size tells how its consumers divide it: above each other where there is a choice.
constexpr Config runtime_tile_config(const RuntimeTile& tile, bool swap_ab, DType dtype,
                                     bool a_m_major, bool b_n_major) {
    const int rows = tile.block_rows(), width = tile.block_width();
    return {.block_m = swap_ab ? width : rows,
            .block_n = swap_ab ? rows : width,
            .stages = 0,
            .consumers = 2,
            .swap_ab = swap_ab,
            .dtype = dtype,
            .a_m_major = a_m_major,
            .b_n_major = b_n_major};
}
constexpr RuntimeTile runtime_tile_of(const Config& c) {
    const int rows = c.swap_ab ? c.block_n : c.block_m, width = c.swap_ab ? c.block_m : c.block_n;
    const bool above = rows % 128 == 0 && width <= most_runtime_width(rows / 2);
    return above ? RuntimeTile{rows / 2, width, false} : RuntimeTile{rows, width / 2, true};
}
constexpr bool is_runtime_tile(const Config& c) {
    const RuntimeTile tile = runtime_tile_of(c);
    return std::ranges::count(RUNTIME_TILE_ROWS, tile.rows) == 1 &&
           tile.width % RUNTIME_WIDTH_STEP == 0 && tile.width >= LEAST_RUNTIME_WIDTH &&
           tile.width <= most_runtime_width(tile.rows, tile.side_by_side) && c.consumers == 2;
}

// Shared memory: the semaphores of the ring; staging buffers of 64 x 64 values for tiles that
// others follow, two for each consumer; and the ring. A block's last tile is staged in the ring.
constexpr int RUNTIME_TILE_STAGES = 16, RUNTIME_TILE_SEMAPHORE_BYTES = 1024;
constexpr int RUNTIME_TILE_BUFFER_BYTES = 64 * 64 * 2;
constexpr int RUNTIME_TILE_SHARED_BYTES = 232448, RUNTIME_TILE_THREADS = 3 * 128;
struct RuntimeTileRing {
    int a_slice, b_slice;  // the rows of a box that a block of a cluster loads
    int a_bytes, b_bytes;  // of a consumer in a stage
    int stage_bytes, stages, buffers, shared_bytes;
};
constexpr RuntimeTileRing runtime_tile_ring(const Config& c, const Schedule& s, bool followed) {
    const RuntimeTile tile = runtime_tile_of(c);
    const bool a_along_k = c.swap_ab ? !c.b_n_major : !c.a_m_major,
               b_along_k = c.swap_ab ? !c.a_m_major : !c.b_n_major;
    const int share_rows = c.swap_ab ? s.share_n : s.share_m,
              share_width = c.swap_ab ? s.share_m : s.share_n;
    constexpr int line = 128;
    RuntimeTileRing ring{};
    ring.a_slice = (a_along_k ? tile.rows : BLOCK_K) / share_width;
    ring.b_slice = b_along_k ? int(ceil_div(tile.width, share_rows * 8)) * 8 : BLOCK_K / share_rows;
    ring.a_bytes = tile.rows * line;
    ring.b_bytes =
        (b_along_k ? 1 : int(ceil_div(tile.width, 64))) * ring.b_slice * share_rows * line;
    ring.stage_bytes =
        tile.side_by_side ? ring.a_bytes + 2 * ring.b_bytes : 2 * ring.a_bytes + ring.b_bytes;
    ring.buffers = followed ? 2 : 0;
    const int before = RUNTIME_TILE_SEMAPHORE_BYTES + 2 * ring.buffers * RUNTIME_TILE_BUFFER_BYTES;
    ring.stages =
        std::min(RUNTIME_TILE_STAGES, (RUNTIME_TILE_SHARED_BYTES - before) / ring.stage_bytes);
    const int last = RUNTIME_TILE_SEMAPHORE_BYTES + 2 * (tile.rows / 64) *
                                                        int(ceil_div(tile.width, 64)) *
                                                        RUNTIME_TILE_BUFFER_BYTES;
    ring.shared_bytes = std::max(last, before + ring.stages * ring.stage_bytes);
    return ring;
}

template <DType dtype, int rows>
void launch_runtime_tile(const Config& config, const Params& params, Stream stream);

// Whether the kernel computes a call, whose rows TMA stores.
inline bool runs_runtime_tile(const Config& c, const Params& p) {
    return p.out_dtype == c.dtype && p.out_stride % 8 == 0 && p.out_batch_stride % 8 == 0 &&
           reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
           p.epilogue.activation == Activation::none && p.epilogue.residual == nullptr &&
           p.epilogue.aux == nullptr && p.epilogue.gate == Gate::none;
}

}  // namespace thunderkittens::gemm
