// Which kernel multiplies which problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/align_rows.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/dispatch.h"

namespace thunderkittens::gemm {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles count by cluster, those of its blocks together.
int clusters_of(const Config& c, int sm_count) { return std::max(1, sm_count / c.cluster_m); }
int64_t height_of(const Config& c) { return int64_t{c.block_m} * c.cluster_m; }

// The cost of a tile in clock cycles of an SM: block_m * block_n / 32 for its products of 64 steps
// of k at the tensor cores' full rate, times `per_product`, plus `fixed`, and `startup` once per
// kernel, before the first product and after the last. Fitted to an H200: one consumer keeps the
// tensor cores less busy than two, and small tiles load more bytes per product.
struct TileCost {
    double per_product, fixed, startup;
};
TileCost tile_cost(const TileShape& shape) {
    const int size = shape.block_m * shape.block_n;
    return {size >= 128 * 256   ? 1.0
            : size >= 128 * 224 ? 1.03
            : size >= 128 * 128 ? 1.05
            : size >= 128 * 112 ? 1.1
            : size >= 64 * 128  ? 1.32
                                : 2.16,
            600, 2500 + 0.12 * size};
}

// TMA asks the L2 cache for lines of 128 bytes. A row of a box that does not begin at a line lies in
// two, so that such operands cost up to twice as many requests, at this rate of an SM; a cluster
// shares those for b.
constexpr double CYCLES_PER_LINE = 1.73;
double line_cycles(const Problem& p, double rows, double columns, int cluster_m) {
    return CYCLES_PER_LINE *
           (rows * (p.a_in_lines ? 1 : 2) + columns * (p.b_in_lines ? 1 : 2) / cluster_m);
}
// Where operands begin at lines, a cluster costs more by its lockstep than it saves.
bool shares_lines(const Problem& p) { return !p.fused && !(p.a_in_lines && p.b_in_lines); }
constexpr double LOCKSTEP = 1.02;

// Epilogue warps: the steps of k between the four subtiles that a consumer hands to them. With a
// short k the consumers would wait for the epilogue warps; for fp16, whose activation formulas are
// longer, sooner than for bf16.
int store_interval_for(const Problem& p) {
    const int64_t steps = ceil_div(p.k, BLOCK_K), least = p.dtype == DType::bf16 ? 48 : 64;
    return steps < least ? 0 : static_cast<int>(std::min<int64_t>(steps / 5, 32));
}

// Balanced tiling with two fixed widths, where the kernel has it and it pays.
Widths two_widths(const Config& config, const Problem& p, int sm_count) {
    if (!has_two_widths(config) || p.batch > 1 || p.out_dtype != p.dtype) return {};
    // A gate allows two widths only with epilogue warps.
    if (p.gate != Gate::none && store_interval_for(p) == 0) return {};
    const bool halves = p.gate == Gate::blocked;
    const int width = halves ? config.block_n / 2 : config.block_n;
    const int64_t n = halves ? p.n / 2 : p.n;
    const int64_t height = height_of(config);
    Widths widths = gemm::two_widths(height, width, p.m, n, clusters_of(config, sm_count));
    if (p.b_n_major && cover_too_much<int64_t>(widths.columns, n, width)) return {};
    // With many rows of tiles the narrower loads cost most of what the balance brings, where nearly
    // all tiles are narrow.
    const int64_t rows = ceil_div(p.m, height), base = rows - widths.extra_rows;
    const int64_t wide = base * wide_tiles(n, widths.columns, width) +
                         widths.extra_rows * wide_tiles(n, widths.columns + 1, width);
    if (p.b_n_major && rows >= 16 && wide * 10 < rows * widths.columns) {
        widths.share *= 1.055;
        if (wide == 0 && widths.share > 0.985) return {};
    }
    return widths;
}

// The cycles that the GPU needs with tiles of this shape: waves of one tile per SM.
double cycles(const TileShape& shape, const Config& config, const Problem& p, int sm_count) {
    const int64_t tiles = p.batch * ceil_div(p.m, height_of(config)) * ceil_div(p.n, shape.block_n);
    const int64_t waves = ceil_div(tiles, clusters_of(config, sm_count));
    const TileCost cost = tile_cost(shape);
    const double steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const double step = std::max(shape.block_m * shape.block_n / 32 * cost.per_product,
                                 line_cycles(p, shape.block_m, shape.block_n, config.cluster_m));
    const double tile = steps * step * (config.cluster_m > 1 ? LOCKSTEP : 1);
    return waves * (tile * two_widths(config, p, sm_count).share + cost.fixed) + cost.startup;
}

// Balanced tiling with run-time widths: the tiles of a row, and the cycles that they need.
struct BalancedTiles {
    int columns = 0, extra_rows = 0;
    double cycles = std::numeric_limits<double>::infinity();
};

// The cost of a tile of a width, in columns of a tile of 256: in narrow tiles the rows of a are
// loaded for fewer columns.
double column_cost(const Config& config, const Problem& p, int64_t width) {
    const double w = static_cast<double>(width);
    const double lines = line_cycles(p, config.block_m, w, config.cluster_m);
    return std::max({w, 0.6 * w + 91, lines * 32 / config.block_m}) *
           (config.cluster_m > 1 ? LOCKSTEP : 1);
}

// The columns that the busiest SM computes.
double balanced_load(const Config& config, const Problem& p, int64_t rows, int64_t columns,
                     int64_t extra_rows, int sm_count) {
    const int64_t n = p.n;
    const int64_t unit = balanced_step(config), tiles = rows * columns + extra_rows;
    const Shares base = share_columns(config, n, columns),
                 extra = share_columns(config, n, columns + 1);
    const auto cost = [&](int64_t width) { return column_cost(config, p, width); };
    const double narrow = cost(base.narrow), wider = cost(base.narrow + unit) - narrow;
    const auto waves = static_cast<double>(ceil_div(tiles, sm_count));
    if (extra_rows == 0) {
        return waves * narrow + double(ceil_div(rows * base.wide, sm_count)) * wider;
    }
    if (waves == 1) return narrow + (base.wide > 0 ? wider : 0);
    const double of_extra = double(columns + 1) * cost(extra.narrow) +
                            extra.wide * (cost(extra.narrow + unit) - cost(extra.narrow));
    const double all = double(rows - extra_rows) * (double(columns) * narrow + base.wide * wider) +
                       double(extra_rows) * of_extra;
    return all / sm_count + wider / 2;
}

BalancedTiles balance_tiles(const Config& config, const Problem& p, int sm_count) {
    BalancedTiles best;
    const int clusters = clusters_of(config, sm_count);
    const int64_t rows = ceil_div(p.m, height_of(config));
    const int64_t least = ceil_div(p.n, widest(config)), most = ceil_div(p.n, narrowest(config));
    const auto steps = static_cast<double>(ceil_div(p.k, BLOCK_K));
    const auto consider = [&](int64_t columns, int64_t extra_rows) {
        if (columns < least || columns + (extra_rows > 0) > most) return;
        const double tiles = std::ceil(double(rows * columns + extra_rows) / clusters);
        const double cycles = steps * config.block_m / 32 *
                                  balanced_load(config, p, rows, columns, extra_rows, clusters) +
                              tiles * 900 + 2500 + 0.12 * config.block_m * config.block_n;
        if (cycles < best.cycles) {
            best = {static_cast<int>(columns), static_cast<int>(extra_rows), cycles};
        }
    };
    const int64_t first = ceil_div(rows * least, clusters);
    for (int64_t waves = first; waves < first + 3; ++waves) {
        const int64_t columns = std::min(waves * clusters / rows, most);
        if (columns < least) continue;
        if (config.b_n_major) {
            for (int64_t i = 0; i < 3; ++i) consider(columns - i, 0);
        } else {
            const Shares shares = share_columns(config, p.n, columns);
            const int64_t widest_tile = shares.narrow + (shares.wide > 0 ? int{NARROW_BY} : 0);
            consider(ceil_div(p.n, widest_tile), 0);
            consider(columns, 0);
            if (columns < most) consider(columns, waves * clusters % rows);
        }
    }
    return best;
}

Schedule schedule_for(const Config& config, const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count), clusters = clusters_of(config, sm_count);
    const int64_t rows = ceil_div(p.m, height_of(config)), columns = ceil_div(p.n, config.block_n);
    Schedule schedule;
    // With few rows of tiles all of them use b at about the same time, and it need not stay in L2.
    // A much larger b is read at the same speed either way.
    const double b_bytes = 2.0 * double(p.n) * double(p.k), l2_bytes = device.l2_bytes;
    schedule.evict_first_b =
        p.m <= 512 && p.batch == 1 && b_bytes * 4 >= l2_bytes && b_bytes <= l2_bytes * 4;
    const int64_t tiles = rows * columns, all = p.batch * tiles;
    schedule.blocks = static_cast<int>(std::min<int64_t>(all, clusters)) * config.cluster_m;
    // A block for each tile: one raster group, and the grid has the shape of the tiles.
    schedule.raster_group = static_cast<int>(rows);
    if (all <= clusters) return schedule;
    // Whole products of a batch at a time, where that takes no more waves: their tiles read the
    // same rows and columns together.
    const int64_t whole = clusters / tiles * tiles;
    if (p.batch > 1 && whole * 16 >= clusters * 15 &&
        ceil_div(all, whole) == ceil_div(all, clusters)) {
        schedule.blocks = static_cast<int>(whole) * config.cluster_m;
    }
    // The tiles at work at a time form a square of elements, in raster groups of equal height.
    const double height = std::sqrt(double(clusters) * config.block_n / double(height_of(config)));
    const double raster_groups = std::round(double(rows) / height);
    schedule.raster_group =
        static_cast<int>(ceil_div(rows, std::max<int64_t>(1, int64_t(raster_groups))));
    const Widths widths = two_widths(config, p, sm_count);
    schedule.columns = widths.columns, schedule.extra_rows = widths.extra_rows;
    return schedule;
}

// The choice of a configuration, without balanced tiling at run-time widths, split-K and stream-K.
Choice tiled_choice(const Config& config, const Problem& p, const DeviceProperties& device) {
    Choice choice{.config = config, .schedule = schedule_for(config, p, device)};
    if (has_epilogue_warps(config) && p.out_dtype == p.dtype) {
        choice.schedule.store_interval = store_interval_for(p);
    }
    // As far as the problem tells.
    choice.kernel = preferred_kernel(config);
    const Params params{.m = p.m,
                        .n = p.n,
                        .k = p.k,
                        .batch = p.batch,
                        .out_stride = p.n,
                        .out_dtype = p.out_dtype,
                        .schedule = choice.schedule};
    if (!allows(choice, params)) choice.kernel = kernel_of(config);
    return choice;
}

// Skinny m: what counts is how fast b is read. With swap-AB a block reads its columns of b once.
bool is_skinny(const Problem& p) { return p.m <= 64 && p.batch == 1 && !p.a_m_major; }
// More rows, but few tiles and a long k: the same swap-AB kernel, with split-K over clusters.
bool is_skinny_with_long_k(const Problem& p, int sm_count) {
    const int64_t tiles = ceil_div(p.m, 64) * ceil_div(p.n, 64);
    return p.m <= 256 && p.batch == 1 && !p.a_m_major && !p.fused && p.k >= 4096 &&
           tiles * 32 <= int64_t{sm_count} * 7;
}

Choice swap_ab_choice(const SwapAbShape& shape, int splits, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::swap_ab, .config = make_config(shape, p.dtype, p.b_n_major)};
    const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t clusters = std::max(1, device.sm_count / splits);
    const int64_t waves = ceil_div(tiles, clusters);
    choice.schedule.splits = splits;
    choice.schedule.blocks = static_cast<int>(ceil_div(tiles, waves) * splits);
    // A weight of many times the L2 cache is read faster without the evict-first hint.
    choice.schedule.evict_first_b =
        p.fused || 2.0 * double(p.n) * double(p.k) <= 6.0 * device.l2_bytes;
    return choice;
}

Choice choose_swap_ab(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const SwapAbShape* shape = nullptr;
    for (const SwapAbShape& candidate : SWAP_AB_SHAPES) {
        if (candidate.fused != p.fused) continue;
        shape = &candidate;
        if (candidate.block_m >= p.m) break;
    }
    const int64_t tiles = ceil_div(p.m, shape->block_m) * ceil_div(p.n, shape->block_n);
    const int64_t k_blocks = ceil_div(p.k, shape->block_k);
    // Half of the SMs read as fast as all do. Below that, split-K over a cluster, as long as each
    // block still has some steps. With several rows of tiles a block reads more than b.
    const double enough = p.m <= 64 ? 0.4 : 0.45;
    int splits = 1;
    while (splits < 8 && double(tiles * splits) < sm_count * enough && k_blocks >= splits * 2 * 2) {
        splits *= 2;
    }
    // Three blocks, where two would leave half of the SMs idle: with many rows the reduction
    // profits, and with a fused epilogue, which has fewer bytes in flight, reading does. The fused
    // kernel also splits a long k sooner.
    const bool three = p.fused || p.m > (p.b_n_major ? 32 : 16);
    if (splits == 2 && three && tiles * 4 <= sm_count && k_blocks >= 3 * 2) splits = 3;
    if (splits == 1 && p.fused && tiles * 2 <= sm_count && k_blocks >= 128) splits = 2;
    return swap_ab_choice(*shape, splits, p, device);
}

// Whether the sums of one product with a long k are only rounded, to rows that TMA can store: what
// the balanced and the split-K kernels compute.
bool is_rounded(const Problem& p, int64_t least_k = 1536) {
    return !p.fused && !p.a_m_major && p.batch == 1 && p.k >= least_k && p.m >= 1 && p.n >= 1 &&
           p.n % 8 == 0 && p.out_dtype == p.dtype;
}

TileShape shape_of(const Config& c) { return {c.block_m, c.block_n, c.stages, c.consumers}; }

// Split-K or stream-K: the tiles, the blocks that share the k of one, and the cycles that they
// need.
struct SplitKTiles {
    const TileShape* shape = nullptr;
    int splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
    int blocks = 0;
};

// The cycles that reading the operands from memory takes.
double operand_cycles(const Problem& p) { return 2 * double(p.m + p.n) * double(p.k) / 1765; }

// Split-K. Fitted to an H200: the products, or reading the operands from memory; a start and an end
// that grow with the partial sums which are stored; and the partial sums which are added, one unit
// of columns of each peer at a time. All blocks run at a time, so there are no more of them than
// SMs.
SplitKTiles split_k_tiles(const Problem& p, int sm_count) {
    constexpr int64_t most_splits = StreamKSegments::MAX_SPLITS;
    SplitKTiles best;
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    const double read = operand_cycles(p);
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t rows = ceil_div(p.m, shape.block_m), columns = ceil_div(p.n, shape.block_n);
        const int64_t units = shape.block_n / SPLIT_K_UNIT;
        const int64_t most = std::min({sm_count / (rows * columns), steps / 4, most_splits});
        for (int64_t splits = 2; splits <= most; ++splits) {
            const double size = shape.block_m * shape.block_n;
            const double step =
                std::max(size / 32 * 1.04, line_cycles(p, shape.block_m, shape.block_n, 1));
            const double products = double(ceil_div(steps, splits)) * step;
            const auto taken = static_cast<double>(ceil_div(units, splits) * (splits - 1));
            const double cycles = std::max(products, read) + 7500 + 0.55 * size + 160 * taken;
            if (cycles < best.cycles) {
                best = {&shape, static_cast<int>(splits), cycles,
                        static_cast<int>(rows * columns * splits)};
            }
        }
    }
    return best;
}

// Stream-K (common/stream_k.h), if it needs fewer cycles than `limit`. The fix-up of the finishing
// peer is the largest cost.
SplitKTiles stream_k_tiles(const Problem& p, int sm_count, double limit) {
    SplitKTiles best{.cycles = limit};
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    const double read = operand_cycles(p);
    if (steps > UINT16_MAX) return best;
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t all = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        const double size = shape.block_m * shape.block_n;
        // Narrow tiles are bound by their loads where not all blocks read the same rows at a time.
        const bool wide = shape.block_n > 128;
        const double lines = line_cycles(p, shape.block_m, shape.block_n, 1);
        const double step = std::max(size / 32 * (wide ? 1.03 : 1.09), lines);
        const double whole =
            double(steps) * std::max(size / 32 * (wide ? 1.03 : 1.24), lines) + 3000;
        // A lower bound: split without a rest, and without costs.
        if (double(all * steps) * step > limit * sm_count || all >= 2 * sm_count) continue;
        const int tiles = static_cast<int>(all);
        for (int splits = 2; splits <= StreamKSegments::MAX_PEERS; ++splits) {
            const int blocks = sm_count / splits * splits;
            const PeerGroup group = make_peer_group(blocks, splits, tiles);
            if (blocks >= tiles * splits || group.whole_tiles > 1) continue;
            const int helped_steps = group.helped_steps(static_cast<int>(steps));
            if (helped_steps == 0) continue;
            const double own_steps = double(steps - helped_steps) * step;
            const int partials = (group.partials() + group.shared_tiles - 1) / group.shared_tiles;
            const double cycles = std::max(group.whole_tiles * whole + own_steps, read) + 4500 +
                                  (0.16 + 0.2 * partials) * size;
            if (cycles < best.cycles) best = {&shape, splits, cycles, blocks};
        }
    }
    return best;
}

// Split-K over a cluster, for few tiles of 64 x 64: all blocks run at a time. Fitted to an H200: the
// steps, of which TMA's requests are the most, or reading the operands; a start, and two barriers
// of the cluster.
struct ClusterSplits {
    int splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
};
constexpr TileShape CLUSTER_SPLIT_K_SHAPE = TILE_SHAPES[3];
int64_t cluster_split_k_tiles(const Problem& p) {
    const TileShape& shape = CLUSTER_SPLIT_K_SHAPE;
    return p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
}
ClusterSplits cluster_splits(const Problem& p, int sm_count) {
    ClusterSplits best;
    const TileShape& shape = CLUSTER_SPLIT_K_SHAPE;
    const int64_t tiles = cluster_split_k_tiles(p), steps = ceil_div(p.k, BLOCK_K);
    if (p.fused || tiles < 1) return best;
    const double step = std::max(double(shape.block_m * shape.block_n) / 32 * 2.16,
                                 line_cycles(p, shape.block_m, shape.block_n, 1));
    const int64_t most = std::min({sm_count / tiles, steps, int64_t{MAX_CLUSTER_SPLITS}});
    for (int64_t splits = 2; splits <= most; ++splits) {
        const double products = double(ceil_div(steps, splits)) * step;
        const double cycles = std::max(products, double(p.batch) * operand_cycles(p)) + 5900;
        if (cycles < best.cycles) best = {static_cast<int>(splits), cycles};
    }
    return best;
}
Choice cluster_split_k_choice(int splits, const Problem& p) {
    Choice choice{.kernel = Kernel::cluster_split_k,
                  .config = make_config(CLUSTER_SPLIT_K_SHAPE, p.dtype, p.a_m_major, p.b_n_major)};
    choice.schedule.splits = splits;
    choice.schedule.blocks = static_cast<int>(cluster_split_k_tiles(p)) * splits;
    return choice;
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype == DType::fp32) {
        return "operands must be bf16 or fp16, got fp32; convert them, or use torch.matmul";
    }
    if (std::string reason = unsupported_sizes(p.m, p.n, p.k, "batch", p.batch); !reason.empty())
        return reason;
    const Choice choice = choose(p, device);
    const double tiles = double(p.batch) * double(ceil_div(p.m, choice.config.block_m)) *
                         double(ceil_div(p.n, choice.config.block_n));
    const int bytes =
        choice.kernel == Kernel::split_k ? SPLIT_K_SHARED_BYTES : shared_bytes(choice.config);
    return unsupported_resources(tiles, bytes, device);
}

Choice choose_fixed_width(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    if (is_skinny(p) || is_skinny_with_long_k(p, sm_count)) return choose_swap_ab(p, device);
    Config best;
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&](const TileShape& shape, int cluster_m = 1) {
        Config config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused);
        config.cluster_m = cluster_m;
        const double needed = cycles(shape, config, p, sm_count);
        if (needed < least) best = config, least = needed;
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) consider(shape);
    }
    for (std::size_t i = 0; shares_lines(p) && i < CLUSTER_SHAPES; ++i) consider(TILE_SHAPES[i], 2);
    // With a short k, reading and writing count for more than full waves.
    if (!p.fused && !p.a_m_major && p.k >= 1536) {
        if (p.b_n_major) {
            consider(NN_SHAPE);
        } else {
            for (const TileShape& shape : NT_SHAPES) consider(shape);
        }
    }
    return tiled_choice(best, p, device);
}

namespace {

Choice balanced_choice(const Config& config, const BalancedTiles& tiles, const Problem& p,
                       const DeviceProperties& device) {
    Choice choice{
        .kernel = Kernel::balanced, .config = config, .schedule = schedule_for(config, p, device)};
    choice.schedule.columns = tiles.columns, choice.schedule.extra_rows = tiles.extra_rows;
    const int64_t all = ceil_div(p.m, height_of(config)) * tiles.columns + tiles.extra_rows;
    const int clusters = clusters_of(config, std::max(1, device.sm_count));
    choice.schedule.blocks = static_cast<int>(std::min<int64_t>(all, clusters)) * config.cluster_m;
    return choice;
}

Choice split_k_choice(const TileShape& shape, int splits, int blocks, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::split_k,
                  .config = make_config(shape, p.dtype, false, p.b_n_major)};
    choice.schedule = schedule_for(choice.config, p, device);
    choice.schedule.splits = splits, choice.schedule.blocks = blocks;
    return choice;
}

// Balanced tiling with run-time widths where it pays, else the best fixed width; and the cycles.
std::pair<Choice, double> choose_unsplit(const Problem& p, const DeviceProperties& device) {
    const Choice choice = choose_fixed_width(p, device);
    if (choice.kernel == Kernel::swap_ab) return {choice, 0};
    const int sm_count = std::max(1, device.sm_count);
    const double fixed = cycles(shape_of(choice.config), choice.config, p, sm_count);
    std::pair<Choice, double> best{choice, fixed};
    if (!is_rounded(p, shares_lines(p) ? 512 : 1536)) return best;
    for (const int cluster_m : {1, 2}) {
        if (cluster_m > 1 && !shares_lines(p)) continue;
        Config config = balanced_config(p.dtype, p.b_n_major);
        config.cluster_m = cluster_m;
        const BalancedTiles tiles = balance_tiles(config, p, sm_count);
        if (tiles.cycles > 0.985 * fixed || tiles.cycles >= best.second) continue;
        best = {balanced_choice(config, tiles, p, device), tiles.cycles};
    }
    return best;
}

// Skinny problems with so few tiles that a cluster for each reads as fast as swap-AB, and ends
// sooner.
bool is_small(const Problem& p, int sm_count) {
    return !p.fused && cluster_split_k_tiles(p) * MAX_CLUSTER_SPLITS <= sm_count && p.k >= 512;
}

}  // namespace

Choice choose(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const auto [unsplit, whole] = choose_unsplit(p, device);
    const ClusterSplits cluster = cluster_splits(p, sm_count);
    if (unsplit.kernel == Kernel::swap_ab) {
        const bool small = cluster.splits > 1 && is_small(p, sm_count);
        return small ? cluster_split_k_choice(cluster.splits, p) : unsplit;
    }
    SplitKTiles tiles;
    if (is_rounded(p) && p.m >= 128) {
        const SplitKTiles split_k = split_k_tiles(p, sm_count);
        const SplitKTiles stream_k =
            stream_k_tiles(p, sm_count, 0.97 * std::min(whole, split_k.cycles));
        tiles = stream_k.shape != nullptr ? stream_k : split_k;
    }
    if (cluster.cycles < 0.97 * std::min(whole, tiles.cycles)) {
        return cluster_split_k_choice(cluster.splits, p);
    }
    if (tiles.shape == nullptr || tiles.cycles > 0.97 * whole) return unsplit;
    return split_k_choice(*tiles.shape, tiles.splits, tiles.blocks, p, device);
}

namespace {

// Every split-K and stream-K schedule of a problem.
template <typename Add>
void add_split_k(const Problem& p, const DeviceProperties& device, Add&& add) {
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        for (int splits = 2; p.m >= shape.block_m && splits <= StreamKSegments::MAX_PEERS;
             ++splits) {
            const bool split_k = tiles * splits <= device.sm_count;
            if (split_k ? steps < 4 * splits : tiles >= 2 * device.sm_count) continue;
            const auto blocks =
                static_cast<int>(split_k ? tiles * splits : device.sm_count / splits * splits);
            if (!split_k &&
                make_peer_group(blocks, splits, static_cast<int>(tiles)).whole_tiles > 1)
                continue;
            if (make_stream_k_segments(blocks, splits, tiles, steps).groups == 0) continue;
            add(split_k_choice(shape, splits, blocks, p, device));
        }
    }
}

}  // namespace

std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list{choose(p, device)};
    const auto add = [&](const Choice& choice) {
        if (std::find(list.begin(), list.end(), choice) == list.end()) list.push_back(choice);
    };
    const auto add_tiles = [&](const TileShape& shape, int cluster_m = 1) {
        Config config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused);
        config.cluster_m = cluster_m;
        Choice choice = tiled_choice(config, p, device);
        add(choice);
        choice.schedule.columns = choice.schedule.extra_rows = 0;
        add(choice);
        add({kernel_of(config), config, choice.schedule});
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) add_tiles(shape);
    }
    for (std::size_t i = 0; !p.fused && i < CLUSTER_SHAPES; ++i) add_tiles(TILE_SHAPES[i], 2);
    const int64_t tiles = cluster_split_k_tiles(p), steps = ceil_div(p.k, BLOCK_K);
    for (const int splits : {2, 3, 4, 6, 8}) {
        const bool fits = tiles * splits <= 2 * device.sm_count && splits <= steps;
        if (!p.fused && fits) add(cluster_split_k_choice(splits, p));
    }
    if (p.a_m_major) return list;
    if (!p.fused && p.b_n_major) add_tiles(NN_SHAPE);
    if (!p.fused && !p.b_n_major) {
        for (const TileShape& shape : NT_SHAPES) add_tiles(shape);
    }
    if (p.batch > 1) return list;
    for (const SwapAbShape& shape : SWAP_AB_SHAPES) {
        const bool holds = p.m <= shape.block_m || (shape.block_m == 64 && p.m <= 256);
        if (shape.fused != p.fused || !holds) continue;
        for (const int splits : {1, 2, 3, 4, 8}) {
            if (splits == 1 || ceil_div(p.k, shape.block_k) >= 2 * splits) {
                add(swap_ab_choice(shape, splits, p, device));
            }
        }
    }
    // What their kernels compute, see allows().
    if (p.fused || p.n % 8 != 0 || p.out_dtype != p.dtype) return list;
    for (const int cluster_m : {1, 2}) {
        Config balanced = balanced_config(p.dtype, p.b_n_major);
        balanced.cluster_m = cluster_m;
        const BalancedTiles found = balance_tiles(balanced, p, std::max(1, device.sm_count));
        if (found.columns > 0 && steps >= (balanced.block_n + 63) / 64) {
            add(balanced_choice(balanced, found, p, device));
        }
    }
    add_split_k(p, device, add);
    return list;
}

Choice choose_masked(const Problem& p, const DeviceProperties& device) {
    return {.config = masked_config(), .schedule = schedule_for(masked_config(), p, device)};
}

void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced) {
    const bool same_split = choice.kernel == Kernel::split_k && choice.config == before.config;
    if (!kernel_is_forced && !same_split) choice.kernel = preferred_kernel(choice.config);
    const int splits = std::max(1, choice.schedule.splits);
    choice.schedule.blocks = (choice.schedule.blocks + splits - 1) / splits * splits;
}

std::string kernel_name(const Config& c) {
    const std::string layout = concat(c.a_m_major ? 't' : 'n', c.b_n_major ? 'n' : 't');
    return concat(name_of(c.dtype), '_', layout, c.swap_ab ? "_swap_ab_" : "_", c.block_m, 'x',
                  c.block_n, c.fused ? "_fused" : "", c.masked ? "_masked" : "",
                  c.balanced ? "_balanced" : "", c.cluster_m == 2 ? "_2x1" : "");
}

std::string kernel_name(const Choice& choice) {
    switch (choice.kernel) {
        case Kernel::split_k: return concat(name_of(choice.config.dtype), "_split_k");
        case Kernel::single_wave:
        case Kernel::single_wave_64x64: return kernel_name(choice.config) + "_single_wave";
        case Kernel::cluster_split_k: return kernel_name(choice.config) + "_split_k";
        default: return kernel_name(choice.config);
    }
}

// The split-K kernel of a dtype, which has both widths of tiles and both orders of b.
static KernelInfo split_k_info(DType dtype) {
    const TileShape &narrow = SPLIT_K_SHAPES[0], &wide = SPLIT_K_SHAPES[1];
    const Config c = make_config(narrow, dtype, false, false);
    return {.name = kernel_name(Choice{.kernel = Kernel::split_k, .config = c}),
            .config = concat("tiles ", narrow.block_m, 'x', narrow.block_n, " and ", wide.block_m,
                             'x', wide.block_n, ", ", narrow.stages, " and ", wide.stages,
                             " stages, 1 producer warp and ", c.consumers,
                             " consumer warpgroups, split-K and stream-K"),
            .source = "split_k",
            .symbol = symbol_of("split_k_kernel", c.dtype),
            .threads = single_wave_threads(c),
            .shared_bytes = SPLIT_K_SHARED_BYTES};
}

// The file of instances.txt that has a configuration's kernels.
static std::string source_of(const Config& c) {
    if (c.balanced) return c.cluster_m == 1 ? "balanced" : "balanced_clusters";
    if (c.cluster_m > 1) return concat(name_of(c.dtype), "_clusters");
    if (c.swap_ab) return concat(name_of(c.dtype), c.fused ? "_swap_ab_fused" : "_swap_ab");
    if (c.fused) return concat(name_of(c.dtype), '_', c.block_m, 'x', c.block_n, "_fused");
    return concat(name_of(c.dtype), '_', strategy_name(kernel_of(c)));
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) list.push_back(split_k_info(dtype));
    list.push_back({.name = "align_rows",
                    .config = "copies of operands that TMA cannot read",
                    .source = "align_rows",
                    .symbol = concat("17align_rows_kernelILi", MAX_ALIGNED, 'E'),
                    .threads = ALIGN_THREADS});
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        const std::string tile = concat(c.block_m, 'x', c.block_n);
        const std::string stages = concat("tile ", tile, 'x', c.block_k, ", ", c.stages, " stages");
        const std::string roles =
            c.swap_ab ? "1 producer warp and 1 consumer warpgroup"
                      : concat("1 producer and ", c.consumers, " consumer warpgroups");
        KernelInfo kernel{
            .name = kernel_name(c),
            .config = concat(stages, ", ", roles),
            .source = source_of(c),
            .symbol = symbol_of(kernel_of(c) == Kernel::swap_ab        ? "swap_ab_kernel"
                                : kernel_of(c) == Kernel::one_consumer ? "one_consumer_kernel"
                                                                       : "persistent_gemm_kernel",
                                "Config", c),
            .threads = threads(c),
            .shared_bytes = shared_bytes(c),
            .fields = detail::fields_of(c),
        };
        kernel.fields["strategy"] = std::string(strategy_name(kernel_of(c)));
        list.push_back(kernel);
        if (!has_single_wave(c) && !has_single_wave_64x64(c)) continue;
        // The single-wave kernel of the same source.
        KernelInfo single = kernel;
        single.name = kernel_name(Choice{.kernel = preferred_kernel(c), .config = c});
        single.fields["strategy"] = std::string(strategy_name(preferred_kernel(c)));
        single.config = concat(stages, ", 1 producer warp and ", c.consumers, " consumer warpgroup",
                               c.consumers > 1 ? "s" : "", ", single-wave");
        single.threads = single_wave_threads(c);
        if (has_single_wave(c)) {
            single.symbol = symbol_of("single_wave_kernel", "Config", c);
        } else {
            single.symbol = symbol_of("single_wave_64x64_kernel", "Config", c);
            single.shared_bytes = single_wave_64x64_shared_bytes(c);
        }
        list.push_back(single);
        if (!has_single_wave_64x64(c)) continue;
        KernelInfo split = kernel;
        split.name = kernel_name(Choice{.kernel = Kernel::cluster_split_k, .config = c});
        split.fields["strategy"] = std::string(strategy_name(Kernel::cluster_split_k));
        split.config = concat("tile ", tile, 'x', c.block_k, ", ", CLUSTER_SPLIT_K_STAGES,
                              " stages, 1 producer warp and 1 consumer warpgroup, split-K over a "
                              "cluster of up to ",
                              MAX_CLUSTER_SPLITS);
        split.source = "cluster_split_k";
        split.symbol = symbol_of("cluster_split_k_kernel", "Config", c);
        split.threads = CLUSTER_SPLIT_K_THREADS;
        split.shared_bytes = cluster_split_k_shared_bytes(c);
        list.push_back(split);
    }
    return list;
}

static const bool registered = register_op("gemm", "gemm", &kernels, &unsupported, &choose) &&
                               register_candidates("gemm", &candidates);

}  // namespace thunderkittens::gemm
