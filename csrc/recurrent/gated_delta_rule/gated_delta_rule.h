// The gated delta rule: what its calls are (problems), what is chosen for them, and the plain
// structs that the ops, the choice and the kernels share. Host C++ only.
//
// For each token of a value head, with the state S (K x V):
//   S <- exp(g) S,  u = beta (v - S^T k),  S <- S + k u^T,  o = scale S^T q
// In chunks of 64 tokens, with c the inclusive sums of g in the chunk, G_ij = exp(c_i - c_j) for
// j <= i and else 0, and S the state before the chunk:
//   T = (I + stril(diag(beta) K K^T) o G)^-1          P = scale (Q K^T) o G
//   U = T diag(beta) (V - exp(c) K S)                 O = scale exp(c) Q S + P U
//   S' = exp(c_last) S + (exp(c_last - c) K)^T U
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::recurrent {

constexpr int DELTA_CHUNK = 64;        // tokens that a block works on at a time
constexpr int DELTA_VALUES = 64;       // columns of values of a warpgroup
constexpr int DELTA_SCAN_COLUMNS = 8;  // of the states, of a block that adds up segments
constexpr int DELTA_SCAN_THREADS = 512;
constexpr int DELTA_MAX_SEGMENTS = 64;
constexpr float DELTA_L2_EPS = 1e-6f;
constexpr int64_t DELTA_MAX_KEY_DIM = 128, DELTA_MAX_VALUE_DIM = 256, DELTA_MAX_TOKENS = 8;

struct DeltaRuleProblem {
    DType dtype = DType::bf16;
    int64_t sequences = 0;  // the batch, or the packed sequences
    int64_t heads = 0, value_heads = 0;
    int64_t length = 0;  // of each sequence of a batch, of all packed ones together
    int64_t key_dim = 128, value_dim = 128;
    bool packed = false;

    bool operator==(const DeltaRuleProblem&) const = default;
};

// What a kernel is compiled for.
struct DeltaRuleConfig {
    DType dtype = DType::bf16;
    int key_dim = 128;  // columns of a tile: 64 or 128
    // Warpgroups with 64 columns of values each, and those that prepare the chunks for them.
    int consumers = 2, preparers = 1;
    // Parts of each sequence, which run side by side.
    int segments = 1;
    bool portable = false;  // one kernel prepares all chunks, before that of the consumers
};
TK_FIELDS(DeltaRuleProblem, dtype, sequences, heads, value_heads, length, key_dim, value_dim,
          packed)
TK_FIELDS(DeltaRuleConfig, dtype, key_dim, consumers, preparers, segments, portable)

// (batch, heads, length, columns); strides in elements, the last dimension has stride 1.
struct DeltaRows {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};
// (batch, value heads, length), fp32 or of the dtype of the call; any strides.
struct DeltaNumbers {
    const void* data = nullptr;
    bool is_fp32 = true;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};
// (sequences, value heads, K, V), fp32 or bf16; any strides. Null: zeros, or not wanted.
struct DeltaStates {
    void* data = nullptr;
    bool is_fp32 = true;
    int64_t sequence_stride = 0, head_stride = 0, key_stride = 0, value_stride = 0;
};

// How the gates and the scale are made of the arguments; A_log and dt_bias may be null.
struct DeltaRuleGate {
    const float *A_log = nullptr, *dt_bias = nullptr;  // (value heads,)
    bool beta_sigmoid = false, allow_neg_eigval = false;
};

// What is made of chunks before there is a state, by portable kernels (prepare_sm80.cuh).
struct DeltaPrepared {
    void *solved = nullptr, *scores = nullptr;  // H, P: (64, 64) a chunk and value head
    float* vectors = nullptr;                   // (DELTA_VECTORS, 64) a chunk and value head
    bool for_gradient = false;
    // For a gradient with norms: normalised q and k, and the factors; else null.
    void *q = nullptr, *k = nullptr;
    float* norms = nullptr;
};

struct DeltaRuleParams {
    DeltaRuleProblem problem;
    DeltaRows q, k, v, out;
    DeltaNumbers g, beta;
    DeltaRuleGate gate;
    DeltaStates initial, final;
    const int32_t* cu_seqlens = nullptr;  // (sequences + 1,), where packed
    float scale = 1.0f;
    bool l2_norm = false;
    int segments = 1;
    float* workspace = nullptr;  // of delta_workspace() floats
    int consumers = 2;           // of a portable kernel's block
    DeltaPrepared prepared;
};

// Of each segment but the last: what it makes of a state S is M S + L, L in (K, V), then M, column
// by column. The states that it leaves take the place of L.
constexpr int64_t delta_segments_kept(const DeltaRuleProblem& p, int segments) {
    return p.sequences * p.value_heads * (segments - 1);
}
constexpr int64_t delta_workspace(const DeltaRuleProblem& p, int segments) {
    return delta_segments_kept(p, segments) * p.key_dim * (p.value_dim + p.key_dim);
}

// ---- chunks that kernels keep something of: those of the gradient, and portable ones ----

constexpr int DELTA_VECTORS = 4;  // per token: exp(c), exp(c_last - c), beta, c log2(e)
constexpr int DELTA_SQUARE = DELTA_CHUNK * DELTA_CHUNK;

// Chunks of packed sequences have slots of their own without a sum over the sequences: those of
// sequence s begin at slot begin / 64 + s. What is behind the last one counts as a sequence.
constexpr int64_t delta_slots(const DeltaRuleProblem& p) {
    return p.packed ? p.length / DELTA_CHUNK + p.sequences + 1
                    : (p.length + DELTA_CHUNK - 1) / DELTA_CHUNK;
}
constexpr int64_t delta_batch(const DeltaRuleProblem& p) { return p.packed ? 1 : p.sequences; }
constexpr int64_t delta_chunks(const DeltaRuleProblem& p) {
    return delta_batch(p) * p.value_heads * delta_slots(p);
}
// Floats of a portable forward behind delta_workspace(): vectors, H and P.
constexpr int64_t delta_prepared(const DeltaRuleProblem& p) {
    return delta_chunks(p) * (DELTA_VECTORS * DELTA_CHUNK + DELTA_SQUARE);
}

inline DeltaPrepared delta_prepared_at(float* workspace, const DeltaRuleProblem& p) {
    uint16_t* const squares =
        reinterpret_cast<uint16_t*>(workspace + delta_chunks(p) * DELTA_VECTORS * DELTA_CHUNK);
    return {.solved = squares,
            .scores = squares + delta_chunks(p) * DELTA_SQUARE,
            .vectors = workspace};
}

// Queries or keys, or those that are normalised.
inline DeltaRows delta_normal_rows(const DeltaRuleProblem& p, const DeltaRows& given,
                                   const void* normal) {
    if (normal == nullptr) return given;
    return {normal, p.heads * p.length * p.key_dim, p.length * p.key_dim, p.key_dim};
}

std::string unsupported(const DeltaRuleProblem& problem, const DeviceProperties& device);
DeltaRuleConfig choose(const DeltaRuleProblem& problem, const DeviceProperties& device);
std::string kernel_name(const DeltaRuleConfig& config);
std::vector<KernelInfo> gated_delta_rule_kernels();
// Warpgroups of a block that prepare chunks, in turn.
constexpr int delta_preparers(int consumers) { return consumers == 1 ? 2 : 1; }
// Dynamic shared memory of a block: four stages of keys and queries, two of values for each
// consumer, two of what is prepared, and what the preparers have for themselves.
constexpr int delta_shared_bytes(int key_dim, int consumers) {
    constexpr int tile = 2 * DELTA_CHUNK * DELTA_CHUNK;
    return 4 * 2 * 2 * DELTA_CHUNK * key_dim + consumers * 2 * tile + 2 * (2 * tile + 1024) +
           delta_preparers(consumers) * 13440 + 2048;
}
// Of the scan of segments: the columns of a state, and their sums over shares of the keys.
constexpr int delta_scan_bytes(int columns) {
    constexpr int rows = int(DELTA_MAX_KEY_DIM);
    return 4 * columns * (rows + DELTA_SCAN_THREADS) + 1024;
}
// Of the portable kernels: keys and queries, later N and H; and two stages of keys, H and vectors,
// one of queries, P and values. 99 KB at most, which every GPU has.
constexpr int portable_delta_prepare_bytes(int key_dim) {
    constexpr int solve = 4 * DELTA_CHUNK * 68 + 2 * DELTA_SQUARE;
    const int rows = 2 * 2 * DELTA_CHUNK * key_dim;
    return (rows > solve ? rows : solve) + 2048;
}
constexpr int portable_delta_chain_bytes(int key_dim) {
    return 3 * 2 * DELTA_CHUNK * key_dim + 5 * 2 * DELTA_SQUARE +
           2 * 4 * DELTA_VECTORS * DELTA_CHUNK;
}
static_assert(portable_delta_chain_bytes(128) <= 99 * 1024);
inline int shared_bytes_of(const DeltaRuleConfig& config) {
    return config.portable ? portable_delta_chain_bytes(config.key_dim)
                           : delta_shared_bytes(config.key_dim, config.consumers);
}

template <DType dtype, int key_dim, int consumers>
void launch_gated_delta_rule(const DeltaRuleParams& params, Stream stream);
// What segments make of a state; then the states between them.
template <DType dtype, int key_dim>
void launch_delta_segments(const DeltaRuleParams& params, Stream stream);
template <int columns, bool portable>
void launch_delta_scan(const DeltaRuleParams& params, Stream stream);

// What a gradient keeps of each chunk: the states before it and U', in tiles of 64 columns.
struct DeltaKept {
    void *states = nullptr, *values = nullptr;
    int slices = 0;
};
// What the walk over the chunks is for: outputs, summaries of segments, or what a gradient keeps.
enum class DeltaWalk { outputs, summaries, kept };
template <DType dtype, int key_dim>
void launch_portable_delta_prepare(const DeltaRuleParams& params, Stream stream);
template <DType dtype, int key_dim>
void launch_portable_gated_delta_rule(const DeltaRuleParams& params, DeltaWalk walk,
                                      const DeltaKept& kept, Stream stream);

}  // namespace thunderkittens::recurrent
