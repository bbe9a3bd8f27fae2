// Which kernel runs a problem of the gated delta rule. Pure functions.
#include <algorithm>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/gated_delta_rule/walk.h"

namespace thunderkittens::recurrent {

std::string unsupported(const DeltaRuleProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16)
        return concat("operands must be bf16 or fp16, got ", name_of(p.dtype));
    if (p.key_dim < 8 || p.key_dim > DELTA_MAX_KEY_DIM || p.key_dim % 8 != 0) {
        return concat("the key dimension must be a multiple of 8 from 8 to ", DELTA_MAX_KEY_DIM,
                      ", got ", p.key_dim);
    }
    if (p.value_dim < 8 || p.value_dim > DELTA_MAX_VALUE_DIM || p.value_dim % 8 != 0) {
        return concat("the value dimension must be a multiple of 8 from 8 to ", DELTA_MAX_VALUE_DIM,
                      ", got ", p.value_dim);
    }
    if (p.heads < 0 || p.value_heads < 0 ||
        (p.heads == 0 ? p.value_heads != 0 : p.value_heads % p.heads != 0)) {
        return concat("the value heads must be a multiple of the heads, got ", p.value_heads,
                      " and ", p.heads);
    }
    constexpr int64_t limit = int64_t{1} << 30;
    if (std::min(p.sequences, p.length) < 0 || std::max(p.sequences, p.length) > limit) {
        return concat("sizes must be in [0, ", limit, "], got ", p.sequences, " sequences, length ",
                      p.length);
    }
    const double slices = double(ceil_div(p.value_dim, DELTA_VALUES));
    if (double(p.sequences) * double(p.value_heads) * slices * DELTA_MAX_SEGMENTS > 2e9) {
        return concat(p.sequences, " sequences times ", p.value_heads, " value heads are too many");
    }
    const int bytes = runs_native(device)
                          ? std::max(delta_shared_bytes(128, 1), delta_shared_bytes(128, 2))
                          : portable_delta_chain_bytes(128);
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernels need ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

// Cycles of a multiprocessor at 1.75 GHz. Of a chunk: of two consumers, which fill each other's
// waits, of one alone, which is done sooner, and of a block that makes the summary of a segment; of
// what is prepared before, of a chunk of a key head and of each of its value heads; of one more
// launch, and of those of segments; of the scan, for each segment. As measured on an H200; those of
// portable kernels are expected on an A100.
namespace {
struct DeltaCosts {
    double two, one, summary;
    int64_t summary_columns;
    double keys_before, values_before, launch, segment_launches, scan;
};
constexpr DeltaCosts FUSED = {7600, 4250, 2850, DELTA_VALUES, 0, 0, 0, 6000, 5000},
                     WALK = {3050, 1970, 2155, DELTA_SUMMARY_CONSUMERS* DELTA_VALUES, 1900, 1650,
                             3000, 6000, 5000},
                     ON_AMPERE = {5500, 3300, 2200, DELTA_VALUES, 0, 0, 0, 12000, 3000};
constexpr double BYTES_PER_CYCLE = 2300;  // of memory, of a whole GPU

// Of a walk: all that it reads and writes.
double memory_cycles(const DeltaRuleProblem& p, int64_t chunks) {
    const double keys = double(p.heads) * 2 * 2 * DELTA_CHUNK * double(p.key_dim);
    const double values = double(p.value_heads) * 2 * 2 * DELTA_CHUNK * double(p.value_dim);
    const double prepared = double(p.value_heads) * (2 * 2 * DELTA_SQUARE + 1024);
    return double(p.sequences) * double(chunks) * (keys + values + prepared) / BYTES_PER_CYCLE;
}
}  // namespace

DeltaRuleConfig choose(const DeltaRuleProblem& p, const DeviceProperties& device) {
    const bool portable = !runs_native(device);
    const int64_t sms = std::max(1, device.sm_count), heads = p.sequences * p.value_heads;
    const int64_t tokens =
        p.packed ? ceil_div(p.length, std::max<int64_t>(p.sequences, 1)) : p.length;
    const int64_t chunks = std::max<int64_t>(ceil_div(tokens, DELTA_CHUNK), 1);
    DeltaRuleConfig best{
        .dtype = p.dtype, .key_dim = p.key_dim <= 64 ? 64 : 128, .portable = portable};
    double least = std::numeric_limits<double>::infinity();
    const int64_t most = std::clamp<int64_t>(chunks / 4, 1, DELTA_MAX_SEGMENTS);
    const auto rounds = [&](int64_t blocks) { return double(ceil_div(blocks, sms)); };
    for (const bool walk : {false, true}) {
        if (walk && portable) continue;
        const DeltaCosts& costs = portable ? ON_AMPERE : walk ? WALK : FUSED;
        for (const int consumers : {2, 1}) {
            const int64_t columns = consumers * DELTA_VALUES;
            if (consumers == 2 && p.value_dim <= DELTA_VALUES) continue;
            for (int segments = 1; segments <= most; ++segments) {
                const double length = double(ceil_div(chunks, segments));
                double cost = rounds(heads * segments * ceil_div(p.value_dim, columns)) * length *
                              (consumers == 2 ? costs.two : costs.one);
                if (walk) {
                    const double share = double(chunks) / double(sms);
                    cost =
                        std::max(cost, memory_cycles(p, chunks)) + costs.launch +
                        std::max(double(p.sequences * p.heads) * share, 4.0) * costs.keys_before +
                        std::max(double(heads) * share, 4.0) * costs.values_before;
                }
                if (segments > 1) {
                    const int64_t slices = ceil_div(p.value_dim, costs.summary_columns) +
                                           ceil_div(p.key_dim, costs.summary_columns);
                    const double scans =
                        portable ? 1 : rounds(heads * ceil_div(p.value_dim, DELTA_SCAN_COLUMNS));
                    cost += rounds(heads * (segments - 1) * slices) * length * costs.summary +
                            costs.segment_launches + scans * double(segments - 1) * costs.scan;
                }
                if (cost >= least) continue;
                least = cost;
                best.consumers = consumers;
                best.preparers = portable || walk ? 0 : delta_preparers(consumers);
                best.segments = segments;
            }
        }
    }
    return best;
}

static int shared_bytes(const DeltaRuleConfig& c) {
    return is_walk(c) ? delta_walk_bytes(c.key_dim, c.consumers) : shared_bytes_of(c);
}

std::string kernel_name(const DeltaRuleConfig& c) {
    if (c.portable) return concat("forward_", name_of(c.dtype), "_k", c.key_dim, "_portable");
    return concat(is_walk(c) ? "walk_" : "forward_", name_of(c.dtype), "_k", c.key_dim, "_",
                  c.consumers * DELTA_VALUES, "_columns");
}

std::vector<KernelInfo> gated_delta_rule_kernels() {
    std::vector<KernelInfo> list;
    const auto add = [&](const DeltaRuleConfig& c, bool summary, const std::string& name) {
        KernelInfo info;
        info.name = name;
        info.config = concat(summary ? "what a segment makes of a state: " : "", "chunks of ",
                             DELTA_CHUNK, " tokens, K up to ", c.key_dim, ", ", c.consumers, " x ",
                             DELTA_VALUES, " columns of values, ", c.preparers, " preparing");
        info.symbol = concat("23gated_delta_rule_kernelI*11DeltaKernelIL<enum>", int(c.dtype),
                             "ELi", c.key_dim, "ELi", c.consumers, "ELb", int(summary), "ELb",
                             int(is_walk(c)), "EE");
        info.threads = (c.consumers + (is_walk(c) ? 1 : c.preparers)) * 128;
        info.shared_bytes = shared_bytes(c);
        list.push_back(info);
    };
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int key_dim : {64, 128}) {
            for (const int consumers : {1, 2}) {
                const DeltaRuleConfig config{dtype, key_dim, consumers, delta_preparers(consumers)};
                add(config, false, kernel_name(config));
            }
            add({dtype, key_dim, 1, delta_preparers(1)}, true,
                concat("segments_", name_of(dtype), "_k", key_dim));
            for (const int consumers : {1, 2}) {
                const DeltaRuleConfig config{dtype, key_dim, consumers, 0};
                add(config, false, kernel_name(config));
            }
            add({dtype, key_dim, DELTA_SUMMARY_CONSUMERS, 0}, true,
                concat("walk_segments_", name_of(dtype), "_k", key_dim));
            KernelInfo prepass;
            prepass.name = concat("prepass_", name_of(dtype), "_k", key_dim);
            prepass.config = concat("T and P of a chunk, for a walk over them, K up to ", key_dim);
            prepass.symbol = concat("delta_prepass_kernelI*11DeltaKernelIL<enum>", int(dtype),
                                    "ELi", key_dim, "ELi1ELb0ELb1EE");
            prepass.threads = 128;
            prepass.shared_bytes = delta_prepass_bytes(key_dim);
            list.push_back(prepass);
        }
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int key_dim : {64, 128}) {
            const auto enter = [&](const char* kernel, const char* text, int threads, int bytes) {
                KernelInfo info;
                info.name = concat(kernel, "_", name_of(dtype), "_k", key_dim, "_portable");
                info.config = concat(text, ", K up to ", key_dim);
                info.symbol = concat("delta_portable_", kernel, "_kernelI*DeltaTilesIL<enum>",
                                     int(dtype), "ELi", key_dim, "EE");
                info.arch = PORTABLE;
                info.threads = threads;
                info.shared_bytes = bytes;
                list.push_back(info);
            };
            enter("prepare", "a chunk before there is a state: H, P and decays", 128,
                  portable_delta_prepare_bytes(key_dim));
            enter("forward", "walk over the chunks, 64 columns of values for each 4 of 8 warps",
                  256, portable_delta_chain_bytes(key_dim));
        }
    }
    for (const bool portable : {false, true}) {
        KernelInfo scan;
        scan.name = portable ? "scan_portable" : "scan";
        scan.config =
            concat("the states between segments, ", DELTA_SCAN_COLUMNS, " columns a block");
        scan.symbol = concat("delta_scan_kernelILi", DELTA_SCAN_COLUMNS, "ELb", int(portable), 'E');
        scan.arch = portable ? PORTABLE : NATIVE;
        scan.threads = DELTA_SCAN_THREADS;
        scan.shared_bytes = delta_scan_bytes(DELTA_SCAN_COLUMNS);
        list.push_back(scan);
    }
    return list;
}

static const bool registered =
    register_op("gated_delta_rule", "recurrent", &gated_delta_rule_kernels, &unsupported, &choose);

}  // namespace thunderkittens::recurrent
