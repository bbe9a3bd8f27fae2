// The work of attention over a cache: items, which keys each of them has, and the parts into which
// a schedule cuts them all.
#pragma once

#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/decode/decode.h"

namespace thunderkittens::attention::decode {

using namespace kittens;

// A place in the work: a key block of an item, which is a tile of rows of a line; a line is a key
// head of a sequence. Lines of a head lie behind each other, then those of the next. `slot` counts
// the partial results before it. An item begins at block 0, whatever its first key.
struct Position {
    int line, tile, block, slot;

    __device__ __forceinline__ bool is_before(const Position& other) const {
        if (line != other.line) return line < other.line;
        if (tile != other.tile) return tile < other.tile;
        return block < other.block;
    }
    __device__ __forceinline__ bool same_item(const Position& other) const {
        return line == other.line && tile == other.tile;
    }
};

// The keys of an item, in blocks, and the blocks that every row of it sees whole.
struct Item {
    int kv_head, first_row;
    KeyBlocks keys;
};

// What every kernel of a call knows of its sequences.
struct Work {
    const int *k_lengths, *cu_q, *cu_new, *first_keys, *rotary_begins;
    int batch, q_length, tokens, new_keys, most_keys;
    int kv_heads, group;
    int left, right;   // keys seen beside the diagonal; UNBOUNDED or more: all
    int chunk;         // 0: none
    bool masked;       // the mask says which of the newest keys are seen
    int split_blocks;  // of a split; 0: as the schedule cuts
    int parts;
    uint32_t hash;

    explicit Work(const Params& params)
        : k_lengths(params.sequences.k_lengths),
          cu_q(params.sequences.cu_q),
          cu_new(params.sequences.cu_new),
          first_keys(params.sequences.first_keys),
          rotary_begins(params.sequences.rotary_begins),
          batch(static_cast<int>(params.problem.batch)),
          q_length(static_cast<int>(params.problem.q_length)),
          tokens(static_cast<int>(params.sequences.tokens)),
          new_keys(static_cast<int>(params.sequences.new_keys)),
          most_keys(static_cast<int>(params.problem.k_length)),
          kv_heads(static_cast<int>(params.problem.kv_heads)),
          group(static_cast<int>(params.problem.group())),
          chunk(static_cast<int>(std::min<int64_t>(params.problem.attention_chunk, UNBOUNDED))),
          masked(params.problem.mask),
          split_blocks(static_cast<int>(params.problem.split_size / BLOCK_N)),
          parts(params.parts) {
        const Problem& p = params.problem;
        const Band band = attention::band(p.causal ? int(Causal::lower_right) : int(Causal::none),
                                          p.window_left, p.window_right, 0, 0);
        left = -band.low;
        right = masked ? UNBOUNDED : band.high;
        hash = 2166136261u;
        for (const int x : {batch, q_length, kv_heads, group, left, right, split_blocks, parts,
                            chunk, int(masked), int(cu_q != nullptr)}) {
            hash = (hash ^ static_cast<uint32_t>(x)) * 16777619u;
        }
    }

    // As they are now. Wrong numbers must not become wrong addresses.
    __device__ __forceinline__ int queries_of(int b) const {
        return cu_q == nullptr ? q_length
                               : ::min(::max(bound(cu_q, b + 1) - bound(cu_q, b), 0), q_length);
    }
    __device__ __forceinline__ int keys_of(int b) const {
        return ::min(::max(arch::load_global_readonly(k_lengths + b) + added(b), 0), most_keys);
    }
    // Keys beside those that k_lengths counts.
    __device__ __forceinline__ int added(int b) const {
        if (cu_new == nullptr) return new_keys;
        return arch::load_global_readonly(cu_new + b + 1) - arch::load_global_readonly(cu_new + b);
    }
    __device__ __forceinline__ Lengths lengths(int b, int keys, int queries) const {
        Lengths s{};
        s.q_begin = cu_q == nullptr ? 0 : bound(cu_q, b);
        s.q_length = queries;
        s.k_length = keys;
        s.k_begin = first_keys == nullptr
                        ? 0
                        : ::min(::max(arch::load_global_readonly(first_keys + b), 0), keys);
        s.diagonal = keys - queries;
        s.low = s.diagonal - left;
        s.high = s.diagonal + right;
        return s;
    }
    __device__ __forceinline__ int tiles(int queries) const {
        return (queries * group + TILE_ROWS - 1) / TILE_ROWS;
    }
    // Of one tile of rows; the key heads have the same.
    __device__ __forceinline__ KeyBlocks blocks_of(const Lengths& s, int tile) const {
        const int first_row = tile * TILE_ROWS;
        const int last = ::min((first_row + TILE_ROWS - 1) / group, s.q_length - 1);
        KeyBlocks keys = key_blocks<BLOCK_N>(s, first_row / group, last);
        if (chunk > 0) cut_to_chunks(keys, s, first_row / group, last);
        keys.begin = ::min(::max(keys.begin, s.k_begin / BLOCK_N), keys.end);
        keys.unmasked_begin = ::max(keys.unmasked_begin, (s.k_begin + BLOCK_N - 1) / BLOCK_N);
        if (masked) keys.unmasked_end = ::min(keys.unmasked_end, ::max(s.diagonal, 0) / BLOCK_N);
        return keys;
    }
    // The keys [first, end) of the chunk of a query; chunks begin with the first key that is seen.
    // A query before it, of which a sequence with more queries than keys has some, has no key.
    __device__ __forceinline__ int2 chunk_of(const Lengths& s, int position) const {
        const int own = position + s.diagonal - s.k_begin;
        if (own < 0) return {0, 0};
        const int begin = s.k_begin + own / chunk * chunk;
        return {begin, begin > INT32_MAX - chunk ? INT32_MAX : begin + chunk};
    }
    __device__ __forceinline__ void cut_to_chunks(KeyBlocks& keys, const Lengths& s, int first,
                                                  int last) const {
        const int2 low = chunk_of(s, first), high = chunk_of(s, last);
        keys.end = ::min(keys.end, high.y > 0 ? (high.y - 1) / BLOCK_N + 1 : 0);
        keys.begin = ::min(::max(keys.begin, low.x / BLOCK_N), keys.end);
        keys.unmasked_begin = ::max(keys.unmasked_begin, (high.x + BLOCK_N - 1) / BLOCK_N);
        keys.unmasked_end = ::min(keys.unmasked_end, low.y / BLOCK_N);
    }
    // Where the first new key of a sequence stands for rotary.
    __device__ __forceinline__ int rotary_begin(int b, int keys) const {
        return rotary_begins == nullptr ? keys - added(b)
                                        : arch::load_global_readonly(rotary_begins + b);
    }
    __device__ __forceinline__ int lines() const { return kv_heads * batch; }
    __device__ __forceinline__ Item item(const Lengths& s, int kv_head, int tile) const {
        return {kv_head, tile * TILE_ROWS, blocks_of(s, tile)};
    }
    // Of an item; 1 unless a split size cuts it.
    __device__ __forceinline__ int splits(const KeyBlocks& keys) const {
        if (split_blocks == 0 || keys.end <= keys.begin) return 1;
        return (keys.end - 1) / split_blocks - keys.begin / split_blocks + 1;
    }

  private:
    __device__ __forceinline__ int bound(const int* cu, int b) const {
        return ::min(::max(arch::load_global_readonly(cu + b), 0), tokens);
    }
};

// A schedule in memory.
struct Schedule {
    int* data;
    int positions, lengths, list, scratch;

    Schedule(int* _data, const ScheduleShape& shape)
        : data(_data),
          positions(static_cast<int>(shape.positions())),
          lengths(static_cast<int>(shape.lengths())),
          list(static_cast<int>(shape.list())),
          scratch(static_cast<int>(shape.scratch())) {}

    __device__ __forceinline__ bool is_of(const Work& work) const {
        return static_cast<uint32_t>(arch::load_global(data)) == work.hash;
    }
    __device__ __forceinline__ int split_items() const { return arch::load_global(data + 1); }
    __device__ __forceinline__ int parts_of_head() const { return arch::load_global(data + 2); }
    __device__ __forceinline__ Position part(int p) const {
        return arch::bit_cast<Position>(
            arch::load_global(reinterpret_cast<const int4*>(data + positions) + p));
    }
    __device__ __forceinline__ int2 lengths_of(int b) const {
        return arch::load_global(reinterpret_cast<const int2*>(data + lengths) + b);
    }
};

// One part of the work, segment by segment: keys of one item without a cut between.
struct Segments {
    const Work& work;
    const Schedule& schedule;
    int part;
    Position at;
    // Of the current segment.
    Lengths s{};
    Item item{};
    int first = 0, last = 0;  // key blocks [first, last)
    bool whole = false;       // all keys of the item; else a partial result goes into at.slot
    bool stale = false;       // the sequence is not what it was when the schedule was made

    __device__ __forceinline__ Segments(const Work& _work, const Schedule& _schedule, int _part)
        : work(_work), schedule(_schedule), part(_part), at(_schedule.part(_part)) {}

    // The sequence of the current segment.
    __device__ __forceinline__ int b() const { return at.line - item.kv_head * work.batch; }

    // Goes to the next segment, or returns false.
    __device__ __forceinline__ bool next() {
        const Position end = schedule.part(part + 1);  // again, as registers are few
        if (begun) {
            at.slot += whole ? 0 : 1;
            const bool item_ends = last >= item.keys.end;
            at.tile += item_ends ? 1 : 0;
            at.block = item_ends ? 0 : last;
        }
        begun = true;
        int kv_head = 0;
        for (;; at = {at.line + 1, 0, 0, at.slot}) {
            if (at.line >= work.lines() || !at.is_before(end)) return false;
            kv_head = at.line / work.batch;
            const int b = at.line - kv_head * work.batch;
            const int2 known = schedule.lengths_of(b);
            const int keys = ::min(::max(known.x, 0), work.most_keys);
            const int queries = ::min(::max(known.y, 0), work.q_length);
            s = work.lengths(b, keys, queries);
            stale = keys != work.keys_of(b) || queries != work.queries_of(b);
            if (at.tile < work.tiles(queries)) break;
        }
        item = work.item(s, kv_head, at.tile);
        first = ::max(at.block, item.keys.begin);
        last = item.keys.end;
        if (at.same_item(end)) last = ::min(last, end.block);
        if (work.split_blocks > 0) {
            last = ::min(last, (first / work.split_blocks + 1) * work.split_blocks);
        }
        whole = first == item.keys.begin && last >= item.keys.end;
        return true;
    }

  private:
    bool begun = false;
};

}  // namespace thunderkittens::attention::decode
