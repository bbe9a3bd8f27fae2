// LoLCATS: softmax attention over a terraced window and linear attention with learned features
// before it, under one denominator. What its calls are (problems), what is chosen for them, and the
// plain structs that the ops, the choice and the kernels share. Host C++ only.
//
// A state in memory is numerator (2F, D), the sum of phi(k) v^T, and denominator (2F,), that of
// phi(k), in fp32, over all blocks of 64 tokens but the last whole one; the keys and values after
// these, in caches of 128 rows, token p in row p % 128; and the number of tokens. That of a sliding
// window has the sums over all but the last 64 tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/fields.h"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

constexpr int WINDOW = CHUNK;  // tokens of a block; a query's window is its own and the one before
constexpr int CACHE = 2 * WINDOW;  // rows of the caches

struct LolcatsProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, kv_heads = 0, length = 0;
    int64_t head_dim = 128, features = 64;  // of one sign
    bool continued = false;                 // there is an initial state
};

// Head dimension and features select the kernel. The blocks of tokens of a head are split into
// segments, each a thread block's work, until they fill the GPU.
struct LolcatsChoice {
    DType dtype = DType::bf16;
    int head_dim = 128, features = 64;
    bool portable = false;  // the kernels for every GPU from compute capability 8.0 on
    int segments = 1;
};

struct LolcatsDecodeProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, kv_heads = 0;
    int64_t head_dim = 128, features = 64;
};
struct LolcatsDecodeChoice {
    DType dtype = DType::bf16;
    int head_dim = 128, features = 64;
    bool portable = false;
};

TK_FIELDS(LolcatsProblem, dtype, batch, heads, kv_heads, length, head_dim, features, continued)
TK_FIELDS(LolcatsChoice, dtype, head_dim, features, portable, segments)
TK_FIELDS(LolcatsDecodeProblem, dtype, batch, heads, kv_heads, head_dim, features)
TK_FIELDS(LolcatsDecodeChoice, dtype, head_dim, features, portable)

// At most so many blocks of tokens: of those in the caches, up to 127, and the new ones.
constexpr int64_t chunks_of(const LolcatsProblem& p) {
    return (p.length + (p.continued ? CACHE - 1 : 0) + CHUNK - 1) / CHUNK;
}
// fp32 numbers of a state's sums, the denominator's behind the numerator's.
constexpr int64_t state_floats_of_head(const LolcatsProblem& p) {
    return 2 * p.features * (p.head_dim + 1);
}

// Contiguous; null where there is none.
struct LolcatsStatePointers {
    float *numerator = nullptr, *denominator = nullptr;
    void *keys = nullptr, *values = nullptr;
    int* lengths = nullptr;
};

struct LolcatsParams {
    LolcatsProblem problem;
    bool portable = false;
    int segments = 1;
    Operand q, k, v, out;
    Operand q_map, k_map;  // (heads, head_dim, features), without a batch stride
    const float *alpha = nullptr, *beta = nullptr;
    LolcatsStatePointers initial, final;
    float *maxima = nullptr, *denominators = nullptr;  // (batch, heads, length); may be null
    float* workspace = nullptr;                        // of lolcats_workspace() floats
};

// So few segments need no scan: each block adds up the states of those before its own.
constexpr int ADDED_SEGMENTS = 4;
constexpr bool scans(int64_t segments) { return segments > ADDED_SEGMENTS; }

// Sums of all segments; the caches' tokens and the first new ones, in order.
constexpr int64_t segment_floats(const LolcatsProblem& p, int64_t segments) {
    return segments > 1 ? p.batch * p.heads * segments * state_floats_of_head(p) : 0;
}
constexpr int64_t first_rows_floats(const LolcatsProblem& p) {
    return p.continued ? p.batch * p.kv_heads * CACHE * p.head_dim / 2 : 0;
}
// The features of the queries, or of the keys, of which portable kernels have those of all tokens.
constexpr int64_t feature_floats(const LolcatsProblem& p) {
    return p.batch * p.heads * chunks_of(p) * CHUNK * p.features;
}
constexpr int64_t lolcats_workspace(const LolcatsProblem& p, int64_t segments, bool portable) {
    return segment_floats(p, segments) + 2 * first_rows_floats(p) +
           (portable ? 2 * feature_floats(p) : 0);
}

struct LolcatsDecodeParams {
    LolcatsDecodeProblem problem;
    bool portable = false;
    Operand q, k, v, out;  // one row each
    Operand q_map, k_map;
    const float *alpha = nullptr, *beta = nullptr;
    LolcatsStatePointers state;
    bool sliding = false;  // the window is the last 64 tokens, and the sums have all before them
};

// Dynamic shared memory of a block.
constexpr int LOLCATS_FORWARD_BYTES = 227 * 1024, LOLCATS_SEGMENT_STATES_BYTES = 180 * 1024;

std::string unsupported(const LolcatsProblem& problem, const DeviceProperties& device);
LolcatsChoice choose(const LolcatsProblem& problem, const DeviceProperties& device);
std::string kernel_name(const LolcatsChoice& choice);
std::vector<KernelInfo> lolcats_kernels();
std::string unsupported(const LolcatsDecodeProblem& problem, const DeviceProperties& device);
LolcatsDecodeChoice choose_decode(const LolcatsDecodeProblem& p, const DeviceProperties& device);
std::string kernel_name(const LolcatsDecodeChoice& choice);
std::vector<KernelInfo> lolcats_decode_kernels();

// Where the kernels find what other kernels have made.
struct LolcatsWorkspace {
    float* segment_states = nullptr;                      // of each segment; null: there is one
    void *first_keys = nullptr, *first_values = nullptr;  // null: no initial state
    void *q_features = nullptr, *k_features = nullptr;    // of portable kernels
};

template <DType dtype, int head_dim, int features>
void launch_lolcats_forward(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                            Stream stream);
// The sums that each segment adds to its successor's.
template <DType dtype, int head_dim, int features>
void launch_lolcats_segment_states(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                                   Stream stream);
// Replaces them by the sums of all segments before.
template <bool portable>
void launch_lolcats_scan(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                         Stream stream);
// The rows of the caches and the first new ones, in order; and the final state's caches.
template <bool portable>
void launch_lolcats_first_rows(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                               Stream stream);
template <bool portable>
void launch_lolcats_kv_cache(const LolcatsParams& params, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_lolcats_decode(const LolcatsDecodeParams& params, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_decode(const LolcatsDecodeParams& params, Stream stream);

}  // namespace thunderkittens::linear_attention
