// The gradient of LoLCATS: what is chosen for it, and the plain structs that the op, the choice and
// the kernels share. Host C++ only.
#pragma once

#include "csrc/linear_attention/lolcats/lolcats.h"

namespace thunderkittens::linear_attention {

struct LolcatsBackwardChoice : LolcatsChoice {
    int map_splits = 1;  // shares of a head's tokens in the sums of the maps' gradients
};

template <typename Visitor>
void visit_fields(LolcatsBackwardChoice& c, Visitor visit) {
    visit_fields(static_cast<LolcatsChoice&>(c), visit);
    visit("map_splits", c.map_splits);
}

// Results are contiguous; null where they are not wanted.
struct LolcatsBackwardParams {
    LolcatsParams forward;  // of the call; without final state, rows and workspace
    int map_splits = 1;
    Operand grad_out, dq, dk, dv;
    const float* denominators = nullptr;                // (batch, heads, length)
    void *dq_map = nullptr, *dk_map = nullptr;          // (heads, head_dim, features)
    float *grad_alpha = nullptr, *grad_beta = nullptr;  // (heads,)
    float* workspace = nullptr;                         // of lolcats_backward_workspace()

    bool wants_keys() const {
        return dk.data != nullptr || dv.data != nullptr || dk_map != nullptr;
    }
};

// Where the kernels find what other kernels have made. Chunks are those of the forward: with an
// initial state, the caches' tokens come first.
struct LolcatsBackwardWorkspace {
    LolcatsWorkspace forward;
    float* rows =
        nullptr;  // (batch_heads, chunks, 64, 4): maximum of q . k; what to subtract from a
                  // scaled score for log2 of its weight; scaled delta; the maximum's
                  // gradient
    float* weights = nullptr;         // (batch_heads, chunks, 64, 2): alpha / denominator, delta
    float* segment_states = nullptr;  // of the queries behind each segment; null: there is one
    void *dq_projected = nullptr, *dk_projected = nullptr;  // (batch_heads, chunks * 64, features)
    float* map_partials = nullptr;     // (2, batch_heads, map_splits, head_dim, features)
    float* factor_partials = nullptr;  // (2, batch_heads, segments): of alpha and beta
    // Of portable kernels: beta's for each chunk, (batch_heads, chunks); and the linear part of the
    // values' gradient, (batch_heads, chunks * 64, head_dim).
    float *beta_partials = nullptr, *linear_dv = nullptr;
    float *dk_partials = nullptr,
          *dv_partials = nullptr;  // (batch_heads, length, head_dim); null: no groups
    // (batch_heads,): 1 when a head's block has left what other kernels need; null: more than one
    // segment
    int *queries_done = nullptr, *keys_done = nullptr;
};

constexpr int64_t aligned_floats(int64_t floats) { return (floats + 31) / 32 * 32; }

// Calls take(floats) for each part in turn.
template <typename Take>
LolcatsBackwardWorkspace split_workspace(const LolcatsProblem& p, int64_t segments,
                                         int64_t map_splits, bool portable, Take take) {
    const int64_t batch_heads = p.batch * p.heads, chunks = chunks_of(p);
    const int64_t projected = (batch_heads * chunks * CHUNK * p.features + 1) / 2;
    LolcatsBackwardWorkspace w;
    w.forward.segment_states = take(segment_floats(p, segments));
    w.forward.first_keys = take(first_rows_floats(p));
    w.forward.first_values = take(first_rows_floats(p));
    w.rows = take(batch_heads * chunks * CHUNK * 4);
    w.weights = take(batch_heads * chunks * CHUNK * 2);
    w.segment_states = take(segment_floats(p, segments));
    w.dq_projected = take(projected);
    w.dk_projected = take(projected);
    w.map_partials = take(2 * batch_heads * map_splits * p.head_dim * p.features);
    w.factor_partials = take(2 * batch_heads * segments);
    if (portable) {
        w.forward.q_features = take(feature_floats(p));
        w.forward.k_features = take(feature_floats(p));
        w.beta_partials = take(batch_heads * chunks);
        w.linear_dv = take(batch_heads * chunks * CHUNK * p.head_dim);
    }
    const int64_t tokens = p.heads == p.kv_heads ? 0 : batch_heads * p.length * p.head_dim;
    w.dk_partials = take(tokens);
    w.dv_partials = take(tokens);
    const int64_t flags = segments > 1 || portable ? 0 : batch_heads;
    w.queries_done = reinterpret_cast<int*>(take(flags));
    w.keys_done = reinterpret_cast<int*>(take(flags));
    return w;
}
inline int64_t lolcats_backward_workspace(const LolcatsProblem& p, int64_t segments,
                                          int64_t map_splits, bool portable) {
    int64_t total = 0;
    split_workspace(p, segments, map_splits, portable, [&](int64_t floats) -> float* {
        total += aligned_floats(floats);
        return nullptr;
    });
    return total;
}
inline LolcatsBackwardWorkspace workspace_of(const LolcatsBackwardParams& params) {
    float* next = params.workspace;
    return split_workspace(params.forward.problem, params.forward.segments, params.map_splits,
                           params.forward.portable, [&](int64_t floats) -> float* {
                               float* part = floats > 0 ? next : nullptr;
                               next += aligned_floats(floats);
                               return part;
                           });
}

// Dynamic shared memory of a block.
constexpr int LOLCATS_QUERY_BYTES = 227 * 1024, LOLCATS_KEY_BYTES = 227 * 1024,
              LOLCATS_SEGMENT_STATE_GRADIENTS_BYTES = 100 * 1024,
              LOLCATS_FEATURE_MAP_GRADIENT_BYTES = 100 * 1024;

LolcatsBackwardChoice choose_lolcats_backward(const LolcatsProblem& problem,
                                              const DeviceProperties& device);
std::string kernel_name(const LolcatsBackwardChoice& choice);
std::vector<KernelInfo> lolcats_backward_kernels();

template <DType dtype, int head_dim, int features>
void launch_lolcats_query_gradient(const LolcatsBackwardParams& params,
                                   const LolcatsBackwardWorkspace& w, Stream stream);
// What the queries of each segment add to the sums for the keys before, and these sums.
template <DType dtype, int head_dim, int features>
void launch_lolcats_segment_state_gradients(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_lolcats_key_gradient(const LolcatsBackwardParams& params,
                                 const LolcatsBackwardWorkspace& w, Stream stream);
template <DType dtype, int head_dim, int features>
void launch_lolcats_feature_map_gradient(const LolcatsBackwardParams& params,
                                         const LolcatsBackwardWorkspace& w, Stream stream);
// The sums of the parts of both maps', the factors' and grouped heads' gradients.
template <DType dtype, bool portable>
void launch_lolcats_reduce_partials(const LolcatsBackwardParams& params,
                                    const LolcatsBackwardWorkspace& w, Stream stream);

}  // namespace thunderkittens::linear_attention
