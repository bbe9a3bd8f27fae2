// Attention forward: what is compiled, what is chosen, and one call. Host C++ only.
#pragma once

#include "csrc/attention/attention.h"

namespace thunderkittens::attention {

// What one kernel is compiled for. A block works on `warpgroups` x 64 query rows by block_n keys; K
// and V each have a ring of `stages`.
struct Config {
    // Of the kernel; smaller ones are filled with zeros on load.
    int head_dim = 0, value_dim = 0;
    int warpgroups = 0;
    int block_n = 0;
    int stages = 0;
    bool modified = false;  // has softcap and ALiBi
    DType dtype = DType::bf16;

    bool operator==(const Config&) const = default;
};

// The kernels that are compiled, each for bf16 and fp16, one per file in inst/.
constexpr Config CONFIGS[] = {
    {64, 64, 2, 128, 2, false},   {64, 64, 3, 128, 2, false},   {64, 64, 3, 128, 2, true},
    {96, 96, 2, 160, 2, false},   {96, 96, 2, 160, 2, true},    {128, 128, 2, 128, 2, false},
    {128, 128, 2, 160, 2, false}, {128, 128, 2, 128, 2, true},  {192, 128, 2, 128, 2, false},
    {192, 128, 2, 128, 2, true},  {192, 192, 2, 112, 2, false}, {192, 192, 2, 112, 2, true},
    {256, 256, 2, 80, 2, false},  {256, 256, 2, 80, 2, true},
};
constexpr Config with_dtype(Config config, DType dtype) {
    config.dtype = dtype;
    return config;
}

// Dynamic shared memory of a block: Q, the rings of K and V, semaphores and alignment; and room
// for the output where the limit of the architecture leaves it.
struct ForwardMemory {
    bool separate_out = false;
    int bytes = 0;
};
constexpr ForwardMemory forward_memory(const Config& c) {
    constexpr int limit = 227 * 1024, overhead = 2048;
    const int q = c.warpgroups * 64 * c.head_dim * 2, out = c.warpgroups * 64 * c.value_dim * 2;
    const int keys = c.stages * c.block_n * (c.head_dim + c.value_dim) * 2;
    const bool separate_out = q + out + keys + overhead <= limit;
    return {separate_out, (separate_out ? q + out : q > out ? q : out) + keys + overhead};
}

struct Choice {
    Config config;
    // The blocks work on this many heads (of all batches) at a time, longest query blocks first.
    int section_heads = 1;
};

struct ForwardParams {
    Problem problem;
    Operand q, k, v, out;
    float* lse = nullptr;  // (batch, q_heads, q_length) or (q_heads, total_q); may be null
    Scores scores;
    Sequences sequences;
    int section_heads = 1;
    int sm_count = 0;
};

template <typename Visitor>
void visit_fields(Choice& c, Visitor visit) {
    visit("head_dim", c.config.head_dim);
    visit("value_dim", c.config.value_dim);
    visit("warpgroups", c.config.warpgroups);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("modified", c.config.modified);
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
