// The gradient of the gated delta rule: what is chosen for a call, and the plain structs that the
// op and the kernels share. Host C++ only.
//
// With gated_delta_rule.h's S, c, G, P and U of a chunk, dS the gradient of the state behind it,
// N = stril(K K^T) o G and H = -(I + N diag(beta))^-1 N, which is finite where beta is 0:
//   R = V - exp(c) K S                        U' = R + H (beta R)          U = beta U'
//   dU = P^T dO + exp(c_last - c) K dS        Y = dU + H^T (beta dU)       dV = beta Y
//   dPG = scale (dO U^T) o G                  W = -stril(dV U^T) o G
//   dQ = scale exp(c) dO S^T + dPG K
//   dK = dPG^T Q + (W + W^T) K - exp(c) dV S^T + exp(c_last - c) U dS^T
//   dbeta_i = Y_i . U'_i
//   dg_t = sum of e_i over i >= t, + sum of z_i over i < t, + exp(c_last) <S, dS>, where
//   e_i = Q_i . dQ_i + K_i . (W K - exp(c) dV S^T)_i - K_i . (dPG^T Q + W^T K)_i, and
//   z_i = K_i . (exp(c_last - c) U dS^T)_i
//   dS before = exp(c_last) dS + scale (exp(c) Q)^T dO - (exp(c) K)^T dV
#pragma once

#include "csrc/recurrent/gated_delta_rule/gated_delta_rule.h"

namespace thunderkittens::recurrent {

// What a kernel is compiled for.
struct DeltaBackwardConfig {
    DType dtype = DType::bf16;
    int key_dim = 128;   // columns of a tile: 64 or 128
    int slices = 2;      // of 64 columns of the values: 1, 2 or 4; of portable kernels also 3
    int segments = 1;    // of each sequence, whose states are made side by side; portable: 1
    bool pairs = false;  // whether two blocks that make states share what they load
    bool portable = false;
};
TK_FIELDS(DeltaBackwardConfig, dtype, key_dim, slices, segments, pairs, portable)

struct DeltaBackwardParams {
    DeltaRuleParams forward;  // its final is the gradient of the final state; `out` is not read
    DeltaBackwardConfig config;
    DeltaRows grad_out, dq, dk, dv;
    DeltaNumbers dg, dbeta;
    DeltaStates grad_initial;
    float *grad_A_log = nullptr, *grad_dt_bias = nullptr;
    int sm_count = 1;
    uint8_t* workspace = nullptr;  // of delta_backward_workspace() bytes
};

// Of both directions, `of_each` of every value head; none without segments.
constexpr int64_t delta_kept_states(const DeltaRuleProblem& p, int segments, int64_t of_each) {
    return segments > 1 ? 2 * p.sequences * p.value_heads * of_each : 0;
}

// Bytes from the workspace's beginning, each a multiple of 256.
struct DeltaBackwardWorkspace {
    int64_t states, grad_states;  // before and behind a chunk, as (values, keys)
    int64_t values, grad_values;  // U' and Y, transposed
    int64_t solved, scores;       // H, P
    int64_t vectors;              // (DELTA_VECTORS, 64) floats a chunk
    int64_t gates;                // a chunk's sums for A_log and dt_bias
    int64_t q, k, norms;          // normalised, and the factors; with l2_norm
    // With segments, per direction, sequence and value head, in fp32, segments counted in the
    // direction: behind the first one, (K, V); then what the next ones but the last make of a
    // state S, M S + L: all L, whose places the states behind them take, and all M by columns.
    int64_t first_states, segment_states;
    int64_t bytes = 0;

    constexpr DeltaBackwardWorkspace(const DeltaRuleProblem& p, const DeltaBackwardConfig& c,
                                     bool l2_norm) {
        const auto take = [&](int64_t count) {
            const int64_t at = bytes;
            bytes += (count + 255) / 256 * 256;
            return at;
        };
        const int64_t chunks = delta_chunks(p);
        const int64_t tokens = l2_norm ? delta_batch(p) * p.heads * p.length : 0;
        states = take(chunks * c.slices * DELTA_VALUES * c.key_dim * 2);
        grad_states = take(chunks * c.slices * DELTA_VALUES * c.key_dim * 2);
        values = take(chunks * c.slices * DELTA_VALUES * DELTA_CHUNK * 2);
        grad_values = take(chunks * c.slices * DELTA_VALUES * DELTA_CHUNK * 2);
        solved = take(chunks * DELTA_CHUNK * DELTA_CHUNK * 2);
        scores = take(chunks * DELTA_CHUNK * DELTA_CHUNK * 2);
        vectors = take(chunks * DELTA_VECTORS * DELTA_CHUNK * 4);
        gates = take(chunks * 2 * 4);
        q = take(tokens * p.key_dim * 2);
        k = take(tokens * p.key_dim * 2);
        norms = take(2 * tokens * 4);
        first_states = take(delta_kept_states(p, c.segments, 1) * p.key_dim * p.value_dim * 4);
        segment_states = take(delta_kept_states(p, c.segments, c.segments - 2) * p.key_dim *
                              (p.value_dim + p.key_dim) * 4);
    }
};

// Slices that the gradients of a chunk take at a time; wider values come in two parts.
constexpr int DELTA_STEP_SLICES = 2;

// Blocks of a value head of a sequence that make states: of the transitions of segments, and of a
// launch, with these where it makes summaries.
constexpr int delta_key_slices(int64_t key_dim) { return int((key_dim + 63) / 64); }
constexpr int delta_transition_blocks(int64_t key_dim, int segments) {
    return segments > 2 ? delta_key_slices(key_dim) * (segments - 2) : 0;
}
constexpr int delta_states_blocks(int slices, int64_t key_dim, int segments, bool summaries) {
    return 2 * slices * (segments > 1 ? segments - 1 : 1) +
           (summaries ? delta_transition_blocks(key_dim, segments) : 0);
}

// Dynamic shared memory of a block.
constexpr int delta_prepare_bytes(int key_dim) { return 2 * 128 * key_dim + (17 + 4) * 1024; }
constexpr int delta_states_bytes(int key_dim) {
    return 3 * (2 * 128 * key_dim + 25 * 1024) + 2 * (128 * key_dim + 8 * 1024) + 2048;
}
constexpr int delta_gradients_bytes(int key_dim, int slices) {
    return (2 + 2 * slices) * 128 * key_dim + 2 * (slices * 24 + 1) * 1024 + (16 + 5) * 1024;
}

// Of the portable kernel of the chunks; 99 KB at most, which every GPU has.
constexpr int portable_delta_gradients_bytes(int key_dim) {
    return 4 * 2 * DELTA_CHUNK * key_dim + 3 * 2 * DELTA_SQUARE + 4 * 1024;
}
static_assert(portable_delta_gradients_bytes(128) <= 99 * 1024);

std::string unsupported_delta_backward(const DeltaRuleProblem& problem,
                                       const DeviceProperties& device);
DeltaBackwardConfig choose_delta_backward(const DeltaRuleProblem& problem,
                                          const DeviceProperties& device);
std::string kernel_name(const DeltaBackwardConfig& config);
std::vector<KernelInfo> delta_backward_kernels();

template <DType dtype, int key_dim>
void launch_delta_prepare(const DeltaBackwardParams& params, Stream stream);
// With segments, `summaries` first, then a scan where there are more than two; then without.
template <DType dtype, int key_dim>
void launch_delta_states(const DeltaBackwardParams& params, bool summaries, Stream stream);
template <DType dtype, int key_dim, int slices>
void launch_delta_gradients(const DeltaBackwardParams& params, Stream stream);
template <int threads, bool portable>
void launch_delta_gate_sums(const DeltaBackwardParams& params, Stream stream);
// Behind the portable kernels of the forward, which keep the states.
template <DType dtype, int key_dim>
void launch_portable_delta_states(const DeltaBackwardParams& params, Stream stream);
template <DType dtype, int key_dim>
void launch_portable_delta_gradients(const DeltaBackwardParams& params, Stream stream);

}  // namespace thunderkittens::recurrent
