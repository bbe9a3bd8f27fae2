// Which backward kernel runs a problem, and in which order the blocks go through it. Pure
// functions.
#include <algorithm>

#include "csrc/attention/backward/backward_d256.h"
#include "csrc/attention/backward/backward_deterministic.h"
#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"

namespace thunderkittens::attention {
namespace {

int block_n_of(const BackwardConfig& c) { return c.is_portable() ? c.block_n : 128; }

bool has_score_mod(const Problem& p) { return p.softcap || p.alibi; }
bool banded(const Problem& p) {
    return p.causal != static_cast<int>(Causal::none) || p.window_left >= 0 || p.window_right >= 0;
}

int64_t group_heads(const Problem& p) { return p.kv_heads > 0 ? p.q_heads / p.kv_heads : 1; }
int64_t key_blocks(const Problem& p, const BackwardConfig& config) {
    return std::max<int64_t>(ceil_div(p.k_length, block_n_of(config)), 1);
}

// The head splits of a group for which the GPU is busy for the shortest time, counted in steps (a
// query block of a head). A work tile costs some steps to begin and to end, and more where its dK
// and dV have to be added to others'. Without a mask work tiles come in waves; with one, longest
// first, the last to end are about half a work tile apart.
int choose_head_splits(const Problem& p, const BackwardConfig& config, int64_t units) {
    constexpr int64_t ITEM_STEPS = 3, SPLIT_STEPS = 5, REDUCE_STEPS = 4;
    const int64_t heads = p.kv_heads * p.batch, blocks = key_blocks(p, config);
    const int64_t group = group_heads(p), block_m = config.block_m, block_n = block_n_of(config);
    if (group <= 1 || heads == 0 || heads * blocks >= 8 * units) return 1;
    const Band seen = band(p.causal, p.window_left, p.window_right, p.q_length, p.k_length);
    int64_t longest = 0, all = 0;  // steps of a key block, over those of a head
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = std::max<int64_t>(0, block * block_n - seen.high);
        const int64_t last = std::min(p.q_length, (block + 1) * block_n - seen.low) - 1;
        const int64_t steps = first <= last ? last / block_m - first / block_m + 1 : 0;
        longest = std::max(longest, steps);
        all += steps;
    }
    const auto time = [&](int64_t head_splits) {
        const int64_t each = group / head_splits, items = heads * blocks * head_splits;
        const int64_t fixed = ITEM_STEPS + (head_splits > 1 ? SPLIT_STEPS : 0);
        const int64_t most = each * longest + fixed;
        const int64_t end = head_splits > 1 ? REDUCE_STEPS : 0;
        if (!banded(p)) return (items + units - 1) / units * most + end;
        const int64_t work = heads * (group * all + blocks * head_splits * fixed);
        return std::max(most, work / units + work / items / 2) + end;
    };
    int64_t best = 1;
    for (int64_t head_splits = 2; head_splits <= group; ++head_splits) {
        if (group % head_splits == 0 && time(head_splits) < time(best)) best = head_splits;
    }
    // Too little to be sure of.
    return static_cast<int>(20 * time(best) < 19 * time(1) ? best : 1);
}

// Which key heads are worked on at a time. Without a mask one after the other, so that its queries
// come from L2. With one, blocks of a section go longest first; that evens out best when a section
// fills whole pairs of waves.
// Clusters that claim their work tiles need no even waves: what they work on at a time stays in
// L2.
int choose_section(const Problem& p, int64_t heads, const BackwardConfig& config, int sm_count) {
    if (!banded(p)) return 1;
    const int64_t blocks = key_blocks(p, config);
    if (config.above_d128()) return static_cast<int>(std::max<int64_t>(sm_count / 2 / blocks, 1));
    const int64_t target = std::max<int64_t>(sm_count / 4, 1);
    if (heads <= target + target / 2) return static_cast<int>(std::max<int64_t>(heads, 1));
    const int64_t least = std::max<int64_t>(target / 2, 1), most = target + target / 2;
    return best_section({blocks, least, most, target, false}, sm_count);
}

// Whether key blocks further on have less to do, as under a causal mask.
bool unequal(const Problem& p) { return banded(p) && p.window_left < 0; }

// In a fixed order, key blocks of a head that begin together wait for each other: some more heads
// than fill the GPU, as far as L2 holds them. Under a mask, where blocks are unequal, more still.
// Above head dimension 128: as many heads as begin a key block each in the time of a turn.
int choose_deterministic_section(const Problem& p, int head_splits, const BackwardConfig& config,
                                 int sm_count) {
    const int64_t blocks = key_blocks(p, config), heads = p.kv_heads * p.batch * head_splits;
    int64_t together = 0;
    if (config.above_d128()) {
        const int64_t walked = unequal(p) ? std::max<int64_t>(group_heads(p) / head_splits, 1) : 1;
        together = (config.values() > 192 ? 1 : 2) * (sm_count / 2) / (blocks * walked);
    } else {
        const int64_t share = config.head_dim > 64 && blocks > 8 ? 4 : 2;
        const int64_t waves = banded(p) ? std::clamp<int64_t>(blocks / share, 2, 8) : 2;
        together = waves * sm_count / blocks;
    }
    return static_cast<int>(std::clamp<int64_t>(together, 1, std::max<int64_t>(heads, 1)));
}

}  // namespace

std::string unsupported_backward(const Problem& p, const DeviceProperties& device) {
    const std::string reason = no_code_for(device);
    return reason.empty() ? unsupported_sizes(p) : reason;
}

// In a fixed order, unequal key blocks that walk several query heads, one after the other, come to
// all but the first at times that do not fit their turns: one head each as far as that makes enough
// work to be done together, then no more than two above head dimension 128.
int deterministic_head_splits(const Problem& p, const BackwardConfig& config, int head_splits,
                              const DeviceProperties& device) {
    const int64_t group = group_heads(p), heads = p.kv_heads * p.batch;
    if (!unequal(p) || key_blocks(p, config) <= 8 || heads == 0) return head_splits;
    const auto enough = [&](int64_t n) {
        return group % n == 0 && heads * n >= device.sm_count / 5 &&
               (!config.above_d128() || group <= 2 * n);
    };
    int64_t best = head_splits;
    while (best < group && !enough(best)) ++best;
    return static_cast<int>(best);
}

namespace {

bool fits(const Problem& p, const BackwardConfig& c) {
    return c.head_dim >= p.head_dim && c.values() >= p.value_dim && c.score_mod == has_score_mod(p);
}
BackwardConfig native_config(const Problem& p) {
    for (const BackwardConfig& c : BACKWARD_CONFIGS) {
        if (fits(p, c)) return c;
    }
    return {};
}
// Of the smallest dimensions that hold the problem's: the first of whose blocks a multiprocessor
// has the memory for as many as it has registers for, else the last, which every device can run.
BackwardConfig portable_config(const Problem& p, const DeviceProperties& device) {
    BackwardConfig found;
    for (const BackwardConfig& c : PORTABLE_BACKWARD_CONFIGS) {
        if (!fits(p, c)) continue;
        if (found.head_dim != 0 && c.head_dim != found.head_dim) break;
        found = c;
        const int together = portable_backward_blocks_per_sm(c);
        // A multiprocessor has a KB more than a block can have, and each takes one.
        if (together * (portable_backward_memory(c) + 1024) <= device.shared_bytes_per_block + 1024)
            break;
    }
    return found;
}

}  // namespace

BackwardChoice choose_backward(const Problem& p, const DeviceProperties& device) {
    BackwardChoice choice;
    const bool native = runs_native(device);
    choice.config = with_dtype(native ? native_config(p) : portable_config(p, device), p.dtype);
    const BackwardConfig& config = choice.config;
    // What works on a key block at a time: a multiprocessor, or a part of it, or two of them.
    const int units = config.above_d128() ? device.sm_count / 2
                      : native            ? device.sm_count
                               : device.sm_count * portable_backward_blocks_per_sm(config);
    choice.head_splits = choose_head_splits(p, config, units);
    const int around = native ? device.sm_count : units;
    choice.section_heads =
        choose_section(p, p.kv_heads * p.batch * choice.head_splits, config, around);
    choice.deterministic_section_heads = choose_deterministic_section(
        p, deterministic_head_splits(p, config, choice.head_splits, device), config, around);
    return choice;
}

std::string kernel_name(const BackwardChoice& choice) {
    const BackwardConfig& c = choice.config;
    if (c.is_portable()) {
        return concat("portable_backward_", name_of(c.dtype), "_d", c.head_dim, "_", c.block_m, "x",
                      c.block_n, "_", portable_backward_warps(c), "_warps_", c.stages,
                      c.stages > 1 ? "_stages" : "_stage", c.score_mod ? "_score_mod" : "");
    }
    const std::string dim = c.above_d128() && c.value_dim != c.head_dim
                                ? concat(c.head_dim, "v", c.value_dim)
                                : concat(c.head_dim);
    return concat("backward_", name_of(c.dtype), "_d", dim, "_", c.block_m, "x", block_n_of(c),
                  c.score_mod ? "_score_mod" : "");
}

KernelInfo backward_d256_info(const BackwardConfig& c) {
    KernelInfo info;
    info.name = kernel_name(BackwardChoice{c});
    info.symbol = symbol_of("backward_d256_kernel", "BackwardConfig", c);
    info.config = concat("head_dim ", c.head_dim, ", value_dim ", c.value_dim, ", ", c.block_m,
                         " query rows x ", block_n_of(c), " keys of 2 blocks, ", c.stages,
                         " stages, 3 consumer warpgroups + 1 producer, dQ in any or a fixed order",
                         c.score_mod ? ", softcap and ALiBi" : "");
    info.threads = 512;
    info.shared_bytes = backward_d256_memory(c);
    return info;
}

KernelInfo portable_backward_info(const BackwardConfig& c) {
    KernelInfo info;
    info.name = kernel_name(BackwardChoice{c});
    info.symbol = symbol_of("portable_backward_kernel", "BackwardConfig", c);
    info.config = concat("head_dim ", c.head_dim, ", ", c.block_m, " query rows x ", c.block_n,
                         " keys, ", c.stages, c.stages > 1 ? " stages, " : " stage, ",
                         portable_backward_warps(c), " warps of ", c.warp_keys, " keys, ",
                         c.column_warps, " of them share keys, dQ in any or a fixed order",
                         c.score_mod ? ", softcap and ALiBi" : "");
    info.arch = PORTABLE;
    info.threads = 32 * portable_backward_warps(c);
    info.shared_bytes = portable_backward_memory(c);
    info.fields = detail::fields_of(c);
    return info;
}
// Before and after the portable ones.
void add_portable_rows(DType dtype, std::vector<KernelInfo>& list) {
    const std::string type = symbol_of(dtype);
    const auto add = [&](const std::string& name, const std::string& symbol, int threads,
                         int shared_bytes) {
        KernelInfo info;
        info.name = concat("portable_", name, "_", name_of(dtype));
        info.config = "rows of the backward: " + name;
        info.symbol = symbol;
        info.arch = PORTABLE;
        info.threads = threads;
        info.shared_bytes = shared_bytes;
        list.push_back(info);
    };
    for (const int lanes : {8, 16, 32}) {
        add(concat("statistics_", 8 * lanes),
            concat("portable_statistics_kernelI", type, "Li", lanes, "E"), 256, 0);
    }
    add("sums", concat("portable_sums_kernelI", type), 128, 0);
    add("sinks", symbol_of("portable_sinks_kernel", dtype), 512, 1024);
}

// A configuration for Hopper has three kernels: dQ summed in any order, in a fixed order, and not
// at all. Above head dimension 128 one kernel does all three, and so does a portable one.
std::vector<KernelInfo> backward_kernels() {
    struct Variant {
        const char *name, *text;
        int query_gradient;  // QueryGradient in backward_sm90.cuh
    };
    constexpr Variant variants[] = {
        {"", "dQ in any order", 1},
        {"_deterministic", "dQ in a fixed order", 2},
        {"_no_dq", "no dQ", 0},
    };
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const BackwardConfig& tile : BACKWARD_CONFIGS) {
            const BackwardConfig c = with_dtype(tile, dtype);
            if (c.above_d128()) {
                list.push_back(backward_d256_info(c));
                continue;
            }
            for (const Variant& variant : variants) {
                KernelInfo info;
                info.name = kernel_name(BackwardChoice{c}) + variant.name;
                // backward_kernel<BackwardKernel<c, QueryGradient>>
                info.symbol = concat(symbol_of("backward_kernel", "BackwardConfig", c), "EEL<enum>",
                                     variant.query_gradient, 'E');
                info.config = concat("head_dim ", c.head_dim, ", ", c.block_m, " query rows x ",
                                     block_n_of(c), " keys, ", c.stages,
                                     " stages, 2 consumer warpgroups + 1 producer, ", variant.text,
                                     c.score_mod ? ", softcap and ALiBi" : "");
                info.threads = 384;
                info.shared_bytes = backward_memory(c);
                list.push_back(info);
            }
        }
        for (const BackwardConfig& c : PORTABLE_BACKWARD_CONFIGS)
            list.push_back(portable_backward_info(with_dtype(c, dtype)));
        add_portable_rows(dtype, list);
        // Before and after all those for Hopper.
        const std::string type = symbol_of(dtype);
        const auto add = [&](const std::string& name, const std::string& symbol, int threads,
                             int shared_bytes) {
            KernelInfo info;
            info.name = concat("backward_", name, "_", name_of(dtype));
            info.config = "rows of the backward: " + name;
            info.symbol = symbol;
            info.threads = threads;
            info.shared_bytes = shared_bytes;
            list.push_back(info);
        };
        for (const int lanes : {8, 16, 32}) {
            add(concat("preprocess_", 8 * lanes),
                concat("preprocess_kernelI", type, "Li", lanes, "E"), 256, 0);
        }
        for (const auto& [block_m, parts, columns] :
             {DqTiles{128, 2, 64}, DqTiles{64, 2, 32}, DqTiles{64, 2, 48}, DqTiles{64, 2, 64},
              DqTiles{64, 2, 96}, DqTiles{64, 2, 128}}) {
            add(concat("postprocess_", block_m, "x", parts, "x", columns),
                concat("postprocess_kernelI", type, "Li", block_m, "ELi", parts, "ELi", columns,
                       "E"),
                128 * parts, parts * 64 * columns * 2 + 1024);
        }
    }
    KernelInfo sink;
    sink.name = "backward_sink";
    sink.config = "gradient of the sinks";
    sink.symbol = "sink_kernel";
    sink.threads = 512;
    sink.shared_bytes = 1024;
    list.push_back(sink);
    return list;
}

static const bool registered = register_op("attention_backward", "attention", &backward_kernels,
                                           &unsupported_backward, &choose_backward);

}  // namespace thunderkittens::attention
