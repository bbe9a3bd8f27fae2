// Tiles of fp8 products for few of them (split_k_sm90.cuh): of a width that fits the problem,
// with their k divided by the blocks of a cluster. One kernel for each kind of sums has all widths.
// Host C++ only.
#pragma once

#include <iterator>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {

// The widest first, of the first pair of dtypes. Their configurations have no number of stages,
// which follows from the width and the blocks that divide k.
constexpr int FITTED_WIDTHS[] = {224, 192, 176, 160, 144, 136, 128, 112, 96};
constexpr Config fitted_config(int width, Sums sums) {
    return {.block_n = width, .stages = 0, .buffers = 0, .sums = sums};
}
constexpr bool is_fitted(const Config& c) { return c.stages == 0; }

// The ring of stages, in rows of 128 bytes. Its end takes what other blocks send.
constexpr int FITTED_ROWS = 1760, FITTED_STAGES = 7, FITTED_SPLITS = 8;
// Sums in shared memory: the distance of their rows, so that no banks conflict.
TK_HOST_DEVICE constexpr int sums_pitch(int width) { return (width | 8) * 4; }
// What one of the eight warps is sent by another block: a share of 16 rows.
TK_HOST_DEVICE constexpr int sent_bytes(int width, int splits) {
    return (16 + splits - 1) / splits * sums_pitch(width);
}
constexpr int received_bytes(int width, int splits) {
    return 8 * (splits - 1) * sent_bytes(width, splits);
}
constexpr int fitted_stages(int width, int splits) {
    const int stages =
        (FITTED_ROWS * BLOCK_K - received_bytes(width, splits)) / ((128 + width) * BLOCK_K);
    return std::min(stages, FITTED_STAGES);
}
// Whether there is room for it beside a block's own sums.
constexpr bool fits_splits(int width, int splits) {
    return 128 * sums_pitch(width) + received_bytes(width, splits) <= FITTED_ROWS * BLOCK_K;
}

// Promoted sums take more registers than all threads can have: the producers are a warpgroup then,
// which hands on its own.
constexpr int fitted_threads(Sums sums) { return 2 * 128 + (sums == Sums::fast ? 32 : 128); }
// The ring, values of rows and columns, semaphores.
constexpr int FITTED_SHARED_BYTES =
    (FITTED_ROWS * BLOCK_K + (128 + 2 * FITTED_WIDTHS[0]) * 4 + (2 * FITTED_STAGES + 4) * 8 + 127) /
    128 * 128;

// What they compute.
inline bool suits_fitted(const Config& c, const Params& p) {
    const auto* end = std::end(FITTED_WIDTHS);
    const int splits = p.schedule.splits;
    return std::find(std::begin(FITTED_WIDTHS), end, c.block_n) != end && is_first_pair(c) &&
           p.k > 0 && !p.blocks && p.offs == nullptr && p.activation == 0 &&
           p.out_dtype != DType::fp32 && splits >= 1 && splits <= FITTED_SPLITS &&
           splits <= (p.k + BLOCK_K - 1) / BLOCK_K && fits_splits(c.block_n, splits);
}

template <Sums sums>
void launch_fitted(const Config& config, const Params& params, Stream stream);
// Each in a file of its own.
extern template void launch_fitted<Sums::fast>(const Config&, const Params&, Stream);
extern template void launch_fitted<Sums::promoted>(const Config&, const Params&, Stream);

// As launch_any, of these tiles too. What they do not compute, as the activation of a call whose
// problem did not tell of it, tiles of 128 x 128 do.
inline bool launch_choice(const Config& config, const Params& params, Stream stream) {
    if (!is_fitted(config)) return launch_any(config, params, stream);
    if (suits_fitted(config, params)) {
        if (config.sums == Sums::fast)
            launch_fitted<Sums::fast>(config, params, stream);
        else
            launch_fitted<Sums::promoted>(config, params, stream);
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
