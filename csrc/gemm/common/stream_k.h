// The schedule of split-K and stream-K (dense/split_k.h): which steps of k of which tiles each
// block computes, and whose partial sums it stores or adds. The host makes the schedule, and the
// kernel reads it.
//
// A group of `splits` blocks, the peers, exchanges partial sums only within itself.
//
// Split-K: with as many blocks as peers for every tile, they divide its k evenly, and each finishes
// a share of its columns.
//
// Stream-K, for more tiles than that: each peer first has the same number of whole tiles. Each of
// the tiles that are left over has a finishing peer, which computes the first steps of k and then
// does the fix-up: it adds the partial sums of the rest of k, which come from the helping peers,
// those that finish none of these tiles. Helping peers compute partial sums before all else, so
// that nobody waits for them for long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace thunderkittens::gemm {

// Stream-K within a group: the whole tiles of each peer, the tiles that are left over and shared,
// and the number of helping peers.
struct PeerGroup {
    int groups = 0, whole_tiles = 0, shared_tiles = 0, helping_peers = 0;

    // The partial sums that go through the workspace.
    constexpr int partials() const {
        return shared_tiles + helping_peers - std::gcd(shared_tiles, helping_peers);
    }
    // The steps of k of a shared tile that the helping peers compute, chosen so that all peers end
    // at the same time. Storing a partial sum costs as much as `send_steps` steps, which includes
    // the time until it can be read. Where whole tiles come first, the partial sums are there
    // already, and adding them costs `receive_steps`. The result is 0 where some peer would get
    // fewer than `min_steps`: the ring of stages must not hold all of two consecutive segments of a
    // block.
    static constexpr int send_steps = 9, receive_steps = 4, min_steps = 4;
    constexpr int helped_steps(int steps) const {
        if (groups == 0 || shared_tiles <= 0 || helping_peers <= 0) return 0;
        const int cost = partials() * (send_steps * shared_tiles -
                                       (whole_tiles > 0 ? receive_steps : 0) * helping_peers);
        const int helped_steps = (helping_peers * shared_tiles * steps - cost) /
                                 (shared_tiles * (shared_tiles + helping_peers));
        return helped_steps < min_steps || steps - helped_steps < min_steps ? 0 : helped_steps;
    }
};
constexpr PeerGroup make_peer_group(int blocks, int splits, int tiles) {
    PeerGroup group{.groups = splits > 0 ? blocks / splits : 0};
    if (group.groups == 0) return group;
    const int round = group.groups * splits;
    group.whole_tiles = tiles / round;
    group.shared_tiles = (tiles - group.whole_tiles * round + group.groups - 1) / group.groups;
    group.helping_peers = splits - group.shared_tiles;
    return group;
}

// Whether the schedule is stream-K: there are fewer blocks than `splits` for each tile.
constexpr bool is_stream_k(int blocks, int splits, int64_t tiles) {
    return blocks < tiles * splits;
}

struct StreamKSegment {
    uint16_t tile;  // of the group
    uint16_t first_step, steps;
    // Numbers of partial sums of the group: the one that is stored, or the first of `received`.
    uint8_t partial, received;
};

struct StreamKSegments {
    // The most peers of a group, the most that split a tile evenly (each finishes at least one unit
    // of its columns), and the most segments of a group.
    static constexpr int MAX_PEERS = 12, MAX_SPLITS = 8, MAX_SEGMENTS = 48;
    StreamKSegment list[MAX_SEGMENTS];
    uint8_t begin[MAX_PEERS + 1];  // of a block's segments
    uint32_t groups;               // 0: nothing to split, or too many segments

    void add(int& count, int tile, int first_step, int steps, int partial = 0, int received = 0) {
        if (count < MAX_SEGMENTS) {
            list[count] = {static_cast<uint16_t>(tile), static_cast<uint16_t>(first_step),
                           static_cast<uint16_t>(steps), static_cast<uint8_t>(partial),
                           static_cast<uint8_t>(received)};
        }
        ++count;
    }
};

// Split-K. Returns the number of segments, which are listed block by block.
inline int split_evenly(StreamKSegments& segments, int splits, int steps) {
    int count = 0;
    for (int i = 0; i < splits; ++i) {
        segments.begin[i] = static_cast<uint8_t>(count);
        const int first = i * (steps / splits) + std::min(i, steps % splits);
        segments.add(count, 0, first, steps / splits + (i < steps % splits));
    }
    return splits > std::min(steps, StreamKSegments::MAX_SPLITS) ? StreamKSegments::MAX_SEGMENTS + 1
                                                                 : count;
}

inline int split_stream_k(StreamKSegments& segments, const PeerGroup& group, int splits,
                          int steps) {
    const int helped_steps = group.helped_steps(steps), own_steps = steps - helped_steps;
    if (helped_steps == 0) return StreamKSegments::MAX_SEGMENTS + 1;
    // The steps that helping peers take over, one tile after the other, are cut into one range for
    // each of them; a cut may fall into a tile.
    struct Partial {
        int tile, first, steps;
    } partials[StreamKSegments::MAX_PEERS];
    int count = 0, first_of_peer[StreamKSegments::MAX_PEERS + 1] = {};
    int first_of_tile[StreamKSegments::MAX_PEERS + 1] = {};
    const int all = group.shared_tiles * helped_steps + group.partials() * PeerGroup::send_steps;
    int tile = 0, done = 0, cost = 0;
    for (int i = 0; i < group.helping_peers; ++i) {
        first_of_peer[i] = count;
        for (bool ends = true; tile < group.shared_tiles && ends;) {
            const bool last = i + 1 == group.helping_peers;
            const int rest = helped_steps - done;
            const int room = all * (i + 1) / group.helping_peers - cost - PeerGroup::send_steps;
            if (!last && room < PeerGroup::min_steps) break;
            ends = last || rest - room < PeerGroup::min_steps;
            const int partial = ends ? rest : room;
            partials[count++] = {tile, own_steps + done, partial};
            done += partial, cost += partial + PeerGroup::send_steps;
            if (ends) first_of_tile[++tile] = count, done = 0;
        }
    }
    first_of_peer[group.helping_peers] = count;
    int entries = 0;
    for (int block = 0; block < splits; ++block) {
        segments.begin[block] = static_cast<uint8_t>(entries);
        const int peer = block - group.shared_tiles, first = group.whole_tiles * splits;
        if (peer >= 0) {
            for (int i = first_of_peer[peer]; i < first_of_peer[peer + 1]; ++i) {
                segments.add(entries, first + partials[i].tile, partials[i].first,
                             partials[i].steps, i);
            }
        }
        for (int i = 0; i < group.whole_tiles; ++i) {
            segments.add(entries, i * splits + block, 0, steps);
        }
        if (peer < 0) {
            const int partial = first_of_tile[block];
            segments.add(entries, first + block, 0, own_steps, partial,
                         first_of_tile[block + 1] - partial);
        }
    }
    return entries;
}

// The schedule of a launch. Tile i of a group is the i-th of the tiles that all groups take at a
// time, so that neighbouring blocks have neighbouring tiles.
inline StreamKSegments make_stream_k_segments(int blocks, int splits, int64_t tiles,
                                              int64_t steps) {
    StreamKSegments segments{};
    if (splits < 2 || splits > StreamKSegments::MAX_PEERS || steps > UINT16_MAX) return segments;
    const bool stream_k = is_stream_k(blocks, splits, tiles);
    const PeerGroup group = make_peer_group(blocks, splits, static_cast<int>(tiles));
    const int all = static_cast<int>(steps);
    const int entries = stream_k ? split_stream_k(segments, group, splits, all)
                                 : split_evenly(segments, splits, all);
    if (entries > StreamKSegments::MAX_SEGMENTS) return segments;
    segments.begin[splits] = static_cast<uint8_t>(entries);
    segments.groups = static_cast<uint32_t>(stream_k ? group.groups : tiles);
    return segments;
}

}  // namespace thunderkittens::gemm
