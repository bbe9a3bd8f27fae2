// Which attention kernel runs a problem, and in which order the blocks go through it. Pure
// functions; the thresholds were measured on an H200 (docs/performance.md).
#include "csrc/attention/forward.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace thunderkittens::attention {
namespace {

constexpr int64_t MAX_LENGTH = int64_t{1} << 28;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Which heads are worked on at a time. Without a causal mask all query blocks cost the same, and
// those of one head after the other keep its keys in L2. With one, blocks of a section go longest
// first, dealt back and forth to the SMs: that evens out best when a section fills a whole even
// number of rounds. A section of about a quarter of the SMs leaves four blocks at work on a head,
// enough for its keys to come from L2.
int choose_section(const Problem& p, int block_m, int sm_count) {
    const int64_t group = p.q_heads / std::max<int64_t>(p.kv_heads, 1);
    const int64_t heads = p.q_heads * p.batch;
    if (p.causal == static_cast<int>(Causal::none)) return static_cast<int>(group);
    const int64_t blocks = ceil_div(p.q_length, block_m);
    const int64_t target = std::max<int64_t>(sm_count / 4, 1);
    if (heads <= target + target / 2) return static_cast<int>(heads);
    int64_t best = target;
    double best_cost = 1e30;
    for (int64_t s = target / 2; s <= target + target / 2; ++s) {
        if (s < 1) continue;
        const int64_t items = s * blocks, round = 2 * sm_count;
        const int64_t off = std::min(items % round, round - items % round);
        // The share of a section that is out of step, then the distance from the target.
        const double cost = static_cast<double>(off) / static_cast<double>(items) +
                            1e-3 * static_cast<double>(std::llabs(s - target));
        if (cost < best_cost) {
            best_cost = cost;
            best = s;
        }
    }
    return static_cast<int>(best);
}

bool modified(const Problem& p) { return p.softcap || p.alibi; }

// Among the kernels of the smallest dimensions that hold the problem's.
Config choose_config(const Problem& p) {
    const bool causal = p.causal != static_cast<int>(Causal::none);
    std::vector<Config> fitting;
    for (const Config& c : CONFIGS) {
        if (c.head_dim < p.head_dim || c.value_dim < p.value_dim || c.modified != modified(p))
            continue;
        if (!fitting.empty() &&
            (c.head_dim != fitting[0].head_dim || c.value_dim != fitting[0].value_dim))
            break;
        fitting.push_back(c);
    }
    if (fitting.size() == 1) return fitting[0];
    if (p.head_dim <= 64) {
        // 192 query rows keep the tensor cores busier; 128 waste less where blocks are few or cut
        // short.
        const bool short_rows = p.q_length <= 128 || (causal && p.q_length <= 1024);
        return fitting[short_rows ? 0 : 1];
    }
    return fitting[p.k_length >= (causal ? 8192 : 4096) ? 1 : 0];
}

}  // namespace

std::string unsupported_problem(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16) {
        return concat("q must be bf16 or fp16, got ", name_of(p.dtype));
    }
    for (const auto& [name, dim] : {std::pair{"head", p.head_dim}, {"value", p.value_dim}}) {
        if (dim < 8 || dim > 256 || dim % 8 != 0) {
            return concat("the ", name, " dimension must be a multiple of 8 from 8 to 256, got ",
                          dim);
        }
    }
    if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0) {
        return concat("k has ", p.kv_heads, " heads, q has ", p.q_heads,
                      "; q's heads must be a multiple of k's");
    }
    if (p.causal < 0 || p.causal > 2) return concat("causal must be 0, 1 or 2, got ", p.causal);
    if (p.q_length > MAX_LENGTH || p.k_length > MAX_LENGTH) {
        return concat("lengths must be at most ", MAX_LENGTH, ", got ", p.q_length, " and ",
                      p.k_length);
    }
    if (p.batch * p.q_heads > MAX_LENGTH ||
        ceil_div(p.q_length, 64) * p.batch * p.q_heads > MAX_LENGTH) {
        return concat("batch * heads * length is too large: ", p.batch, " * ", p.q_heads, " * ",
                      p.q_length);
    }
    return "";
}

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    return unsupported_problem(p, device);
}

Choice choose(const Problem& problem, const DeviceProperties& device) {
    const Config config = with_dtype(choose_config(problem), problem.dtype);
    return {config, choose_section(problem, 64 * config.warpgroups, device.sm_count)};
}

std::string kernel_name(const Choice& choice) {
    const Config& c = choice.config;
    const std::string value = c.value_dim == c.head_dim ? "" : concat("v", c.value_dim);
    return concat("forward_", name_of(c.dtype), "_d", c.head_dim, value, "_", 64 * c.warpgroups,
                  "x", c.block_n, c.modified ? "_modified" : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Config& tile : CONFIGS) {
            const Config config = with_dtype(tile, dtype);
            const std::string name = kernel_name({config});
            KernelInfo info;
            info.name = name;
            info.config = concat("head_dim ", config.head_dim, ", value_dim ", config.value_dim,
                                 ", ", 64 * config.warpgroups, " query rows x ", config.block_n,
                                 " keys, ", config.stages, " stages, ", config.warpgroups,
                                 " consumer warpgroups + 1 producer",
                                 config.modified ? ", softcap and ALiBi" : "");
            info.source = name;
            info.threads = 128 * (config.warpgroups + 1);
            info.shared_bytes = forward_memory(config).bytes;
            list.push_back(info);
        }
    }
    return list;
}

static const bool registered =
    register_op("attention", "attention", &kernels, &unsupported, &choose);

}  // namespace thunderkittens::attention
