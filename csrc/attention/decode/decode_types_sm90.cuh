// Attention over a cache, what its roles share: tiles, shared memory, and where queries, caches and
// results are. What the kernel does is in decode_sm90.cuh.
#pragma once

#include <algorithm>

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/tile_scheduler.cuh"
#include "csrc/attention/decode/codes_sm90.cuh"
#include "csrc/attention/decode/rotary.cuh"
#include "csrc/attention/decode/work_sm90.cuh"

namespace thunderkittens::attention::decode {

template <Config config>
struct Kernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim, value_dim = config.value_dim;
    static constexpr int slots = config.slots;
    static constexpr bool portable = config.portable;
    static constexpr int producers = producer_warps(config);
    static constexpr int threads = WARPGROUP_THREADS + producers * WARP_THREADS;
    static constexpr int blocks_per_sm = config.blocks_per_sm;
    // Which a whole warpgroup of producers gives to the consumers, where registers are few.
    static constexpr bool reallocates = producers == 4 && blocks_per_sm > 1;
    static constexpr int launch_registers = 65536 / (256 * blocks_per_sm) / 8 * 8;
    static constexpr int producer_registers = blocks_per_sm > 2 ? (config.nvfp4 ? 56 : 48)
                                              : config.few_rows ? 64
                                                                : 80;
    static constexpr int consumer_registers = 2 * launch_registers - producer_registers;
    static constexpr int operand_rows = config.few_rows;  // of mma.sync
    static constexpr bool any_rows = decode::has_any_rows(config);
    static constexpr int pass_columns = decode::pass_columns(config);
    static constexpr int result_columns = decode::result_columns(config);  // in shared memory
    // Of few rows, in registers.
    static constexpr bool keeps_query = head_dim <= 192 && operand_rows == FEW_ROWS &&
                                        !(portable && head_dim == 128 && has_codes(config));
    static constexpr bool codes = has_codes(config), few_rows = config.few_rows > 0;
    static constexpr bool staged = config.staged > 0;  // the producers convert codes
    static constexpr bool nvfp4 = config.nvfp4;
    static constexpr bool token_scales = codes && !nvfp4;  // slots have them
    // Copies of so many slots are on their way at a time; of few rows, of all that are free.
    static constexpr int lag = staged ? config.staged : std::max(slots - 2, 1);
    // Where instructions limit, of few rows of NVFP4 and of all codes of portable kernels, the
    // producers take turns at blocks: what it takes to look a page up and to wait for a slot does
    // not depend on how many rows a warp has. The ring is so long that none comes to a slot a
    // second time before its last but one use is over: a parity tells no more apart.
    static constexpr int producer_turns = few_rows && (portable ? codes : nvfp4) ? producers : 1;
    static_assert(slots >= 2 * producer_turns - 1);
    static constexpr int producer_rows = BLOCK_N * producer_turns / producers;
    static constexpr int slot_arrivals = WARP_THREADS * producers / producer_turns;

    using Operand =  // what a slot has; of few rows, bytes
        std::conditional_t<staged, half, std::conditional_t<codes, fp8e4m3, T>>;
    static constexpr int packed = few_rows && nvfp4 ? 2 : 1;  // codes of an operand
    using q_tile = st<Operand, TILE_ROWS, head_dim>;
    using k_tile = st<Operand, BLOCK_N, head_dim / packed>;
    using v_tile = st<Operand, BLOCK_N, value_dim / packed>;
    union slot {
        k_tile k;
        v_tile v;
        __device__ slot() {}
    };
};

// Where the results of (batch, head, position) are, and partial ones: rows of a slot.
template <class T>
struct Results {
    StridedRows<T> out;
    float* lse;         // may be null
    const float* sink;  // may be null
    float *partial_out, *partial_lse;
    int heads, positions, value_dim, slot_rows;

    Results(const Params& params)
        : out(params.out, params.problem.varlen),
          lse(params.lse),
          sink(params.scores.sink),
          partial_out(params.partial_out),
          partial_lse(params.partial_lse),
          heads(static_cast<int>(params.problem.q_heads)),
          positions(static_cast<int>(params.problem.varlen ? params.sequences.tokens
                                                           : params.problem.q_length)),
          value_dim(static_cast<int>(params.problem.value_dim)),
          slot_rows(static_cast<int>(params.problem.tile_rows())) {}

    __device__ __forceinline__ int64_t lse_row(int b, int head, int position) const {
        return (out.packed ? head : int64_t(b) * heads + head) * positions + position;
    }
};

// A row of a tile: a query and one of the heads that share its keys.
struct Row {
    int position, head;
    bool exists;

    __device__ __forceinline__ Row(const Work& work, const Lengths& s, const Item& item, int row) {
        const int index = item.first_row + row;
        position = index / work.group;
        head = item.kv_head * work.group + index - position * work.group;
        exists = position < s.q_length;
    }
};

// Elements, or codes.
template <class E>
struct CacheRows {
    const E* data;
    int64_t page_stride, token_stride, head_stride;

    CacheRows(const Cache& cache)
        : data(static_cast<const E*>(cache.data)),
          page_stride(cache.page_stride),
          token_stride(cache.token_stride),
          head_stride(cache.head_stride) {}
    __device__ __forceinline__ const E* at(int page, int token, int head) const {
        const auto times = [](int i, int64_t stride) {  // no sign, which would take more
            return uint64_t{static_cast<uint32_t>(i)} * static_cast<uint64_t>(stride);
        };
        return data +
               (times(page, page_stride) + times(token, token_stride) + times(head, head_stride));
    }
};

// Scales of the blocks of NVFP4. Of other caches, nothing.
template <bool nvfp4>
struct BlockScaleRows {
    struct None {};
    [[no_unique_address]] None k, v;
    BlockScaleRows(const BlockScales&) {}
};
template <>
struct BlockScaleRows<true> {
    CacheRows<uint8_t> k, v;
    BlockScaleRows(const BlockScales& scales) : k(scales.k), v(scales.v) {}
};

__device__ __forceinline__ float scale_of_head(const Scales& scales, int b, int head) {
    if (scales.data == nullptr || scales.tokens) return 1.0f;
    return arch::load_global_readonly(scales.data + b * scales.strides[0] +
                                      head * scales.strides[1]);
}

template <class Kernel>
struct Globals {
    using T = typename Kernel::T;
    using Element = std::conditional_t<Kernel::codes, uint8_t, T>;
    StridedRows<T> q;
    CacheRows<Element> k, v;
    CacheFormat format;
    Scales k_scale, v_scale, q_scale;
    Results<T> results;
    Work work;
    Schedule schedule;
    ScoreMod score_mod;
    RotaryTable<T> rotary;
    bool rotary_moves;  // with the query's position; else all stand where the new keys begin
    Pages pages;
    Divisor by_page_size;
    bool rows_share_page;     // those of a block that a producer warp copies
    bool whole_block_scales;  // of a row, which come in one aligned piece
    const int* mask;
    int64_t mask_stride;
    int mask_words;
    int head_dim;
    [[no_unique_address]] BlockScaleRows<Kernel::nvfp4> block_scales;

    // Of block scales: every row is aligned to its own size, and fills a row of a slot.
    static bool has_whole_rows(const Params& params) {
        constexpr int64_t bytes = std::max(Kernel::head_dim, Kernel::value_dim) / NV_BLOCK;
        const auto aligned = [](const Cache& c) {
            return (reinterpret_cast<uintptr_t>(c.data) | c.page_stride | c.token_stride |
                    c.head_stride) %
                       bytes ==
                   0;
        };
        const Problem& p = params.problem;
        return p.head_dim == p.value_dim && p.head_dim == bytes * NV_BLOCK &&
               aligned(params.block_scales.k) && aligned(params.block_scales.v);
    }

    explicit Globals(const Params& params)
        : q(params.q, params.problem.varlen),
          k(params.k),
          v(params.v),
          format(params.format),
          k_scale(params.k_scale),
          v_scale(params.v_scale),
          q_scale(params.q_scale),
          results(params),
          work(params),
          schedule(params.schedule, schedule_shape(params.problem, params.parts)),
          score_mod(params.scores),
          rotary(params.rotary),
          rotary_moves(params.problem.causal || params.problem.window_left >= 0 ||
                       params.problem.window_right >= 0),
          pages(params.pages),
          by_page_size(static_cast<int>(params.pages.page_size)),
          rows_share_page(params.pages.table == nullptr ||
                          params.pages.page_size % Kernel::producer_rows == 0),
          whole_block_scales(Kernel::nvfp4 && has_whole_rows(params)),
          mask(params.mask),
          mask_stride(params.mask_stride),
          mask_words(static_cast<int>(params.mask_words)),
          head_dim(static_cast<int>(params.problem.head_dim)),
          block_scales(params.block_scales) {}
};

// What caches of codes need besides: codes as they come, 16 bytes by copy and thread; factors.
template <class Kernel, bool staged = Kernel::staged, bool nvfp4 = Kernel::nvfp4>
struct Staging {};
template <class Kernel>
struct Staging<Kernel, true, false> {
    static constexpr int threads = Kernel::producers * WARP_THREADS;
    static constexpr int columns = std::max(Kernel::head_dim, Kernel::value_dim);
    uint4 codes[Kernel::lag][BLOCK_N * columns / 16 / threads][threads];
    float staged_scales[Kernel::lag][BLOCK_N];
    float scales[Kernel::slots][BLOCK_N];  // of the tokens of a slot
    float q_factors[TILE_ROWS];
};
// A copy has 32 codes, and the word of four scales that has those of its two blocks.
template <class Kernel>
struct Staging<Kernel, true, true> {
    static constexpr int threads = Kernel::producers * WARP_THREADS;
    static constexpr int columns = std::max(Kernel::head_dim, Kernel::value_dim);
    static constexpr int copies = BLOCK_N * columns / 32 / threads;
    uint4 codes[Kernel::lag][copies][threads];
    uint32_t block_scales[Kernel::lag][copies][threads];
    float q_factors[TILE_ROWS];
};

template <class Kernel, bool few_rows = Kernel::few_rows, bool any_rows = Kernel::any_rows>
struct Shared {
    typename Kernel::q_tile q;
    typename Kernel::slot ring[Kernel::slots];
    [[no_unique_address]] Staging<Kernel> staging;
    semaphore full[Kernel::slots], empty[Kernel::slots];
};
// Scales of a slot's tokens, or of the blocks of their rows.
template <class Kernel, bool nvfp4 = Kernel::nvfp4>
struct SlotScales {
    float of_tokens[BLOCK_N];
};
template <class Kernel>
struct SlotScales<Kernel, true> {
    static constexpr int words = std::max(Kernel::head_dim, Kernel::value_dim) / NV_BLOCK / 4;
    struct alignas(words % 4 == 0 ? 16 : words % 2 == 0 ? 8 : 4) Row {
        uint32_t words[SlotScales::words];
    };
    Row of_blocks[BLOCK_N];
};
// What a thread has of 16 or 8 rows and 16 columns: two pairs of columns, of an upper and a lower
// row, or of one.
template <int rows>
struct alignas(rows) QueryOperand {
    uint32_t pairs[2][rows / 8];
};
// What portable kernels, whose registers are few, seldom need of a segment.
struct alignas(16) KeptSegment {
    int4 vectors[6];
};
// Of few rows: the queries, and what each of the warps that multiply has of an item's keys.
template <class Kernel>
struct Shared<Kernel, true, false> {
    typename Kernel::slot ring[Kernel::slots];
    SlotScales<Kernel> scales[Kernel::slots];
    float factors[FEW_ROWS];  // of the queries
    float base[CONSUMER_WARPS][FEW_ROWS], sum[CONSUMER_WARPS][FEW_ROWS];
    float4 out[CONSUMER_WARPS][Kernel::operand_rows][Kernel::result_columns / 4];
    QueryOperand<Kernel::operand_rows> query[Kernel::head_dim / 16][WARP_THREADS];
    semaphore full[Kernel::slots], empty[Kernel::slots];
    struct None {};
    [[no_unique_address]] std::conditional_t<Kernel::portable, KeptSegment, None> segment;

    // Of the n-th 16 rows.
    __device__ __forceinline__ auto& query_of(int) { return query; }
};
// Kernels of any number of rows have one place for both: results come when the queries have gone.
template <class Kernel>
struct Shared<Kernel, true, true> {
    struct NoScales {};
    typename Kernel::slot ring[Kernel::slots];
    [[no_unique_address]] std::conditional_t<Kernel::codes, SlotScales<Kernel>[Kernel::slots],
                                             NoScales> scales;
    float factors[TILE_ROWS];
    float base[CONSUMER_WARPS][FEW_ROWS], sum[CONSUMER_WARPS][FEW_ROWS];
    union {
        float4 out[CONSUMER_WARPS][FEW_ROWS][Kernel::pass_columns / 4];
        QueryOperand<FEW_ROWS> query[CONSUMER_WARPS][Kernel::head_dim / 16][WARP_THREADS];
    };
    KeptSegment segment;
    semaphore full[Kernel::slots], empty[Kernel::slots];

    __device__ Shared() {}
    __device__ __forceinline__ auto& query_of(int sixteen) { return query[sixteen]; }
};

}  // namespace thunderkittens::attention::decode
