// Which kernel multiplies which fp8 problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/common/latest_choices.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/fp8/cost.h"
#include "csrc/gemm/fp8/dispatch.h"

namespace thunderkittens::fp8_gemm {
namespace {

Sums sums_of(const Problem& p) {
    if (p.blockwise_1d1d) return Sums::promoted_1d1d;
    return p.accurate || p.blockwise || p.grouped ? Sums::promoted : Sums::fast;
}

// Whether the kernels for block-wise (1D2D) scales alone compute the problem.
bool is_blockwise_only(const Problem& p) {
    const bool stored = p.out_dtype != DType::fp32 && p.n % 8 == 0;
    const bool first_pair = p.a_dtype == DTYPES[0].a && p.b_dtype == DTYPES[0].b;
    return p.blockwise && !p.blockwise_1d1d && !p.grouped && !p.activated && p.k > 0 && stored &&
           first_pair;
}

// A multicast cluster: blocks above each other load b's tile together, blocks side by side a's.
struct Cluster {
    int m = 1, n = 1;
};

// Where power limits, a cluster saves more than it costs.
Cluster cluster_of(const Config& config, const Problem& p) {
    const bool large = double(p.m) * double(p.n) * double(p.k) >= 0x1p39;
    const bool even = ceil_div(p.m, config.block_m) % 2 == 0;
    return {.m = config.sums == Sums::fast && !is_pingpong(config) && large && even ? 2 : 1};
}

// Balanced tiling with two widths, where the kernel has it and TMA stores. Block-wise scales belong
// to whole tiles.
gemm::Widths two_widths(const Config& config, const Cluster& cluster, const Problem& p,
                        int sm_count) {
    const bool stored = p.out_dtype != DType::fp32 && p.n % 8 == 0;
    if (!has_two_widths(config) || p.blockwise || p.grouped || !stored || cluster.n > 1) return {};
    if (narrows_rowwise_only(config) && p.activated) return {};
    return gemm::two_widths(config.block_m * cluster.m, config.block_n, p.m, p.n,
                            std::max(1, sm_count / cluster.m));
}

// The cycles that the GPU needs with tiles of this shape: waves of one tile per SM, each of block_m
// * block_n / 32 cycles for 128 of k at the tensor cores' full rate. Fitted to an H200: narrow
// tiles load more bytes per product.
double cycles(const Config& config, const Problem& p, int sm_count) {
    const int64_t tiles = ceil_div(p.m, config.block_m) * ceil_div(p.n, config.block_n);
    const double steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const bool fast = config.sums == Sums::fast;
    const double waves = static_cast<double>(ceil_div(tiles, sm_count));
    // Where a bias, of which the problem says nothing, would forbid two widths, they do not count.
    const Cluster cluster = cluster_of(config, p);
    const double share =
        narrows_rowwise_only(config) ? 1 : two_widths(config, cluster, p, sm_count).share;
    const double products = steps * config.block_m * config.block_n / 32 * share;
    if (is_pingpong(config)) {
        // Ping-pong: the epilogue of a tile overlaps with the next one's products, if those take
        // long enough.
        const double end = 5000;
        return waves * std::max(products * 1.005 + 600, (products + end) / 2) + end / 2;
    }
    const double per_product = config.block_n >= 256   ? (fast ? 1.005 : 1.0)
                               : config.block_n >= 192 ? (fast ? 1.02 : 1.05)
                               : config.block_n >= 176 ? 1.04
                                                       : (fast ? 1.05 : 1.22);
    const double between = fast && config.block_n >= 256 ? 2000 : 1500;
    return waves * (products * per_product * (config.blockwise_only ? 0.95 : 1.0) + between);
}

Schedule schedule_for(const Config& config, const Cluster& cluster, const Problem& p,
                      int sm_count) {
    Schedule schedule{.cluster_m = cluster.m, .cluster_n = cluster.n};
    const int64_t all_rows = ceil_div(p.m, config.block_m), rows = ceil_div(all_rows, cluster.m);
    const int64_t columns = ceil_div(p.n, int64_t{config.block_n} * cluster.n);
    // The tiles at work at a time form a square of elements, in raster groups of equal height.
    const double height = std::sqrt(double(sm_count) * config.block_n / config.block_m);
    const double raster_groups = std::round(double(all_rows) / height);
    schedule.raster_group =
        static_cast<int>(ceil_div(rows, std::max<int64_t>(1, int64_t(raster_groups))));
    const int blocks = cluster.m * cluster.n;
    const int64_t at_a_time = std::max(1, sm_count / blocks);
    // Only the device knows the rows of groups.
    const int64_t tiles = p.grouped ? at_a_time : rows * columns;
    schedule.blocks = static_cast<int>(std::min(tiles, at_a_time) * blocks);
    const gemm::Widths widths = two_widths(config, cluster, p, sm_count);
    schedule.columns = widths.columns, schedule.extra_rows = widths.extra_rows;
    return schedule;
}

// Skinny m: what counts is how fast b is read, so swap-AB.
bool is_skinny(const Problem& p) { return p.m <= 64 && p.k > 0 && !p.grouped; }

Choice swap_ab_choice(const SwapAbShape& shape, int splits, const Problem& p, int sm_count) {
    Choice choice{.kernel = Kernel::swap_ab, .config = make_config(shape, {p.a_dtype, p.b_dtype})};
    const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t clusters = std::max(1, sm_count / splits);
    const int64_t waves = ceil_div(tiles, clusters);
    choice.schedule.splits = splits;
    choice.schedule.blocks = static_cast<int>(ceil_div(tiles, waves) * splits);
    return choice;
}

Choice choose_swap_ab(const Problem& p, int sm_count) {
    const SwapAbShape* shape = nullptr;
    for (const SwapAbShape& candidate : SWAP_AB_SHAPES) {
        shape = &candidate;
        if (candidate.block_m >= p.m) break;
    }
    const Config config = make_config(*shape, {p.a_dtype, p.b_dtype});
    const int64_t tiles = ceil_div(p.m, shape->block_m) * ceil_div(p.n, shape->block_n);
    const int64_t k_steps = ceil_div(p.k, shape->block_k);
    // Split-K over a cluster, as long as each block still has some steps: where it gives SMs to
    // each tile that would be idle, and more of them where tiles are very few. With half of the SMs
    // or more at work it pays only for 64 rows of a, whose loads it shares.
    int splits = 1;
    for (const int splits_more : {2, 3}) {
        // Clusters of three do not come out even with the SMs that they can share.
        const int64_t clusters = splits_more == 2 ? sm_count / 2 : sm_count / 3 * 8 / 9;
        const bool pays = tiles * 3 <= sm_count || shape->block_m > 32;
        if (pays && tiles <= clusters && splits_more <= senders(config) + 1 &&
            k_steps >= splits_more * 2 * 2) {
            splits = splits_more;
        }
    }
    for (int splits_more = 4; splits_more <= 8; splits_more *= 2) {
        if (tiles * splits_more * 4 <= sm_count && k_steps >= splits_more * 2) splits = splits_more;
    }
    return swap_ab_choice(*shape, splits, p, sm_count);
}

// The cycles of the swap-AB kernel for more rows than a tile has, beside those of cycles(): of a
// stage what its products take, or its bytes from the L2 cache, of all blocks. Infinite where tiles
// are more than SMs.
double swap_ab_cycles(const Problem& p, const Choice& choice, int sm_count) {
    const Config& c = choice.config;
    const int64_t tiles = ceil_div(p.m, c.block_m) * ceil_div(p.n, c.block_n);
    const int splits = choice.schedule.splits;
    if (tiles > sm_count) return std::numeric_limits<double>::infinity();
    const double bytes = double(tiles * splits) * (c.block_m + c.block_n) * c.block_k;
    const double stage = std::max(900.0, bytes / 3966);
    return double(ceil_div(ceil_div(p.k, c.block_k), splits)) * stage + 1500 +
           (splits > 1 ? 2500 : 0);
}

bool takes_split_k(const Problem& p) {
    const bool simple =
        !p.blockwise_1d1d && !p.grouped && !p.activated && p.out_dtype != DType::fp32;
    return simple && p.k > 0 && p.a_dtype == DTYPES[0].a && p.b_dtype == DTYPES[0].b;
}

// Split-K over clusters, with a run-time tile N: the width that fits the problem, and the blocks
// that share the k of a tile.
struct SplitKTiles {
    int width = 0, splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
};

// A bound where reading the operands from memory takes longer than their products.
double cycles_to_read(const Problem& p) { return double(p.m + p.n) * double(p.k) / 3000; }

// The split-K tiles, in a single wave. Clusters of many blocks do not come out even with the SMs
// that they can share; and several ranges of k at a time read more lines at a time. Fitted to an
// H200, beside cycles().
SplitKTiles split_k_tiles(const Problem& p, int sm_count) {
    SplitKTiles best;
    if (!takes_split_k(p) || p.blockwise) return best;
    const Sums sums = sums_of(p);
    const int64_t rows = ceil_div(p.m, 128), steps = ceil_div(p.k, BLOCK_K);
    for (const int splits : {1, 2, 4, 8}) {
        const int64_t clusters = splits <= 2   ? sm_count / splits
                                 : splits == 4 ? sm_count / splits * 10 / 11
                                               : sm_count / splits * 15 / 16;
        const double exchange = splits == 1 ? 0 : splits < 8 ? 2500 : 5000;
        const double crowded = splits == 1 ? 0 : splits == 2 ? 0.1 : 0.8;
        const int64_t each = ceil_div(steps, splits);
        for (const int width : SPLIT_K_WIDTHS) {
            const int64_t tiles = rows * ceil_div(p.n, width);
            if (tiles > clusters || each < 4 || !fits_splits(width, splits)) continue;
            // With a short k, what follows the products weighs more than idle SMs.
            if (sums != Sums::fast && splits == 1 && width > 136 && each <= 16) continue;
            const double busy = double(tiles * splits) / sm_count;
            const double products = double(each) * width * 4 * (sums == Sums::fast ? 1 : 1.03);
            const double slower = std::max(products * (1 + crowded * busy), cycles_to_read(p));
            const double cycles = slower + 7 * width + 500 + exchange;
            if (cycles < best.cycles) best = {width, splits, cycles};
        }
    }
    return best;
}

// Whether the kernel for row-wise scales alone computes a problem, as far as that tells.
bool allows_rowwise(const Choice& choice, const Problem& p) {
    if (p.grouped || p.activated) return false;
    return runs_rowwise(choice.config, {.m = p.m,
                                        .n = p.n,
                                        .k = p.k,
                                        .blockwise = p.blockwise,
                                        .out_dtype = p.out_dtype,
                                        .schedule = choice.schedule});
}

Choice tiled_choice(const Config& config, const Cluster& cluster, const Problem& p, int sm_count) {
    Choice choice{.kernel = preferred_kernel(config),
                  .config = config,
                  .schedule = schedule_for(config, cluster, p, sm_count)};
    if (!allows_rowwise(choice, p)) choice.kernel = kernel_of(config);
    return choice;
}

Choice split_k_choice(int width, const Cluster& cluster, int splits, const Problem& p) {
    const int64_t rows = round_up(ceil_div(p.m, 128), cluster.m),
                  columns = round_up(ceil_div(p.n, width), cluster.n);
    return {.kernel = Kernel::split_k,
            .config = split_k_config(width, sums_of(p)),
            .schedule = {.cluster_m = cluster.m,
                         .cluster_n = cluster.n,
                         .blocks = static_cast<int>(rows * columns * splits),
                         .splits = splits}};
}

const char* kind_of(const Config& c) {
    return c.swap_ab ? "swap_ab" : c.blockwise_only ? "blockwise" : name_of(c.sums);
}

// The suffix of the kernels for row-wise scales alone.
constexpr const char* ROWWISE = "_rowwise";

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    const bool pair = is_fp8(p.a_dtype) && is_fp8(p.b_dtype) &&
                      (p.a_dtype == DType::e4m3 || p.b_dtype == DType::e4m3);
    if (!pair) {
        return concat("operands must be e4m3 x e4m3, e4m3 x e5m2 or e5m2 x e4m3, got ",
                      name_of(p.a_dtype), " x ", name_of(p.b_dtype));
    }
    if (std::string reason = gemm::unsupported_sizes(p.m, p.n, p.k, "groups", p.groups);
        !reason.empty())
        return reason;
    if (!runs_native(device)) return unsupported_portable(p, device);
    const Choice choice = choose(p, device);
    const double tiles = double(ceil_div(p.m, choice.config.block_m) + p.groups) *
                         double(ceil_div(p.n, choice.config.block_n));
    const int bytes =
        choice.kernel == Kernel::split_k ? SPLIT_K_SHARED_BYTES : shared_bytes(choice.config);
    return gemm::unsupported_resources(tiles, bytes, device);
}

namespace {

// The choice that is tuned to few and many rows of weights, all of whose rows begin at lines.
Choice choose_in_lines(const Problem& p, int sm_count) {
    if (is_skinny(p)) return choose_swap_ab(p, sm_count);
    std::optional<Config> best;
    double least = 0;
    const auto consider = [&](const Config& config) {
        const double needed = cycles(config, p, sm_count);
        if (!best || needed < least) best = config, least = needed;
    };
    const DTypes dtypes{p.a_dtype, p.b_dtype};
    for (const TileShape& shape : TILE_SHAPES) {
        if (shape.sums != sums_of(p)) continue;
        // A tile has the scales of two blocks of b, which meet in its middle or at 128 columns.
        if (p.blockwise && shape.sums == Sums::promoted && shape.block_n % 64 != 0) continue;
        if (p.grouped && !takes_groups(make_config(shape, DTYPES[0]))) continue;
        consider(make_config(shape, dtypes));
    }
    if (is_blockwise_only(p)) {
        for (const TileShape& shape : BLOCKWISE_SHAPES) consider(make_config(shape, dtypes, true));
    }
    const Choice choice = tiled_choice(*best, cluster_of(*best, p), p, sm_count);
    const SplitKTiles tiles = split_k_tiles(p, sm_count);
    // Its sums are promoted.
    if (!p.grouped && p.k > 0 && sums_of(p) == Sums::promoted) {
        const Choice swap_ab = choose_swap_ab(p, sm_count);
        if (swap_ab_cycles(p, swap_ab, sm_count) < std::min(least, tiles.cycles)) return swap_ab;
    }
    if (tiles.cycles > std::max(least, cycles_to_read(p))) return choice;
    return split_k_choice(tiles.width, {}, tiles.splits, p);
}

// Visits the tiled kernels that compute the problem, each alone and, with fast sums, in clusters.
template <typename Add>
void for_each_tiled(const Problem& p, int sm_count, Add&& add) {
    const DTypes dtypes{p.a_dtype, p.b_dtype};
    for (const TileShape& shape : TILE_SHAPES) {
        if (shape.sums != sums_of(p)) continue;
        // A tile has the scales of two blocks of b, which meet in its middle or at 128 columns.
        if (p.blockwise && shape.sums == Sums::promoted && shape.block_n % 64 != 0) continue;
        const Config config = make_config(shape, dtypes);
        if (p.grouped && !takes_groups(config)) continue;
        add(tiled_choice(config, {}, p, sm_count));
        if (config.sums != Sums::fast) continue;
        add(tiled_choice(config, {.m = 2, .n = 1}, p, sm_count));
        add(tiled_choice(config, {.m = 1, .n = 2}, p, sm_count));
    }
    if (!is_blockwise_only(p)) return;
    for (const TileShape& shape : BLOCKWISE_SHAPES)
        add(tiled_choice(make_config(shape, dtypes, true), {}, p, sm_count));
}

// The blocks that share loads at most: more of them wait for each other more.
constexpr int MOST_SHARES = 4;

// Visits the cluster tiles of every width, with each way to share loads and to divide k.
template <typename Add>
void for_each_split_k(const Problem& p, Add&& add) {
    const int64_t rows = ceil_div(p.m, 128), steps = ceil_div(p.k, BLOCK_K);
    for (const int width : SPLIT_K_WIDTHS) {
        const int64_t columns = ceil_div(p.n, width);
        // A grid has no more of them.
        if (columns + MAX_SPLITS > UINT16_MAX || (p.blockwise && !takes_blocks(width))) continue;
        for (const int splits : {1, 2, 3, 4, 6, 8}) {
            if (splits > steps) break;
            for (int m = 1; m <= MOST_SHARES && m < 2 * rows; m *= 2) {
                for (int n = 1; m * n <= MOST_SHARES && n < 2 * columns; n *= 2) {
                    if (fits_splits(width, splits) && fits_cluster(width, m, n, splits))
                        add(split_k_choice(width, {.m = m, .n = n}, splits, p));
                }
            }
        }
    }
}

// Visits every compiled kernel that computes the problem, with each way to divide it.
template <typename Add>
void for_each_candidate(const Problem& p, int sm_count, Add&& add) {
    for_each_tiled(p, sm_count, add);
    if (p.grouped || p.k == 0) return;
    for (const SwapAbShape& shape : SWAP_AB_SHAPES) {
        const bool holds = p.m <= shape.block_m || (shape.block_m == 64 && p.m <= 512);
        for (const int splits : {1, 2, 3, 4, 6, 8}) {
            if (holds && ceil_div(p.k, shape.block_k) >= splits)
                add(swap_ab_choice(shape, splits, p, sm_count));
        }
    }
    if (takes_split_k(p)) for_each_split_k(p, add);
}

Choice cheapest(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return choose_portable(p, device);
    const int sm_count = std::max(1, device.sm_count);
    const Choice tuned = choose_in_lines(p, sm_count);
    // The few rows that a large weight is read for are tuned to the speed of memory.
    const bool reads = in_lines(p) && is_skinny(p) && double(p.n) * double(p.k) > 0x1p24;
    if (p.grouped || p.k == 0 || reads) return tuned;
    Choice best = tuned;
    // By which another kernel has to be cheaper than the one that is tuned.
    double least = (in_lines(p) ? 0.93 : 1) * fitted_cycles(tuned, p, sm_count);
    for_each_candidate(p, sm_count, [&](const Choice& choice) {
        const bool waves = choice.kernel == Kernel::split_k && choice.schedule.blocks > sm_count;
        if (waves && in_lines(p)) return;
        const double needed = fitted_cycles(choice, p, sm_count);
        if (needed < least) best = choice, least = needed;
    });
    return best;
}

bool is_same(const Problem& a, const Problem& b) {
    const auto fields = [](const Problem& p) {
        return std::tie(p.m, p.n, p.k, p.groups, p.a_dtype, p.b_dtype, p.out_dtype, p.accurate,
                        p.blockwise, p.blockwise_1d1d, p.grouped, p.activated);
    };
    return fields(a) == fields(b);
}

}  // namespace

Choice choose(const Problem& p, const DeviceProperties& device) {
    const int64_t hash =
        p.m * 31 + p.n * 1009 + p.k * 65537 + p.accurate * 3 + p.blockwise * 5 + p.grouped * 7;
    return gemm::latest_choice<Choice>(p, device, hash, is_same, cheapest);
}

static std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list{choose(p, device)};
    if (!runs_native(device)) return list;
    std::vector<Fields> known{detail::fields_of(list[0])};
    for_each_candidate(p, std::max(1, device.sm_count), [&](const Choice& choice) {
        Fields fields = detail::fields_of(choice);
        if (std::find(known.begin(), known.end(), fields) != known.end()) return;
        list.push_back(choice), known.push_back(std::move(fields));
    });
    return list;
}

void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced) {
    if (before.kernel == Kernel::portable) return;
    const bool same_split = choice.kernel == Kernel::split_k && choice.config == before.config;
    if (!kernel_is_forced && !same_split) choice.kernel = preferred_kernel(choice.config);
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.a_dtype), '_', name_of(c.b_dtype), '_', kind_of(c), '_', c.block_m, 'x',
                  c.block_n);
}

std::string kernel_name(const Choice& choice) {
    const Config& c = choice.config;
    if (choice.kernel == Kernel::portable) return portable_name(c);
    if (choice.kernel == Kernel::split_k)
        return concat(name_of(c.a_dtype), '_', name_of(c.b_dtype), "_split_k_", name_of(c.sums));
    return kernel_name(c) + (choice.kernel == Kernel::rowwise ? ROWWISE : "");
}

// The split-K kernel, which has all widths.
static KernelInfo split_k_info(Sums sums) {
    const Config c = split_k_config(SPLIT_K_WIDTHS[0], sums);
    return {.name = kernel_name(Choice{.kernel = Kernel::split_k, .config = c}),
            .config = concat("tiles of 128 rows and 64 to ", c.block_n, " columns, up to ",
                             SPLIT_K_STAGES, " stages, 1 producer warp and ", c.consumers,
                             " consumer warpgroups, split-K, sums ", name_of(sums)),
            .symbol = symbol_of("fp8_split_k_kernel", sums),
            .threads = split_k_threads(sums),
            .shared_bytes = SPLIT_K_SHARED_BYTES};
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const Sums sums : {Sums::fast, Sums::promoted}) list.push_back(split_k_info(sums));
    for (KernelInfo& info : portable_kernels()) list.push_back(std::move(info));
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        const std::string kind = kind_of(c);
        const std::string roles =
            c.swap_ab ? "2 producer warps and 1 consumer warpgroup, sums promoted"
                      : concat("1 producer and ", c.consumers, " consumer warpgroups",
                               is_pingpong(c) ? " in ping-pong" : "", ", sums ", name_of(c.sums),
                               c.blockwise_only ? ", block-wise scales" : "");
        list.push_back({
            .name = kernel_name(c),
            .config = concat("tile ", c.block_m, 'x', c.block_n, 'x', c.block_k, ", ", c.stages,
                             " stages, ", c.swap_ab ? "" : concat(c.buffers, " buffers, "), roles),
            .symbol = symbol_of(c.swap_ab ? "fp8_swap_ab_kernel" : "fp8_gemm_kernel", "Config", c),
            .threads = threads(c),
            .shared_bytes = shared_bytes(c),
            .fields = detail::fields_of(c),
        });
        list.back().fields["strategy"] = std::string(strategy_name(kernel_of(c)));
        if (has_rowwise_kernel(c)) {  // fp8_gemm_kernel<Traits, true>
            KernelInfo rowwise = list.back();
            list.back().symbol += "EEEELb0E", rowwise.symbol += "EEEELb1E";
            rowwise.name += ROWWISE, rowwise.config += ", row-wise scales";
            rowwise.fields["strategy"] = std::string(strategy_name(Kernel::rowwise));
            list.push_back(rowwise);
        }
    }
    return list;
}

static const bool registered = register_op("fp8_gemm", "gemm", &kernels, &unsupported, &choose) &&
                               register_candidates("fp8_gemm", &candidates);

}  // namespace thunderkittens::fp8_gemm
