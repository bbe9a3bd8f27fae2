// Split-K and stream-K through a workspace, for few tiles and a long k (split_k_sm90.cuh): several
// blocks share the k of a tile and exchange partial sums through memory. One kernel for each dtype
// has both widths of tiles and both orders of b; a's rows lie along k. Host C++ only.
#pragma once

#include <cstdint>

#include "csrc/gemm/common/stream_k.h"
#include "csrc/gemm/common/workspace.h"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

// The shapes of the split-K kernel.
constexpr TileShape SPLIT_K_SHAPES[] = {
    {128, 128, 7, 2},
    {128, 192, 5, 2},
};
// The fewest columns that a block finishes, and the tiles of 64 x 64 that the ring of stages has
// room for.
constexpr int SPLIT_K_UNIT = 16, SPLIT_K_RING_TILES = 28;

// The ring of stages, and two semaphores for each stage.
constexpr int SPLIT_K_SHARED_BYTES =
    (SPLIT_K_RING_TILES * 64 * 64 * 2 + SPLIT_K_SHAPES[0].stages * 16 + 127) / 128 * 128;

// The workspace of a call, 16-byte aligned, with any contents: the partial sums, and behind them a
// flag of every block for each consumer and each of its peers.
struct Workspace {
    void* data = nullptr;
    uint64_t epoch = 0;  // new_epoch()
};
constexpr int64_t tiles_of(const Config& c, int64_t m, int64_t n) {
    return ((m + c.block_m - 1) / c.block_m) * ((n + c.block_n - 1) / c.block_n);
}
// The bytes of the partial sums, of as many tiles as there are blocks; the flags lie behind them.
constexpr int64_t sums_bytes(const Config& c, const Schedule& s, int64_t tiles) {
    const int64_t blocks = is_stream_k(s.blocks, s.splits, tiles) ? s.blocks : tiles * s.splits;
    return blocks * 4 * c.block_m * c.block_n;
}
constexpr int64_t workspace_bytes(const Choice& choice, int64_t m, int64_t n) {
    const Config& c = choice.config;
    if (choice.kernel != Kernel::split_k) return 0;
    const int64_t sums = sums_bytes(c, choice.schedule, tiles_of(c, m, n));
    return sums + sums / (4 * c.block_m * c.block_n) * 8 * c.consumers * choice.schedule.splits;
}

// Returns whether there was room for all blocks at a time, without which the kernel is not
// launched.
template <DType dtype>
bool launch_split_k(const Config& config, const Params& params, const Workspace& workspace,
                    Stream stream);
// Each is compiled in a file of its own.
extern template bool launch_split_k<DType::bf16>(const Config&, const Params&, const Workspace&,
                                                 Stream);
extern template bool launch_split_k<DType::fp16>(const Config&, const Params&, const Workspace&,
                                                 Stream);

// Whether the split-K kernel computes a call.
inline bool runs_split_k(const Config& c, const Params& p) {
    // The 32-bit words that a thread stores at a time.
    const int64_t tiles = tiles_of(c, p.m, p.n);
    const int words = is_stream_k(p.schedule.blocks, p.schedule.splits, tiles) ? 4 : 1;
    return p.out_dtype == c.dtype && p.batch == 1 && p.m >= c.block_m && p.n % 8 == 0 &&
           p.out_stride % (2 * words) == 0 && reinterpret_cast<uintptr_t>(p.out) % (4 * words) == 0;
}

}  // namespace thunderkittens::gemm
