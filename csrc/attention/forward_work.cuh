// What the kernels of whole keys share about their work: the tiles of the schedule, with the keys
// that each sees, and where the LSE of its rows goes.
#pragma once

#include "csrc/attention/forward_scheduler.cuh"
#include "csrc/attention/paged_keys.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// A work tile of the schedule: a block of queries of one head, with the keys they see. Blocks are
// counted from a sequence's last: where it is shorter than others, the longest come first all the
// same, and the surplus is below 0.
template <class Kernel>
struct ForwardWorkTile {
    int b, head, row;
    Lengths s;
    KeyBlocks keys;

    __device__ __forceinline__ ForwardWorkTile(const ForwardSequences& sequences,
                                               TileScheduler::WorkTile tile)
        : b(tile.batch), head(tile.head), s(sequences.lengths(b)) {
        constexpr int m = Kernel::block_m;
        row = ((s.q_length + m - 1) / m - 1 - tile.level) * m;
        keys = row < 0 ? KeyBlocks{0, 0, 0, 0}
                       : key_blocks<Kernel::block_n>(s, row, ::min(row + m, s.q_length) - 1);
    }
    __device__ __forceinline__ bool sees_keys() const { return keys.end > keys.begin; }
};

// Of the work tile's sequence: (batch, heads, rows), or of packed sequences (heads, tokens).
template <class Kernel>
__device__ __forceinline__ float* lse_rows(float* lse, const ForwardWorkTile<Kernel>& work,
                                           const SequenceTable& sequences, int heads, bool packed) {
    const int64_t line = packed ? work.head : int64_t(work.b) * heads + work.head;
    return lse + line * sequences.q_length + work.s.q_begin;
}
// By the thread that has the first columns of a row and of that 8 below.
__device__ __forceinline__ void store_row_lse(float* rows, float2 lse, const Lengths& s, int row) {
    if (laneid() % 4 != 0) return;
    if (row < s.q_length) arch::store_global(rows + row, lse.x);
    if (row + 8 < s.q_length) arch::store_global(rows + row + 8, lse.y);
}

}  // namespace thunderkittens::attention
