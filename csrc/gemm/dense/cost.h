// What choose.cpp compares: the clock cycles that the kernels of the dense GEMM need for a problem,
// fitted to an H200. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles count by cluster, those of its blocks together.
inline int clusters_of(const Config& c, int sm_count) {
    return std::max(1, sm_count / c.cluster_m);
}
inline int64_t height_of(const Config& c) { return int64_t{c.block_m} * c.cluster_m; }

// The cost of a tile in clock cycles of an SM: block_m * block_n / 32 for its products of 64 steps
// of k at the tensor cores' full rate, times `per_product`, plus `fixed`, and `startup` once per
// kernel, before the first product and after the last. Fitted to an H200: one consumer keeps the
// tensor cores less busy than two, and small tiles load more bytes per product.
struct TileCost {
    double per_product, fixed, startup;
};
inline TileCost tile_cost(const TileShape& shape) {
    const int size = shape.block_m * shape.block_n;
    return {size >= 128 * 256   ? 1.0
            : size >= 128 * 224 ? 1.03
            : size >= 128 * 128 ? 1.05
            : size >= 128 * 112 ? 1.1
            : size >= 64 * 128  ? 1.32
                                : 2.16,
            600, 2500 + 0.12 * size};
}

// TMA asks the L2 cache for lines of 128 bytes. A row of a box that does not begin at a line lies
// in two, so that such operands cost up to twice as many requests, at this rate of an SM; a cluster
// shares those for b.
constexpr double CYCLES_PER_LINE = 1.73;
inline double line_cycles(const Problem& p, double rows, double columns, int cluster_m) {
    return CYCLES_PER_LINE *
           (rows * (p.a_in_lines ? 1 : 2) + columns * (p.b_in_lines ? 1 : 2) / cluster_m);
}
// Where operands begin at lines, a cluster costs more by its lockstep than it saves; and it begins
// later than single blocks.
inline bool shares_lines(const Problem& p) { return !p.fused && !(p.a_in_lines && p.b_in_lines); }
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

// The cycles that the GPU needs with tiles of this shape: waves of one tile per SM.
inline double cycles(const TileShape& shape, const Config& config, const Problem& p, int sm_count) {
    const int64_t tiles = p.batch * ceil_div(p.m, height_of(config)) * ceil_div(p.n, shape.block_n);
    const int64_t waves = ceil_div(tiles, clusters_of(config, sm_count));
    const TileCost cost = tile_cost(shape);
    const double steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const double step = std::max(shape.block_m * shape.block_n / 32 * cost.per_product,
                                 line_cycles(p, shape.block_m, shape.block_n, config.cluster_m));
    const double tile = steps * step * (config.cluster_m > 1 ? LOCKSTEP : 1);
    return waves * (tile * two_widths(config, p, sm_count).share + cost.fixed) + cost.startup +
           (config.cluster_m > 1 ? CLUSTER_STARTUP : 0);
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

inline BalancedTiles balance_tiles(const Config& config, const Problem& p, int sm_count) {
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
                              tiles * 900 + 2500 + 0.12 * config.block_m * config.block_n +
                              (config.cluster_m > 1 ? CLUSTER_STARTUP : 0);
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
inline double operand_cycles(const Problem& p) {
    return 2 * double(p.m + p.n) * double(p.k) / 1765;
}

// Split-K. Fitted to an H200: the products, or reading the operands from memory; a start and an end
// that grow with the partial sums which are stored; and the partial sums which are added, one unit
// of columns of each peer at a time. All blocks run at a time, so there are no more of them than
// SMs.
inline SplitKTiles split_k_tiles(const Problem& p, int sm_count) {
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
inline SplitKTiles stream_k_tiles(const Problem& p, int sm_count, double limit) {
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

// Split-K over a cluster, for few tiles of 64 x 64: all blocks run at a time. Fitted to an H200:
// the steps, of which TMA's requests are the most, or reading the operands; a start, and two
// barriers of the cluster.
struct ClusterSplits {
    int splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
};
constexpr TileShape CLUSTER_SPLIT_K_SHAPE = TILE_SHAPES[3];
inline int64_t cluster_split_k_tiles(const Problem& p) {
    const TileShape& shape = CLUSTER_SPLIT_K_SHAPE;
    return p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
}
inline ClusterSplits cluster_splits(const Problem& p, int sm_count) {
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

// The kernel for a short k: a latency of memory for each of its steps, which another block of the
// SM hides in part, then reading the operands from the L2 cache and writing the output. A first
// guess, by what single parts are known to take; not fitted yet.
struct ShortKTiles {
    const TileShape* shape = nullptr;
    double cycles = std::numeric_limits<double>::infinity();
};
constexpr TileShape SHORT_K_SHAPES[] = {tile_shape(64, 64), tile_shape(64, 128)};
constexpr int SHORT_K_BLOCKS = 2;  // of an SM
inline double short_k_cycles(const TileShape& shape, const Problem& p, int sm_count) {
    constexpr double startup = 3000, fixed = 500, step = 900, read_bytes = 24, written_bytes = 13;
    const double tiles = double(p.batch) * double(ceil_div(p.m, shape.block_m)) *
                         double(ceil_div(p.n, shape.block_n));
    const double of_sm = std::ceil(tiles / sm_count);
    const int block_k = short_k_block_k(make_config(shape, p.dtype, p.a_m_major, p.b_n_major));
    const auto more_steps = static_cast<double>(ceil_div(p.k, block_k) - 1);
    const double read = 2 * double(shape.block_m + shape.block_n) * double(p.k) / read_bytes;
    const double written =
        double(shape.block_m * shape.block_n * size_in_bytes(p.out_dtype)) / written_bytes;
    return startup + more_steps * step * std::ceil(of_sm / SHORT_K_BLOCKS) +
           of_sm * (fixed + std::max(read, written));
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
    constexpr double startup = 4000;
    if (!p.a_needs_copy && !p.b_needs_copy) return 0;
    const double rows = double(p.a_needs_copy ? p.m : 0) + double(p.b_needs_copy ? p.n : 0);
    return startup + double(p.batch) * rows * double(p.k) * 4 / 1765;
}
}  // namespace thunderkittens::gemm
