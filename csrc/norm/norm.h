// Normalisation of rows: what a call is (Problem), what is compiled (Config), what a kernel is
// given (Params), and the functions that choose. Host C++ only.
//
// A row is what shares statistics: the last dimension, or a group of its neighbours. A unit is
// eight neighbours of a row, which a thread reads at once, 16 bytes of 16-bit elements. A team is
// the threads that share a row, and a thread of it a lane.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/common/math.h"

namespace thunderkittens::norm {

constexpr int UNIT = 8;                    // elements
constexpr int UNITS = 4;                   // of a lane
constexpr int SPAN = UNIT * UNITS;         // elements of a lane
constexpr int WARP = 32;                   // lanes
constexpr int BLOCK = 128;                 // threads of a block of teams no larger than a warp
constexpr int MAX_LANES = 512;             // of a team that holds its row in registers
constexpr int WIDE_THREADS = 512;          // of a block that holds one long row in registers
constexpr int MOST_SLICES = 8;             // blocks of a cluster that divides a row
constexpr int SLICE_LANES = 256;           // of a block that normalises a slice
constexpr int SLICE = SLICE_LANES * SPAN;  // elements, at most
constexpr int SLICE_STEP = 128;            // elements, of which slices have multiples
constexpr int REDUCE_COLUMNS = 8;          // of a block that adds partial gradients
constexpr int REDUCE_THREADS = 256;
constexpr int STREAM_STAGES = 2;     // batches of rows that are on their way
constexpr int STREAM_THREADS = 512;  // of an SM whose rows stream

struct Problem {
    int64_t rows = 0, width = 0;
    int64_t groups = 1;  // rows of neighbours have different weights
    DType dtype = DType::bf16;
    DType sum_dtype = DType::bf16;  // of the residual, else of x
    bool layer = false, gated = false;
    bool aligned = true;  // rows of whole units that begin at multiples of 16 bytes
};

// How a row is kept between its statistics and the result: in the registers of a team of up to 512
// lanes; in those of a block of 512 threads; not at all, so that it is read several times, from L1
// and L2; in the registers of a cluster, whose blocks have slices of it. Only `memory` takes rows
// that are not aligned, and any width.
enum class Path : int { registers, wide, memory, cluster };
constexpr const char* strategy_name(Path path) {
    constexpr const char* names[] = {"registers", "wide", "memory", "cluster"};
    return static_cast<int>(path) < 4 ? names[static_cast<int>(path)] : nullptr;
}

// Of a kernel. `layer` is that of gradients alone: what normalises takes both in one.
struct Config {
    DType dtype = DType::bf16;
    DType sum_dtype = DType::bf16;
    bool layer = false, gated = false;
    Path path = Path::registers;
    int units = 0;  // of a lane, in a gradient whose rows stream through shared memory
    bool portable = false;
    bool operator==(const Config&) const = default;
};

TK_FIELDS(Problem, rows, width, groups, dtype, sum_dtype, layer, gated, aligned)
TK_FIELDS(Config, dtype, sum_dtype, layer, gated, path, units, portable)

// What is compiled, by number.
struct Types {
    DType dtype, sum_dtype;
    bool gated;
};
constexpr Types TYPES[] = {{DType::bf16, DType::bf16, false}, {DType::bf16, DType::fp32, false},
                           {DType::fp16, DType::fp16, false}, {DType::fp16, DType::fp32, false},
                           {DType::fp32, DType::fp32, false}, {DType::bf16, DType::bf16, true},
                           {DType::fp16, DType::fp16, true},  {DType::fp32, DType::fp32, true}};
constexpr std::size_t COMBINATIONS = std::size(TYPES), UNGATED = 5;
// What normalises: native kernels, then portable ones, which have blocks of long rows instead of
// clusters, without gates.
constexpr std::size_t NATIVE_FORWARDS = 3 * COMBINATIONS;
constexpr std::size_t FORWARD_CONFIGS = NATIVE_FORWARDS + 2 * COMBINATIONS + UNGATED;
constexpr Config forward_at(std::size_t i) {
    const bool portable = i >= NATIVE_FORWARDS;
    if (portable) i -= NATIVE_FORWARDS;
    const Types& t = TYPES[i % COMBINATIONS];
    const Path long_rows = portable ? Path::wide : Path::cluster;
    return {.dtype = t.dtype,
            .sum_dtype = t.sum_dtype,
            .gated = t.gated,
            .path = i < COMBINATIONS       ? Path::registers
                    : i < 2 * COMBINATIONS ? Path::memory
                                           : long_rows,
            .portable = portable};
}
// Gates are those of rms_norm: the first five types have a layer norm. Rows stream where they have
// no gate, four units a lane only of 16 bits. Registers hold the rest, and portable kernels' rows.
constexpr std::size_t GRADIENTS = COMBINATIONS + UNGATED, STREAMED = 24;
constexpr std::size_t GATED = COMBINATIONS - UNGATED;
constexpr std::size_t DIVIDED = 2 * UNGATED;  // by clusters, with two units a lane
constexpr std::size_t BACKWARD_CONFIGS = 3 * GRADIENTS + GATED + STREAMED + DIVIDED;
constexpr Config gradient_of(const Types& t, bool layer, Path path, int units, bool portable) {
    return {.dtype = t.dtype,
            .sum_dtype = t.sum_dtype,
            .layer = layer,
            .gated = t.gated,
            .path = path,
            .units = units,
            .portable = portable};
}
constexpr Config backward_at(std::size_t i) {
    if (i < 3 * GRADIENTS) {
        const std::size_t kind = i % GRADIENTS, variant = i / GRADIENTS;
        return gradient_of(TYPES[kind % COMBINATIONS], kind >= COMBINATIONS,
                           variant == 2 ? Path::registers : Path::memory, 0, variant > 0);
    }
    i -= 3 * GRADIENTS;
    if (i < GATED) return gradient_of(TYPES[UNGATED + i], false, Path::registers, 0, false);
    i -= GATED;
    if (i >= STREAMED) {
        i -= STREAMED;
        return gradient_of(TYPES[i / 2], i % 2 == 1, Path::cluster, 2, false);
    }
    const bool layer = i % 2 == 1;
    i /= 2;
    const int units = i < UNGATED ? 1 : i < 2 * UNGATED ? 2 : 4;
    const Types& t = TYPES[units == 4 ? 2 * (i - 2 * UNGATED) : i % UNGATED];
    return gradient_of(t, layer, Path::registers, units, false);
}

// A tensor by rows: its strides in elements along the dimensions of Rows, the innermost first.
struct Operand {
    const void* data = nullptr;
    int64_t stride[3] = {};
};
struct Rows {
    int64_t count = 0;
    int dims = 1;
    int64_t size[2] = {1, 1};  // of the first two
};

struct Params {
    Rows rows;
    int64_t width = 0, groups = 1;
    int64_t row_units = 0;      // units of a row
    Operand x, residual, gate;  // x of a gradient is what was normalised
    const void* weight = nullptr;
    const void* bias = nullptr;
    const void* seed = nullptr;  // of the dropout
    void* out = nullptr;         // contiguous, and so is the sum
    void* sum = nullptr;
    float eps = 0, offset = 0;
    float scale = 1;       // of what is not dropped
    uint32_t dropped = 0;  // the numbers of 16 bits below this
    bool layer = false, gate_first = false;
    bool wide_weight = false;  // fp32
    bool aligned = false;      // see Problem
    int lanes = 0;             // of a team
    int teams = 1;             // of a block
    int slices = 1;            // of a row, each of a block of a cluster
    int slice = 0;             // their elements
};

struct BackwardParams {
    Params forward;
    Operand grad_out, grad_sum;
    void* grad_x = nullptr;         // of the dtype of grad_out
    void* grad_residual = nullptr;  // of that of the sum
    void* grad_gate = nullptr;
    float* partials = nullptr;       // of the weight: (count, pitch)
    float* partials_bias = nullptr;  // the same
    void* grad_weight = nullptr;
    void* grad_bias = nullptr;
    DType weight_dtype = DType::fp32;
    int64_t count = 0, pitch = 0;
    int64_t steps = 0;     // rows that a team takes
    uint32_t between = 0;  // rows between two of them
    int blocks = 0;
};

// How many lanes a team has: as many as the row fills, within a warp a power of two.
constexpr int lanes_of(int64_t width, int units = UNITS) {
    const int64_t lanes = ceil_div(width, UNIT * units);
    if (lanes > WARP) return static_cast<int>(std::min<int64_t>(round_up(lanes, WARP), 1 << 20));
    int power = 1;
    while (power < lanes) power *= 2;
    return power;
}
// Units of a lane that holds its row in registers. The gradient of LayerNorm has two sums for each
// element, and half as many elements a lane leave room for twice the lanes.
constexpr int units_of(const Config& config) {
    if (config.units > 0) return config.units;
    return config.layer ? UNITS / 2 : UNITS;
}
// Rows of a batch of a gradient whose rows stream: of units of a lane, 64 bytes of what is
// normalised; of a slice one row. How many batches are on their way, and the bytes of shared memory
// that its threads take, with their weights.
constexpr int streamed_rows(const Config& config) {
    if (config.path == Path::cluster) return 1;
    return std::max(1, (config.sum_dtype == DType::fp32 ? 2 : 4) / std::max(config.units, 1));
}
constexpr int bytes_of_element(const Config& config) {
    return (config.sum_dtype == DType::fp32 ? 4 : 2) + (config.dtype == DType::fp32 ? 4 : 2);
}
constexpr int streamed_stages(const Config& config) {
    if (config.path != Path::cluster) return STREAM_STAGES;
    return bytes_of_element(config) == 4 ? 4 : bytes_of_element(config) == 6 ? 3 : 2;
}
constexpr int streamed_bytes(const Config& config, int threads) {
    const int rows = streamed_stages(config) * streamed_rows(config);
    const int bytes = threads * UNIT * config.units * (rows * bytes_of_element(config) + 4);
    // A launch raises the limit of what is more than 48 KB, and the sums of a batch come on top.
    constexpr int LIMIT = 48 * 1024, SUMS = 1024;
    return bytes > LIMIT - SUMS && bytes <= LIMIT ? LIMIT + 16 : bytes;
}
// Blocks that divide a row, a power of two, and the elements of each.
constexpr int slices_of(int64_t width) {
    int slices = 1;
    while (slices < MOST_SLICES && slices * int64_t{SLICE} < width) slices *= 2;
    return slices;
}
constexpr int64_t slice_of(int64_t width) {
    return round_up(ceil_div(width, slices_of(width)), SLICE_STEP);
}
constexpr int lanes_of(const Config& config, int64_t width) {
    if (config.path == Path::wide) return WIDE_THREADS;
    if (config.path == Path::cluster) {
        // More than a warp, whose teams are others.
        const int units = config.units > 0 ? config.units : UNITS;
        return std::max(2 * WARP, lanes_of(slice_of(width), units));
    }
    const int units = config.path == Path::registers ? units_of(config) : UNITS;
    return std::min(lanes_of(width, units), MAX_LANES);
}
constexpr int threads_of(int lanes) { return lanes <= WARP ? BLOCK : lanes; }
// Teams of a block.
constexpr int teams_of(int lanes) { return lanes <= WARP ? BLOCK / lanes : 1; }

// The longest rows that are held in registers.
constexpr int64_t most_in_block(const Config& config) {
    return int64_t{WIDE_THREADS} * SPAN * (config.sum_dtype == DType::fp32 ? 2 : 4);
}
constexpr int64_t MOST_IN_CLUSTER = int64_t{MOST_SLICES} * SLICE;
// The most lanes of a block that normalises.
constexpr int most_lanes_of_forward(const Config& config) {
    if (config.path == Path::cluster) return SLICE_LANES;
    const bool gated_row = config.gated && config.path == Path::registers && !config.portable;
    return gated_row ? SLICE_LANES : MAX_LANES;
}
// The most lanes whose registers hold a row and its share of the weight's gradient.
constexpr int most_lanes_of_gradient(const Config& config) {
    if (config.layer || config.units > 0) return MAX_LANES;
    return config.gated || config.sum_dtype == DType::fp32 ? MAX_LANES / 2 : MAX_LANES;
}

// Threads of an SM whose registers hold a gradient.
constexpr int resident_threads(const Config& config) {
    if (config.path == Path::memory) return 1024;
    if (config.units > 0) return STREAM_THREADS;
    return most_lanes_of_gradient(config) == MAX_LANES ? 512 : 256;
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Config choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::vector<KernelInfo> kernels();

std::string unsupported_backward(const Problem& problem, const DeviceProperties& device);
Config choose_backward(const Problem& problem, const DeviceProperties& device);
std::vector<KernelInfo> backward_kernels();

template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_backward(const BackwardParams& params, Stream stream);
template <bool portable>
void launch_reduce(const BackwardParams& params, Stream stream);

}  // namespace thunderkittens::norm
