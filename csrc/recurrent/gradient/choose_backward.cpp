// Which kernels run a gradient: into how many segments the passes over the states cut sequences,
// and into how many tiles the chunks' gradient cuts the heads of a group. Pure functions.
#include <algorithm>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/gradient/gradient.h"

namespace thunderkittens::recurrent {
namespace {

constexpr int64_t MAX_SEGMENTS = 256;
// Of the pass that sums segments, in relation to the other, which also writes states.
constexpr double SUM = 0.6;

// Cycles, of an H200, as expected from products, exponentials and bytes; not measured.
struct Costs {
    int64_t blocks;     // of a pass over the states, on a multiprocessor
    double chunk;       // with so many
    double alone;       // of one block in relation to that
    double launches;    // of the pass that sums segments, and of the scan
    double segment;     // in the scan
    double step, tile;  // of the chunks' gradient: 64 columns of a head, and all but these
    double word;        // 16 bytes of a partial sum, written and read
};
constexpr Costs WIDE{.blocks = 3,
                     .chunk = 2000,
                     .alone = 0.5,
                     .launches = 9000,
                     .segment = 60,
                     .step = 2600,
                     .tile = 3500,
                     .word = 0.015};
constexpr Costs NARROW{.blocks = 3,
                       .chunk = 1300,
                       .alone = 0.5,
                       .launches = 9000,
                       .segment = 60,
                       .step = 1900,
                       .tile = 2500,
                       .word = 0.015};
constexpr Costs PORTABLE_WIDE{.blocks = portable_blocks_per_sm(128),
                              .chunk = 2600,
                              .alone = 0.6,
                              .launches = 12000,
                              .segment = 60,
                              .step = 4500,
                              .tile = 5000,
                              .word = 0.015};
constexpr Costs PORTABLE_NARROW{.blocks = portable_blocks_per_sm(64),
                                .chunk = 2600,
                                .alone = 0.45,
                                .launches = 12000,
                                .segment = 60,
                                .step = 2600,
                                .tile = 3500,
                                .word = 0.015};

const Costs& costs_of(int key_dim, bool portable) {
    if (portable) return key_dim == 128 ? PORTABLE_WIDE : PORTABLE_NARROW;
    return key_dim == 128 ? WIDE : NARROW;
}

int choose_segments(int64_t runs, int64_t chunks, const Costs& costs, int64_t sms) {
    int best = 1;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t segments = 1; segments <= std::min(chunks, MAX_SEGMENTS); ++segments) {
        const int64_t blocks = 2 * runs * segments, length = ceil_div(chunks, segments);
        // The last blocks may leave multiprocessors with fewer, which are faster then.
        const int64_t wave = costs.blocks * sms, rest = ceil_div(blocks % wave, sms);
        const double last = rest == 0 ? 0.0
                                      : costs.alone + (1.0 - costs.alone) * double(rest - 1) /
                                                          double(costs.blocks - 1);
        double cost = (double(blocks / wave) + last) * double(length) * costs.chunk;
        if (segments > 1)
            cost = (1.0 + SUM) * cost + costs.launches + double(segments) * costs.segment;
        if (cost < least) best = int(segments), least = cost;
    }
    return best;
}

int choose_splits(int64_t tiles, int64_t heads, int64_t steps, int key_dim, const Costs& costs,
                  int64_t sms) {
    int best = 1;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t splits = 1; splits <= heads; ++splits) {
        const double waves = double(ceil_div(tiles * splits, sms));
        double cost = waves * (costs.tile + double(ceil_div(heads, splits) * steps) * costs.step);
        if (splits > 1) cost += 3000 + double(tiles * splits) * CHUNK * key_dim / 2 * costs.word;
        if (cost < 0.98 * least) best = int(splits), least = cost;
    }
    return best;
}

}  // namespace

std::string unsupported_backward(const RecurrentProblem& p, const DeviceProperties& device) {
    if (std::string reason = unsupported(p, device); !reason.empty()) return reason;
    // Tiles of states are counted in 32 bits.
    if (p.groups > 0 && double(slots_of(p)) * double(p.heads * slices_of(p)) * 4 >
                            double(std::numeric_limits<int32_t>::max())) {
        return concat("a gradient of ", p.batch, " batches of ", p.length, " tokens with ", p.heads,
                      " heads has too many chunks");
    }
    const int bytes =
        runs_native(device) ? gradient_chunk_bytes(128) : PORTABLE_GRADIENT_CHUNK_BYTES;
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernels need ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

GradientChoice choose_backward(const RecurrentProblem& p, const DeviceProperties& device) {
    const int key_dim = int(padded_keys(p));
    const bool portable = !runs_native(device);
    const Costs& costs = costs_of(key_dim, portable);
    const int64_t sms = std::max(1, device.sm_count);
    const int64_t states = std::max<int64_t>(states_of(p), 1);
    const int64_t runs = states * p.heads * slices_of(p);
    // Of packed sequences the lengths are not known; on the average.
    const int64_t length = p.sequences > 0 ? ceil_div(p.length, states) : p.length;
    return {p.dtype, key_dim, choose_segments(runs, ceil_div(length, CHUNK), costs, sms),
            choose_splits(slots_of(p) * p.groups, heads_per_group(p), slices_of(p), key_dim, costs,
                          sms),
            portable};
}

std::string kernel_name(const GradientChoice& c) {
    return concat("chunks_", name_of(c.dtype), "_keys", c.key_dim, c.portable ? "_portable" : "");
}

std::vector<KernelInfo> gradient_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        const auto add = [&](const std::string& name, const std::string& text,
                             const std::string& symbol, int threads, int bytes) {
            KernelInfo info;
            info.name = concat(name, portable ? "_portable" : "");
            info.config = text;
            info.symbol = symbol;
            info.arch = portable ? PORTABLE : NATIVE;
            info.threads = threads;
            info.shared_bytes = bytes;
            list.push_back(info);
        };
        const std::string flag = concat("Lb", int(portable), 'E');
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            const std::string type = symbol_of(dtype);
            const std::string name = name_of(dtype);
            for (const int keys : {64, 128}) {
                const std::string types =
                    concat("_kernelINS0_13GradientTypesILNS_5DTypeE", int(dtype), "ELi", keys);
                add(concat("chunks_", name, "_keys", keys),
                    concat("chunks of ", CHUNK, " tokens, ", keys, " keys; ",
                           portable ? "4 warps each: queries, keys"
                                    : "a warpgroup each: states, pairs, loads and decays"),
                    concat("gradient_", portable ? "portable_" : "", "chunk", types),
                    portable ? 256 : 384,
                    portable ? PORTABLE_GRADIENT_CHUNK_BYTES : gradient_chunk_bytes(keys));
                add(concat("states_", name, "_keys", keys),
                    concat("states before, and gradients of those behind, every ", CHUNK,
                           " tokens; ", keys, " keys"),
                    concat("gradient_", portable ? "portable_" : "", "states", types), 128,
                    portable ? portable_gradient_states_bytes(keys) : GRADIENT_STATES_BYTES);
            }
            add(concat("sum_keys_", name), "sums over the splits of a group's heads",
                concat("gradient_sum_keys_kernelI", type, flag), 256, 0);
            add(concat("gate_", name), "gradient of the gate behind the output",
                concat("gradient_gate_kernelI", type, flag), 256, 0);
        }
        add("gates", "log decays and weights of the tokens", concat("gradient_gates_kernelI", flag),
            256, 0);
        add("scan", "states before the segments", concat("gradient_scan_kernelI", flag), 128, 0);
        add("finish", "gradients of what decays and weights are made of",
            concat("gradient_finish_kernelI", flag), 128, 0);
        add("shares", "sums over the shares of a head's tokens",
            concat("gradient_shares_kernelI", flag), 128, 0);
    }
    return list;
}

static const bool registered = register_op("ssd_backward", "recurrent", &gradient_kernels,
                                           &unsupported_backward, &choose_backward);

}  // namespace thunderkittens::recurrent
