// A few tokens of the gated delta rule per sequence: what a call is, what is chosen for it, and
// what the op and the kernel share. Host C++ only.
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule.h"

namespace thunderkittens::recurrent {

struct DeltaRuleDecodeProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, value_heads = 0, length = 1;
    int64_t key_dim = 128, value_dim = 128;
    bool wide_state = true;   // fp32, else bf16
    bool keys_inner = false;  // keys are what is adjacent in a state in memory, else values
};

struct DeltaRuleDecodeConfig {
    DType dtype = DType::bf16;
    bool portable = false;  // the kernel for every GPU from compute capability 8.0 on
    bool wide_state = true, keys_inner = false;
};

TK_FIELDS(DeltaRuleDecodeProblem, dtype, batch, heads, value_heads, length, key_dim, value_dim,
          wide_state, keys_inner)
TK_FIELDS(DeltaRuleDecodeConfig, dtype, portable, wide_state, keys_inner)

constexpr int DELTA_DECODE_THREADS = 128;

// (batch, heads, length, columns), any strides.
struct DeltaElements {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
};

struct DeltaRuleDecodeParams {
    DeltaRuleDecodeProblem problem;
    DeltaElements q, k, v;
    DeltaNumbers g, beta;
    DeltaRuleGate gate;
    // One of key_stride and value_stride is 1; the others are multiples of 16 bytes.
    DeltaStates state;
    const int32_t* indices = nullptr;  // (batch,), the slot of each; null: its place in the batch
    int64_t slots = 0;
    void* out = nullptr;  // (batch, value heads, length, value_dim), packed
    float scale = 1.0f;
    bool l2_norm = false;
};

std::string unsupported(const DeltaRuleDecodeProblem& problem, const DeviceProperties& device);
DeltaRuleDecodeConfig choose_decode(const DeltaRuleDecodeProblem& problem,
                                    const DeviceProperties& device);
std::string kernel_name(const DeltaRuleDecodeConfig& config);
std::vector<KernelInfo> gated_delta_rule_decode_kernels();

template <DType dtype, bool wide_state, bool keys_inner>
void launch_gated_delta_rule_decode(const DeltaRuleDecodeParams& params, Stream stream);
template <DType dtype, bool wide_state, bool keys_inner>
void launch_portable_gated_delta_rule_decode(const DeltaRuleDecodeParams& params, Stream stream);

}  // namespace thunderkittens::recurrent
