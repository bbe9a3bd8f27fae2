// What choose.cpp compares: the clock cycles that the kernels of the dense GEMM need for a problem,
// fitted to an H200. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/math.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// Tiles count by cluster, those of its blocks together.
inline int clusters_of(const Config& c, int sm_count) {
    return std::max(1, sm_count / c.cluster_m);
}
inline int64_t height_of(const Config& c) { return int64_t{c.block_m} * c.cluster_m; }

// The constants of the model: cycles of an H200's SM, unless they say otherwise. They are fitted to
// 400 drawn products and to listed ones, each with some sixty kernels and clusters
// (docs/experiments/gemm.md).
struct Fit {
    // A step of 64 of k: its products at the tensor cores' full rate, times what tiles of a size
    // lose; a line of 128 bytes that the SM asks of the L2 cache, and one that it receives.
    double large = 0.78, medium = 0.94, middle = 0.99, small = 1.04, smallest = 1.57;
    double asked = 1.47, received = 0.45, least_step = 19;
    double off_line = 1.13;  // lines that a row takes more where none begins at one
    double blend = 0.21;     // of the shorter of products and loads, which disturb each other
    // A kernel before its first product and after its last; the same of a cluster; its steps.
    double start = 2200, cluster_start = 730, lockstep = 1.126;
    // The store of an element of a tile; and what the tiles behind the first cost besides.
    double store_element = 0.096, next_tile = 295, next_block = 2190, next_element = 0.125;
    // Split-K over a cluster.
    double split = 2075, split_element = 0.096;
    // Bytes of memory per cycle, of the GPU, and of the shorter of that and the steps.
    double memory = 2500, blend_memory = 0.46;
    // SMs that clusters of so many blocks leave without work, of 132.
    double lost_by_3 = 9.2, lost_by_4 = 11.4, lost_by_6 = 36, lost_by_8 = 11.5;
    // What kernels take more than that.
    double swap_ab = 180, single_wave = -3400, persistent = 1000, balanced = -830, split_k = -6050;
    double wide_lines = 2.17;  // as `asked`, for balanced tiling and split-K
};
constexpr Fit FIT;

// TMA asks the L2 cache for lines of 128 bytes, of which a row of a box that does not begin at one
// takes two. So many lines are a row, in the mean, of an operand whose rows begin at multiples of
// `alignment` bytes.
inline double lines_of(int64_t alignment) {
    return 1 + FIT.off_line * (1 - double(std::min<int64_t>(alignment, 128)) / 128);
}

// How a kernel divides a problem: tiles, blocks that share loads or the k of a tile, blocks that an
// SM holds.
struct Tiling {
    int block_m, block_n;
    int share_m = 1, share_n = 1, splits = 1;
    int per_sm = 1;
    bool persistent = true;
};

inline double product_share(int size) {
    return size >= 128 * 256   ? FIT.large
           : size >= 128 * 192 ? 0.5 * (FIT.large + FIT.medium)
           : size >= 128 * 128 ? FIT.medium
           : size >= 128 * 96  ? FIT.middle
           : size >= 64 * 128  ? FIT.small
                               : FIT.smallest;
}

// The cycles of a step of k on an SM that has `blocks` blocks at a time.
inline double step_cycles(const Tiling& t, const Problem& p, double blocks) {
    const double a = lines_of(p.a_alignment) * double(std::min<int64_t>(t.block_m, p.m)),
                 b = lines_of(p.b_alignment) * double(std::min<int64_t>(t.block_n, p.n));
    const double products = t.block_m * t.block_n / 32 * product_share(t.block_m * t.block_n);
    const double loads =
        std::max(FIT.asked * (a / t.share_n + b / t.share_m), FIT.received * (a + b));
    const double sum = std::max(products, loads) + FIT.blend * std::min(products, loads);
    return std::max(blocks * sum, FIT.least_step);
}

// Blocks of a grid, of whole clusters.
inline int64_t blocks_of(const Tiling& t, const Problem& p) {
    return p.batch * round_up(ceil_div(p.m, t.block_m), t.share_m) *
           round_up(ceil_div(p.n, t.block_n), t.share_n) * t.splits;
}

// The cycles in which the operands are read and the result is written.
inline double memory_cycles(const Problem& p) {
    const double operands = double(p.m + p.n) * double(p.k), result = double(p.m) * double(p.n);
    return 2 * double(p.batch) * (operands + result) / FIT.memory;
}

// The cycles that the GPU needs. `share`: those of balanced tiling, of those of whole tiles.
inline double tiling_cycles(const Tiling& t, const Problem& p, int sm_count, double share = 1) {
    const int cluster = t.share_m * t.share_n * t.splits;
    const double lost = cluster == 8   ? FIT.lost_by_8
                        : cluster >= 5 ? FIT.lost_by_6
                        : cluster == 4 ? FIT.lost_by_4
                        : cluster == 3 ? FIT.lost_by_3
                                       : 0;
    const auto sms = static_cast<int64_t>(std::max(1.0, sm_count * (1 - lost / 132)));
    const int64_t of_sm = ceil_div(blocks_of(t, p), sms);
    const int64_t rounds = of_sm / t.per_sm, rest = of_sm % t.per_sm;
    const int64_t k_blocks = std::max<int64_t>(1, ceil_div(p.k, BLOCK_K));
    const auto steps = static_cast<double>(ceil_div(k_blocks, t.splits));
    const double size = t.block_m * t.block_n;
    double work = double(rounds) * step_cycles(t, p, t.per_sm);
    if (rest > 0) work += step_cycles(t, p, double(rest));
    work *= steps * share * (cluster > 1 ? FIT.lockstep : 1);
    const double memory = memory_cycles(p);
    const double more = double(ceil_div(of_sm, t.per_sm) - 1);
    const double each = t.persistent ? FIT.next_tile : FIT.next_block + FIT.next_element * size;
    return std::max(work, memory) + FIT.blend_memory * std::min(work, memory) + FIT.start +
           FIT.store_element * size + more * each + (t.persistent ? FIT.persistent : 0) +
           (cluster > 1 ? FIT.cluster_start : 0) +
           (t.splits > 1 ? FIT.split + FIT.split_element * size : 0);
}

// Whether blocks may gain by sharing lines, and the fitted model holds. Where all rows begin at
// lines a cluster costs more by its lockstep than it saves. There, and for fused epilogues, the
// choice is that of a model of waves, which was tuned to the weights of language models and to
// squares.
inline bool shares_lines(const Problem& p) {
    return !p.fused &&
           (p.a_alignment < 128 || p.b_alignment < 128 || p.a_needs_copy || p.b_needs_copy);
}
constexpr double LINE_IN_LINES = 1.73;

// Balanced tiling's narrow and wide tiles, split-K and stream-K: a step's requests to the L2 cache.
inline double line_cycles(const Problem& p, double rows, double columns, int cluster_m) {
    return (shares_lines(p) ? FIT.wide_lines : LINE_IN_LINES) *
           (rows * lines_of(p.a_alignment) + columns * lines_of(p.b_alignment) / cluster_m);
}
constexpr double LOCKSTEP = 1.02, CLUSTER_STARTUP = 1500;

// Epilogue warps: the steps of k between the four subtiles that a consumer hands to them. With a
// short k the consumers would wait for the epilogue warps; for fp16, whose activation formulas are
// longer, sooner than for bf16.
inline int store_interval_for(const Problem& p) {
    const int64_t steps = ceil_div(p.k, BLOCK_K), least = p.dtype == DType::bf16 ? 48 : 64;
    return steps < least ? 0 : static_cast<int>(std::min<int64_t>(steps / 5, 32));
}

// Balanced tiling with two fixed widths, where the kernel has it and it pays.
inline Widths two_widths(const Config& config, const Problem& p, int sm_count) {
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

inline Tiling tiling_of(const Choice& choice) {
    const Config& c = choice.config;
    const Schedule& schedule = choice.schedule;
    return {.block_m = c.block_m,
            .block_n = c.block_n,
            .share_m = c.cluster_tile ? schedule.share_m : c.cluster_m,
            .share_n = schedule.share_n,
            .splits = schedule.splits,
            .per_sm = schedule.per_sm,
            .persistent = !c.cluster_tile && !c.swap_ab};
}

// Where all rows begin at lines, and for fused epilogues: waves of tiles of one per SM,
// block_m * block_n / 32 cycles for the products of 64 steps of k, times what smaller tiles lose.
inline double cycles_in_lines(const Config& config, const Problem& p, int sm_count) {
    const int size = config.block_m * config.block_n;
    const double per_product = size >= 128 * 256   ? 1.0
                               : size >= 128 * 224 ? 1.03
                               : size >= 128 * 128 ? 1.05
                               : size >= 128 * 112 ? 1.1
                               : size >= 64 * 128  ? 1.32
                                                   : 2.16;
    const int64_t tiles = p.batch * ceil_div(p.m, config.block_m) * ceil_div(p.n, config.block_n);
    const auto steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const double lines = LINE_IN_LINES * (config.block_m * (p.a_alignment < 128 ? 2 : 1) +
                                          config.block_n * (p.b_alignment < 128 ? 2 : 1));
    const double tile = steps * std::max(size / 32 * per_product, lines);
    return double(ceil_div(tiles, sm_count)) *
               (tile * two_widths(config, p, sm_count).share + 600) +
           2500 + 0.12 * size;
}

// The cycles of the persistent and the single-wave kernels.
inline double fixed_width_cycles(const Config& config, const Problem& p, int sm_count) {
    if (!shares_lines(p)) return cycles_in_lines(config, p, sm_count);
    const Tiling tiling = tiling_of({.config = config});
    const bool single_wave = has_single_wave(config) && blocks_of(tiling, p) <= sm_count &&
                             p.out_dtype == p.dtype && p.n % 8 == 0 && p.k > 3 * BLOCK_K;
    return tiling_cycles(tiling, p, sm_count, two_widths(config, p, sm_count).share) +
           (single_wave ? FIT.single_wave : 0);
}

// The cycles that reading the operands from memory takes.
inline double operand_cycles(const Problem& p) {
    return 2 * double(p.m + p.n) * double(p.k) / 1765;
}

// A way to divide a problem into cluster tiles, and the cycles that it needs.
struct ClusterTile {
    const TileShape* shape = nullptr;
    int share_m = 1, share_n = 1, splits = 1, per_sm = 1;
    double cycles = std::numeric_limits<double>::infinity();

    Tiling tiling() const {
        return {shape->block_m, shape->block_n, share_m, share_n, splits, per_sm, false};
    }
};
template <class Visit>
void for_each_cluster_tile(const Problem& p, int sm_count, Visit visit) {
    constexpr int most = MAX_CLUSTER_BLOCKS, grid_limit = 65535;
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    if (p.gate != Gate::none || p.batch > grid_limit / most) return;
    for (const TileShape& shape : CLUSTER_TILE_SHAPES) {
        const int64_t rows = ceil_div(p.m, shape.block_m), columns = ceil_div(p.n, shape.block_n);
        const int64_t tiles = p.batch * rows * columns;
        if (tiles < 1 || columns > grid_limit - most) continue;
        const Config config = cluster_tile_config(shape, p.dtype, p.a_m_major, p.b_n_major);
        const int pairs = most_cluster_tiles_per_sm(config);
        for (const int splits : {1, 2, 3, 4, 6, 8}) {
            if (splits > steps || (splits > 1 && tiles * splits > sm_count * pairs)) break;
            for (int share_m = 1; share_m * splits <= most && share_m < 2 * rows; share_m *= 2) {
                for (int share_n = 1; share_m * share_n * splits <= most && share_n < 2 * columns;
                     share_n *= 2) {
                    ClusterTile tile{&shape, share_m, share_n, splits};
                    const bool waits = blocks_of(tile.tiling(), p) > sm_count;
                    if (!waits || pairs == 1) visit(tile);
                    tile.per_sm = 2;
                    if (waits && pairs > 1) visit(tile);
                }
            }
        }
    }
}
inline ClusterTile best_cluster_tile(const Problem& p, int sm_count) {
    ClusterTile best;
    for_each_cluster_tile(p, sm_count, [&](ClusterTile& tile) {
        tile.cycles = tiling_cycles(tile.tiling(), p, sm_count);
        if (tile.cycles < best.cycles) best = tile;
    });
    return best;
}
// The same where all rows begin at lines: split-K alone, for few tiles of 64 x 64.
inline ClusterTile best_cluster_in_lines(const Problem& p, int sm_count) {
    ClusterTile best;
    const TileShape& shape = CLUSTER_TILE_SHAPES[0];
    const int64_t tiles = p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    if (tiles < 1) return best;
    const double step = shape.block_m * shape.block_n / 32 * 2.16;
    const int64_t most = std::min({sm_count / tiles, steps, int64_t{MAX_CLUSTER_BLOCKS}});
    for (int64_t splits = 2; splits <= most; ++splits) {
        const double products = double(ceil_div(steps, splits)) * step;
        const double cycles = std::max(products, double(p.batch) * operand_cycles(p)) + 5900;
        if (cycles < best.cycles) {
            best = {.shape = &shape, .splits = static_cast<int>(splits), .cycles = cycles};
        }
    }
    return best;
}

// Balanced tiling with run-time widths: the tiles of a row, and the cycles that they need.
struct BalancedTiles {
    int columns = 0, extra_rows = 0;
    double cycles = std::numeric_limits<double>::infinity();
};

// The cost of a tile of a width, in columns of a tile of 256: in narrow tiles the rows of a are
// loaded for fewer columns.
inline double column_cost(const Config& config, const Problem& p, int64_t width) {
    const double w = static_cast<double>(width);
    const double lines = line_cycles(p, config.block_m, w, config.cluster_m);
    return std::max({w, 0.6 * w + 91, lines * 32 / config.block_m}) *
           (config.cluster_m > 1 ? LOCKSTEP : 1);
}

// The columns that the busiest SM computes.
inline double balanced_load(const Config& config, const Problem& p, int64_t rows, int64_t columns,
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

inline double balanced_cycles(const Config& config, const Problem& p, int64_t columns,
                              int64_t extra_rows, int sm_count) {
    const int clusters = clusters_of(config, sm_count);
    const int64_t rows = ceil_div(p.m, height_of(config));
    const auto steps = static_cast<double>(ceil_div(p.k, BLOCK_K));
    const double tiles = std::ceil(double(rows * columns + extra_rows) / clusters);
    const double work =
        steps * config.block_m / 32 * balanced_load(config, p, rows, columns, extra_rows, clusters);
    const bool in_lines = !shares_lines(p);
    return (in_lines ? work : std::max(work, memory_cycles(p)) + FIT.balanced) + tiles * 900 +
           2500 + 0.12 * config.block_m * config.block_n +
           (config.cluster_m > 1 ? CLUSTER_STARTUP : 0);
}

inline BalancedTiles balance_tiles(const Config& config, const Problem& p, int sm_count) {
    BalancedTiles best;
    const int clusters = clusters_of(config, sm_count);
    const int64_t rows = ceil_div(p.m, height_of(config));
    const int64_t least = ceil_div(p.n, widest(config)), most = ceil_div(p.n, narrowest(config));
    const auto consider = [&](int64_t columns, int64_t extra_rows) {
        if (columns < least || columns + (extra_rows > 0) > most) return;
        const double cycles = balanced_cycles(config, p, columns, extra_rows, sm_count);
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

// Whether the sums of one product with a long k are only rounded, to rows that TMA can store: what
// the balanced and the split-K kernels compute.
inline bool is_rounded(const Problem& p, int64_t least_k = 1536) {
    return !p.fused && !p.a_m_major && p.batch == 1 && p.k >= least_k && p.m >= 1 && p.n >= 1 &&
           p.n % 8 == 0 && p.out_dtype == p.dtype;
}

// Split-K or stream-K: the tiles, the blocks that share the k of one, and the cycles that they
// need.
struct SplitKTiles {
    const TileShape* shape = nullptr;
    int splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
    int blocks = 0;
};

// Split-K. Fitted to an H200: the products, or reading the operands from memory; a start and an end
// that grow with the partial sums which are stored; and the partial sums which are added, one unit
// of columns of each peer at a time. All blocks run at a time, so there are no more of them than
// SMs.
inline double split_k_cycles(const TileShape& shape, int64_t splits, const Problem& p) {
    const int64_t steps = ceil_div(p.k, BLOCK_K), units = shape.block_n / SPLIT_K_UNIT;
    const double size = shape.block_m * shape.block_n;
    const double step = std::max(size / 32 * 1.04, line_cycles(p, shape.block_m, shape.block_n, 1));
    const double products = double(ceil_div(steps, splits)) * step;
    const auto taken = static_cast<double>(ceil_div(units, splits) * (splits - 1));
    return std::max(products, operand_cycles(p)) + 7500 + 0.55 * size + 160 * taken +
           (shares_lines(p) ? FIT.split_k : 0);
}
inline SplitKTiles split_k_tiles(const Problem& p, int sm_count) {
    SplitKTiles best;
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        const int64_t most =
            std::min({sm_count / tiles, steps / 4, int64_t{StreamKSegments::MAX_SPLITS}});
        for (int64_t splits = 2; splits <= most; ++splits) {
            const double cycles = split_k_cycles(shape, splits, p);
            if (cycles < best.cycles) {
                best = {&shape, static_cast<int>(splits), cycles, static_cast<int>(tiles * splits)};
            }
        }
    }
    return best;
}

// Stream-K (common/stream_k.h): infinite where the segments do not fit. The fix-up of the finishing
// peer is the largest cost.
inline double stream_k_cycles(const TileShape& shape, int splits, const Problem& p, int sm_count) {
    constexpr double never = std::numeric_limits<double>::infinity();
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    const auto tiles =
        static_cast<int>(ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n));
    const int blocks = sm_count / splits * splits;
    const PeerGroup group = make_peer_group(blocks, splits, tiles);
    if (blocks >= tiles * splits || group.whole_tiles > 1) return never;
    const int helped_steps = group.helped_steps(static_cast<int>(steps));
    if (helped_steps == 0) return never;
    const double size = shape.block_m * shape.block_n;
    // Narrow tiles are bound by their loads where not all blocks read the same rows at a time.
    const bool wide = shape.block_n > 128;
    const double lines = line_cycles(p, shape.block_m, shape.block_n, 1);
    const double step = std::max(size / 32 * (wide ? 1.03 : 1.09), lines);
    const double whole = double(steps) * std::max(size / 32 * (wide ? 1.03 : 1.24), lines) + 3000;
    const double own_steps = double(steps - helped_steps) * step;
    const int partials = (group.partials() + group.shared_tiles - 1) / group.shared_tiles;
    return std::max(group.whole_tiles * whole + own_steps, operand_cycles(p)) + 4500 +
           (0.16 + 0.2 * partials) * size + (shares_lines(p) ? FIT.split_k : 0);
}
// The best, if it needs fewer cycles than `limit`.
inline SplitKTiles stream_k_tiles(const Problem& p, int sm_count, double limit) {
    SplitKTiles best{.cycles = limit};
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    if (steps > UINT16_MAX) return best;
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        // A lower bound: split without a rest, and without costs.
        const double all = double(tiles * steps) * shape.block_m * shape.block_n / 32 * 1.03;
        if (all > limit * sm_count || tiles >= 2 * sm_count) continue;
        for (int splits = 2; splits <= StreamKSegments::MAX_PEERS; ++splits) {
            const double cycles = stream_k_cycles(shape, splits, p, sm_count);
            if (cycles < best.cycles) {
                best = {&shape, splits, cycles, sm_count / splits * splits};
            }
        }
    }
    return best;
}

// The kernel for a short k: a latency of memory for each of its steps, which another block of the
// SM hides in part, then reading the operands from the L2 cache and writing the output.
// Fitted to an H200.
struct ShortKTiles {
    const TileShape* shape = nullptr;
    double cycles = std::numeric_limits<double>::infinity();
};
constexpr TileShape SHORT_K_SHAPES[] = {tile_shape(64, 64), tile_shape(64, 128)};
constexpr int SHORT_K_BLOCKS = 2;  // of an SM
inline double short_k_cycles(const TileShape& shape, const Problem& p, int sm_count) {
    constexpr double startup = 2330, fixed = 1630, step = 1580, read_bytes = 40, written_bytes = 17;
    const double tiles = double(p.batch) * double(ceil_div(p.m, shape.block_m)) *
                         double(ceil_div(p.n, shape.block_n));
    const double of_sm = std::ceil(tiles / sm_count);
    const int block_k = short_k_block_k(make_config(shape, p.dtype, p.a_m_major, p.b_n_major));
    const auto more_steps = static_cast<double>(ceil_div(p.k, block_k) - 1);
    const double read = 2 * double(shape.block_m + shape.block_n) * double(p.k) / read_bytes;
    const double written =
        double(shape.block_m * shape.block_n * size_in_bytes(p.out_dtype)) / written_bytes;
    return startup + more_steps * step * std::ceil(of_sm / SHORT_K_BLOCKS) +
           of_sm * (fixed + read + written);
}
inline ShortKTiles short_k_tiles(const Problem& p, int sm_count) {
    ShortKTiles best;
    for (const TileShape& shape : SHORT_K_SHAPES) {
        const double cycles = short_k_cycles(shape, p, sm_count);
        if (cycles < best.cycles) best = {&shape, cycles};
    }
    return best;
}

// Copies of the operands that TMA cannot read: a launch, reading and writing.
inline double copy_cycles(const Problem& p) {
    constexpr double startup = 5000;
    if (!p.a_needs_copy && !p.b_needs_copy) return 0;
    const double rows = double(p.a_needs_copy ? p.m : 0) + double(p.b_needs_copy ? p.n : 0);
    return startup + double(p.batch) * rows * double(p.k) * 4 / 1765;
}
}  // namespace thunderkittens::gemm
