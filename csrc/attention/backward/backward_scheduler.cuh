// The tile scheduler of the backward kernels: the work tiles that a persistent grid claims, which
// query blocks a block of keys is seen by, and the rows of the workspace.
#pragma once

#include "csrc/attention/backward/backward.h"
#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/common/tile_scheduler.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

// The workspace has whole tiles of rows for every head of every sequence: a dense one's after the
// other, those of packed sequences from their first token on, with room to round in between.
struct PaddedRows {
    int64_t batch, head;  // rows from one to the next
    bool packed;

    explicit PaddedRows(const Problem& p, const Sequences& s)
        : batch(p.varlen ? 0 : p.q_heads * padded_rows(p.q_length)),
          head(rows_of_head(p, s)),
          packed(p.varlen) {}
    __device__ __forceinline__ int64_t first(int b, int q_begin, int h) const {
        const int64_t sequence = packed ? (q_begin + 128 * b) / 128 * 128 : b * batch;
        return sequence + h * head;
    }
};

// A block of keys of one key head, with a share of its query heads, and the query blocks that see
// it: [begin, end). Those in [unmasked_begin, unmasked_end) see all of its keys, the others need a
// mask.
struct BackwardWorkTile {
    int block, b;        // of keys; block < 0: there is no more work
    int head, key_head;  // `head` counts the splits of all key heads
    int begin, end, unmasked_begin, unmasked_end;
    int dq_tile;   // the first of dQ of the first query head
    int dkv_tile;  // of 64 keys, the first of this split's dK and dV
    int q_begin, q_length, k_begin, k_length, low, high, diagonal;
};

// Fields of a work tile in shared memory.
__device__ __forceinline__ int read(const int& field) {
    return arch::load_shared<int>(arch::shared_address(&field));
}
__device__ __forceinline__ void write(int& field, int value) {
    arch::store_shared(arch::shared_address(&field), value);
}

template <int BLOCK_M, int BLOCK_N>
struct BackwardScheduler {
    SequenceTable sequences;
    TileScheduler tiles;  // over key blocks and splits of key heads
    PaddedRows rows, key_rows;
    int* next_work_tile;  // 0 at first
    int head_splits;      // of a key head's group of query heads
    int group;            // query heads of a split
    int q_limit;          // that sequences are cut to

    BackwardScheduler(const BackwardParams& params, int* _next_work)
        : sequences(params.problem, params.sequences),
          tiles{.blocks = int((params.problem.k_length + BLOCK_N - 1) / BLOCK_N),
                .heads = int(params.problem.kv_heads * params.head_splits),
                .batch = int(params.problem.batch),
                .section_heads = params.section_heads},
          rows(params.problem, params.sequences),
          key_rows(keys_as_queries(params.problem, params.head_splits),
                   keys_as_queries(params.sequences)),
          next_work_tile(_next_work),
          head_splits(params.head_splits),
          group(int(params.problem.q_heads / (params.problem.kv_heads * params.head_splits))),
          q_limit(int(params.problem.q_length)) {}

    // Puts a work tile into shared memory; false: there is no more work.
    __device__ __forceinline__ bool describe(BackwardWorkTile& work, int index) const {
        if (index >= tiles.work_tiles()) {
            write(work.block, -1);
            return false;
        }
        const auto [block, head, b] = tiles.work_tile(index);
        write(work.block, block);
        write(work.head, head);
        write(work.key_head, head / head_splits);
        write(work.b, b);
        const Lengths s = sequences.lengths(b);
        write(work.q_begin, s.q_begin);
        write(work.k_begin, s.k_begin);
        write(work.diagonal, s.diagonal);
        write(work.dq_tile, static_cast<int>(rows.first(b, s.q_begin, head * group) / BLOCK_M));
        write(work.dkv_tile,
              static_cast<int>(key_rows.first(b, s.k_begin, head) / 64) + block * (BLOCK_N / 64));
        const int q_length = ::min(s.q_length, q_limit), k_length = s.k_length;
        const int low = s.low, high = s.high;
        write(work.q_length, q_length);
        write(work.k_length, k_length);
        write(work.low, low);
        write(work.high, high);
        const int first_key = block * BLOCK_N, last_key = first_key + BLOCK_N - 1;
        const int first_row = ::max(0, first_key - high);
        const int last_row = ::min(q_length, ::min(last_key, k_length - 1) - low + 1) - 1;
        const bool seen = first_key < k_length && first_row <= last_row;
        const int end = seen ? last_row / BLOCK_M + 1 : 0;
        write(work.begin, seen ? first_row / BLOCK_M : 0);
        write(work.end, end);
        write(work.unmasked_begin,
              last_key < k_length ? (::max(0, last_key - high) + BLOCK_M - 1) / BLOCK_M : end);
        write(work.unmasked_end, ::max(0, first_key - low + 1) / BLOCK_M);
        return true;
    }
    // The first key block that query block m sees.
    static __device__ __forceinline__ int first_block(int m, int low) {
        return ::max(0, m * BLOCK_M + low) / BLOCK_N;
    }
    // The last one.
    static __device__ __forceinline__ int last_block(int m, const BackwardWorkTile& work) {
        const int last_row = ::min(m * BLOCK_M + BLOCK_M, read(work.q_length)) - 1;
        return ::min(last_row + read(work.high), read(work.k_length) - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int tiles_of_head() const {
        return static_cast<int>(rows.head / BLOCK_M);
    }
};

// A split's partial dK or dV of 64 keys, in the order of the accumulator's registers, `before`
// columns of which are in other tiles.
template <any_register_tile Tile>
__device__ __forceinline__ void store_partial(float* sums, int columns, const Tile& tile,
                                              const BackwardWorkTile& work, int index,
                                              int before = 0) {
    float* to = sums + int64_t(read(work.dkv_tile) + index) * (64 * columns) + 64 * before +
                4 * warpgroup::laneid();
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 high = tile.tiles[0][j].data[2 * half],
                         low = tile.tiles[0][j].data[2 * half + 1];
            arch::store_global(
                reinterpret_cast<float4*>(to + (2 * j + half) * 4 * WARPGROUP_THREADS),
                make_float4(high.x, high.y, low.x, low.y));
        }
    }
}

// The producer claims work tiles in their order, from a counter in global memory, and hands them to
// the other roles. A slot stays filled while its tile is worked on: fields are read again, not kept
// in registers. In the deterministic mode a tile waits only for tiles claimed before it: the first
// that has not ended goes on, however few blocks run.
struct WorkTileRing {
    BackwardWorkTile tiles[2];
    semaphore full[2], empty[2];

    __device__ __forceinline__ void init(int receivers) {
        for (int i = 0; i < 2; ++i) {
            init_semaphore(full[i], 1);
            init_semaphore(empty[i], receivers);
        }
    }
    // Calls process(work tile) for all tiles of this block.
    template <class Scheduler, class F>
    __device__ __forceinline__ void claim(const Scheduler& scheduler, F process) {
        claim_by([&] { return arch::fetch_add_global(scheduler.next_work_tile, 1); }, scheduler,
                 process);
    }
    // For all tiles whose indices next() gives.
    template <class Next, class Scheduler, class F>
    __device__ __forceinline__ void claim_by(Next next, const Scheduler& scheduler, F process) {
        RingPosition<2> at;
        while (true) {
            const int index = next();
            wait(empty[at.stage], at.phase ^ 1);
            BackwardWorkTile& work = tiles[at.stage];
            const bool more = scheduler.describe(work, index);
            arrive(full[at.stage]);
            at.advance();
            if (!more) return;
            process(work);
        }
    }
    template <class F>
    __device__ __forceinline__ void receive(F process) {
        RingPosition<2> at;
        while (true) {
            wait(full[at.stage], at.phase);
            const BackwardWorkTile& work = tiles[at.stage];
            if (read(work.block) < 0) return;
            process(work);
            arrive(empty[at.stage]);
            at.advance();
        }
    }
};

}  // namespace thunderkittens::attention
