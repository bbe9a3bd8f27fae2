// Which kernels run the gradient of the gated delta rule. Pure functions.
#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/gated_delta_rule_backward/backward.h"

namespace thunderkittens::recurrent {

std::string unsupported_delta_backward(const DeltaRuleProblem& p, const DeviceProperties& device) {
    if (std::string reason = unsupported(p, device); !reason.empty()) return reason;
    // Rows of the workspace's tiles are 32-bit coordinates.
    const double chunks = double(delta_batch(p)) * double(p.value_heads) * double(delta_slots(p));
    if (chunks * 256 > 2e9) {
        return concat(
            "the gradient keeps ", int64_t(chunks),
            " states, of every chunk of 64 tokens of every value head; they are too many");
    }
    const int bytes =
        runs_native(device)
            ? std::max(delta_states_bytes(128), delta_gradients_bytes(128, 2))
            : std::max(portable_delta_chain_bytes(128), portable_delta_gradients_bytes(128));
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernels need ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

// The passes over the states, in steps of one chunk. A step takes a block some 1.24 us where it
// waits for its own products alone; more than some 80 blocks that keep states, or 136 that do not,
// wait for memory.
static double steps_of(double blocks, double most, int64_t sms) {
    return std::max(double(ceil_div(int64_t(blocks), sms)), blocks / most);
}
static int segments_of(const DeltaRuleProblem& p, const DeltaBackwardConfig& config,
                       const DeviceProperties& device) {
    const int64_t sms = std::max(1, device.sm_count), heads = p.sequences * p.value_heads;
    const int64_t tokens =
        p.packed ? ceil_div(p.length, std::max<int64_t>(p.sequences, 1)) : p.length;
    const int64_t chunks = std::max<int64_t>(ceil_div(tokens, DELTA_CHUNK), 1);
    const double keeping = 0.6 * double(sms), summing = 1.03 * double(sms);
    // In steps, too: a launch, and the scan per segment.
    constexpr double launch = 3, scan = 1;
    const auto blocks = [&](int segments, bool summaries) {
        return double(heads) * delta_states_blocks(config.slices, p.key_dim, segments, summaries);
    };
    int best = 1;
    double least = double(chunks) * steps_of(blocks(1, false), keeping, sms);
    // Two are made one after the other.
    const int64_t most = std::min<int64_t>(chunks / 4, DELTA_MAX_SEGMENTS);
    for (int segments = 3; segments <= most; ++segments) {
        const double cost =
            double(ceil_div(chunks, segments)) * (steps_of(blocks(segments, true), summing, sms) +
                                                  steps_of(blocks(segments, false), keeping, sms)) +
            2 * launch + scan * (segments - 2);
        if (cost >= least) continue;
        least = cost;
        best = segments;
    }
    return best;
}

DeltaBackwardConfig choose_delta_backward(const DeltaRuleProblem& p,
                                          const DeviceProperties& device) {
    const int64_t slices = ceil_div(p.value_dim, DELTA_VALUES);
    const bool portable = !runs_native(device);
    DeltaBackwardConfig config{.dtype = p.dtype,
                               .key_dim = p.key_dim <= 64 ? 64 : 128,
                               .slices = int(slices == 3 && !portable ? 4 : slices),
                               .portable = portable};
    if (portable) return config;
    config.segments = segments_of(p, config, device);
    // Fewer blocks wait for each other longer than for memory.
    const int64_t blocks = p.sequences * p.value_heads *
                           delta_states_blocks(config.slices, p.key_dim, config.segments, false);
    config.pairs = config.slices % 2 == 0 && 3 * blocks > 2 * int64_t(device.sm_count);
    return config;
}

std::string kernel_name(const DeltaBackwardConfig& c) {
    if (c.portable) return concat("gradients_", name_of(c.dtype), "_k", c.key_dim, "_portable");
    const int slices = std::min(c.slices, DELTA_STEP_SLICES);
    return concat("gradients_", name_of(c.dtype), "_k", c.key_dim, "_v", slices * DELTA_VALUES);
}

std::vector<KernelInfo> delta_backward_kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int key_dim : {64, 128}) {
            const auto enter = [&](std::string name, std::string text, const char* kernel,
                                   int threads, int bytes) {
                KernelInfo info;
                info.name = std::move(name);
                info.config = std::move(text);
                info.symbol =
                    concat(kernel, "DeltaTilesIL<enum>", int(dtype), "ELi", key_dim, "EE");
                info.threads = threads;
                info.shared_bytes = bytes;
                list.push_back(info);
                return &list.back();
            };
            enter(concat("prepare_", name_of(dtype), "_k", key_dim),
                  concat("products within chunks and H, K up to ", key_dim),
                  "delta_prepare_kernelI*", 128, delta_prepare_bytes(key_dim));
            enter(concat("states_", name_of(dtype), "_k", key_dim),
                  concat("states in both directions, 64 columns of values, K up to ", key_dim),
                  "delta_states_kernelI*", 192, delta_states_bytes(key_dim));
            for (const int slices : {1, DELTA_STEP_SLICES}) {
                const DeltaBackwardConfig config{dtype, key_dim, slices};
                KernelInfo* info =
                    enter(kernel_name(config),
                          concat("gradients of a chunk, K up to ", key_dim, ", a step of ",
                                 DELTA_VALUES * slices, " columns of values"),
                          "delta_gradients_kernelI*", 384, delta_gradients_bytes(key_dim, slices));
                info->symbol += concat("ELi", slices, 'E');
            }
        }
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int key_dim : {64, 128}) {
            const auto enter = [&](const char* kernel, const char* text, int bytes) {
                KernelInfo info;
                info.name = concat(kernel, "_", name_of(dtype), "_k", key_dim, "_portable");
                info.config = concat(text, ", K up to ", key_dim);
                info.symbol = concat("delta_portable_", kernel, "_kernelI*DeltaTilesIL<enum>",
                                     int(dtype), "ELi", key_dim, "EE");
                info.arch = PORTABLE;
                info.threads = 256;
                info.shared_bytes = bytes;
                list.push_back(info);
            };
            enter("states", "gradients of states, 64 columns of values for each 4 of 8 warps",
                  portable_delta_chain_bytes(key_dim));
            enter("gradients", "gradients of a chunk, 4 warps for dQ and 4 for dK and dV",
                  portable_delta_gradients_bytes(key_dim));
        }
    }
    for (const bool portable : {false, true}) {
        list.push_back({.name = portable ? "gate_sums_portable" : "gate_sums",
                        .config = "sums of the chunks for A_log and dt_bias",
                        .symbol = concat("delta_gate_sums_kernelILi128ELb", int(portable), 'E'),
                        .arch = portable ? PORTABLE : NATIVE,
                        .threads = 128,
                        .shared_bytes = 2048});
    }
    return list;
}

static const bool registered = register_op<DeltaRuleProblem, DeltaBackwardConfig>(
    "gated_delta_rule_backward", "recurrent", &delta_backward_kernels, &unsupported_delta_backward,
    &choose_delta_backward);

}  // namespace thunderkittens::recurrent
