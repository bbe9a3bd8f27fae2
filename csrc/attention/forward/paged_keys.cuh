// Keys of the forward's work tiles: those of a batch or of packed sequences, or pages of a cache,
// whose lengths and places are on the device.
#pragma once

#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/common/tile_scheduler.cuh"
#include "csrc/attention/forward/forward.h"

namespace thunderkittens::attention {

using namespace kittens;

struct ForwardSequences : SequenceTable {
    const int *k_lengths, *cu_new;  // null: as SequenceTable has them; as many new keys for all
    int new_keys, most_keys;

    ForwardSequences(const Problem& p, const Sequences& s, const PagedKeys& keys)
        : SequenceTable(p, s),
          k_lengths(keys.k_lengths),
          cu_new(keys.cu_new),
          new_keys(static_cast<int>(keys.new_keys)),
          most_keys(static_cast<int>(keys.most_keys)) {}

    __device__ __forceinline__ Lengths lengths(int b) const {
        return k_lengths == nullptr ? SequenceTable::lengths(b)
                                    : lengths_with(b, b < batch ? keys_of(b) : 0);
    }

  private:
    __device__ __forceinline__ int keys_of(int b) const {
        const int added = cu_new == nullptr ? new_keys
                                            : arch::load_global_readonly(cu_new + b + 1) -
                                                  arch::load_global_readonly(cu_new + b);
        return ::min(::max(arch::load_global_readonly(k_lengths + b) + added, 0), most_keys);
    }
};

// Where a sequence's keys are in a cache: a page is a segment of a ragged layout, and a transfer
// moves a piece of a tile, which lies within a page.
struct PageTable {
    const int *table, *rows;
    int64_t stride;
    int page_size, k_page_rows, v_page_rows;
    Divisor by_page_size;
    int piece;  // 0: keys are not paged

    PageTable(const PagedKeys& keys, int block_n)
        : table(keys.table),
          rows(keys.rows),
          stride(keys.table_stride),
          page_size(static_cast<int>(keys.page_size)),
          k_page_rows(static_cast<int>(keys.k_page_rows)),
          v_page_rows(static_cast<int>(keys.v_page_rows)),
          by_page_size(page_size),
          piece(keys.k_lengths == nullptr ? 0 : static_cast<int>(piece_rows(keys, block_n))) {}

    // A sequence's row of the table; without a table its page.
    struct Row {
        const int* pages = nullptr;
        int page = 0;
    };
    __device__ __forceinline__ Row row_of(int b) const {
        const int row = rows == nullptr ? b : arch::load_global_readonly(rows + b);
        return {table == nullptr ? nullptr : table + row * stride, row};
    }
    struct Page {
        int page = 0, first = 0;  // a page of the cache, and its first key in the sequence
    };
    // Of a key, or of the first or last one where it is outside.
    __device__ __forceinline__ Page page_of(const Row& row, int key, int k_length) const {
        if (row.pages == nullptr) return {row.page, 0};
        const int index = by_page_size.quotient(::max(::min(key, k_length - 1), 0));
        return {arch::load_global_readonly(row.pages + index), index * page_size};
    }
    // Of the piece that begins with a key. What lies behind the last key comes as zeros.
    __device__ __forceinline__ ragged_coord place(const Page& at, int head, int key, int k_length,
                                                  int page_rows) const {
        if (key >= k_length) return {.head = head};
        return {.head = head,
                .begin = at.page * page_rows,
                .length = ::min(page_size, k_length - at.first),
                .row = key - at.first};
    }
};

}  // namespace thunderkittens::attention
