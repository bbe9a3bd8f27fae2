// Which backward kernel runs a problem, and in which order the blocks go through it. Pure
// functions.
#include <algorithm>
#include <cstdlib>

#include "csrc/attention/backward_wide.h"

namespace thunderkittens::attention {
namespace {

constexpr int BLOCK_N = 128;

bool modified(const Problem& p) { return p.softcap || p.alibi; }
bool banded(const Problem& p) {
    return p.causal != static_cast<int>(Causal::none) || p.window_left >= 0 || p.window_right >= 0;
}

// Which key heads are worked on at a time. Without a mask one after the other, so that its queries
// come from L2. With one, blocks of a section go longest first; that evens out best when a section
// fills whole pairs of rounds.
// Clusters that claim their items need no even rounds: what they work on at a time stays in L2.
int choose_section(const Problem& p, bool wide, int sm_count) {
    if (!banded(p)) return 1;
    const int64_t heads = p.kv_heads * p.batch;
    const int64_t blocks = std::max<int64_t>((p.k_length + BLOCK_N - 1) / BLOCK_N, 1);
    if (wide) return static_cast<int>(std::max<int64_t>(sm_count / 2 / blocks, 1));
    const int64_t target = std::max<int64_t>(sm_count / 4, 1);
    if (heads <= target + target / 2) return static_cast<int>(std::max<int64_t>(heads, 1));
    int64_t best = target;
    double best_cost = 1e30;
    for (int64_t s = std::max<int64_t>(target / 2, 1); s <= target + target / 2; ++s) {
        const int64_t items = s * blocks, round = 2 * sm_count;
        const int64_t off = std::min(items % round, round - items % round);
        const double cost =
            static_cast<double>(off) / static_cast<double>(std::max<int64_t>(items, 1)) +
            1e-3 * static_cast<double>(std::llabs(s - target));
        if (cost < best_cost) {
            best_cost = cost;
            best = s;
        }
    }
    return static_cast<int>(best);
}

// In a fixed order, key blocks of a head that begin together wait for each other: some more heads
// than fill the GPU, as far as L2 holds them. Under a mask, where blocks are unequal, more still.
int choose_ordered_section(const Problem& p, int sm_count) {
    const int64_t blocks = std::max<int64_t>((p.k_length + BLOCK_N - 1) / BLOCK_N, 1);
    const int64_t heads = std::max<int64_t>(p.kv_heads * p.batch, 1);
    const int64_t rounds = banded(p) ? std::clamp<int64_t>(blocks / 2, 2, 8) : 2;
    return static_cast<int>(std::clamp<int64_t>(rounds * sm_count / blocks, 1, heads));
}

}  // namespace

std::string unsupported_backward(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = unsupported_problem(p, device); !reason.empty()) return reason;
    return "";
}

BackwardChoice choose_backward(const Problem& p, const DeviceProperties& device) {
    BackwardChoice choice;
    for (const BackwardConfig& config : BACKWARD_CONFIGS) {
        const int64_t value_dim = config.wide() ? config.value_dim : config.head_dim;
        if (config.head_dim < p.head_dim || value_dim < p.value_dim) continue;
        if (config.modified != modified(p)) continue;
        choice.config = with_dtype(config, p.dtype);
        break;
    }
    const bool wide = choice.config.wide();
    choice.section_heads = choose_section(p, wide, device.sm_count);
    choice.ordered_section_heads =
        wide ? choice.section_heads : choose_ordered_section(p, device.sm_count);
    return choice;
}

std::string kernel_name(const BackwardChoice& choice) {
    const BackwardConfig& c = choice.config;
    const std::string dim = c.wide() && c.value_dim != c.head_dim
                                ? concat(c.head_dim, "v", c.value_dim)
                                : concat(c.head_dim);
    return concat("backward_", name_of(c.dtype), "_d", dim, "_", c.block_m, "x", BLOCK_N,
                  c.modified ? "_modified" : "");
}

KernelInfo wide_backward_kernel(const BackwardConfig& c) {
    KernelInfo info;
    info.source = info.name = kernel_name(BackwardChoice{c});
    info.symbol = "wide_backward_kernel";
    info.config = concat("head_dim ", c.head_dim, ", value_dim ", c.value_dim, ", ", c.block_m,
                         " query rows x ", BLOCK_N, " keys of 2 blocks, ", c.stages,
                         " stages, 3 consumer warpgroups + 1 producer, dQ in any or a fixed order",
                         c.modified ? ", softcap and ALiBi" : "");
    info.threads = 512;
    info.shared_bytes = wide_backward_memory(c);
    return info;
}

// A source holds three kernels: dQ summed in any order, in a fixed order, and not at all. Those of
// the wide kernels hold one for all three.
std::vector<KernelInfo> backward_kernels() {
    struct Variant {
        const char *name, *text, *symbol;
    };
    constexpr Variant variants[] = {
        {"", "dQ in any order", "QueryGradientE1"},
        {"_deterministic", "dQ in a fixed order", "QueryGradientE2"},
        {"_keys", "no dQ", "QueryGradientE0"},
    };
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const BackwardConfig& tile : BACKWARD_CONFIGS) {
            const BackwardConfig c = with_dtype(tile, dtype);
            if (c.wide()) {
                list.push_back(wide_backward_kernel(c));
                continue;
            }
            for (const Variant& variant : variants) {
                KernelInfo info;
                info.source = kernel_name(BackwardChoice{c});
                info.name = info.source + variant.name;
                info.symbol = variant.symbol;
                info.config =
                    concat("head_dim ", c.head_dim, ", ", c.block_m, " query rows x ", BLOCK_N,
                           " keys, ", c.stages, " stages, 2 consumer warpgroups + 1 producer, ",
                           variant.text, c.modified ? ", softcap and ALiBi" : "");
                info.threads = 384;
                info.shared_bytes = backward_memory(c);
                list.push_back(info);
            }
        }
        // Before and after all of them.
        const std::string type = dtype == DType::bf16 ? "bfloat16" : "6__half";
        const auto add = [&](const std::string& name, const std::string& symbol, int threads,
                             int shared_bytes) {
            KernelInfo info;
            info.source = "backward_rows";
            info.name = concat("backward_", name, "_", name_of(dtype));
            info.config = "rows of the backward: " + name;
            info.symbol = symbol;
            info.threads = threads;
            info.shared_bytes = shared_bytes;
            list.push_back(info);
        };
        for (const int lanes : {8, 16, 32}) {
            add(concat("statistics_", 8 * lanes),
                concat("prepare_kernelI", dtype == DType::bf16 ? "13__nv_" : "", type, "Li", lanes,
                       "E"),
                256, 0);
        }
        for (const auto& [block_m, parts, columns] :
             {DqTiles{128, 2, 64}, DqTiles{64, 2, 32}, DqTiles{64, 2, 48}, DqTiles{64, 2, 64},
              DqTiles{64, 2, 96}, DqTiles{64, 2, 128}}) {
            add(concat("dq_", block_m, "x", parts, "x", columns),
                concat("finish_kernelI", dtype == DType::bf16 ? "13__nv_" : "", type, "Li", block_m,
                       "ELi", parts, "ELi", columns, "E"),
                128 * parts, parts * 64 * columns * 2 + 1024);
        }
    }
    KernelInfo sink;
    sink.source = "backward_rows";
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
