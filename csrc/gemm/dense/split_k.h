// Tiles whose k is divided by several blocks, which exchange sums through memory: for few tiles and
// a long k (split_k_sm90.cuh). Both widths of tiles and both orders of b have one kernel for each
// dtype; a's rows lie along k. Host C++ only.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/stream_k.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

// Their configurations have more stages than others.
constexpr TileShape DIVIDED_SHAPES[] = {
    {128, 128, 7, 2},
    {128, 192, 5, 2},
};
// Columns that a block finishes at least, and how many blocks of 64 x 64 the stages have room for.
constexpr int DIVIDED_UNIT = 16, DIVIDED_PARTS = 28;

constexpr bool is_divided(const Config& c) {
    if (c.streamed || c.fused || c.marked || c.varied) return false;
    for (const TileShape& shape : DIVIDED_SHAPES) {
        if (c.block_n == shape.block_n && c.stages == shape.stages) return true;
    }
    return false;
}
// Stages, and two semaphores for each.
constexpr int DIVIDED_SHARED_BYTES =
    (DIVIDED_PARTS * 64 * 64 * 2 + DIVIDED_SHAPES[0].stages * 16 + 127) / 128 * 128;

// Scratch memory of a call, 16-byte aligned, with any contents: the sums that blocks give others,
// and a mark of each for every consumer and block of the tile.
struct Scratch {
    void* data = nullptr;
    uint64_t mark = 0;  // new_mark()
};
constexpr int64_t tiles_of(const Config& c, int64_t m, int64_t n) {
    return ((m + c.block_m - 1) / c.block_m) * ((n + c.block_n - 1) / c.block_n);
}
// The bytes of the sums, of as many tiles as there are blocks; the marks lie behind them.
constexpr int64_t sums_bytes(const Config& c, const Schedule& s, int64_t tiles) {
    const int64_t blocks = has_owners(s.blocks, s.splits, tiles) ? s.blocks : tiles * s.splits;
    return blocks * 4 * c.block_m * c.block_n;
}
constexpr int64_t scratch_bytes(const Choice& choice, int64_t m, int64_t n) {
    const Config& c = choice.config;
    if (!is_divided(c)) return 0;
    const int64_t sums = sums_bytes(c, choice.schedule, tiles_of(c, m, n));
    return sums + sums / (4 * c.block_m * c.block_n) * 8 * c.consumers * choice.schedule.splits;
}

// Whether there was room for all blocks at a time.
template <DType dtype>
bool launch_divided(const Config& config, const Params& params, const Scratch& scratch,
                    Stream stream);
// Each in a file of its own.
extern template bool launch_divided<DType::bf16>(const Config&, const Params&, const Scratch&,
                                                 Stream);
extern template bool launch_divided<DType::fp16>(const Config&, const Params&, const Scratch&,
                                                 Stream);

// Whether the kernel computes a call.
inline bool suits_divided(const Config& c, const Params& p) {
    // Words that a thread stores at a time.
    const int64_t tiles = tiles_of(c, p.m, p.n);
    const int words = has_owners(p.schedule.blocks, p.schedule.splits, tiles) ? 4 : 1;
    return p.out_dtype == c.dtype && p.batch == 1 && p.m >= c.block_m && p.n % 8 == 0 &&
           p.out_stride % (2 * words) == 0 && reinterpret_cast<uintptr_t>(p.out) % (4 * words) == 0;
}

// Whether a configuration's kernel computes a call itself, and not tiles of 128 x 256.
inline bool suits(const Config& c, const Params& p) {
    if (c.varied) return suits_varied(c, p);
    return !is_divided(c) || suits_divided(c, p);
}

}  // namespace thunderkittens::gemm
