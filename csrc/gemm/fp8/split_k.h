// Cluster tiles for fp8 products with few tiles, and with rows that do not begin at lines of 128
// bytes (split_k_sm90.cuh): the tile N is known at run time, so that it fits the problem, and the
// blocks of a cluster share loads of tiles beside each other, or the k of a tile. One kernel for
// each kind of sums has all widths. Host C++ only.
#pragma once

#include <iterator>

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {

// The widths, the widest first, for the first pair of dtypes. The number of stages follows from the
// width and the number of splits.
constexpr int SPLIT_K_WIDTHS[] = {256, 224, 192, 176, 160, 144, 136, 128, 112, 96, 64};
constexpr Config split_k_config(int width, Sums sums) {
    return {.block_n = width, .stages = 0, .buffers = 0, .sums = sums};
}

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

// Whether a product of a tile, of at most 128 columns, has one block of b's block-wise scales.
TK_HOST_DEVICE constexpr bool takes_blocks(int width) { return width == 64 || width % 128 == 0; }

// Whether blocks of a cluster can share loads: slices of tiles are multiples of 8 rows, where the
// swizzle begins again.
constexpr bool fits_cluster(int width, int share_m, int share_n, int splits) {
    return width % (8 * share_m) == 0 && share_m * share_n * splits <= MAX_SPLITS;
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
           p.k > 0 && p.offs == nullptr && p.activation == 0 &&
           (!p.blockwise || (!p.is_1d1d && takes_blocks(c.block_n))) &&
           p.out_dtype != DType::fp32 && splits >= 1 && splits <= MAX_SPLITS &&
           splits <= (p.k + BLOCK_K - 1) / BLOCK_K && fits_splits(c.block_n, splits) &&
           fits_cluster(c.block_n, p.schedule.cluster_m, p.schedule.cluster_n, splits);
}

template <Sums sums>
void launch_split_k(const Config& config, const Params& params, Stream stream);
// Each is compiled in a file of its own.
extern template void launch_split_k<Sums::fast>(const Config&, const Params&, Stream);
extern template void launch_split_k<Sums::promoted>(const Config&, const Params&, Stream);

}  // namespace thunderkittens::fp8_gemm
