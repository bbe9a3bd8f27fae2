// What the kernels of whole keys share about their work: the tiles of the schedule, with the keys
// that each sees.
#pragma once

#include "csrc/attention/forward/forward_scheduler.cuh"
#include "csrc/attention/forward/paged_keys.cuh"

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

    template <class Globals>
    __device__ __forceinline__ ForwardWorkTile(const Globals& g, TileScheduler::WorkTile tile)
        : b(tile.batch), head(tile.head), s(g.sequences.lengths(b)) {
        constexpr int m = Kernel::block_m;
        row = ((s.q_length + m - 1) / m - 1 - tile.level) * m;
        keys = row < 0 ? KeyBlocks{0, 0, 0, 0}
                       : key_blocks<Kernel::block_n>(s, row, ::min(row + m, s.q_length) - 1);
    }
    __device__ __forceinline__ bool sees_keys() const { return keys.end > keys.begin; }
};

}  // namespace thunderkittens::attention
