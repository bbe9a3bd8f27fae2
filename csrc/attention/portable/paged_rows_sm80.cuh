// Rows of keys and values that are pages of a cache, for threads that copy them: each row has an
// address of its own, by the page that it is in.
#pragma once

#include "csrc/attention/forward/paged_keys.cuh"

namespace thunderkittens::attention {

// Where the pages of one sequence are: a row of a table, or one page.
struct alignas(16) PagesOfSequence {
    const int* table = nullptr;
    int page = 0;
};

template <bool PAGED>
struct PagedRows {
    struct Pages {};
    PagedRows(const PagedKeys&) {}
};
template <>
struct PagedRows<true> {
    using Pages = PagesOfSequence;
    const int *table, *rows;
    int64_t table_stride;
    int page_size, k_page_rows, v_page_rows;
    Divisor by_page_size;

    PagedRows(const PagedKeys& keys)
        : table(keys.table),
          rows(keys.rows),
          table_stride(keys.table_stride),
          page_size(static_cast<int>(keys.page_size)),
          k_page_rows(static_cast<int>(keys.k_page_rows)),
          v_page_rows(static_cast<int>(keys.v_page_rows)),
          by_page_size(page_size) {}

    __device__ __forceinline__ Pages pages_of(int b) const {
        const int row = rows == nullptr ? b : arch::load_global_readonly(rows + b);
        return {table == nullptr ? nullptr : table + row * table_stride, row};
    }
    // Of a key of the sequence, counted in rows of the cache.
    __device__ __forceinline__ int64_t row_of(const Pages& at, int key, int page_rows) const {
        if (at.table == nullptr) return int64_t{at.page} * page_rows + key;
        const int index = by_page_size.quotient(key);
        const int page = arch::load_global_readonly(at.table + index);
        return int64_t{page} * page_rows + (key - index * page_size);
    }
};

}  // namespace thunderkittens::attention
