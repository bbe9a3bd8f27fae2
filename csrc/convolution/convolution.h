// Causal depthwise convolutions of few taps along a sequence: what a call is (Problem), what a
// kernel is compiled for (Config), its arguments (Params), and the functions that choose. Host C++
// only.
//
//   out[t] = act(bias + sum over w < width of weight[w] x[t - width + 1 + w])
//
// in each of the channels. Tokens before a sequence are those of its state, the last width - 1
// inputs, or zero.
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

namespace thunderkittens::convolution {

constexpr int THREADS = 256;
constexpr int MIN_WIDTH = 2, MAX_WIDTH = 4;

// Which dimension is adjacent in memory, and aligned so that a thread reads and writes vectors of
// it; `any` layout is accessed by elements.
enum class Layout { channels, tokens, any };
constexpr const char* strategy_name(Layout layout) {
    switch (layout) {
        case Layout::channels: return "channels";
        case Layout::tokens: return "tokens";
        case Layout::any: return "any";
    }
    return nullptr;
}

struct ConvProblem {
    int64_t batch = 1, channels = 0, length = 0;
    int64_t sequences = 1;
    int width = 4;
    DType dtype = DType::bf16;
    Layout layout = Layout::channels;
    bool return_state = false;
};
struct ConvBackwardProblem : ConvProblem {};
struct UpdateProblem {
    int64_t batch = 0, channels = 0, length = 1;
    int width = 4;
    DType dtype = DType::bf16;
    Layout layout = Layout::any;  // of states, of one token; of channels alike, of x and out
};

// A kernel, and how a block of it cuts its work: `lanes` neighbouring threads lie along the
// dimension that is adjacent in memory, the others along the other one.
struct ConvChoice {
    DType dtype = DType::bf16;
    Layout layout = Layout::channels;
    int width = 4;
    bool portable = false;  // the kernel for every GPU from compute capability 8.0 on
    int lanes = 32;
    int steps = 1;  // of a thread, see forward_tokens()
};
struct ConvBackwardChoice {
    DType dtype = DType::bf16;
    Layout layout = Layout::channels;
    int width = 4;
    bool portable = false;
    int lanes = 32;
    int steps = 1;  // of a thread, see backward_tokens()
};
// Of one token, by vectors: how states are adjacent, and how many sequences a warp goes along.
struct UpdateChoice {
    DType dtype = DType::bf16;
    int width = 4;
    bool portable = false;
    Layout layout = Layout::any;
    int rows = 1;
};

TK_FIELDS(ConvProblem, batch, channels, length, sequences, width, dtype, layout, return_state)
TK_FIELDS(UpdateProblem, batch, channels, length, width, dtype, layout)
TK_FIELDS(ConvChoice, dtype, layout, width, portable, lanes, steps)
TK_FIELDS(ConvBackwardChoice, dtype, layout, width, portable, lanes, steps)
TK_FIELDS(UpdateChoice, dtype, width, portable, layout, rows)

// What a thread works on, `steps` times. Forward: four neighbouring channels (or one) of as many
// tokens as it has on their way, 64 bytes of them or 16 tokens; or a vector of 16 bytes of tokens,
// of which FORWARD_VECTORS are on their way.
constexpr int FORWARD_VECTORS = 4, MAX_STEPS = 64;
constexpr int vector_elements(DType dtype) { return 16 / size_in_bytes(dtype); }
constexpr int rows_ahead(int bytes) { return bytes < 8 ? 16 : 64 / bytes; }
constexpr int forward_channels(Layout layout) { return layout == Layout::channels ? 4 : 1; }
constexpr int forward_tokens(DType dtype, Layout layout, int steps) {
    if (layout == Layout::tokens) return steps * vector_elements(dtype);
    return steps * rows_ahead(forward_channels(layout) * size_in_bytes(dtype));
}
// Blocks that a multiprocessor takes at once.
constexpr int forward_blocks(DType dtype, Layout layout) {
    if (layout != Layout::channels) return 4;
    return dtype == DType::fp32 ? 2 : 3;
}
// Backward: 8 bytes of channels (or one) of tokens in batches of four, of which the last gives
// width - 1 fewer than it takes; or a vector of tokens, of which BACKWARD_VECTORS are on their way.
constexpr int BATCH_TOKENS = 4, BACKWARD_VECTORS = 3;
constexpr int STAGES = 3;  // batches of tokens on their way, where cp.async can bring them
constexpr int backward_channels(DType dtype, Layout layout) {
    return layout == Layout::channels ? 8 / size_in_bytes(dtype) : 1;
}
constexpr int backward_tokens(DType dtype, Layout layout, int width, int steps) {
    return layout == Layout::tokens ? steps * vector_elements(dtype)
                                    : steps * BATCH_TOKENS - (width - 1);
}

constexpr int backward_blocks(Layout layout) { return layout == Layout::tokens ? 2 : 2; }

// Dynamic shared memory: a ring of batches of x and the gradient of out, of each thread its own,
// and after them the sums of the threads.
constexpr int gradient_shared_bytes(DType dtype, Layout layout, int width) {
    if (layout == Layout::tokens) return 0;
    const int channels = backward_channels(dtype, layout);
    const int bytes = channels * size_in_bytes(dtype);
    const int ring = bytes < 4 ? 0 : STAGES * BATCH_TOKENS * 2 * THREADS * bytes;
    const int sums = 4 * THREADS * channels * (width + 1);
    return ring > sums ? ring : sums;
}

// A step: sequences on their way to a warp, in a ring of its own in shared memory, with 16 bytes of
// each of width - 1 inputs and the token of a lane; the most sequences of a warp; blocks that a
// multiprocessor takes at once.
constexpr int UPDATE_STAGES = 3, MAX_ROWS = 32, UPDATE_BLOCKS = 2;
constexpr int update_shared_bytes(int width) { return UPDATE_STAGES * THREADS * 16 * width; }

// The tiles of a call: blocks of so many channels and tokens, of each sequence of the batch. All of
// them are counted in 31 bits.
struct Grid {
    int64_t channel_blocks = 1, token_blocks = 1;
    int lanes = 32, groups = THREADS / 32;
    int lane_bits = 5;  // of a thread's number, that say which lane it is
};
Grid forward_grid(const ConvProblem& problem, const ConvChoice& choice);
Grid backward_grid(const ConvProblem& problem, const ConvBackwardChoice& choice);

// (batch, channels, tokens), (sequences, channels, width - 1); strides in elements.
struct Operand {
    void* data = nullptr;
    int64_t batch_stride = 0, channel_stride = 0, token_stride = 0;
};
// Contiguous from a multiple of 16 bytes on, of the dtype of x or fp32.
struct Coefficients {
    const void* data = nullptr;
    bool wide = false;  // fp32
};
struct Sequences {
    const int32_t* edges = nullptr;  // cumulative lengths (count + 1), or nullptr: a batch of them
    int64_t count = 0;
};

struct Params {
    Operand x, out;
    Operand initial, final;  // states; data is nullptr where there is none
    Coefficients weight, bias;
    Sequences sequences;
    int64_t batch = 1, channels = 0, length = 0;
    Grid grid;
    int steps = 1;
    bool silu = false;
};
// x and the initial state are those of the forward, `out` is the gradient of out.
struct BackwardParams {
    Params forward;           // its final is the gradient of the final state
    Operand dx, dinitial;     // data is nullptr where it is not wanted
    float* sums = nullptr;    // (blocks of tokens, channels, width + 1), of weights and bias
    void* dweight = nullptr;  // contiguous; null where it is not wanted
    void* dbias = nullptr;
};
// Several tokens of each of a batch of sequences, of which state[slots[b]] is the state.
struct UpdateParams {
    Operand x, out, state;
    Coefficients weight, bias;
    const int32_t* slots = nullptr;  // or nullptr: in order
    int64_t batch = 0, channels = 0, length = 1, state_length = 0, state_count = 0;
    Layout layout = Layout::any;
    int rows = 1;
    bool silu = false;
};

std::string unsupported(const ConvProblem& problem, const DeviceProperties& device);
std::string unsupported(const UpdateProblem& problem, const DeviceProperties& device);
ConvChoice choose(const ConvProblem& problem, const DeviceProperties& device);
ConvBackwardChoice choose_backward(const ConvBackwardProblem& problem,
                                   const DeviceProperties& device);
UpdateChoice choose_update(const UpdateProblem& problem, const DeviceProperties& device);
std::string kernel_name(const ConvChoice& choice);
std::string kernel_name(const ConvBackwardChoice& choice);
std::string kernel_name(const UpdateChoice& choice);

// Run the kernel on the stream; sum_partials adds up what the gradient's blocks have found.
template <DType dtype, Layout layout, int width, bool portable>
void convolve(const Params& params, Stream stream);
template <DType dtype, Layout layout, int width, bool portable>
void gradient(const BackwardParams& params, Stream stream);
template <DType dtype, bool portable>
void sum_partials(const BackwardParams& params, int width, Stream stream);
template <DType dtype, int width, bool portable>
void update(const UpdateParams& params, Stream stream);

}  // namespace thunderkittens::convolution
