// The gradients of the recurrent ops: what is chosen for a call, the plain structs of the kernels,
// and the workspace that they share. Host C++ only.
//
// The tokens of each sequence are cut into chunks of 64. A chunk has a slot, the same for all
// heads: of a batch (sequence, chunk) in order, of packed sequences one that is found from
// cu_seqlens alone, begin / 64 + sequence + chunk, so that some slots stay empty. In the order of
// slots the kernels hand over to each other
//   table            where the slot's tokens are
//   gates            of each head and token: cumulative log2 decay within the chunk, and w
//   before, after    of each head and 64 columns of the values the state before the chunk and the
//                    gradient of the state behind it, (64 values, keys) in the operands' dtype
//   units            what those two have been divided by, a power of two: in fp16 alone
//   tokens           of each head and token: gradients of the log decay and of w
//   shares           of each share of the slots and each head the sums of the gradients of A and
//                    dt_bias, and of the skip's columns
#pragma once

#include <type_traits>

#include "csrc/recurrent/common/recurrent.h"

namespace thunderkittens::recurrent {

struct GradientChoice {
    DType dtype = DType::bf16;
    int key_dim = 128;  // 64 or 128, what keys are padded to
    int segments = 1;   // of each sequence, in the passes that make the states
    int splits = 1;     // of the heads of a group, whose gradients of q and k are summed later
    bool portable = false;
};
TK_FIELDS(GradientChoice, dtype, key_dim, segments, splits, portable)

struct GradientParams {
    RecurrentParams forward;  // out is not read; initial: the forward's
    Operand grad_out;         // before the gate
    StateOperand grad_final, grad_initial;
    Operand dq, dk, dv;
    // Null: not wanted.
    TokenOperand grad_token;                      // of dt, or of g
    HeadOperand grad_head, grad_bias, grad_skip;  // of A or decay, of dt_bias, of D
    int key_dim = 128, segments = 1, splits = 1;
    bool portable = false;
};

// Slots of a call, the tokens of their chunks included that are not there.
constexpr int64_t slots_of(const RecurrentProblem& p) {
    return p.sequences > 0 ? p.length / CHUNK + p.sequences
                           : p.batch * ((p.length + CHUNK - 1) / CHUNK);
}
// So many slots are summed by a block, and the shares then by another.
constexpr int64_t SLOTS_OF_SHARE = 16;
constexpr int64_t shares_of(const RecurrentProblem& p) {
    return (slots_of(p) + SLOTS_OF_SHARE - 1) / SLOTS_OF_SHARE;
}
constexpr int64_t share_width(const RecurrentProblem& p) { return 2 + slices_of(p) * VALUES; }
constexpr int64_t heads_per_group(const RecurrentProblem& p) { return p.heads / p.groups; }

// What a slot holds; no sequence: -1.
struct SlotTokens {
    int sequence, begin, length, chunk;  // begin and length of the sequence
};

struct GradientWorkspace {
    SlotTokens* table = nullptr;               // (slots,)
    float* gates = nullptr;                    // (slots, heads, 2, 64)
    void *before = nullptr, *after = nullptr;  // (slots, heads, slices, 64, key_dim)
    float* units = nullptr;                    // (slots, heads, slices, 2); null: bf16
    float* tokens = nullptr;                   // (slots, heads, 2, 64)
    float* skip = nullptr;                     // (slots, heads, slices * 64); null: not wanted
    float* shares = nullptr;                   // (shares, heads, 2 + slices * 64)
    float* partial = nullptr;  // (2, splits, slots, groups, 64, key_dim); null: one split
    // Of both directions; null: one segment.
    float* segment_states = nullptr;  // (2, states, heads, slices, segments, 64, key_dim)
    float* segment_decays = nullptr;  // (2, states, heads, slices, segments)

    // The bytes that it takes, from `memory` on.
    int64_t place(const GradientParams& params, void* memory) {
        const RecurrentProblem& p = params.forward.problem;
        const int64_t slots = slots_of(p), slices = slices_of(p);
        const int64_t state = CHUNK * params.key_dim;
        const int64_t runs = states_of(p) * p.heads * slices * params.segments;
        int64_t bytes = 0;
        const auto take = [&](auto*& part, int64_t count, int64_t size, bool wanted = true) {
            part = nullptr;
            if (!wanted) return;
            if (memory != nullptr) {
                part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(
                    static_cast<char*>(memory) + bytes);
            }
            bytes += (count * size + 127) / 128 * 128;
        };
        take(table, slots, sizeof(SlotTokens));
        take(gates, slots * p.heads * 2 * CHUNK, 4);
        take(before, slots * p.heads * slices * state, 2);
        take(after, slots * p.heads * slices * state, 2);
        take(units, slots * p.heads * slices * 2, 4, p.dtype == DType::fp16);
        take(tokens, slots * p.heads * 2 * CHUNK, 4);
        take(skip, slots * p.heads * slices * VALUES, 4, params.grad_skip.data != nullptr);
        take(shares, shares_of(p) * p.heads * share_width(p), 4);
        take(partial, 2 * params.splits * slots * p.groups * state, 4, params.splits > 1);
        take(segment_states, 2 * runs * state, 4, params.segments > 1);
        take(segment_decays, 2 * runs, 4, params.segments > 1);
        return bytes;
    }
};

// Dynamic shared memory of a block.
constexpr int GRADIENT_STATES_BYTES = 68 * 1024;
constexpr int gradient_chunk_bytes(int key_dim) { return (key_dim == 128 ? 196 : 164) * 1024; }
// Of the portable kernels.
constexpr int portable_gradient_states_bytes(int key_dim) {
    return 2 * (2 * CHUNK * (key_dim + VALUES) + 2 * 4 * CHUNK);
}
constexpr int PORTABLE_GRADIENT_CHUNK_BYTES = 94 * 1024;

std::string unsupported_backward(const RecurrentProblem& problem, const DeviceProperties& device);
GradientChoice choose_backward(const RecurrentProblem& problem, const DeviceProperties& device);
std::string kernel_name(const GradientChoice& choice);
std::vector<KernelInfo> gradient_kernels();

template <bool portable>
void launch_gradient_gates(const GradientParams& params, const GradientWorkspace& w, Stream stream);
template <DType dtype, int key_dim>
void launch_gradient_states(const GradientParams& params, const GradientWorkspace& w, bool sums,
                            Stream stream);
template <bool portable>
void launch_gradient_scan(const GradientParams& params, const GradientWorkspace& w, Stream stream);
template <DType dtype, int key_dim>
void launch_gradient_chunks(const GradientParams& params, const GradientWorkspace& w, int sms,
                            Stream stream);
template <DType dtype, int key_dim>
void launch_portable_gradient_states(const GradientParams& params, const GradientWorkspace& w,
                                     bool sums, Stream stream);
template <DType dtype, int key_dim>
void launch_portable_gradient_chunks(const GradientParams& params, const GradientWorkspace& w,
                                     Stream stream);
template <DType dtype, bool portable>
void launch_gradient_sum_keys(const GradientParams& params, const GradientWorkspace& w,
                              Stream stream);
template <bool portable>
void launch_gradient_finish(const GradientParams& params, const GradientWorkspace& w,
                            Stream stream);

// Of the output behind a gate: z, the output before it, and gradients of both.
struct GateGradient {
    Operand grad_out, out, z, grad_before, grad_z;
};
template <DType dtype, bool portable>
void launch_gradient_gate(const RecurrentProblem& problem, const GateGradient& call, Stream stream);

}  // namespace thunderkittens::recurrent
