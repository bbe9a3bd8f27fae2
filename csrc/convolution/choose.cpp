// Which kernel convolves, and how its blocks cut the work: pure functions of the problem and the
// device.
#include <algorithm>
#include <bit>
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
constexpr int BLOCKS_PER_SM = 2;

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

// How many neighbouring threads lie along the adjacent dimension: so many that the fewest blocks
// suffice, and of those the first.
template <class Choice>
int fewest_blocks(const ConvProblem& p, Choice choice, std::initializer_list<int> lanes,
                  Grid (*grid_of)(const ConvProblem&, const Choice&)) {
    int best = *lanes.begin();
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (const int n : lanes) {
        choice.lanes = n;
        const Grid grid = grid_of(p, choice);
        const int64_t blocks = grid.channel_blocks * grid.token_blocks;
        if (blocks < fewest) best = n, fewest = blocks;
    }
    return best;
}
// Lanes of a sum over tokens are those of a warp at most.
template <class Choice>
int lanes_of(const ConvProblem& p, const Choice& choice,
             Grid (*grid_of)(const ConvProblem&, const Choice&)) {
    if (p.layout == Layout::tokens) {
        return fewest_blocks(p, choice, {32, 16, 8, 4, 2, 1}, grid_of);
    }
    return fewest_blocks(p, choice, {32, 16, 8, 64, 128, 256, 4, 2, 1}, grid_of);
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

KernelInfo kernel(const std::string& name, const char* config, const std::string& source,
                  const std::string& symbol, bool portable) {
    return {.name = name,
            .config = config,
            .source = source + (portable ? "_sm80" : ""),
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
                           "eight tokens or vectors of tokens a thread, 256 threads",
                           concat("causal_conv1d_", name_of(dtype)),
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
                list.push_back(kernel(
                    kernel_name(ConvBackwardChoice{dtype, layout, width, portable}),
                    "a run of tokens a thread, 256 threads",
                    concat("causal_conv1d_gradient_", name_of(dtype), '_', strategy_name(layout)),
                    symbol_of_kernel("causal_conv1d_gradient_kernel", dtype, layout, width,
                                     portable),
                    portable));
                list.back().shared_bytes = gradient_shared_bytes(dtype, layout, width);
            }
        list.push_back(kernel(concat("sums_", name_of(dtype), portable ? "_portable" : ""),
                              "sums of the blocks' weights and biases, 256 threads",
                              "causal_conv1d_sums",
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
                                  "four channels a thread, 256 threads", "causal_conv1d_update",
                                  concat(mangled("causal_conv1d_update_kernel"), "ILi", int(dtype),
                                         "ELi", width, "ELb", int(portable), 'E'),
                                  portable));
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
    return grid_of_blocks(p, c.lanes, forward_channels(p.dtype, p.layout),
                          forward_tokens(p.dtype, p.layout));
}
Grid backward_grid(const ConvProblem& p, const ConvBackwardChoice& c) {
    return grid_of_blocks(p, c.lanes, backward_channels(p.dtype, p.layout),
                          backward_tokens(p.dtype, p.layout, p.width, c.steps));
}

ConvChoice choose(const ConvProblem& p, const DeviceProperties& device) {
    ConvChoice choice{p.dtype, p.layout, p.width, !runs_native(device)};
    choice.lanes = lanes_of(p, choice, &forward_grid);
    return choice;
}

// As many steps of a thread as make the blocks end together, and no more work than has to be done
// twice: a run costs what it does before its first token and behind its last.
ConvBackwardChoice choose_backward(const ConvBackwardProblem& p, const DeviceProperties& device) {
    constexpr int MOST_STEPS = 16;
    constexpr double AROUND = 8;  // a run, in tokens
    ConvBackwardChoice best{p.dtype, p.layout, p.width, !runs_native(device)};
    double least = std::numeric_limits<double>::max();
    const int64_t at_once = int64_t{BLOCKS_PER_SM} * std::max(1, device.sm_count);
    for (int steps = 1; steps <= MOST_STEPS; ++steps) {
        ConvBackwardChoice choice = best;
        choice.steps = steps;
        choice.lanes = lanes_of(p, choice, &backward_grid);
        const Grid grid = backward_grid(p, choice);
        const int64_t blocks = p.batch * grid.channel_blocks * grid.token_blocks;
        const int tokens = backward_tokens(p.dtype, p.layout, p.width, steps);
        const double cost = double(std::max<int64_t>(1, ceil_div(blocks, at_once))) *
                            (tokens + 2 * (p.width - 1) + AROUND);
        if (cost < least) best = choice, least = cost;
    }
    return best;
}

UpdateChoice choose_update(const UpdateProblem& p, const DeviceProperties& device) {
    return {p.dtype, p.width, !runs_native(device)};
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
