// Which attention kernel runs a problem, and in which order the blocks go through it. Pure
// functions; the thresholds were measured on an H200 (docs/experiments/).
#include "csrc/attention/forward/forward.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"

namespace thunderkittens::attention {
namespace {

constexpr int64_t MAX_LENGTH = int64_t{1} << 28;
constexpr int64_t SHORT_QUERY = 64;  // rows that a tile of the kernels that split keys holds

// Which heads are worked on at a time. Without a causal mask all query blocks cost the same, and
// those of one head after the other keep its keys in L2. With one, blocks of a section go longest
// first, dealt back and forth to the SMs: that evens out best when a section fills one wave or a
// whole even number. A section of about a quarter of the SMs leaves four blocks at work on a head,
// enough for its keys to come from L2; it may be larger if the keys of all its heads fit there.
int choose_section(const Problem& p, int block_m, const DeviceProperties& device) {
    const int64_t group = p.q_heads / std::max<int64_t>(p.kv_heads, 1);
    const int64_t heads = p.q_heads * p.batch;
    if (p.causal == static_cast<int>(Causal::none)) return static_cast<int>(group);
    const int64_t blocks = ceil_div(p.q_length, block_m);
    const int64_t target = std::max<int64_t>(device.sm_count / 4, 1);
    if (heads <= target + target / 2) return static_cast<int>(std::max<int64_t>(heads, 1));
    const int64_t head_bytes = p.k_length * (p.head_dim + p.value_dim) * 2 / group;
    const int64_t in_cache = device.l2_bytes / 2 / std::max<int64_t>(head_bytes, 1);
    const int64_t most = std::min({heads, std::max(target + target / 2, in_cache), 4 * target});
    return best_section({blocks, std::max<int64_t>(target / 2, 1), most, target, true},
                        device.sm_count);
}

bool has_score_mod(const Problem& p) { return p.softcap || p.alibi; }
bool softcap_only(const Problem& p) { return p.softcap && !p.alibi; }

// Three consumers of 64 rows keep the tensor cores busier than fewer; those waste less where blocks
// are few or cut short.
bool prefers_short_blocks(const Problem& p, const Config& few, const Config& three, int sm_count) {
    const bool banded = p.causal != static_cast<int>(Causal::none) || p.window_left >= 0;
    const auto items = [&](const Config& c) {
        return ceil_div(p.q_length, 64 * c.warpgroups) * p.batch * p.q_heads;
    };
    if (few.head_dim <= 64) {
        const bool narrow = p.window_left >= 0 && p.window_left < 512;
        return narrow || p.q_length <= (banded ? 1024 : 256) || items(three) < 2 * sm_count;
    }
    if (banded) return p.q_length < 3072 || items(three) < 2 * sm_count;
    // All blocks cost the same: what counts are waves of all multiprocessors, and the time of a
    // wave, per row that of three is 0.94 of that of two.
    const auto cost = [&](const Config& c, double per_row) {
        return static_cast<double>(ceil_div(items(c), sm_count) * c.warpgroups) * per_row;
    };
    return cost(few, 1.0) <= cost(three, 0.94);
}

// The kernels of the smallest dimensions that hold the problem's.
std::vector<Config> fitting_whole(const Problem& p) {
    std::vector<Config> fitting;
    for (const Config& c : CONFIGS) {
        if (c.head_dim < p.head_dim || c.value_dim < p.value_dim) continue;
        if (!fitting.empty() &&
            (c.head_dim != fitting[0].head_dim || c.value_dim != fitting[0].value_dim))
            break;
        if (c.softcap_only && softcap_only(p)) return {c};
        if (!c.softcap_only && c.score_mod == has_score_mod(p)) fitting.push_back(c);
    }
    return fitting;
}

Config choose_config(const Problem& p, int sm_count) {
    const std::vector<Config> fitting = fitting_whole(p);
    if (fitting.size() == 1) return fitting[0];
    return fitting[prefers_short_blocks(p, fitting[0], fitting[1], sm_count) ? 0 : 1];
}

Config choose_split_kv_config(const Problem& p) {
    for (const Config& c : SPLIT_KV_CONFIGS) {
        if (c.head_dim >= p.head_dim && c.value_dim >= p.value_dim) return c;
    }
    return {};
}

// Key blocks that a tile of rows visits: the mean, and the most. Of many tiles a sample.
struct KeyBlockCounts {
    double mean = 0;
    int64_t most = 0;
};
// Tiles of so many rows, `group` of which share a position.
KeyBlockCounts key_blocks_of(const Problem& p, int64_t tiles, int rows, int64_t group,
                             int block_n) {
    constexpr int64_t SAMPLE = 16;
    const Band seen = band(p.causal, p.window_left, p.window_right, p.q_length, p.k_length);
    const int64_t taken = std::clamp<int64_t>(tiles, 1, SAMPLE);
    KeyBlockCounts counts;
    for (int64_t i = 0; i < taken; ++i) {
        const int64_t tile = i * tiles / taken;
        const int64_t first = tile * rows / group;
        const int64_t last = std::min(((tile + 1) * rows - 1) / group, p.q_length - 1);
        const int64_t begin = std::max<int64_t>(0, first + seen.low);
        const int64_t end = std::min(p.k_length, last + seen.high + 1);
        const int64_t count = end > begin ? ceil_div(end, block_n) - begin / block_n : 0;
        counts.mean += double(count) / double(taken);
        counts.most = std::max(counts.most, count);
    }
    return counts;
}

// What a call takes, in microseconds of an H200: to begin and to end, a block, a step of a block
// over a key block where it has the multiprocessor for itself, and where it shares it with one more
// of its kind for each of these. Fitted to timings of drawn calls (docs/experiments/attention.md).
struct Costs {
    bool splits;
    int head_dim, block_m;
    double start, block, step, shared_step;
};
constexpr Costs COSTS[] = {
    {true, 32, 64, 1.99, 2.22, 0.468, 0.221},    {true, 64, 64, 0.63, 3.71, 0.542, 0.302},
    {true, 96, 64, 1.22, 3.31, 0.556, 0.300},    {true, 128, 64, 0.13, 4.11, 0.716, 0.300},
    {true, 192, 64, 2.66, 2.92, 0.723, 0.723},   {true, 256, 64, 5.34, 1.88, 0.843, 0.843},
    {false, 32, 64, 2.66, 1.58, 0.346, 0.255},   {false, 32, 192, 2.65, 2.16, 1.060, 1.060},
    {false, 64, 64, 1.03, 1.89, 0.418, 0.304},   {false, 64, 192, 2.23, 2.06, 1.370, 1.370},
    {false, 96, 192, 2.18, 2.25, 1.176, 1.176},  {false, 128, 128, 2.66, 2.00, 1.288, 1.288},
    {false, 128, 192, 2.81, 1.80, 0.923, 0.923}, {false, 192, 128, 1.29, 4.25, 1.455, 1.455},
    {false, 256, 128, 1.62, 3.68, 1.141, 1.141},
};
constexpr double BYTES_PER_MICROSECOND = 3.07e6;  // of keys and values, by all multiprocessors
constexpr double COMBINATION = 0.79, COMBINATION_SPLIT = 0.047, COMBINATION_BYTE = 0.36e-6;

struct Microseconds {
    double work, memory, total;  // of the blocks alone, of memory alone, and all in all
};
Microseconds microseconds(const Problem& p, const Choice& choice, int sm_count) {
    const Config& c = choice.config;
    const bool split = choice.splits > 0;
    const int block_m = 64 * c.warpgroups;
    const Costs& costs = *std::ranges::find_if(COSTS, [&](const Costs& x) {
        return x.splits == split && x.head_dim == c.head_dim && x.block_m == block_m;
    });
    const int64_t group = split ? p.q_heads / std::max<int64_t>(p.kv_heads, 1) : 1;
    const int64_t tiles = ceil_div(p.q_length * group, block_m);
    const int64_t heads = p.batch * (split ? p.kv_heads : p.q_heads);
    const int64_t splits = std::max(choice.splits, 1);
    const KeyBlockCounts counts = key_blocks_of(p, tiles, block_m, group, c.block_n);
    const double most = double(ceil_div(counts.most, splits));
    const double mean = counts.mean < double(counts.most) ? counts.mean / double(splits) : most;
    const auto time_of = [&](double key_blocks, int64_t on_one) {
        return costs.block + key_blocks * std::max(costs.step, double(on_one) * costs.shared_step);
    };
    const int64_t per_sm = split ? split_kv_blocks_per_sm(c) : blocks_per_sm(c);
    const int64_t blocks = tiles * heads * splits;
    const int64_t full = blocks / (sm_count * per_sm);
    int64_t rest = ceil_div(blocks % (sm_count * per_sm), sm_count);
    // Blocks that start under the end of others are not dealt evenly: some multiprocessors fill up.
    if (split && rest > 1) rest = per_sm;
    double work = double(full) * time_of(mean, per_sm) + (rest > 0 ? time_of(mean, rest) : 0);
    work = std::max(work, time_of(most, full > 0 ? per_sm : rest));
    const int64_t keys =
        p.window_left < 0 ? p.k_length
                          : std::min(p.k_length, p.window_left + p.q_length + int64_t{c.block_n});
    const double memory = double(p.batch * p.kv_heads * keys * (p.head_dim + p.value_dim)) * 2 /
                          BYTES_PER_MICROSECOND;
    double time = costs.start + std::max(work, memory) + 0.15 * std::min(work, memory);
    if (split && combines(p, choice.splits)) {
        const double bytes = double(p.batch * p.q_heads * p.q_length * p.value_dim) * 8;
        time += COMBINATION + choice.splits * (COMBINATION_SPLIT + COMBINATION_BYTE * bytes);
    }
    return {work, memory, time};
}

// The ranges of one wave of blocks, one of them on a multiprocessor.
int splits_of_a_wave(const Problem& p, int64_t key_blocks, int sm_count) {
    const int64_t group = p.q_heads / std::max<int64_t>(p.kv_heads, 1);
    const int64_t blocks = ceil_div(p.q_length * group, 64) * p.kv_heads * p.batch;
    const int64_t most = std::min<int64_t>(key_blocks, MAX_SPLITS);
    return static_cast<int>(std::clamp<int64_t>(sm_count / std::max<int64_t>(blocks, 1), 1, most));
}

// Whether keys are split, and into how many ranges. Of longer queries the partial results should
// stay in the cache. Of few queries, where memory limits, the model hardly tells numbers of ranges
// apart, and those of a wave stay unless others are 4 % cheaper.
void consider_split_kv(const Problem& p, const DeviceProperties& device, Choice& choice) {
    const Config config = choose_split_kv_config(p);
    const int sm_count = std::max(1, device.sm_count);
    const int64_t key_blocks = std::max<int64_t>(ceil_div(p.k_length, config.block_n), 1);
    const int64_t partial = p.batch * p.q_heads * p.q_length * p.value_dim * 4;
    const bool few_queries = p.q_length <= SHORT_QUERY;
    double least = microseconds(p, choice, sm_count).total;
    const Choice wave{.config = config, .splits = splits_of_a_wave(p, key_blocks, sm_count)};
    const Microseconds of_wave = microseconds(p, wave, sm_count);
    if (few_queries && of_wave.memory > of_wave.work && 0.96 * of_wave.total <= least)
        choice = wave, least = 0.96 * of_wave.total;
    for (int splits = 1; splits <= std::min<int64_t>(key_blocks, MAX_SPLITS);
         splits += std::max(1, splits / 4)) {
        if (splits > 1 && !few_queries && splits * partial > device.l2_bytes / 2) break;
        const Choice candidate{.config = config, .splits = splits};
        const double time = microseconds(p, candidate, sm_count).total;
        if (time < least) choice = candidate, least = time;
    }
}

// The portable kernels of the smallest dimensions that hold the problem's, those of fewer rows
// first. Every device that runs them has the memory for all.
std::vector<Config> fitting_portable(const Problem& p, bool paged = false) {
    std::vector<Config> fitting;
    for (const Config& c : PORTABLE_CONFIGS) {
        if (c.head_dim < p.head_dim || c.value_dim < p.value_dim) continue;
        if (!fitting.empty() &&
            (c.head_dim != fitting[0].head_dim || c.value_dim != fitting[0].value_dim))
            break;
        if (c.paged != paged) continue;
        if (paged || c.score_mod == has_score_mod(p)) fitting.push_back(with_dtype(c, p.dtype));
    }
    return fitting;
}
Choice portable_choice(const Problem& p, const Config& config, const DeviceProperties& device) {
    return {.config = config, .section_heads = choose_section(p, 64 * config.warpgroups, device)};
}
// Of two, the one of more rows is the quicker where as many of its blocks share a multiprocessor as
// registers allow, and there are blocks for all of these. One whose warps have no more rows gains
// nothing by them (docs/experiments/portable.md): it is for GPUs that do not hold two of the other.
Choice choose_portable(const Problem& p, const DeviceProperties& device) {
    const std::vector<Config> fitting = fitting_portable(p);
    const auto fits = [&](const Config& c) {
        return portable_blocks_per_sm(c) * (forward_memory(c).bytes + 1024) <=
               device.shared_bytes_per_block;
    };
    const auto has_blocks = [&](const Config& c) {
        const int64_t blocks = ceil_div(p.q_length, 64 * c.warpgroups) * p.batch * p.q_heads;
        return blocks >= portable_blocks_per_sm(c) * device.sm_count;
    };
    const Config &few = fitting.front(), &more = fitting.back();
    const bool gains = more.warp_rows > few.warp_rows || !fits(few);
    const bool larger = gains && fits(more) && has_blocks(more);
    return portable_choice(p, larger ? more : few, device);
}

}  // namespace

int best_section(const SectionSearch& search, int sm_count) {
    int64_t best = search.target;
    double best_cost = 1e30;
    for (int64_t s = search.least; s <= search.most; ++s) {
        const int64_t tiles = s * search.blocks, pair = 2 * sm_count;
        const int64_t off = search.one_wave && tiles <= sm_count
                                ? sm_count - tiles
                                : std::min(tiles % pair, pair - tiles % pair);
        const double cost =
            static_cast<double>(off) / static_cast<double>(std::max<int64_t>(tiles, 1)) +
            1e-3 * static_cast<double>(std::llabs(s - search.target));
        if (cost < best_cost) {
            best_cost = cost;
            best = s;
        }
    }
    return static_cast<int>(best);
}

std::string unsupported_problem(const Problem& p, const DeviceProperties& device) {
    const std::string reason = no_native_code_for(device);
    return reason.empty() ? unsupported_sizes(p) : reason;
}

std::string unsupported_sizes(const Problem& p) {
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
    const std::string reason = no_code_for(device);
    return reason.empty() ? unsupported_sizes(p) : reason;
}

// Among the kernels of whole keys.
static Choice choose_whole(const Problem& p, const DeviceProperties& device) {
    Choice choice;
    choice.config = with_dtype(choose_config(p, device.sm_count), p.dtype);
    choice.section_heads = choose_section(p, 64 * choice.config.warpgroups, device);
    return choice;
}

Choice choose_paged(const Problem& p, const DeviceProperties& device) {
    if (runs_native(device)) return choose_whole(p, device);
    return portable_choice(p, fitting_portable(p, true).front(), device);
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return choose_portable(p, device);
    Choice choice = choose_whole(p, device);
    // Of packed sequences the lengths are bounds, which do not tell how many blocks have rows.
    if (!p.varlen && !has_score_mod(p)) {
        // What the rules say stays unless the model has another tile 10 % cheaper.
        const int sm_count = std::max(1, device.sm_count);
        const double limit = 0.9 * microseconds(p, choice, sm_count).total;
        for (const Config& c : fitting_whole(p)) {
            const Choice other{.config = with_dtype(c, p.dtype),
                               .section_heads = choose_section(p, 64 * c.warpgroups, device)};
            if (microseconds(p, other, sm_count).total < limit) choice = other;
        }
    }
    if (p.q_length <= SHORT_QUERY || !p.varlen) consider_split_kv(p, device, choice);
    choice.config.dtype = p.dtype;
    return choice;
}

std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list{choose(p, device)};
    const auto add = [&](Choice choice) {
        choice.config.dtype = p.dtype;
        if (std::find(list.begin(), list.end(), choice) == list.end()) list.push_back(choice);
    };
    if (!runs_native(device)) {
        for (const Config& c : fitting_portable(p)) add(portable_choice(p, c, device));
        return list;
    }
    // Kernels of the smallest dimensions that hold the problem's, and those of a power of two.
    constexpr int SMALL = 64;
    const int smallest = choose_split_kv_config(p).head_dim;
    const int most = std::max(int(std::bit_ceil(unsigned(smallest))), SMALL);
    for (const Config& config : SPLIT_KV_CONFIGS) {
        if (config.head_dim < p.head_dim || config.value_dim < p.value_dim) continue;
        if (config.head_dim > most) break;
        for (const int splits : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128}) {
            if (splits > ceil_div(p.k_length, config.block_n)) break;
            // Of longer queries the partial results should stay in the cache.
            if (p.q_length > SHORT_QUERY &&
                splits * p.batch * p.q_heads * p.q_length * p.value_dim * 4 > device.l2_bytes / 2)
                break;
            add({.config = config, .splits = splits});
        }
    }
    const Config* first = nullptr;
    for (const Config& c : CONFIGS) {
        if (c.head_dim < p.head_dim || c.value_dim < p.value_dim) continue;
        const bool other =
            first && (c.head_dim != first->head_dim || c.value_dim != first->value_dim);
        if (other && c.head_dim > SMALL) break;
        const bool has_its_own = softcap_only(p) && has_softcap_only(c);
        if (c.softcap_only ? !softcap_only(p) : has_its_own || c.score_mod != has_score_mod(p))
            continue;
        first = &c;
        add({.config = c, .section_heads = choose_section(p, 64 * c.warpgroups, device)});
    }
    return list;
}

std::string kernel_name(const Choice& choice) {
    const Config& c = choice.config;
    const std::string value = c.value_dim == c.head_dim ? "" : concat("v", c.value_dim);
    const std::string tile =
        concat(name_of(c.dtype), "_d", c.head_dim, value, "_", 64 * c.warpgroups, "x", c.block_n);
    if (choice.splits > 0) return concat("split_kv_", tile);
    if (c.is_portable()) {
        return concat("portable_", tile, c.paged ? "_paged" : c.score_mod ? "_score_mod" : "");
    }
    return concat("forward_", tile, c.score_mod ? "_score_mod" : c.softcap_only ? "_softcap" : "");
}

namespace {

KernelInfo kernel_info(const Config& config, bool split) {
    KernelInfo info;
    const char* const kernel = split ? "split_kv" : "forward";
    info.name = kernel_name({config, 1, split});
    info.config = concat("head_dim ", config.head_dim, ", value_dim ", config.value_dim, ", ",
                         64 * config.warpgroups, " query rows x ", config.block_n, " keys, ",
                         config.stages, " stages, ", config.warpgroups,
                         config.warpgroups > 1 ? " consumer warpgroups + 1 producer"
                                               : " consumer warpgroup + 1 producer warp",
                         config.score_mod ? ", softcap and ALiBi" : "",
                         config.softcap_only ? ", softcap" : "");
    info.symbol = symbol_of(concat(kernel, "_kernel"), "Config", config);
    info.threads = forward_threads(config);
    info.shared_bytes = forward_memory(config).bytes;
    return info;
}

KernelInfo portable_info(const Config& config) {
    KernelInfo info;
    info.name = kernel_name({config, 1, 0});
    info.config = concat(
        "head_dim ", config.head_dim, ", value_dim ", config.value_dim, ", ",
        64 * config.warpgroups, " query rows x ", config.block_n, " keys, ", config.stages,
        config.stages > 1 ? " stages, " : " stage, ", forward_threads(config) / 32, " warps of ",
        config.warp_rows, " rows", config.keeps_query ? ", query in registers" : "",
        config.score_mod ? ", softcap and ALiBi" : "", config.paged ? ", pages of a cache" : "");
    info.symbol = symbol_of("portable_forward_kernel", "Config", config);
    info.arch = PORTABLE;
    info.threads = forward_threads(config);
    info.shared_bytes = forward_memory(config).bytes;
    info.fields = detail::fields_of(config);
    return info;
}

// The kernels that combine the results of those that split the keys.
KernelInfo combining_info(DType dtype, bool few) {
    KernelInfo info;
    info.name = concat(few ? "combine_few_" : "combine_", name_of(dtype));
    info.config = concat("weighs and adds up the results of ", few ? "few" : "the",
                         " ranges of keys, ", few ? "a warp" : "four warps", " for a row");
    info.symbol =
        concat(few ? "18combine_few_kernelI" : "9attention14combine_kernelI", symbol_of(dtype));
    info.threads = 128;
    return info;
}

}  // namespace

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Config& c : CONFIGS) list.push_back(kernel_info(with_dtype(c, dtype), false));
        for (const Config& c : SPLIT_KV_CONFIGS)
            list.push_back(kernel_info(with_dtype(c, dtype), true));
        for (const Config& c : PORTABLE_CONFIGS)
            list.push_back(portable_info(with_dtype(c, dtype)));
        for (const bool few : {false, true}) list.push_back(combining_info(dtype, few));
    }
    return list;
}

static const bool registered =
    register_op("attention", "attention", &kernels, &unsupported, &choose) &&
    register_candidates("attention", &candidates);

}  // namespace thunderkittens::attention
