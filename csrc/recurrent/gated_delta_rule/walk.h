// The gated delta rule in two kernels: one prepares T, P and the factors of all chunks, the other
// one walks over the chunks with the state. Host C++ only.
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule.h"

namespace thunderkittens::recurrent {

// A choice without warpgroups that prepare.
inline bool is_walk(const DeltaRuleConfig& c) { return !c.portable && c.preparers == 0; }
// Floats behind delta_workspace() for chunks that a kernel prepares.
inline int64_t delta_prepared_of(const DeltaRuleConfig& c, const DeltaRuleProblem& p) {
    return c.portable || is_walk(c) ? delta_prepared(p) : 0;
}

constexpr int DELTA_WALK_VALUES = 3;        // tiles of values of a consumer
constexpr int DELTA_SUMMARY_CONSUMERS = 2;  // of a block that makes the summary of a segment
constexpr int delta_walk_stages(int consumers) { return consumers == 1 ? 4 : 3; }

// Dynamic shared memory of a block: stages of keys, queries, T, P and factors; values.
constexpr int delta_walk_bytes(int key_dim, int consumers) {
    constexpr int tile = 2 * DELTA_CHUNK * DELTA_CHUNK;
    return delta_walk_stages(consumers) * (2 * 2 * DELTA_CHUNK * key_dim + 2 * tile + 1024) +
           consumers * DELTA_WALK_VALUES * tile + 2048;
}
// Keys and queries, later T and P; what the inverse needs; gates of four value heads.
constexpr int delta_prepass_bytes(int key_dim) {
    return 2 * 2 * DELTA_CHUNK * key_dim + 11392 + 5 * 512 + 2048;
}

template <DType dtype, int key_dim>
void launch_delta_prepass(const DeltaRuleParams& params, Stream stream);
template <DType dtype, int key_dim, int consumers>
void launch_delta_walk(const DeltaRuleParams& params, Stream stream);
// What segments make of a state; then the states between them.
template <DType dtype, int key_dim>
void launch_delta_walk_segments(const DeltaRuleParams& params, Stream stream);

}  // namespace thunderkittens::recurrent
