// The tile scheduler of the forward: longest-processing-time-first (LPT), static, without a counter
// in memory and without divisions by run-time numbers. Work tiles are short where sequences are,
// and between two of them every consumer waits for the index of the next.
#pragma once

#include "csrc/attention/common/tile_scheduler.cuh"

namespace thunderkittens::attention {

// The order of TileScheduler, dealt to the blocks of the grid back and forth, so that who got the
// longest work tile of a wave gets the shortest of the next.
struct ForwardScheduler : TileScheduler {
    Divisor by_section, by_level, by_last_level, by_heads;

    explicit ForwardScheduler(const TileScheduler& s)
        : TileScheduler(s),
          by_section(blocks * section_heads),
          by_level(section_heads),
          by_last_level((heads * batch - 1) % section_heads + 1),
          by_heads(heads) {}

    template <class F>
    __device__ __forceinline__ void for_each_work_tile(F process) const {
        const int grid = static_cast<int>(gridDim.x), id = static_cast<int>(blockIdx.x);
        for (int wave = 0; wave * grid < work_tiles(); ++wave) {
            const int index = wave * grid + (wave % 2 == 0 ? id : grid - 1 - id);
            if (index < work_tiles()) process(work_tile(index));
        }
    }
    __device__ __forceinline__ WorkTile work_tile(int index) const {
        const int section = by_section.quotient(index);
        const int rest = index - section * blocks * section_heads;
        const int first_head = section * section_heads, here = heads * batch - first_head;
        const bool last = here <= section_heads;
        const int level = last ? by_last_level.quotient(rest) : by_level.quotient(rest);
        const int head = first_head + rest - level * (last ? here : section_heads);
        const int b = by_heads.quotient(head);
        return {level, head - b * heads, b};
    }
};

}  // namespace thunderkittens::attention
