// Attention backward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include "csrc/attention/attention.h"

namespace thunderkittens::attention {

// What one backward kernel is compiled for: block_m queries a step against the keys of a block.
struct BackwardConfig {
    int head_dim = 0;  // of the kernel; smaller ones are filled with zeros on load
    int block_m = 0;
    int stages = 0;  // of Q and dO
    DType dtype = DType::bf16;
    bool modified = false;  // softcap or ALiBi

    bool operator==(const BackwardConfig&) const = default;
};
constexpr BackwardConfig BACKWARD_CONFIGS[] = {
    {64, 128, 2},
    {96, 64, 2},
    {128, 64, 2},
    {64, 64, 2, DType::bf16, true},
    {96, 64, 2, DType::bf16, true},
    {128, 64, 2, DType::bf16, true},
};
constexpr BackwardConfig with_dtype(BackwardConfig config, DType dtype) {
    config.dtype = dtype;
    return config;
}
struct BackwardChoice {
    BackwardConfig config;
    // The blocks work on this many key heads (of all batches) at a time.
    int section_heads = 1;
};

struct BackwardParams {
    Problem problem;
    Operand q, k, v, out, grad_out;
    const float* lse = nullptr;       // (batch, q_heads, q_length), packed: (q_heads, total_q)
    const float* grad_lse = nullptr;  // likewise, or null
    Operand dq, dk, dv;               // data null: not wanted
    float* dsink = nullptr;           // (q_heads,); null: not wanted
    float* workspace = nullptr;       // workspace_floats(problem, sequences, config)
    Scores scores;
    Sequences sequences;
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
// Two statistics per row, dQ in fp32, two flags per tile of at least 64 rows, and a counter.
constexpr int64_t workspace_floats(const Problem& p, const Sequences& s,
                                   const BackwardConfig& config) {
    const int64_t rows = (p.varlen ? 1 : p.batch) * p.q_heads * rows_of_head(p, s);
    return rows * (2 + config.head_dim) + rows / 32 + 1;
}

template <typename Visitor>
void visit_fields(BackwardChoice& c, Visitor visit) {
    visit("head_dim", c.config.head_dim);
    visit("block_m", c.config.block_m);
    visit("stages", c.config.stages);
    visit("dtype", c.config.dtype);
    visit("modified", c.config.modified);
    visit("section_heads", c.section_heads);
}

std::string unsupported_backward(const Problem& problem, const DeviceProperties& device);
BackwardChoice choose_backward(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const BackwardChoice& choice);
std::vector<KernelInfo> backward_kernels();

template <BackwardConfig config>
void launch_backward(const BackwardParams& params, Stream stream);

}  // namespace thunderkittens::attention
