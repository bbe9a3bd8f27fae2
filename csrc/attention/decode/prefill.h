// Attention of many queries over a cache, by the kernels of attention, whose keys may be pages.
// Host C++ without torch.
#pragma once

#include "csrc/attention/common/ragged.h"
#include "csrc/attention/decode/decode.h"
#include "csrc/attention/forward/dispatch.h"

namespace thunderkittens::attention::decode {

// From a page of a cache (pages, page_size, heads, dim) to the next, in rows of tokens; -1 where
// the pages are not segments of such rows.
template <class Tensor>
int64_t page_rows_of(const Tensor& cache) {
    constexpr int64_t most_rows = int64_t{1} << 30;
    const View view = as_4d(cache);
    const int64_t pages = view.size[0], size = view.size[1], row = view.stride[1];
    if (pages < 1 || size < LEAST_PIECE || !fits_ragged_map(size, row)) return -1;
    const int64_t page = pages > 1 ? view.stride[0] : size * row;
    const bool fits =
        page >= 0 && page % row == 0 && (pages - 1) * (page / row) + size <= most_rows;
    return fits ? page / row : -1;
}

inline ForwardParams forward_params(const Params& from, int64_t k_page_rows, int64_t v_page_rows,
                                    int64_t pages, int sm_count) {
    const Problem& p = from.problem;
    ForwardParams to;
    to.problem = {.dtype = p.dtype,
                  .batch = p.batch,
                  .q_heads = p.q_heads,
                  .kv_heads = p.kv_heads,
                  .q_length = p.q_length,
                  .k_length = p.k_length,
                  .head_dim = p.head_dim,
                  .value_dim = p.value_dim,
                  .causal = static_cast<int>(p.causal ? Causal::lower_right : Causal::none),
                  .window_left = p.window_left,
                  .window_right = p.window_right,
                  .softcap = from.scores.softcap > 0,
                  .alibi = from.scores.alibi_slopes != nullptr,
                  .sink = from.scores.sink != nullptr,
                  .varlen = p.varlen};
    to.q = from.q;
    to.k = {from.k.data, 0, from.k.head_stride, from.k.token_stride};
    to.v = {from.v.data, 0, from.v.head_stride, from.v.token_stride};
    to.out = from.out;
    to.lse = from.lse;
    to.scores = from.scores;
    to.sequences = {.cu_q = from.sequences.cu_q, .total_q = from.sequences.tokens};
    to.pages = {.k_lengths = from.sequences.k_lengths,
                .cu_new = from.sequences.cu_new,
                .new_keys = from.sequences.new_keys,
                .most_keys = p.k_length,
                .table = from.pages.table,
                .rows = from.pages.rows,
                .table_stride = from.pages.table_stride,
                .pages = pages,
                .page_size = from.pages.page_size,
                .k_page_rows = k_page_rows,
                .v_page_rows = v_page_rows};
    to.sm_count = sm_count;
    return to;
}

}  // namespace thunderkittens::attention::decode
