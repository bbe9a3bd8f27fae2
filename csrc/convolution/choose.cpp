// Which kernel convolves, and how its blocks cut the work: pure functions of the problem and the
// device.
#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/convolution/convolution.h"

namespace thunderkittens::convolution {
namespace {

constexpr DType DTYPES[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr Layout LAYOUTS[] = {Layout::channels, Layout::tokens, Layout::any};

std::string unsupported_kind(DType dtype, int width, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (std::ranges::find(DTYPES, dtype) == std::end(DTYPES)) {
        return concat("x must be bf16, fp16 or fp32, got ", name_of(dtype));
    }
    if (width < MIN_WIDTH || width > MAX_WIDTH) {
        return concat("weight has ", width, " taps; it must have ", MIN_WIDTH, " to ", MAX_WIDTH);
    }
    return "";
}
// Blocks are counted in 31 bits.
std::string unsupported_size(int64_t batch, int64_t channels, int64_t tokens) {
    // No kernel's block has less than this, or leaves more than half of it unused.
    const double blocks = double(batch) * (double(channels) / 32 + 1) * (double(tokens) / 32 + 1);
    if (blocks < double(std::numeric_limits<int32_t>::max()) / 2) return "";
    return concat("x has some ", blocks * 1024, " elements; at most 1e12 are supported");
}

// How many neighbouring threads lie along a dimension of so many vectors: a warp, or fewer where
// that saves an eighth of them; 8 at least, which access a line, unless there are fewer vectors.
int lanes_of(int64_t vectors) {
    int best = 32;
    for (const int lanes : {16, 8}) {
        if (round_up(vectors, lanes) * 8 < round_up(vectors, best) * 7) best = lanes;
    }
    while (best / 2 >= vectors && best > 1) best /= 2;
    return best;
}

// What a kernel's time is made of, in steps of a thread while all of the device is busy.
struct Cost {
    int blocks_per_sm;
    int most_steps;
    double around;  // what a thread does before its first step and behind its last
    double alone;   // a step while hardly any other block runs
};
// Of so many blocks for each that runs at once. The last ones cost less, as they run alone.
double time_of(double waves, int steps, const Cost& cost) {
    constexpr double UNEQUAL = 0.1;  // of a block's time, by which equal ones differ
    const double whole = std::floor(waves), rest = waves - whole;
    const double last = rest > 0 ? cost.alone + (1 - cost.alone) * rest : 0;
    return (whole + last) * (steps + cost.around) + UNEQUAL * steps;
}
double waves_of(double blocks, const Cost& cost, const DeviceProperties& device) {
    return blocks / (double(cost.blocks_per_sm) * std::max(1, device.sm_count));
}
// The steps of a thread for which a call takes least: few of them cost what is around them, many
// let multiprocessors wait for the last blocks.
template <class Waves>
int best_steps(const Cost& cost, Waves waves) {
    int best = 1;
    for (int steps = 2; steps <= cost.most_steps; ++steps) {
        if (time_of(waves(steps), steps, cost) < time_of(waves(best), best, cost)) best = steps;
    }
    return best;
}
template <class Choice>
Choice with_best_steps(const ConvProblem& p, Choice choice, const Cost& cost,
                       const DeviceProperties& device,
                       Grid (*grid_of)(const ConvProblem&, const Choice&)) {
    choice.steps = best_steps(cost, [&](int steps) {
        choice.steps = steps;
        const Grid grid = grid_of(p, choice);
        return waves_of(double(p.batch * grid.channel_blocks) * double(grid.token_blocks), cost,
                        device);
    });
    return choice;
}

// A block's `along` and `across` elements of the dimensions.
Grid grid_of_blocks(const ConvProblem& p, int lanes, int64_t channels, int64_t tokens) {
    const bool along_tokens = p.layout == Layout::tokens;
    const int64_t rows = THREADS / lanes;
    return {.channel_blocks = ceil_div(p.channels, channels * (along_tokens ? rows : lanes)),
            .token_blocks = ceil_div(p.length, tokens * (along_tokens ? lanes : rows)),
            .lanes = lanes,
            .groups = THREADS / lanes,
            .lane_bits = std::countr_zero(static_cast<unsigned>(lanes))};
}

std::string name_of_kernel(const char* kind, DType dtype, Layout layout, int width, bool portable) {
    return concat(kind, name_of(dtype), '_', strategy_name(layout), '_', width,
                  portable ? "_portable" : "");
}

KernelInfo kernel(const std::string& name, const char* config, const std::string& symbol,
                  bool portable) {
    return {.name = name,
            .config = config,
            .symbol = symbol,
            .arch = portable ? PORTABLE : NATIVE,
            .threads = THREADS};
}
// A name as it is mangled, behind its length.
std::string mangled(std::string_view name) { return concat(name.size(), name); }

std::string symbol_of_kernel(const char* kernel, DType dtype, Layout layout, int width,
                             bool portable) {
    return concat(mangled(kernel), "ILi", int(dtype), "EL<enum>", int(layout), "ELi", width, "ELb",
                  int(portable), 'E');
}

template <class Each>
void for_each_kind(Each each) {
    for (const bool portable : {false, true})
        for (const DType dtype : DTYPES) each(dtype, portable);
}

std::vector<KernelInfo> conv_kernels() {
    std::vector<KernelInfo> list;
    for_each_kind([&](DType dtype, bool portable) {
        for (const Layout layout : LAYOUTS)
            for (int width = MIN_WIDTH; width <= MAX_WIDTH; ++width) {
                list.push_back(
                    kernel(kernel_name(ConvChoice{dtype, layout, width, portable}),
                           "a run of tokens a thread, 256 threads",
                           symbol_of_kernel("causal_conv1d_kernel", dtype, layout, width, portable),
                           portable));
            }
    });
    return list;
}
std::vector<KernelInfo> gradient_kernels() {
    std::vector<KernelInfo> list;
    for_each_kind([&](DType dtype, bool portable) {
        for (const Layout layout : LAYOUTS)
            for (int width = MIN_WIDTH; width <= MAX_WIDTH; ++width) {
                list.push_back(
                    kernel(kernel_name(ConvBackwardChoice{dtype, layout, width, portable}),
                           "a run of tokens a thread, 256 threads",
                           symbol_of_kernel("causal_conv1d_gradient_kernel", dtype, layout, width,
                                            portable),
                           portable));
                list.back().shared_bytes = gradient_shared_bytes(dtype, layout, width);
            }
        list.push_back(kernel(concat("sums_", name_of(dtype), portable ? "_portable" : ""),
                              "sums of the blocks' weights and biases, 256 threads",
                              concat(mangled("causal_conv1d_sums_kernel"), "ILi", int(dtype), "ELb",
                                     int(portable), 'E'),
                              portable));
    });
    return list;
}
std::vector<KernelInfo> update_kernels() {
    std::vector<KernelInfo> list;
    for_each_kind([&](DType dtype, bool portable) {
        for (int width = MIN_WIDTH; width <= MAX_WIDTH; ++width) {
            list.push_back(kernel(kernel_name(UpdateChoice{dtype, width, portable}),
                                  "16 bytes of channels a lane, 256 threads",
                                  concat(mangled("causal_conv1d_update_kernel"), "ILi", int(dtype),
                                         "ELi", width, "ELb", int(portable), 'E'),
                                  portable));
            list.back().shared_bytes = update_shared_bytes(width);
        }
    });
    return list;
}

}  // namespace

std::string unsupported(const ConvProblem& p, const DeviceProperties& device) {
    if (std::string reason = unsupported_kind(p.dtype, p.width, device); !reason.empty()) {
        return reason;
    }
    return unsupported_size(p.batch, p.channels, p.length + p.sequences);
}
std::string unsupported(const UpdateProblem& p, const DeviceProperties& device) {
    if (std::string reason = unsupported_kind(p.dtype, p.width, device); !reason.empty()) {
        return reason;
    }
    return unsupported_size(p.batch, p.channels, p.length);
}

Grid forward_grid(const ConvProblem& p, const ConvChoice& c) {
    return grid_of_blocks(p, c.lanes, forward_channels(p.layout),
                          forward_tokens(p.dtype, p.layout, c.steps));
}
Grid backward_grid(const ConvProblem& p, const ConvBackwardChoice& c) {
    return grid_of_blocks(p, c.lanes, backward_channels(p.dtype, p.layout),
                          backward_tokens(p.dtype, p.layout, p.width, c.steps));
}

ConvChoice choose(const ConvProblem& p, const DeviceProperties& device) {
    const bool tokens = p.layout == Layout::tokens;
    const int64_t vectors = tokens ? ceil_div(p.length, vector_elements(p.dtype))
                                   : ceil_div(p.channels, forward_channels(p.layout));
    const ConvChoice start{p.dtype, p.layout, p.width, !runs_native(device), lanes_of(vectors)};
    const Cost cost{forward_blocks(p.dtype, p.layout), MAX_STEPS, tokens ? 2.0 : 0.9, 0.3};
    return with_best_steps(p, start, cost, device, &forward_grid);
}

ConvBackwardChoice choose_backward(const ConvBackwardProblem& p, const DeviceProperties& device) {
    const bool tokens = p.layout == Layout::tokens;
    const int64_t vectors = tokens ? ceil_div(p.length, vector_elements(p.dtype))
                                   : ceil_div(p.channels, backward_channels(p.dtype, p.layout));
    const ConvBackwardChoice start{p.dtype, p.layout, p.width, !runs_native(device),
                                   lanes_of(vectors)};
    const Cost cost{backward_blocks(p.layout), MAX_STEPS, tokens ? 2.0 : 3.0, 0.5};
    return with_best_steps(p, start, cost, device, &backward_grid);
}

UpdateChoice choose_update(const UpdateProblem& p, const DeviceProperties& device) {
    UpdateChoice choice{p.dtype, p.width, !runs_native(device), p.layout};
    if (p.layout == Layout::any) return choice;
    const Cost cost{UPDATE_BLOCKS, MAX_ROWS, 2.0, 0.3};
    const int64_t columns = ceil_div(p.channels, 32 * vector_elements(p.dtype));
    choice.rows = best_steps(cost, [&](int rows) {
        return waves_of(double(columns * ceil_div(p.batch, rows)) / (THREADS / 32), cost, device);
    });
    return choice;
}

std::string kernel_name(const ConvChoice& c) {
    return name_of_kernel("forward_", c.dtype, c.layout, c.width, c.portable);
}
std::string kernel_name(const ConvBackwardChoice& c) {
    return name_of_kernel("gradient_", c.dtype, c.layout, c.width, c.portable);
}
std::string kernel_name(const UpdateChoice& c) {
    return concat("update_", name_of(c.dtype), '_', c.width, c.portable ? "_portable" : "");
}

static std::string unsupported_gradient(const ConvBackwardProblem& problem,
                                        const DeviceProperties& device) {
    return unsupported(static_cast<const ConvProblem&>(problem), device);
}

static const bool registered =
    register_op<ConvProblem, ConvChoice>("causal_conv1d", "convolution", &conv_kernels,
                                         &unsupported, &choose) &&
    register_op<ConvBackwardProblem, ConvBackwardChoice>("causal_conv1d_backward", "convolution",
                                                         &gradient_kernels, &unsupported_gradient,
                                                         &choose_backward) &&
    register_op<UpdateProblem, UpdateChoice>("causal_conv1d_update", "convolution", &update_kernels,
                                             &unsupported, &choose_update);

}  // namespace thunderkittens::convolution
