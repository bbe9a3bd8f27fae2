// Attention of new queries over a cache of keys and values, paged or not: what is compiled, what is
// chosen, and one call. Host C++ only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/attention/common/attention.h"
#include "csrc/common/math.h"

namespace thunderkittens::attention::decode {

constexpr int BLOCK_N = 64;    // keys of a block: the unit in which work is cut
constexpr int TILE_ROWS = 64;  // query positions and, in each, the heads that share keys

// What a cache holds: elements as the queries have them, codes of 8 bits, or those of NVFP4: e2m1,
// two to a byte, and an e4m3 scale for each NV_BLOCK neighbours of a row.
enum class CacheFormat : int { same, e4m3, e5m2, int8, nvfp4 };
constexpr int NV_BLOCK = 16;

// A sequence has at most q_length new queries and k_length keys, these among them.
struct Problem {
    DType dtype = DType::bf16;
    int64_t batch = 0;
    int64_t q_heads = 0, kv_heads = 0;
    int64_t q_length = 0, k_length = 0;
    int64_t head_dim = 0, value_dim = 0;
    int64_t window_left = -1, window_right = -1;  // keys seen beside the diagonal; -1: all
    int64_t attention_chunk = 0;                  // a query sees the keys of its own chunk; 0: all
    int64_t split_size = 0;  // keys; 0: the keys are cut so that all parts have as much to do
    bool causal = true, mask = false, varlen = false;
    bool codes = false;                    // the cache has 8 bits, or less
    bool nvfp4 = false;                    // it has 4
    bool rotary = false, leftpad = false;  // queries are rotated; sequences have a first key
    int64_t tokens = 0;                    // queries of all sequences
    int64_t page_size = 0;                 // 0: each sequence has a place of its own

    int64_t group() const { return q_heads / std::max<int64_t>(kv_heads, 1); }
    int64_t tiles() const { return ceil_div(q_length * group(), TILE_ROWS); }  // of a key head
    // Rows of a tile that exist in any.
    int64_t tile_rows() const { return std::min<int64_t>(TILE_ROWS, q_length * group()); }
};

constexpr int FEW_ROWS = 16;       // the wider side of mma.sync; the narrower one has 8
constexpr int CONSUMER_WARPS = 4;  // of every kernel here

// What one kernel is compiled for: a ring of `slots`, of which keys and values take turns. Codes
// become 16 bits before them, in slots for `staged` ones, or, of few rows, behind them, in the
// registers of those who multiply. NVFP4 has no kernels of its own for the head dimensions 192 and
// 128, nor for 64 and few rows, and takes those of the next dimensions.
struct Config {
    int head_dim = 0, value_dim = 0;
    int slots = 0;
    int staged = 0;
    int blocks_per_sm = 1;
    bool nvfp4 = false;
    DType dtype = DType::bf16;  // of queries and results
    int few_rows = 0;           // of an operand of mma.sync: 8 or 16; 0: TILE_ROWS, by wgmma
    // For every GPU from Ampere on. The kernel of few rows then has as many as there are, and a
    // cache of sixteen_bits too.
    bool portable = false;
    bool sixteen_bits = false;

    bool operator==(const Config&) const = default;
};
constexpr Config CONFIGS[] = {
    {64, 64, 10, 0, 2},
    {128, 128, 5, 0, 2},
    {192, 128, 7, 0, 1},
    {256, 256, 5, 0, 1},
    {64, 64, 4, 10, 2},
    {128, 128, 3, 5, 2},
    {192, 128, 4, 7, 1},
    {256, 256, 3, 5, 1},
    {64, 64, 4, 16, 2, true},
    {128, 128, 3, 9, 2, true},
    {256, 256, 3, 9, 1, true},
    // Few rows.
    {.head_dim = 64, .value_dim = 64, .slots = 20, .blocks_per_sm = 2, .few_rows = 16},
    {.head_dim = 128, .value_dim = 128, .slots = 9, .blocks_per_sm = 2, .few_rows = 16},
    {.head_dim = 192, .value_dim = 128, .slots = 15, .blocks_per_sm = 1, .few_rows = 16},
    {.head_dim = 256, .value_dim = 256, .slots = 9, .blocks_per_sm = 1, .few_rows = 16},
    {.head_dim = 128,
     .value_dim = 128,
     .slots = 16,
     .blocks_per_sm = 2,
     .nvfp4 = true,
     .few_rows = 16},
    {.head_dim = 256,
     .value_dim = 256,
     .slots = 14,
     .blocks_per_sm = 1,
     .nvfp4 = true,
     .few_rows = 16},
    {.head_dim = 64, .value_dim = 64, .slots = 14, .blocks_per_sm = 3, .few_rows = 8},
    {.head_dim = 128, .value_dim = 128, .slots = 6, .blocks_per_sm = 3, .few_rows = 8},
    {.head_dim = 192, .value_dim = 128, .slots = 7, .blocks_per_sm = 2, .few_rows = 8},
    {.head_dim = 256, .value_dim = 256, .slots = 4, .blocks_per_sm = 2, .few_rows = 8},
    {.head_dim = 128,
     .value_dim = 128,
     .slots = 12,
     .blocks_per_sm = 3,
     .nvfp4 = true,
     .few_rows = 8},
    {.head_dim = 256,
     .value_dim = 256,
     .slots = 8,
     .blocks_per_sm = 2,
     .nvfp4 = true,
     .few_rows = 8},
};
// The portable kernels. Those of head dimensions to 128 have a multiprocessor for two where a block
// can have 163 KB, those above one; 99 KB are enough for any.
constexpr Config portable_config(int head_dim, int value_dim, int slots, int blocks_per_sm,
                                 bool sixteen_bits, bool nvfp4 = false) {
    return {.head_dim = head_dim,
            .value_dim = value_dim,
            .slots = slots,
            .blocks_per_sm = blocks_per_sm,
            .nvfp4 = nvfp4,
            .few_rows = 16,
            .portable = true,
            .sixteen_bits = sixteen_bits};
}
constexpr Config eight_rows(Config config) {
    config.few_rows = 8;
    return config;
}
constexpr Config PORTABLE_CONFIGS[] = {
    portable_config(64, 64, 8, 2, true),
    portable_config(128, 128, 4, 2, true),
    portable_config(192, 128, 3, 1, true),
    portable_config(256, 256, 2, 1, true),
    portable_config(64, 64, 14, 2, false),
    portable_config(128, 128, 7, 2, false),
    portable_config(192, 128, 6, 1, false),
    portable_config(256, 256, 4, 1, false),
    portable_config(128, 128, 14, 2, false, true),
    portable_config(256, 256, 7, 1, false, true),
    // Up to 8 rows.
    eight_rows(portable_config(64, 64, 14, 3, false)),
    eight_rows(portable_config(128, 128, 6, 3, false)),
    eight_rows(portable_config(128, 128, 12, 3, false, true)),
};
constexpr bool has_codes(const Config& c) {
    return c.staged > 0 || (c.few_rows && !c.sixteen_bits);
}
// Whether a kernel of few rows has tiles of more, too.
constexpr bool has_any_rows(const Config& c) { return c.portable && c.few_rows == FEW_ROWS; }

constexpr Config with_dtype(Config config, DType dtype) {
    config.dtype = dtype;
    return config;
}
// As instances.txt names it; value_dim 0 is head_dim.
struct ConfigName {
    int head_dim, value_dim = 0;
    bool codes = false, nvfp4 = false;
    int few_rows = 0;
    DType dtype = DType::bf16;

    constexpr bool is_of(const Config& c) const {
        return c.head_dim == head_dim && c.nvfp4 == nvfp4 && has_codes(c) == (codes || nvfp4) &&
               c.value_dim == (value_dim ? value_dim : head_dim) &&
               c.few_rows == (c.portable && few_rows == 0 ? FEW_ROWS : few_rows);
    }
};
template <std::size_t n>
consteval Config config_among(const Config (&configs)[n], const ConfigName& name) {
    for (const Config& c : configs) {
        if (name.is_of(c)) return with_dtype(c, name.dtype);
    }
    throw "no such configuration is listed";
}
consteval Config config_of(const ConfigName& name) { return config_among(CONFIGS, name); }
consteval Config portable_config_of(const ConfigName& name) {
    return config_among(PORTABLE_CONFIGS, name);
}
// Warps. Codes are much to convert; what is only copied needs half as many. A whole warpgroup can
// also leave registers to those who multiply.
constexpr int producer_warps(const Config& c) {
    return c.staged > 0 || (c.few_rows && !c.portable && c.blocks_per_sm > 1) ? 4 : 2;
}
constexpr int slot_bytes(const Config& c) {
    const int elements = BLOCK_N * std::max(c.head_dim, c.value_dim);
    return !has_codes(c) || !c.few_rows ? 2 * elements : c.nvfp4 ? elements / 2 : elements;
}
// Columns of the results that pass through shared memory at a time, of kernels of few rows. Of
// portable ones they do in the place of the queries.
constexpr int pass_columns(const Config& c) {
    return !has_any_rows(c) ? c.value_dim : c.value_dim > 128 ? 128 : 64;
}
// Of a row of results there. Those of 8 rows are written by columns, without bank conflicts.
constexpr int result_columns(const Config& c) {
    return pass_columns(c) + (c.few_rows == 8 ? 4 : 0);
}
constexpr int shared_bytes(const Config& c) {
    constexpr int semaphores = 512, alignment = 1024;
    if (has_any_rows(c)) {
        const int queries = TILE_ROWS * c.head_dim * 2, results = TILE_ROWS * pass_columns(c) * 4;
        const int scales = !has_codes(c) ? 0
                           : c.nvfp4     ? BLOCK_N * std::max(c.head_dim, c.value_dim) / NV_BLOCK
                                         : BLOCK_N * 4;
        const int of_rows = 3 * TILE_ROWS * 4, segment = 96;  // three numbers for each
        const int bytes = c.slots * (slot_bytes(c) + scales + 16) + std::max(queries, results) +
                          of_rows + segment;
        return (bytes + 127) / 128 * 128;
    }
    if (c.few_rows) {
        // Queries, and the results of four warps, with three numbers for each row.
        const int queries = c.few_rows * c.head_dim * 2;
        const int results = 4 * (c.few_rows * result_columns(c) + 3 * FEW_ROWS) * 4;
        const int scales =
            c.nvfp4 ? BLOCK_N * std::max(c.head_dim, c.value_dim) / NV_BLOCK : BLOCK_N * 4;
        return c.slots * (slot_bytes(c) + scales) + queries + results + semaphores + alignment;
    }
    // Codes, and a scale for each token of a slot, or a word of scales for 32 codes of NVFP4; a
    // factor for each row of queries.
    const int codes = slot_bytes(c) / (c.nvfp4 ? 4 : 2);
    const int staged = c.staged * (codes + (c.nvfp4 ? codes / 4 : BLOCK_N * 4));
    const int token_scales = c.nvfp4 ? 0 : c.slots * BLOCK_N * 4;
    const int scales = c.staged > 0 ? token_scales + TILE_ROWS * 4 : 0;
    return TILE_ROWS * c.head_dim * 2 + c.slots * slot_bytes(c) + staged + scales + semaphores +
           alignment;
}

struct Choice {
    Config config;
    int parts = 1;          // of the work, a block each
    int schedule_ints = 0;  // of a schedule
    bool prefill = false;   // the kernels of attention instead, for many queries

    bool operator==(const Choice&) const = default;
};

// A schedule cuts the work of all heads and sequences into parts of equal cost. It is an
// array of 32-bit integers, which a kernel writes and others read:
//   header      HEADER_INTS: what it was made for, as a hash; the number of split items; of the
//               parts of each head, 0 where one has parts of several heads
//   positions   parts + 1 of 4: where a part begins, see Position
//   lengths     2 for each sequence: keys and queries
//   items       4 for each split item: its line and tile, see Position, first slot, number of slots
//   scratch     of the kernel that writes it: 3 integers of 64 bits for each sequence, and 3
// An item is a tile of rows of one key head of one sequence; it is split if more than one part, or
// with a split size more than one split, has keys of it. Then each of them leaves a partial result
// in a slot of its own; the slots of an item are neighbours.
constexpr int HEADER_INTS = 4, POSITION_INTS = 4;
constexpr int MOST_PARTS = 1024;
constexpr int COMBINE_WARPS = 8, MOST_VALUE_DIM = 256;
constexpr int COMBINE_SHARED_BYTES = COMBINE_WARPS * 4 * (MOST_VALUE_DIM + 1) + 1024;
constexpr int SCHEDULE_THREADS = 256;  // of the one block that writes it
struct ScheduleShape {
    int64_t parts = 0, batch = 0, items = 0, slots = 0;

    int64_t positions() const { return HEADER_INTS; }
    int64_t lengths() const { return positions() + POSITION_INTS * (parts + 1); }
    int64_t list() const { return lengths() + 2 * batch; }
    int64_t scratch() const { return round_up(list() + 4 * items, 2); }
    int64_t ints() const { return round_up(scratch() + 6 * (batch + 1), 4); }
};
ScheduleShape schedule_shape(const Problem& problem, int parts);

// By elements; tokens of a page, and heads, lie anywhere.
struct Cache {
    const void* data = nullptr;
    int64_t page_stride = 0, token_stride = 0, head_stride = 0;
};
struct BlockScales {
    Cache k, v;  // by bytes
};

// Factors of the codes, fp32: one, or one for each sequence and head, or one for each token and
// head of a cache.
struct Scales {
    const float* data = nullptr;  // null: 1
    bool tokens = false;
    int64_t strides[3] = {};  // (sequence, head), or (page, token, head)
};

struct Sequences {
    const int* k_lengths = nullptr;   // (batch,)
    const int* cu_q = nullptr;        // (batch + 1,) for packed queries
    const int* cu_new = nullptr;      // (batch + 1,) keys that were appended: more than k_lengths
    int64_t new_keys = 0;             // the same where all have as many
    const int* first_keys = nullptr;  // (batch,) keys before are not seen; null: 0
    const int* rotary_begins = nullptr;  // (batch,) position of the first new key; null: k_lengths
    int64_t tokens = 0;                  // of packed queries
};
struct Pages {
    const int* table = nullptr;  // (sequences, pages); null: a page for each sequence
    const int* rows = nullptr;   // (batch,) which row of the table, or page; null: in order
    int64_t table_stride = 0, page_size = 1;
};

// Rotary embedding of the first `dim` elements of a row, by a table of cosines and sines of
// (positions, dim / 2) in the operands' dtype. The pairs are neighbours if interleaved, else
// elements i and i + dim / 2.
struct Rotary {
    const void *cos = nullptr, *sin = nullptr;  // null: none
    int dim = 0;
    bool interleaved = false;
    int64_t positions = 0;
};

struct Params {
    Problem problem;
    Operand q, out;
    float* lse = nullptr;  // (batch, q_heads, q_length) or (q_heads, tokens); may be null
    Cache k, v;
    CacheFormat format = CacheFormat::same;
    BlockScales block_scales;  // of NVFP4
    Scales k_scale, v_scale, q_scale;
    Sequences sequences;
    Pages pages;
    ScoreOptions scores;
    const int* mask = nullptr;  // (tokens, mask_words): bits over the last keys of the sequence
    int64_t mask_stride = 0, mask_words = 0;
    Rotary rotary;  // of the queries
    int parts = 1;
    int* schedule = nullptr;
    float *partial_out = nullptr, *partial_lse = nullptr;  // (slots, tile_rows, value_dim)
};

TK_FIELDS(Problem, dtype, batch, q_heads, kv_heads, q_length, k_length, head_dim, value_dim,
          window_left, window_right, attention_chunk, split_size, causal, mask, varlen, codes,
          nvfp4, rotary, leftpad, tokens, page_size)
TK_FIELDS(Config, head_dim, value_dim, slots, staged, blocks_per_sm, nvfp4, dtype, few_rows,
          portable, sixteen_bits)
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit_fields(c.config, visit);
    visit("parts", c.parts);
    visit("schedule_ints", c.schedule_ints);
    visit("prefill", c.prefill);
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
// Whether the kernels of attention can read the cache's pages and have what the call asks for.
bool can_prefill(const Problem& problem);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();

template <int threads>
void launch_schedule(const Params& params, Stream stream);
template <Config config>
void launch(const Params& params, Stream stream);
template <DType dtype>
void launch_combine(const Params& params, Stream stream);
// The same of portable kernels.
template <int threads>
void launch_portable_schedule(const Params& params, Stream stream);
template <Config config>
void launch_portable(const Params& params, Stream stream);
template <DType dtype>
void launch_portable_combine(const Params& params, Stream stream);

}  // namespace thunderkittens::attention::decode
