// Attention backward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include "csrc/attention/attention.h"

namespace thunderkittens::attention {

// What one backward kernel is compiled for: block_m queries a step against 128 keys of a block.
struct BackwardConfig {
    int head_dim = 0;
    int block_m = 0;
    int stages = 0;  // of Q and dO
    DType dtype = DType::bf16;

    bool operator==(const BackwardConfig&) const = default;
};
constexpr BackwardConfig BACKWARD_CONFIGS[] = {{64, 128, 2}, {128, 64, 2}};
constexpr BackwardConfig with_dtype(BackwardConfig config, DType dtype) {
    config.dtype = dtype;
    return config;
}
struct BackwardChoice {
    BackwardConfig config;
    int section_heads = 1;
};

struct BackwardParams {
    Problem problem;
    Operand q, k, v, out, grad_out;
    const float* lse = nullptr;       // (batch, q_heads, q_length)
    const float* grad_lse = nullptr;  // likewise, or null
    Operand dq, dk, dv;               // data null: not wanted
    float* workspace = nullptr;       // workspace_floats(problem, config)
    Scores scores;
    Sequences sequences;
    int section_heads = 1;
    int sm_count = 0;
    bool deterministic = false;
};

// Rows of the workspace of a head: whole query blocks of any kernel.
constexpr int64_t padded_rows(int64_t q_length) { return (q_length + 127) / 128 * 128; }
// Two statistics per row, and dQ in fp32.
constexpr int64_t workspace_floats(const Problem& p, const BackwardConfig& config) {
    const int64_t rows = p.batch * p.q_heads * padded_rows(p.q_length);
    return rows * (2 + config.head_dim) + rows / 64 + 1;
}

BackwardChoice choose_backward(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const BackwardConfig& config);

template <BackwardConfig config>
void launch_backward(const BackwardParams& params, Stream stream);

}  // namespace thunderkittens::attention
