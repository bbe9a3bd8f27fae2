// Attention forward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include "csrc/attention/attention.h"

namespace thunderkittens::attention {

// What one kernel is compiled for. A block works on `warpgroups` x 64 query rows by block_n keys; K
// and V each have a ring of `stages`.
struct Config {
    int head_dim = 0;  // of the kernel; smaller ones are filled with zeros on load
    int warpgroups = 0;
    int block_n = 0;
    int stages = 0;
    DType dtype = DType::bf16;

    bool operator==(const Config&) const = default;
};

// The kernels that are compiled, each for bf16 and fp16, one per file in inst/.
constexpr Config CONFIGS[] = {
    {64, 2, 128, 2}, {64, 3, 128, 2}, {128, 2, 128, 2}, {128, 2, 160, 2}, {256, 2, 80, 2},
};
constexpr Config with_dtype(Config config, DType dtype) {
    config.dtype = dtype;
    return config;
}

// Dynamic shared memory of a block: Q, the rings of K and V, semaphores and alignment; and a copy
// of Q's size for the output where the limit of the architecture leaves room.
struct ForwardMemory {
    bool separate_out = false;
    int bytes = 0;
};
constexpr ForwardMemory forward_memory(const Config& c) {
    constexpr int limit = 227 * 1024, overhead = 2048;
    const int q = c.warpgroups * 64 * c.head_dim * 2;
    const int keys = 2 * c.stages * c.block_n * c.head_dim * 2;
    const bool separate_out = 2 * q + keys + overhead <= limit;
    return {separate_out, (separate_out ? 2 : 1) * q + keys + overhead};
}

struct Choice {
    Config config;
    // The blocks work on this many heads (of all batches) at a time, longest query blocks first.
    int section_heads = 1;
};

struct ForwardParams {
    Problem problem;
    Operand q, k, v, out;
    float* lse = nullptr;  // (batch, q_heads, q_length), contiguous; may be null
    Scores scores;
    Sequences sequences;
    int section_heads = 1;
    int sm_count = 0;
};

template <typename Visitor>
void visit_fields(Choice& c, Visitor visit) {
    visit("head_dim", c.config.head_dim);
    visit("warpgroups", c.config.warpgroups);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("dtype", c.config.dtype);
    visit("section_heads", c.section_heads);
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();

template <Config config>
void launch_forward(const ForwardParams& params, Stream stream);

}  // namespace thunderkittens::attention
