// How blocks share tiles whose k is divided (dense/split_k.h): which steps of which tiles each of
// them computes, and whose sums it gives or takes. The host finds it, and the kernel reads it.
//
// A group of `splits` blocks exchanges sums only within itself. Where each tile has that many, they
// divide its k evenly, and each finishes a part of its columns. Where there are fewer, a block has
// whole tiles, as many as any other one, and each of those that are left over has an owner: it
// computes the first steps of k, and takes the sums of the others, which blocks of the group that
// own none compute. These do that before all else, so that nobody waits for them for long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace thunderkittens::gemm {

// Of a group: tiles of each block, those that are left over and have an owner, and the blocks that
// help these.
struct Group {
    int groups = 0, whole = 0, owned = 0, helpers = 0;

    // Parts of tiles whose sums are handed over.
    constexpr int parts() const { return owned + helpers - std::gcd(owned, helpers); }
    // Steps of k of a tile that its owner leaves to others, where all are to end at a time: to give
    // sums costs as much as `giving` steps, with the time until they are there. Where these come
    // before whole tiles they are there already, and to take them costs something too. 0: that does
    // not leave something to everyone, for a ring of stages is not to hold all of two neighbours in
    // the list of a block.
    static constexpr int giving = 9, taking = 4, least = 4;
    constexpr int handed(int steps) const {
        if (groups == 0 || owned <= 0 || helpers <= 0) return 0;
        const int cost = parts() * (giving * owned - (whole > 0 ? taking : 0) * helpers);
        const int handed = (helpers * owned * steps - cost) / (owned * (owned + helpers));
        return handed < least || steps - handed < least ? 0 : handed;
    }
};
constexpr Group make_group(int blocks, int splits, int tiles) {
    Group group{.groups = splits > 0 ? blocks / splits : 0};
    if (group.groups == 0) return group;
    const int round = group.groups * splits;
    group.whole = tiles / round;
    group.owned = (tiles - group.whole * round + group.groups - 1) / group.groups;
    group.helpers = splits - group.owned;
    return group;
}

// Whether tiles have owners: there are not as many blocks for each.
constexpr bool has_owners(int blocks, int splits, int64_t tiles) { return blocks < tiles * splits; }

struct Segment {
    uint16_t tile;  // of the group
    uint16_t first_step, steps;
    uint8_t part, taken;  // of the group's parts: the one it gives, or the first that it takes
};

struct Segments {
    // Blocks of a group, those that may divide a tile evenly, as each finishes some columns of it,
    // and segments.
    static constexpr int MOST_BLOCKS = 12, MOST_EVENLY = 8, MOST = 48;
    Segment list[MOST];
    uint8_t begin[MOST_BLOCKS + 1];  // of a block's segments
    uint32_t groups;                 // 0: there is nothing to divide, or no room

    void add(int& count, int tile, int first_step, int steps, int part = 0, int taken = 0) {
        if (count < MOST) {
            list[count] = {static_cast<uint16_t>(tile), static_cast<uint16_t>(first_step),
                           static_cast<uint16_t>(steps), static_cast<uint8_t>(part),
                           static_cast<uint8_t>(taken)};
        }
        ++count;
    }
};

// How many segments there are, in the order of the blocks.
inline int divide_evenly(Segments& segments, int splits, int steps) {
    int count = 0;
    for (int i = 0; i < splits; ++i) {
        segments.begin[i] = static_cast<uint8_t>(count);
        const int first = i * (steps / splits) + std::min(i, steps % splits);
        segments.add(count, 0, first, steps / splits + (i < steps % splits));
    }
    return splits > std::min(steps, Segments::MOST_EVENLY) ? Segments::MOST + 1 : count;
}

inline int divide_owned(Segments& segments, const Group& group, int splits, int steps) {
    const int handed = group.handed(steps), kept = steps - handed;
    if (handed == 0) return Segments::MOST + 1;
    // What is handed over, one tile after the other, is cut into a piece for each helper.
    struct Part {
        int tile, first, steps;
    } parts[Segments::MOST_BLOCKS];
    int count = 0, first_of_helper[Segments::MOST_BLOCKS + 1] = {};
    int first_of_tile[Segments::MOST_BLOCKS + 1] = {};
    const int all = group.owned * handed + group.parts() * Group::giving;
    int tile = 0, done = 0, cost = 0;
    for (int i = 0; i < group.helpers; ++i) {
        first_of_helper[i] = count;
        for (bool ends = true; tile < group.owned && ends;) {
            const bool last = i + 1 == group.helpers;
            const int rest = handed - done;
            const int room = all * (i + 1) / group.helpers - cost - Group::giving;
            if (!last && room < Group::least) break;
            ends = last || rest - room < Group::least;
            const int part = ends ? rest : room;
            parts[count++] = {tile, kept + done, part};
            done += part, cost += part + Group::giving;
            if (ends) first_of_tile[++tile] = count, done = 0;
        }
    }
    first_of_helper[group.helpers] = count;
    int entries = 0;
    for (int block = 0; block < splits; ++block) {
        segments.begin[block] = static_cast<uint8_t>(entries);
        const int helper = block - group.owned, first = group.whole * splits;
        if (helper >= 0) {
            for (int i = first_of_helper[helper]; i < first_of_helper[helper + 1]; ++i) {
                segments.add(entries, first + parts[i].tile, parts[i].first, parts[i].steps, i);
            }
        }
        for (int i = 0; i < group.whole; ++i) {
            segments.add(entries, i * splits + block, 0, steps);
        }
        if (helper < 0) {
            const int part = first_of_tile[block];
            segments.add(entries, first + block, 0, kept, part, first_of_tile[block + 1] - part);
        }
    }
    return entries;
}

// The tiles of neighbouring blocks are neighbours: a group's tile i is the i-th of its round.
inline Segments make_segments(int blocks, int splits, int64_t tiles, int64_t steps) {
    Segments segments{};
    if (splits < 2 || splits > Segments::MOST_BLOCKS || steps > UINT16_MAX) return segments;
    const bool owners = has_owners(blocks, splits, tiles);
    const Group group = make_group(blocks, splits, static_cast<int>(tiles));
    const int all = static_cast<int>(steps);
    const int entries =
        owners ? divide_owned(segments, group, splits, all) : divide_evenly(segments, splits, all);
    if (entries > Segments::MOST) return segments;
    segments.begin[splits] = static_cast<uint8_t>(entries);
    segments.groups = static_cast<uint32_t>(owners ? group.groups : tiles);
    return segments;
}

}  // namespace thunderkittens::gemm
