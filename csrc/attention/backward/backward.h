// Attention backward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include "csrc/attention/common/attention.h"
#include "csrc/common/fields.h"

namespace thunderkittens::attention {

// What one backward kernel is compiled for: block_m queries a step against the keys of a block.
struct BackwardConfig {
    int head_dim = 0;  // of the kernel; smaller ones are filled with zeros on load
    int block_m = 0;
    int stages = 0;  // of Q and dO; of Q above head dimension 128
    DType dtype = DType::bf16;
    bool score_mod = false;  // softcap or ALiBi
    int value_dim = 0;       // 0: as head_dim; given for those of backward_d256_sm90.cuh
    // Of portable kernels, 0 of those for Hopper: the keys of a block, those of a warp (16 or 32),
    // and the warps that share keys, each of which has a part of the columns of dK and dV.
    int block_n = 0, warp_keys = 0, column_warps = 0;

    constexpr bool is_portable() const { return block_n != 0; }
    constexpr bool above_d128() const { return value_dim != 0 && !is_portable(); }
    constexpr int values() const { return value_dim != 0 ? value_dim : head_dim; }
    bool operator==(const BackwardConfig&) const = default;
};
constexpr BackwardConfig BACKWARD_CONFIGS[] = {
    {64, 128, 2},
    {96, 64, 2},
    {128, 64, 2},
    {64, 64, 2, DType::bf16, true},
    {96, 64, 2, DType::bf16, true},
    {128, 64, 2, DType::bf16, true},
    {192, 64, 3, DType::bf16, false, 128},
    {192, 64, 2, DType::bf16, false, 192},
    {256, 64, 2, DType::bf16, false, 256},
    {192, 64, 3, DType::bf16, true, 128},
    {192, 64, 2, DType::bf16, true, 192},
    {256, 64, 2, DType::bf16, true, 256},
};
// The portable kernels. Those with score_mod hold at most 99 KB of shared memory, all that a block
// can have on GPUs of compute capability 8.6, 8.9 and 12.x; there is one such without score_mod for
// each head dimension too, behind the others.
constexpr BackwardConfig portable_backward(int head_dim, int block_m, int block_n, int stages,
                                           int warp_keys, int column_warps,
                                           bool score_mod = false) {
    return {head_dim, block_m, stages,    DType::bf16, score_mod,
            head_dim, block_n, warp_keys, column_warps};
}
constexpr BackwardConfig PORTABLE_BACKWARD_CONFIGS[] = {
    portable_backward(64, 64, 128, 2, 32, 1),       portable_backward(64, 64, 128, 2, 32, 2),
    portable_backward(64, 64, 128, 2, 32, 2, true), portable_backward(128, 64, 128, 2, 32, 2),
    portable_backward(128, 32, 128, 1, 32, 2),      portable_backward(128, 32, 128, 1, 32, 2, true),
    portable_backward(192, 64, 64, 2, 32, 4),       portable_backward(192, 32, 32, 2, 16, 2),
    portable_backward(192, 32, 32, 2, 16, 2, true), portable_backward(256, 64, 64, 2, 32, 4),
    portable_backward(256, 64, 64, 1, 32, 4),       portable_backward(256, 32, 32, 1, 16, 2),
    portable_backward(256, 32, 32, 1, 16, 2, true),
};
constexpr BackwardConfig with_dtype(BackwardConfig config, DType dtype) {
    config.dtype = dtype;
    return config;
}
// A configuration as instances.txt names it, by what tells it from the others; value_dim 0 is
// head_dim. One that is not compiled is an error of the compiler.
struct BackwardName {
    int head_dim, value_dim = 0, block_m;
    DType dtype = DType::bf16;
    bool score_mod = false;
};
consteval BackwardConfig backward_config_of(const BackwardName& name) {
    for (const BackwardConfig& c : BACKWARD_CONFIGS) {
        if (name.head_dim == c.head_dim && name.block_m == c.block_m &&
            (name.value_dim ? name.value_dim : name.head_dim) == c.values() &&
            name.score_mod == c.score_mod) {
            return with_dtype(c, name.dtype);
        }
    }
    throw "no such configuration is listed";
}
struct PortableBackwardName {
    int head_dim, block_m, block_n, stages, warps;
    DType dtype = DType::bf16;
    bool score_mod = false;
};
constexpr int portable_backward_warps(const BackwardConfig& c) {
    return c.block_n / c.warp_keys * c.column_warps;
}
consteval BackwardConfig portable_backward_config_of(const PortableBackwardName& name) {
    for (const BackwardConfig& c : PORTABLE_BACKWARD_CONFIGS) {
        if (name.head_dim == c.head_dim && name.block_m == c.block_m && name.block_n == c.block_n &&
            name.stages == c.stages && name.warps == portable_backward_warps(c) &&
            name.score_mod == c.score_mod) {
            return with_dtype(c, name.dtype);
        }
    }
    throw "no such configuration is listed";
}
// Of a portable kernel: K and V, the ring of Q, dO and their statistics, P where warps share keys,
// dS, and the work tile.
constexpr int portable_backward_memory(const BackwardConfig& c) {
    const int keys = c.block_n * (c.head_dim + c.values()) * 2;
    const int queries = c.stages * c.block_m * ((c.head_dim + c.values()) * 2 + 8);
    const int exchange = (c.column_warps > 1 ? 2 : 1) * c.block_n * c.block_m * 2;
    return keys + queries + exchange + 128;
}
// As many as registers allow, 255 a thread.
constexpr int portable_backward_blocks_per_sm(const BackwardConfig& c) {
    return c.warp_keys == 32 ? 8 / portable_backward_warps(c) : 2;
}
// Dynamic shared memory of a block: K and V, the ring of Q and dO, what the consumers hand on, the
// rows' statistics, semaphores and alignment.
constexpr int backward_memory(const BackwardConfig& c) {
    const int keys = 2 * 128 * c.head_dim * 2, queries = 2 * c.stages * c.block_m * c.head_dim * 2;
    const int exchange = 2 * (2 * 64 * c.block_m * 2) + c.block_m * c.head_dim * 4;
    return keys + queries + exchange + 2 * c.stages * c.block_m * 4 + 1536;
}
struct BackwardChoice {
    BackwardConfig config;
    // Head splits: the query heads of a GQA group are split among this many blocks, where the key
    // heads alone do not fill the GPU. Each leaves its partial dK and dV in fp32, and the
    // postprocessing adds them.
    int head_splits = 1;
    // The blocks work on this many key heads (of all batches, each in `head_splits`) at a time.
    int section_heads = 1;
    int deterministic_section_heads = 1;  // in the deterministic mode
};

struct BackwardParams {
    Problem problem;
    Operand q, k, v, out, grad_out;
    const float* lse = nullptr;       // (batch, q_heads, q_length), packed: (q_heads, total_q)
    const float* grad_lse = nullptr;  // likewise, or null
    Operand dq, dk, dv;               // data null: not wanted
    float* dsink = nullptr;           // (q_heads,); null: not wanted
    float* workspace = nullptr;       // workspace_floats(problem, sequences, config, head_splits)
    ScoreOptions scores;
    float query_scale = 1.0f;  // dQ is this times dS K; differs from the scale of signed_query()
    Sequences sequences;
    int head_splits = 1;
    int section_heads = 1;
    int sm_count = 0;
    bool deterministic = false;
};

// Rows of the workspace per head: whole query blocks of any kernel, those of packed sequences with
// room to round the beginning of each.
constexpr int64_t padded_rows(int64_t q_length) { return (q_length + 127) / 128 * 128; }
constexpr int64_t rows_of_head(const Problem& p, const Sequences& s) {
    return p.varlen ? padded_rows(s.total_q) + 128 * (p.batch + 1) : padded_rows(p.q_length);
}
constexpr int64_t workspace_rows(const Problem& p, const Sequences& s) {
    return (p.varlen ? 1 : p.batch) * p.q_heads * rows_of_head(p, s);
}
// The splits of the key heads as if they were query heads: what is stored per key has rows like
// what is stored per query.
constexpr Problem keys_as_queries(Problem p, int head_splits) {
    p.q_heads = p.kv_heads * head_splits;
    p.q_length = p.k_length;
    return p;
}
constexpr Sequences keys_as_queries(Sequences s) {
    s.cu_q = s.cu_k;
    s.total_q = s.total_k;
    return s;
}
constexpr int64_t dkv_partial_rows(const Problem& p, const Sequences& s, int head_splits) {
    return head_splits > 1 ? workspace_rows(keys_as_queries(p, head_splits), keys_as_queries(s))
                           : 0;
}
// Two statistics per row, dQ in fp32, dK and dV likewise where groups are split, up to four
// counters per tile of at least 64 rows, and one.
constexpr int64_t workspace_floats(const Problem& p, const Sequences& s,
                                   const BackwardConfig& config, int head_splits) {
    const int64_t rows = workspace_rows(p, s);
    return rows * (2 + config.head_dim) +
           dkv_partial_rows(p, s, head_splits) * (config.head_dim + config.values()) + rows / 16 +
           1;
}

// What the workspace holds.
struct Workspace {
    float *lse_log2, *delta;  // per row
    float* dq;                // dq_columns per row
    float *dk, *dv;  // of each part of a group, per key, as dQ; null: not wanted, or not split
    // A counter; for the deterministic mode some per tile of dQ, how many key blocks have added
    // theirs: the first is 0 until something is in the tile.
    int *next_work_tile, *dq_semaphores;

    Workspace(const BackwardParams& params, const BackwardConfig& config) {
        const int64_t rows = workspace_rows(params.problem, params.sequences);
        const int64_t keys = dkv_partial_rows(params.problem, params.sequences, params.head_splits);
        lse_log2 = params.workspace;
        delta = lse_log2 + rows;
        float* next = delta + rows;
        dq = params.dq.data ? next : nullptr;
        next += rows * config.head_dim;
        dk = keys > 0 && params.dk.data ? next : nullptr;
        next += keys * config.head_dim;
        dv = keys > 0 && params.dv.data ? next : nullptr;
        next += keys * config.values();
        next_work_tile = reinterpret_cast<int*>(next);
        dq_semaphores = next_work_tile + 1;
    }
};

// How dQ is summed: in tiles of block_m rows, each in parts of 64 x part_cols, those of 64 rows
// first, in the order of the accumulators' registers.
struct DqTiles {
    int block_m, parts, part_cols;

    int columns() const { return parts * 64 * part_cols / block_m; }
    bool operator==(const DqTiles&) const = default;
};

// The preprocessing: statistics of the rows, and cleared counters.
template <DType dtype>
void launch_preprocess(const BackwardParams& params, const Workspace& workspace,
                       const DqTiles& tiles, Stream stream);
// The postprocessing: dQ, dK and dV where groups are split, and the gradient of the sinks.
template <DType dtype>
void launch_postprocess(const BackwardParams& params, const Workspace& workspace,
                        const DqTiles& tiles, const BackwardConfig& config, Stream stream);

// The same for the portable kernels, whose sums are in tiles of 16 x 16, and whose counters are of
// 32 or of 64 rows.
template <DType dtype>
void launch_portable_preprocess(const BackwardParams& params, const Workspace& workspace,
                                const BackwardConfig& config, Stream stream);
template <DType dtype>
void launch_portable_postprocess(const BackwardParams& params, const Workspace& workspace,
                                 const BackwardConfig& config, Stream stream);

TK_FIELDS(BackwardConfig, head_dim, block_m, stages, dtype, score_mod, value_dim, block_n,
          warp_keys, column_warps)
template <typename Visitor>
void visit_fields(BackwardChoice& c, Visitor&& visit) {
    visit_fields(c.config, visit);
    visit("head_splits", c.head_splits);
    visit("section_heads", c.section_heads);
    visit("deterministic_section_heads", c.deterministic_section_heads);
}

std::string unsupported_backward(const Problem& problem, const DeviceProperties& device);
BackwardChoice choose_backward(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const BackwardChoice& choice);
std::vector<KernelInfo> backward_kernels();

template <BackwardConfig config>
void launch_backward(const BackwardParams& params, Stream stream);
template <BackwardConfig config>
void launch_backward_d256(const BackwardParams& params, Stream stream);
template <BackwardConfig config>
void launch_portable_backward(const BackwardParams& params, Stream stream);
// The one of the three that has the configuration.
template <BackwardConfig config>
void launch_any_backward(const BackwardParams& params, Stream stream) {
    if constexpr (config.is_portable()) {
        if constexpr (BUILDS_PORTABLE) launch_portable_backward<config>(params, stream);
    } else if constexpr (config.above_d128())
        launch_backward_d256<config>(params, stream);
    else
        launch_backward<config>(params, stream);
}

}  // namespace thunderkittens::attention
