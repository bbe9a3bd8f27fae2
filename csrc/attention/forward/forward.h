// Attention forward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include <algorithm>
#include <numeric>

#include "csrc/attention/common/attention.h"
#include "csrc/common/fields.h"

namespace thunderkittens::attention {

// What one kernel is compiled for. A block works on `warpgroups` x 64 query rows by block_n keys; K
// and V each have a ring of `stages`.
struct Config {
    // Of the kernel; smaller ones are filled with zeros on load.
    int head_dim = 0, value_dim = 0;
    int warpgroups = 0;
    int block_n = 0;
    int stages = 0;
    bool score_mod = false;  // has softcap and ALiBi
    DType dtype = DType::bf16;
    bool softcap_only = false;  // has softcap alone
    // Of portable kernels, whose `warpgroups` only count rows; 0: the kernel is for sm_90a.
    int warp_rows = 0;         // query rows that a warp has, 16 or 32
    bool keeps_query = false;  // in registers
    bool paged = false;        // keys are pages of a cache

    constexpr bool is_portable() const { return warp_rows > 0; }
    bool operator==(const Config&) const = default;
};

// The kernels that are compiled, each for bf16 and fp16 (instances.txt).
constexpr Config CONFIGS[] = {
    {32, 32, 1, 64, 3, false},    {32, 32, 3, 128, 2, false},
    {64, 64, 1, 64, 3, false},    {64, 64, 3, 128, 2, false},
    {64, 64, 3, 128, 2, true},    {96, 96, 3, 96, 3, false},
    {96, 96, 3, 80, 3, true},     {128, 128, 2, 128, 2, false},
    {128, 128, 3, 64, 3, false},  {128, 128, 2, 128, 2, true},
    {128, 128, 3, 64, 3, true},   {128, 128, 2, 128, 2, false, DType::bf16, true},
    {192, 128, 2, 128, 2, false}, {192, 128, 2, 128, 2, true},
    {192, 192, 2, 112, 2, false}, {192, 192, 2, 112, 2, true},
    {256, 256, 2, 64, 2, false},  {256, 256, 2, 64, 2, true},
};
// Whether there is a kernel with softcap alone beside this one, which then never has that to do.
constexpr bool has_softcap_only(const Config& config) {
    for (const Config& c : CONFIGS) {
        if (c.softcap_only && c.head_dim == config.head_dim && c.value_dim == config.value_dim)
            return true;
    }
    return false;
}
// The portable kernels, which hold at most 99 KB of shared memory: all that a block can have on
// GPUs of compute capability 8.6, 8.9 and 12.x.
constexpr Config portable_config(int head_dim, int value_dim, int block_m, int warp_rows,
                                 int block_n, int stages, bool keeps_query, bool score_mod,
                                 bool paged = false) {
    Config c{head_dim, value_dim, block_m / 64, block_n, stages, score_mod};
    c.warp_rows = warp_rows;
    c.keeps_query = keeps_query;
    c.paged = paged;
    return c;
}
constexpr Config PORTABLE_CONFIGS[] = {
    portable_config(64, 64, 128, 32, 64, 2, true, false),
    portable_config(64, 64, 128, 32, 64, 2, true, true),
    portable_config(96, 96, 128, 32, 64, 1, false, false),
    portable_config(96, 96, 128, 32, 64, 1, false, true),
    portable_config(128, 128, 64, 16, 64, 1, true, false),
    portable_config(128, 128, 128, 32, 64, 1, false, false),
    portable_config(128, 128, 128, 32, 64, 1, false, true),
    portable_config(192, 128, 64, 16, 64, 1, true, false),
    portable_config(192, 128, 128, 32, 64, 1, false, false),
    portable_config(192, 128, 64, 16, 64, 1, true, true),
    portable_config(192, 192, 64, 16, 64, 1, true, false),
    portable_config(192, 192, 64, 16, 64, 1, true, true),
    portable_config(256, 256, 64, 16, 64, 1, false, false),
    portable_config(256, 256, 128, 16, 32, 1, true, false),
    portable_config(256, 256, 64, 16, 64, 1, false, true),
    // Of pages, with softcap and ALiBi or without.
    portable_config(64, 64, 128, 32, 64, 2, true, true, true),
    portable_config(96, 96, 128, 32, 64, 1, false, true, true),
    portable_config(128, 128, 128, 32, 64, 1, false, true, true),
    portable_config(192, 128, 64, 16, 64, 1, true, true, true),
    portable_config(192, 192, 64, 16, 64, 1, true, true, true),
    portable_config(256, 256, 64, 16, 64, 1, false, true, true),
};
// Split-KV, for short queries: 64 rows, the keys split among blocks, of which several share a
// multiprocessor where registers allow it.
constexpr Config SPLIT_KV_CONFIGS[] = {
    {32, 32, 1, 64, 4, true},   {64, 64, 1, 64, 4, true},   {96, 96, 1, 64, 2, true},
    {128, 128, 1, 64, 2, true}, {192, 192, 1, 64, 3, true}, {256, 256, 1, 64, 3, true},
};
constexpr int MAX_SPLITS = 128;         // of the keys
constexpr int MAX_SPLITS_OF_WARP = 16;  // whose results a warp combines for a row
constexpr Config with_dtype(Config config, DType dtype) {
    config.dtype = dtype;
    return config;
}

// A configuration as instances.txt names it, by what tells it from the others; value_dim 0 is
// head_dim, block_m are the query rows of a block.
struct ConfigName {
    int head_dim, value_dim = 0, block_m = 64, block_n;
    DType dtype = DType::bf16;
    bool score_mod = false, softcap_only = false, paged = false;

    constexpr bool is_of(const Config& c) const {
        return head_dim == c.head_dim && (value_dim ? value_dim : head_dim) == c.value_dim &&
               block_m == c.warpgroups * 64 && block_n == c.block_n && score_mod == c.score_mod &&
               softcap_only == c.softcap_only && paged == c.paged;
    }
};
// Those that have the name, for whole keys and for split ones, all of which have score_mod. One
// that is not compiled is an error of the compiler.
consteval Config config_of(const ConfigName& name) {
    for (const Config& c : CONFIGS) {
        if (name.is_of(c)) return with_dtype(c, name.dtype);
    }
    throw "no such configuration is listed";
}
consteval Config portable_config_of(const ConfigName& name) {
    for (const Config& c : PORTABLE_CONFIGS) {
        if (name.is_of(c)) return with_dtype(c, name.dtype);
    }
    throw "no such configuration is listed";
}
consteval Config split_kv_config_of(ConfigName name) {
    name.score_mod = true;
    for (const Config& c : SPLIT_KV_CONFIGS) {
        if (name.is_of(c)) return with_dtype(c, name.dtype);
    }
    throw "no such configuration is listed";
}

// How many blocks share a multiprocessor. One with a single consumer neither fills it nor moves
// registers, and needs only a warp beside the consumer.
constexpr int blocks_per_sm(const Config& c) {
    if (c.warpgroups > 1 || c.score_mod) return 1;
    return c.block_n > 64 ? 2 : c.head_dim > 32 ? 3 : 4;
}
constexpr int forward_threads(const Config& c) {
    if (c.is_portable()) return 64 * c.warpgroups / c.warp_rows * 32;
    return 128 * c.warpgroups + (c.warpgroups > 1 ? 128 : 32);
}

// Dynamic shared memory of a block: Q, the rings of K and V, semaphores and alignment; and, where
// the limit of the architecture leaves it, room for the output or for half its columns.
struct ForwardMemory {
    int q_slots = 1;    // of each consumer: with two the next Q arrives while one is in use
    int out_parts = 0;  // the output passes in so many parts; 0: through Q's memory, whole
    int bytes = 0;
};
constexpr ForwardMemory forward_memory(const Config& c) {
    if (c.is_portable()) {
        const int query = c.warpgroups * 64 * c.head_dim * 2;
        const int rings = c.stages * c.block_n * (c.head_dim + c.value_dim) * 2;
        const int warps = forward_threads(c) / 32;
        const int task = (32 + (c.paged ? 16 : 0) + 16 * warps + 127) / 128 * 128;
        return {1, 0, task + (c.keeps_query ? std::max(query, rings) : query + rings)};
    }
    // A multiprocessor has 228 KB, of which every block takes one more.
    const int limit = 228 * 1024 / blocks_per_sm(c) - 1024;
    const bool split = c.warpgroups == 1 && c.score_mod;  // has one Q for all its keys
    constexpr int overhead = 2048;
    const int q = c.warpgroups * 64 * c.head_dim * 2, out = c.warpgroups * 64 * c.value_dim * 2;
    const int fixed = c.stages * c.block_n * (c.head_dim + c.value_dim) * 2 + overhead;
    if (split) return {1, 0, q + fixed};
    if (2 * q + out + fixed <= limit) return {2, 1, 2 * q + out + fixed};
    if (q + out + fixed <= limit) return {1, 1, q + out + fixed};
    if (c.value_dim % 128 == 0 && q + out / 2 + fixed <= limit) return {1, 2, q + out / 2 + fixed};
    return {1, 0, (q > out ? q : out) + fixed};
}

// Of portable kernels: as many as registers allow, 255 a thread.
constexpr int portable_blocks_per_sm(const Config& c) { return 256 / forward_threads(c); }
// Of the kernels that split keys.
constexpr int split_kv_blocks_per_sm(const Config& c) {
    return std::min(c.head_dim > 32 ? 3 : 4, 228 * 1024 / (forward_memory(c).bytes + 1024));
}

struct Choice {
    Config config;
    // The blocks work on this many heads (of all batches) at a time, longest query blocks first.
    int section_heads = 1;
    int splits = 0;  // of the keys, for the kernels of short queries; 0: the others

    bool operator==(const Choice&) const = default;
};

// Keys and values that are pages of a cache, in place of the keys of Sequences. k and v are then
// rows of tokens, and a page is so many of them that lie next to each other.
struct PagedKeys {
    const int* k_lengths = nullptr;  // (batch,); null: keys are not paged
    const int* cu_new = nullptr;     // (batch + 1,) keys beside those; null: new_keys each
    int64_t new_keys = 0, most_keys = 0;
    const int* table = nullptr;  // (sequences, pages); null: a page for each sequence
    const int* rows = nullptr;   // (batch,) which row of the table, or page; null: in order
    int64_t table_stride = 0;
    int64_t pages = 0, page_size = 0;
    int64_t k_page_rows = 0, v_page_rows = 0;  // from a page to the next
};
constexpr int64_t LEAST_PIECE = 8;  // rows that one transfer moves
// How many rows of a tile one transfer moves: a tile may have several pages.
constexpr int64_t piece_rows(const PagedKeys& keys, int64_t block_n) {
    return keys.table == nullptr ? block_n : std::gcd(keys.page_size, block_n);
}

struct ForwardParams {
    Problem problem;
    Operand q, k, v, out;
    float* lse = nullptr;  // (batch, q_heads, q_length) or (q_heads, total_q); may be null
    ScoreOptions scores;
    Sequences sequences;
    PagedKeys pages;
    int section_heads = 1;
    int sm_count = 0;
    // Of kernels that split keys, where combines(): (splits, partial_rows(), value_dim) and
    // (splits, partial_rows()).
    int splits = 0;
    float *partial_out = nullptr, *partial_lse = nullptr;
};
// Whether results pass through memory. With packed sequences even those of a single split do: the
// combination also knows the rows behind the last sequence.
constexpr bool combines(const Problem& p, int splits) {
    return splits > 1 || (splits > 0 && p.varlen);
}
constexpr int64_t partial_rows(const Problem& p, const Sequences& s) {
    return p.q_heads * (p.varlen ? s.total_q : p.batch * p.q_length);
}

TK_FIELDS(Config, head_dim, value_dim, warpgroups, block_n, stages, score_mod, dtype, softcap_only,
          warp_rows, keeps_query, paged)
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit_fields(c.config, visit);
    visit("section_heads", c.section_heads);
    visit("splits", c.splits);
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
// Among the kernels of whole keys, which are pages of a cache.
Choice choose_paged(const Problem& problem, const DeviceProperties& device);
// The choice and what else could run, for measurements of the choice.
std::vector<Choice> candidates(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();

template <Config config>
void launch_forward(const ForwardParams& params, Stream stream);
template <Config config>
void launch_portable(const ForwardParams& params, Stream stream);
template <Config config>
void launch_split_kv(const ForwardParams& params, Stream stream);

}  // namespace thunderkittens::attention
