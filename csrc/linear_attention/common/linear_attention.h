// Linear attention: what its calls are (problems), what is chosen for them, and the plain structs
// that the ops, the choice and the kernels share. Host C++ only.
//
// Based has q and k of 16 elements per token. A state in memory is numerator (153, value_dim), the
// sum of phi(k) v^T, and denominator (153,), the sum of phi(k), in fp32, with
//   row 0           1
//   rows 1 to 16    x_a / 2
//   rows 17 to 32   x_a^2 / (4 sqrt 2)
//   rows 33 to 152  x_a x_b / 4 for a < b: (0, 1), (0, 2), ..., (14, 15)
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

namespace thunderkittens::linear_attention {

constexpr int ELEMENTS = 16;   // of a token of q and k
constexpr int FEATURES = 153;  // of a token in memory
constexpr int CHUNK = 64;      // tokens that a block works on at a time
constexpr int VALUES = 64;     // columns of values that a block works on

struct BasedProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0, length = 0;
    int64_t value_dim = 64;
    bool normalize = false;
    bool denominator = false;  // the denominator's state is summed: it normalises or is returned
};

// The chunks of a head are split into segments, each a block's work, until the blocks fill the GPU.
struct BasedChoice {
    DType dtype = DType::bf16;
    bool denominator = false;
    bool portable = false;  // the kernels for every GPU from compute capability 8.0 on
    int segments = 1;
};
struct BasedBackwardChoice : BasedChoice {};

TK_FIELDS(BasedProblem, dtype, batch, heads, length, value_dim, normalize, denominator)
TK_FIELDS(BasedChoice, dtype, denominator, portable, segments)
constexpr int64_t chunks_of(const BasedProblem& p) { return (p.length + CHUNK - 1) / CHUNK; }
constexpr int64_t slices_of(const BasedProblem& p) { return (p.value_dim + VALUES - 1) / VALUES; }
constexpr int64_t padded_length(const BasedProblem& p) { return chunks_of(p) * CHUNK; }

// (batch, heads, length, columns); strides in elements, the last dimension has stride 1.
struct Operand {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// Contiguous fp32; null where there is none.
struct StatePointers {
    float* numerator = nullptr;
    float* denominator = nullptr;
};

struct BasedParams {
    BasedProblem problem;
    bool portable = false;
    int segments = 1;
    Operand q, k, v, out;
    StatePointers initial, final;       // of each head; for kernels: of each segment
    float* row_denominators = nullptr;  // (batch, heads, length), eps included; may be null
    float eps = 0.0f;
    float* workspace = nullptr;  // of forward_workspace() or backward_workspace() floats
};

struct BasedBackwardParams {
    BasedParams forward;  // its initial is the forward's; final is the gradient of its final state
    Operand grad_out;
    const float* row_denominators = nullptr;
    StatePointers grad_initial;
    Operand dq, dk, dv;
};

// States of all segments, numerators first.
constexpr int64_t state_floats(const BasedProblem& p, int64_t segments) {
    const int64_t states = p.batch * p.heads * segments;
    return states * FEATURES * p.value_dim + (states * FEATURES + 3) / 4 * 4;
}
constexpr int64_t forward_workspace(const BasedProblem& p, int64_t segments) {
    return segments > 1 ? state_floats(p, segments) : 0;
}
// States in both directions; weights of the tokens; gradients of q and k per slice of the values.
constexpr int64_t token_weight_floats(const BasedProblem& p) {
    return p.denominator ? 2 * p.batch * p.heads * padded_length(p) : 0;
}
constexpr int64_t partial_floats(const BasedProblem& p) {
    const int64_t slices = slices_of(p);
    return slices > 1 ? slices * p.batch * p.heads * p.length * ELEMENTS : 0;
}
constexpr int64_t backward_workspace(const BasedProblem& p, int64_t segments) {
    return (segments > 1 ? 2 * state_floats(p, segments) : 0) + token_weight_floats(p) +
           2 * partial_floats(p);
}

// Dynamic shared memory of a block.
constexpr int FORWARD_BYTES = 70 * 1024, SEGMENT_STATES_BYTES = 52 * 1024,
              BACKWARD_BYTES = 102 * 1024;
// Of portable kernels: two blocks fit the 100 KB that a multiprocessor has at least, of which the
// system takes 1 KB for each.
constexpr int PORTABLE_FORWARD_BYTES = 48 * 1024, PORTABLE_SEGMENT_STATES_BYTES = 27 * 1024,
              PORTABLE_BACKWARD_BYTES = 48 * 1024;

std::string unsupported(const BasedProblem& problem, const DeviceProperties& device);
BasedChoice choose(const BasedProblem& problem, const DeviceProperties& device);
std::string kernel_name(const BasedChoice& choice);
std::vector<KernelInfo> based_kernels();
BasedBackwardChoice choose_backward(const BasedProblem& problem, const DeviceProperties& device);
std::string kernel_name(const BasedBackwardChoice& choice);
std::vector<KernelInfo> based_backward_kernels();

// What the kernels of sums add up: phi(x)^T v, with weights of the tokens or without.
struct SegmentStatesParams {
    Operand x, v;
    float* weights = nullptr;  // (values and denominator, batch, heads, padded length)
    StatePointers states;
};

// What the kernels of the backward are given beside the call.
struct BackwardKernelParams {
    StatePointers before, after;  // of each segment; may be null
    StatePointers grad_initial;   // written by the kernel where there is one segment
    float* weights = nullptr;     // as in SegmentStatesParams
    float *partial_dq = nullptr, *partial_dk = nullptr;  // (slices, batch, heads, length, 16)
};

// Each for Hopper, and for every GPU from compute capability 8.0 on.
template <DType dtype>
void launch_based_forward(const BasedParams& params, Stream stream);
template <DType dtype>
void launch_based_segment_states(const BasedParams& params, const SegmentStatesParams& call,
                                 Stream stream);
struct ScanParams {
    StatePointers states, initial, final;
    bool backwards = false;
};
template <bool denominator>
void launch_based_scan(const BasedParams& params, const ScanParams& scan, Stream stream);
template <DType dtype>
void launch_based_preprocess(const BasedBackwardParams& params, float* weights, Stream stream);
template <DType dtype>
void launch_based_query_gradient(const BasedBackwardParams& params,
                                 const BackwardKernelParams& kernel, Stream stream);
template <DType dtype>
void launch_based_key_gradient(const BasedBackwardParams& params,
                               const BackwardKernelParams& kernel, Stream stream);
template <DType dtype>
void launch_based_reduce_partials(const BasedBackwardParams& params,
                                  const BackwardKernelParams& kernel, Stream stream);
template <DType dtype>
void launch_portable_based_forward(const BasedParams& params, Stream stream);
template <DType dtype>
void launch_portable_based_segment_states(const BasedParams& params,
                                          const SegmentStatesParams& call, Stream stream);
template <bool denominator>
void launch_portable_based_scan(const BasedParams& params, const ScanParams& scan, Stream stream);
template <DType dtype>
void launch_portable_based_preprocess(const BasedBackwardParams& params, float* weights,
                                      Stream stream);
template <DType dtype>
void launch_portable_based_query_gradient(const BasedBackwardParams& params,
                                          const BackwardKernelParams& kernel, Stream stream);
template <DType dtype>
void launch_portable_based_key_gradient(const BasedBackwardParams& params,
                                        const BackwardKernelParams& kernel, Stream stream);
template <DType dtype>
void launch_portable_based_reduce_partials(const BasedBackwardParams& params,
                                           const BackwardKernelParams& kernel, Stream stream);

}  // namespace thunderkittens::linear_attention
