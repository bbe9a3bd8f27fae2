// The clock cycles that the kernels of the dense GEMM need for a problem whose rows all begin at
// lines, fitted to an H200, which choose.cpp compares; and the balanced tiles and the splits of any
// problem. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/math.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/fitted_cost.h"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// Whether all rows of the operands begin at lines of 128 bytes.
inline bool begins_at_lines(const Problem& p) {
    return p.a_alignment >= 128 && p.b_alignment >= 128 && !p.a_needs_copy && !p.b_needs_copy;
}
// Whether sums are only rounded, too. There the choice is that of the models of this file, which
// were tuned to the weights of language models and to squares; elsewhere that of fitted_cost.h, but
// for skinny m.
inline bool in_lines(const Problem& p) { return !p.fused && begins_at_lines(p); }

// A step's requests to the L2 cache, of balanced tiling's narrow and wide tiles, split-K and
// stream-K.
inline double line_cycles(const Problem& p, double rows, double columns, int cluster_m) {
    constexpr double in_lines_cycles = 1.73, off_lines_cycles = 3.4;
    return (begins_at_lines(p) ? in_lines_cycles : off_lines_cycles) *
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

// The persistent and the single-wave kernels: waves of tiles of one per SM, block_m * block_n / 32
// cycles for the products of 64 steps of k, times what smaller tiles lose.
inline double fixed_width_cycles(const Config& config, const Problem& p, int sm_count) {
    const int size = config.block_m * config.block_n;
    const double per_product = size >= 128 * 256   ? 1.0
                               : size >= 128 * 224 ? 1.03
                               : size >= 128 * 128 ? 1.05
                               : size >= 128 * 112 ? 1.1
                               : size >= 64 * 128  ? 1.32
                                                   : 2.16;
    const int64_t tiles = p.batch * ceil_div(p.m, config.block_m) * ceil_div(p.n, config.block_n);
    const auto steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const double lines = line_cycles(p, config.block_m, config.block_n, 1);
    const double tile = steps * std::max(size / 32 * per_product, lines);
    return double(ceil_div(tiles, sm_count)) *
               (tile * two_widths(config, p, sm_count).share + 600) +
           2500 + 0.12 * size;
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

    int64_t blocks(const Problem& p) const {
        return p.batch * round_up(ceil_div(p.m, shape->block_m), share_m) *
               round_up(ceil_div(p.n, shape->block_n), share_n) * splits;
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
                    const bool waits = tile.blocks(p) > sm_count;
                    if (!waits || pairs == 1) visit(tile);
                    tile.per_sm = 2;
                    if (waits && pairs > 1) visit(tile);
                }
            }
        }
    }
}
// Where all rows begin at lines: split-K alone, for few tiles of 64 x 64.
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
    return work + tiles * 900 + 2500 + 0.12 * config.block_m * config.block_n +
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
    return std::max(products, operand_cycles(p)) + 7500 + 0.55 * size + 160 * taken;
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
           (0.16 + 0.2 * partials) * size;
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

}  // namespace thunderkittens::gemm
