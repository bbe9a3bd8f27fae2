// Attention: the plain structs that the ops, the choice of a kernel and the kernels of both
// directions share. Host C++ only. What is of one direction is in forward.h and backward.h.
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

namespace thunderkittens::attention {

// Alignment of masks and ALiBi when the lengths differ: the diagonal of query i is key
//   i + (k_length - q_length) for none and lower_right,      i for upper_left.
enum class Causal : int { none = 0, lower_right = 1, upper_left = 2 };

// Packed sequences (varlen) have batch sequences of at most q_length queries and k_length keys.
struct Problem {
    DType dtype = DType::bf16;
    int64_t batch = 0;
    int64_t q_heads = 0, kv_heads = 0;
    int64_t q_length = 0, k_length = 0;
    int64_t head_dim = 0;
    int64_t value_dim = 0;
    int causal = 0;
    int64_t window_left = -1, window_right = -1;  // keys seen beside the diagonal; -1: all
    bool softcap = false, alibi = false, sink = false, varlen = false;
};

// Query i sees key j iff i + low <= j <= i + high (and j < k_length).
struct Band {
    int low, high;
    int diagonal;  // of query i: key i + diagonal
};
constexpr int UNBOUNDED = 1 << 29;
constexpr Band band(int causal, int64_t window_left, int64_t window_right, int64_t q_length,
                    int64_t k_length) {
    const int64_t diagonal =
        causal == static_cast<int>(Causal::upper_left) ? 0 : k_length - q_length;
    const int64_t right = causal != static_cast<int>(Causal::none) ? 0 : window_right;
    const auto bounded = [](int64_t x) {
        return static_cast<int>(x < -UNBOUNDED ? -UNBOUNDED : x > UNBOUNDED ? UNBOUNDED : x);
    };
    return {window_left < 0 ? -UNBOUNDED : bounded(diagonal - window_left),
            right < 0 ? UNBOUNDED : bounded(diagonal + right), bounded(diagonal)};
}

// Sizes and strides in elements; the last dimension has stride 1. Packed sequences have no batch
// stride: row_stride lies between tokens.
struct Operand {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// What becomes of a score x = q . k before the softmax: softcap * tanh(scale * x / softcap) if
// softcap > 0, else scale * x; minus slope * |i + diagonal - j| with ALiBi. A sink is the logit of
// one more key per query head, whose value is zero.
struct ScoreOptions {
    float scale = 1.0f;                   // positive
    float softcap = 0.0f;                 // 0: none
    const float* alibi_slopes = nullptr;  // (q_heads,) or (batch, q_heads); null: none
    int64_t alibi_batch_stride = 0;
    const float* sink = nullptr;  // (q_heads,); null: none
};

// Packed sequences: sequence b has the tokens cu_q[b] to cu_q[b + 1] - 1 and the keys of cu_k
// likewise. Null for dense batches.
struct Sequences {
    const int* cu_q = nullptr;
    const int* cu_k = nullptr;
    int64_t total_q = 0, total_k = 0;
};

TK_FIELDS(Problem, dtype, batch, q_heads, kv_heads, q_length, k_length, head_dim, value_dim, causal,
          window_left, window_right, softcap, alibi, sink, varlen)

// A section of work tiles, of `blocks` in a head, that go longest first.
struct SectionSearch {
    int64_t blocks, least, most, target;  // heads
    bool one_wave;                        // a section may fill a single wave
};
// The number of heads, from `least` to `most`, that leaves the smallest share of a section out of
// step with whole pairs of waves of the SMs, then the one nearest to `target`.
int best_section(const SectionSearch& search, int sm_count);

// What both directions refuse: sizes, or those and the device; empty, or the reason.
std::string unsupported_sizes(const Problem& problem);
std::string unsupported_problem(const Problem& problem, const DeviceProperties& device);

}  // namespace thunderkittens::attention
