// Split-K over clusters for fp8 products with few tiles (split_k_sm90.cuh): the tile N is known at
// run time, so that it fits the problem, and the blocks of a cluster share the k of a tile. One
// kernel for each kind of sums has all widths. Host C++ only.
#pragma once

#include <iterator>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {

// The widths, the widest first, for the first pair of dtypes. Their configurations are told from
// others by having no number of stages: that follows from the width and the number of splits.
constexpr int SPLIT_K_WIDTHS[] = {224, 192, 176, 160, 144, 136, 128, 112, 96};
constexpr Config split_k_config(int width, Sums sums) {
    return {.block_n = width, .stages = 0, .buffers = 0, .sums = sums};
}
constexpr bool is_split_k(const Config& c) { return c.stages == 0; }

// The ring of stages, in rows of 128 bytes. Its end receives the partial sums of other blocks.
constexpr int SPLIT_K_RING_ROWS = 1760, SPLIT_K_STAGES = 7, MAX_SPLITS = 8;
// The distance of rows of sums in shared memory, without bank conflicts.
TK_HOST_DEVICE constexpr int sums_pitch(int width) { return (width | 8) * 4; }
// The bytes that one of the eight warps is sent by another block: its share of 16 rows.
TK_HOST_DEVICE constexpr int sent_bytes(int width, int splits) {
    return (16 + splits - 1) / splits * sums_pitch(width);
}
constexpr int received_bytes(int width, int splits) {
    return 8 * (splits - 1) * sent_bytes(width, splits);
}
constexpr int split_k_stages(int width, int splits) {
    const int stages =
        (SPLIT_K_RING_ROWS * BLOCK_K - received_bytes(width, splits)) / ((128 + width) * BLOCK_K);
    return std::min(stages, SPLIT_K_STAGES);
}
// Whether there is room for what is received beside a block's own sums.
constexpr bool fits_splits(int width, int splits) {
    return 128 * sums_pitch(width) + received_bytes(width, splits) <= SPLIT_K_RING_ROWS * BLOCK_K;
}

// Promoted sums take more registers than all threads can have: the producer is then a warpgroup,
// which gives its registers away.
constexpr int split_k_threads(Sums sums) { return 2 * 128 + (sums == Sums::fast ? 32 : 128); }
// The ring, values of rows and columns, and semaphores.
constexpr int SPLIT_K_SHARED_BYTES =
    (SPLIT_K_RING_ROWS * BLOCK_K + (128 + 2 * SPLIT_K_WIDTHS[0]) * 4 +
     (2 * SPLIT_K_STAGES + 4) * 8 + 127) /
    128 * 128;

// Whether the split-K kernel computes a call.
inline bool runs_split_k(const Config& c, const Params& p) {
    const auto* end = std::end(SPLIT_K_WIDTHS);
    const int splits = p.schedule.splits;
    return std::find(std::begin(SPLIT_K_WIDTHS), end, c.block_n) != end && is_first_pair(c) &&
           p.k > 0 && !p.blockwise && p.offs == nullptr && p.activation == 0 &&
           p.out_dtype != DType::fp32 && splits >= 1 && splits <= MAX_SPLITS &&
           splits <= (p.k + BLOCK_K - 1) / BLOCK_K && fits_splits(c.block_n, splits);
}

template <Sums sums>
void launch_split_k(const Config& config, const Params& params, Stream stream);
// Each is compiled in a file of its own.
extern template void launch_split_k<Sums::fast>(const Config&, const Params&, Stream);
extern template void launch_split_k<Sums::promoted>(const Config&, const Params&, Stream);

// As launch_any, for split-K configurations too. What the split-K kernel does not compute, for
// example an activation that the problem did not tell of, falls back to tiles of 128 x 128.
inline bool launch_choice(const Config& config, const Params& params, Stream stream) {
    if (!is_split_k(config)) return launch_any(config, params, stream);
    if (runs_split_k(config, params)) {
        if (config.sums == Sums::fast)
            launch_split_k<Sums::fast>(config, params, stream);
        else
            launch_split_k<Sums::promoted>(config, params, stream);
        return true;
    }
    const auto* whole =
        std::find_if(std::begin(TILE_SHAPES), std::end(TILE_SHAPES),
                     [&](const TileShape& s) { return s.sums == config.sums && s.block_n == 128; });
    Params others = params;
    others.schedule = {.blocks = params.schedule.blocks};
    return launch_any(make_config(*whole, {config.a, config.b}), others, stream);
}

}  // namespace thunderkittens::fp8_gemm
