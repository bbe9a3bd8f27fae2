// Which tile a block of a portable kernel has, of groups whose ends are known on the device alone.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

namespace arch = kittens::arch;

// A tile of `tokens` rows of a, of which those below `end` belong to it. Group number `groups`
// stands for the rows behind the last group, which are zero; a later one for no tile at all.
struct GroupTile {
    uint32_t group, column_tile, token, end;
};

struct Groups {
    const int32_t* offs;  // or nullptr: one group
    uint32_t m, count, column_tiles;

    // Tiles of the same columns of a group come one after the other.
    template <int tokens>
    __device__ __forceinline__ GroupTile at(uint32_t index) const {
        uint32_t begin = 0;
#pragma unroll 1
        for (uint32_t group = 0; group <= count; ++group) {
            uint32_t end = m;
            if (offs != nullptr && group < count) {
                const int last = arch::load_global(offs + group);
                end = min(max(uint32_t(max(last, 0)), begin), m);
            }
            const uint32_t token_tiles = (end - begin + tokens - 1) / tokens;
            const uint32_t tiles = token_tiles * column_tiles;
            if (index < tiles) {
                const uint32_t column_tile = index / token_tiles;
                const uint32_t token_tile = index - column_tile * token_tiles;
                return {group, column_tile, begin + token_tile * tokens, end};
            }
            index -= tiles;
            begin = end;
        }
        return {count + 1, 0, 0, 0};
    }
};

// Blocks that suffice for the tiles, wherever groups end.
inline unsigned blocks_of(const Groups& groups, int tokens) {
    const int64_t more = groups.offs == nullptr ? 0 : groups.count;
    return static_cast<unsigned>(((int64_t{groups.m} + tokens - 1) / tokens + more) *
                                 groups.column_tiles);
}

}  // namespace sm80
}  // namespace thunderkittens::gemm
