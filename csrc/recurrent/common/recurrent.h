// The recurrent ops with a decay per head and token: what their calls are (problems), what is
// chosen for them, and the plain structs that the ops, the choice and the kernels share. Host C++
// only.
//
// One skeleton serves tk.ssd and tk.linear_attention. Of each head, with the state S (V, K),
//
//   S_t = e^(g_t) S_(t-1) + w_t v_t k_t^T        o_t = (scale S_t q_t + skip v_t) silu(z_t)
//
//                          q    k    v    w    g
//   tk.ssd                 C    B    x    d    A d, d = clamp(softplus(dt + dt_bias), dt_limit)
//   tk.linear_attention    q    k    v    1    decay + g
//
// Heads of q and k are groups of heads of v, G and H in the words of SSD. A tensor with states is
// (sequences, heads, V, K) by its strides, in whatever order it lies in memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/common/math.h"

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::recurrent {

constexpr int CHUNK = 64;   // tokens that a block works on at a time
constexpr int VALUES = 64;  // columns of the values, of one head, that a warpgroup works on
constexpr int MAX_KEY_DIM = 128, MAX_VALUE_DIM = 256;
// As LEAST_LOG_DECAY of reference/_recurrent.py.
constexpr float LEAST_LOG_DECAY = -128.0f;

struct RecurrentProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, groups = 1, length = 0;
    int64_t key_dim = 128, value_dim = 64;
    // Packed sequences, whose lengths only the GPU knows; the batch is then 1. 0: none are packed.
    int64_t sequences = 0;
    bool gate = false;  // silu(z)

    bool operator==(const RecurrentProblem&) const = default;
};
TK_FIELDS(RecurrentProblem, dtype, batch, heads, groups, length, key_dim, value_dim, sequences,
          gate)

// The number of states: of batches, or of packed sequences.
constexpr int64_t states_of(const RecurrentProblem& p) {
    return p.sequences > 0 ? p.sequences : p.batch;
}
constexpr int64_t slices_of(const RecurrentProblem& p) {
    return (p.value_dim + VALUES - 1) / VALUES;
}
constexpr int64_t padded_keys(const RecurrentProblem& p) { return p.key_dim > 64 ? 128 : 64; }

// (batch, heads or groups, length, columns); strides in elements, the last dimension has stride 1.
struct Operand {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// (batch, heads, length) of one number per token, in `dtype`; strides in elements. Null: none.
struct TokenOperand {
    const void* data = nullptr;
    DType dtype = DType::fp32;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// One number per head, or with a column stride one per head and column. Null: none.
struct HeadOperand {
    const void* data = nullptr;
    DType dtype = DType::fp32;
    int64_t head_stride = 0, column_stride = 0;
};

// (sequences, heads, V, K), fp32; strides in elements. Null: none.
struct StateOperand {
    float* data = nullptr;
    int64_t sequence_stride = 0, head_stride = 0, value_stride = 0, key_stride = 0;
};

// What a token's log decay g and the weight w of its values are made of. With dt it is SSD.
struct GateOperands {
    TokenOperand dt;
    HeadOperand dt_bias, A;
    bool softplus = false;
    float dt_min = 0.0f, dt_max = 0.0f;
    TokenOperand g;     // else what is added to
    HeadOperand decay;  // the log decay of every token
};

struct RecurrentParams {
    RecurrentProblem problem;
    Operand q, k, v, z, out;
    GateOperands gates;
    HeadOperand skip;
    float scale = 1.0f;
    const int* cu_seqlens = nullptr;  // (sequences + 1,), where sequences are packed
    StateOperand initial, final;
};

// What a kernel is compiled for, and how a call is cut. A block has so many warpgroups, each of
// which walks over the chunks of a segment with the state of 64 columns of the values of one head,
// and one of producers; they share the chunks of q and k.
struct RecurrentConfig {
    DType dtype = DType::bf16;
    int keys = 128;  // columns of q and k, padded: 64 or 128
    int warpgroups = 1;
    int segments = 1;       // of each sequence
    bool portable = false;  // for every GPU from compute capability 8.0 on: one warpgroup alone
};
TK_FIELDS(RecurrentConfig, dtype, keys, warpgroups, segments, portable)

constexpr int MAX_SEGMENTS = 16;

// Slices of the values that go with a head of q and k, and blocks for these.
constexpr int64_t slices_of_group(const RecurrentProblem& p) {
    return p.groups > 0 ? p.heads / p.groups * slices_of(p) : 0;
}
constexpr int64_t blocks_of(const RecurrentProblem& p, const RecurrentConfig& c) {
    return states_of(p) * p.groups * ceil_div(slices_of_group(p), c.warpgroups) * c.segments;
}
// States that all segments but the last add, each behind its log decay: floats.
constexpr int64_t STATE_HEAD = 32;
template <int keys>
constexpr int64_t SEGMENT_STATE_FLOATS = STATE_HEAD + int64_t(keys) * VALUES;
constexpr int64_t workspace_floats(const RecurrentProblem& p, const RecurrentConfig& c) {
    return c.segments > 1
               ? states_of(p) * p.heads * slices_of(p) * (c.segments - 1) *
                     (c.keys == 64 ? SEGMENT_STATE_FLOATS<64> : SEGMENT_STATE_FLOATS<128>)
               : 0;
}

constexpr int stages_of(int keys, int warpgroups) {
    if (keys == 64) return warpgroups == 1 ? 3 : 4;
    return warpgroups == 1 ? 2 : 3;
}
constexpr int blocks_per_sm(int warpgroups) { return warpgroups == 1 ? 2 : 1; }
// Dynamic shared memory of a block: stages of q, k, values and gates; for each warpgroup a copy of
// the state and a tile of the output; semaphores and the alignment of tiles.
constexpr int shared_bytes_of(int keys, int warpgroups) {
    const int tile = 2 * CHUNK, gates = 5 * 4 * CHUNK;
    const int stage = 2 * tile * keys + warpgroups * (tile * VALUES + gates);
    return stages_of(keys, warpgroups) * stage + warpgroups * (tile * keys + tile * VALUES + 512) +
           2048;
}

// Of the portable kernels: a chunk of q, k, values and weights, and gates of two.
constexpr int portable_blocks_per_sm(int keys) { return keys == 64 ? 3 : 2; }
constexpr int portable_shared_bytes_of(int keys) {
    return 2 * CHUNK * (2 * keys + VALUES + CHUNK) + 2 * 2 * 4 * CHUNK;
}

std::string unsupported(const RecurrentProblem& problem, const DeviceProperties& device);
RecurrentConfig choose(const RecurrentProblem& problem, const DeviceProperties& device);
std::string kernel_name(const RecurrentConfig& config);
std::vector<KernelInfo> recurrent_kernels();

// `states_only` makes what each segment but the last adds to the state; else the output, from these
// in the workspace.
template <RecurrentConfig config>
void launch_recurrent(const RecurrentParams& params, int segments, float* workspace,
                      bool states_only, Stream stream);
template <DType dtype, int keys>
void launch_portable_recurrent(const RecurrentParams& params, int segments, float* workspace,
                               bool states_only, Stream stream);

}  // namespace thunderkittens::recurrent
