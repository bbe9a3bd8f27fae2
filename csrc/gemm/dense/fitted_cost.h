// The clock cycles that the kernels of the dense GEMM need for a problem whose rows do not all
// begin at lines of 128 bytes, or that has a fused epilogue: one model of all kernels, which
// choose.cpp compares. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>

#include "csrc/common/math.h"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// Tiles count by cluster, those of its blocks together.
inline int clusters_of(const Config& c, int sm_count) {
    return std::max(1, sm_count / c.cluster_m);
}
inline int64_t height_of(const Config& c) { return int64_t{c.block_m} * c.cluster_m; }

// The constants of the model: cycles of an H200's SM, unless they say otherwise. They are fitted to
// 438 drawn products, each with some eighty kernels and clusters (docs/experiments/gemm.md).
struct Fit {
    // A step of 64 of k: its products, times what tiles of a size lose; a line of 128 bytes that
    // the SM asks of the L2 cache, and one that it receives.
    double large = 0.483, medium = 0.509, middle = 0.636, small = 0.622, smallest = 0.664;
    double asked = 1.848, received = 0.338, least_step = 19;
    double off_line = 0.366;  // lines that a row takes more where none begins at one
    double same_line = 13.6;  // lines that the L2 cache gives per cycle where all SMs ask for them
    double blend = 0.268;     // of the shorter of products and loads, which disturb each other
    // A kernel before its first product and after its last; the same of a cluster; its steps.
    double start = 568, cluster_start = 555, lockstep = 1.328;
    // What the tiles behind the first cost besides.
    double next_tile = 295, next_block = 2486, next_element = 0.093;
    // An element of a tile: its store; more where the output's rows begin anywhere, of cluster
    // tiles, of a short k, of swap-AB and of the others.
    double store = 0.092;
    double any_cluster = 0.029, any_short_k = 0.024, any_swap_ab = 0.05, any_other = 0.216;
    // Its fused epilogue, with epilogue warps, and behind another tile; the same again where the
    // output's rows begin anywhere.
    double fused_cluster = 0.498, fused_swap_ab = 0.529, fused_short_k = 0.009, fused_other = 0.224;
    double fused_warps = 0.024, fused_next = 0.223;
    double fused_any_cluster = 0.94, fused_any_swap_ab = 0.203, fused_any_short_k = 0.392,
           fused_any_other = 0.025;
    // Split-K: over a cluster, of swap-AB, and through a workspace, with units of columns to add.
    double split = 942, split_element = 0.185, split_swap_ab = 1000;
    double workspace = 2708, workspace_element = 0.492, workspace_unit = 184;
    // Bytes of memory per cycle, of the GPU, and of the shorter of that and the steps.
    double memory = 2500, blend_memory = 0.132;
    // SMs that clusters of so many blocks leave without work, of 132.
    double lost_by_3 = 7.1, lost_by_4 = 11.9, lost_by_6 = 30, lost_by_8 = 23.6;
    // What kernels take more than that.
    double swap_ab = 180, persistent = 277, single_wave = -1641, one_consumer = 1000,
           balanced = -463;
    // A short k: a start, a tile, a step, and bytes per cycle that are read and written.
    double short_start = 616, short_tile = 1682, short_step = 558, short_read = 46.6,
           short_written = 34.2;
    // Copies of operands that TMA cannot read.
    double copy = 5712, copied = 9280;
};
constexpr Fit FIT;

// TMA asks the L2 cache for lines of 128 bytes, of which a row of a box that does not begin at one
// takes more. So many lines are a row, in the mean, of an operand whose rows begin at multiples of
// `alignment` bytes.
inline double lines_of(int64_t alignment) {
    return 1 + FIT.off_line * (1 - double(std::min<int64_t>(alignment, 128)) / 128);
}

// How a choice divides a problem: tiles, blocks that share loads or the k of a tile, blocks that an
// SM holds, and blocks in all.
struct Tiling {
    double block_m, block_n;
    int share_m = 1, share_n = 1, splits = 1, per_sm = 1;
    double blocks = 0, tiles = 0;
};

inline Tiling tiling_of(const Choice& choice, const Problem& p) {
    const Config& c = choice.config;
    const Schedule& s = choice.schedule;
    Tiling t{.block_m = double(c.block_m), .block_n = double(c.block_n)};
    if (choice.kernel == Kernel::cluster_tile) {
        t.share_m = s.share_m, t.share_n = s.share_n, t.per_sm = s.per_sm;
    } else {
        t.share_m = c.cluster_m;
    }
    const bool splits = choice.kernel == Kernel::cluster_tile || choice.kernel == Kernel::swap_ab ||
                        choice.kernel == Kernel::split_k;
    if (splits) t.splits = s.splits;
    const int64_t rows = round_up(ceil_div(p.m, c.block_m), t.share_m);
    if (s.columns > 0) {  // balanced: tiles as wide as their mean
        const double more = std::min(1.0, double(s.extra_rows * c.cluster_m) / double(rows));
        const double width = double(p.n) / (s.columns + more);
        t.block_n = std::min(t.block_n, std::ceil(width / 8) * 8);
        t.tiles = double(rows * s.columns + int64_t{s.extra_rows} * c.cluster_m);
    } else {
        t.tiles = double(p.batch * rows * round_up(ceil_div(p.n, c.block_n), t.share_n));
    }
    t.blocks = choice.kernel == Kernel::split_k ? s.blocks : t.tiles * t.splits;
    return t;
}

inline double product_share(double size) {
    return size >= 128 * 256   ? FIT.large
           : size >= 128 * 192 ? 0.5 * (FIT.large + FIT.medium)
           : size >= 128 * 128 ? FIT.medium
           : size >= 128 * 96  ? FIT.middle
           : size >= 64 * 128  ? FIT.small
                               : FIT.smallest;
}

// A step of k on an SM, of one block: its products, and its loads. `longer` is the longer of them,
// `both` the cycles of the two.
struct Step {
    double longer, both;
};
inline Step step_of(const Tiling& t, const Problem& p, int sm_count) {
    const double a = lines_of(p.a_alignment) * std::min(t.block_m, double(p.m)),
                 b = lines_of(p.b_alignment) * std::min(t.block_n, double(p.n));
    const double products = t.block_m * t.block_n / 32 * product_share(t.block_m * t.block_n);
    // The blocks at work at a time that read the same rows of b, and the same columns of a.
    const double batch = double(p.batch), at_a_time = std::min(t.blocks, double(sm_count));
    const double rows = batch * std::ceil(double(p.m) / t.block_m),
                 columns = batch * std::ceil(double(p.n) / t.block_n);
    const double of_b = std::max(1.0, at_a_time / columns / t.splits) / t.share_m * b,
                 of_a = std::max(1.0, at_a_time / rows / t.splits) / t.share_n * a;
    const double loads = std::max({FIT.asked * (a / t.share_n + b / t.share_m),
                                   FIT.received * (a + b), std::max(of_a, of_b) / FIT.same_line});
    const double longer = std::max(products, loads);
    return {longer, longer + FIT.blend * std::min(products, loads)};
}

inline int64_t k_steps(const Problem& p) { return std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)); }

inline double operand_bytes(const Problem& p) {
    return 2 * double(p.batch) * double(p.m + p.n) * double(p.k);
}
inline double result_bytes(const Problem& p) {
    return 2 * double(p.batch) * double(p.m) * double(p.n);
}

inline double short_k_cycles(const Config& c, const Problem& p, int sm_count) {
    const double tiles =
        double(p.batch) * double(ceil_div(p.m, c.block_m)) * double(ceil_div(p.n, c.block_n));
    const double of_sm = std::ceil(tiles / sm_count), size = c.block_m * c.block_n;
    const auto more_steps = static_cast<double>(ceil_div(p.k, short_k_block_k(c)) - 1);
    const double read = 2 * double(c.block_m + c.block_n) * double(p.k) / FIT.short_read;
    const bool any = p.n % 8 != 0;
    const double element = 2 / FIT.short_written + any * FIT.any_short_k +
                           p.fused * (FIT.fused_short_k + any * FIT.fused_any_short_k);
    return FIT.short_start + more_steps * FIT.short_step * std::ceil(of_sm / 2) +
           of_sm * (FIT.short_tile + read + size * element);
}

// Split-K and stream-K through a workspace.
inline double workspace_cycles(const Tiling& t, const Problem& p, int sm_count) {
    const double steps = std::ceil(double(k_steps(p)) * t.tiles / t.blocks);
    const double taken = std::ceil(t.block_n / 32 / t.splits) * (t.splits - 1);
    return std::max(steps * step_of(t, p, sm_count).longer, operand_bytes(p) / FIT.memory) +
           FIT.start + FIT.workspace + FIT.workspace_element * t.block_m * t.block_n +
           FIT.workspace_unit * taken;
}

// The cycles of the steps and of memory, and the tiles of an SM behind its first ones.
struct Work {
    double cycles, more_tiles;
};
inline Work work_of(const Tiling& t, const Problem& p, int sm_count) {
    const int cluster = t.share_m * t.share_n * t.splits;
    const double lost = cluster == 8   ? FIT.lost_by_8
                        : cluster >= 5 ? FIT.lost_by_6
                        : cluster == 4 ? FIT.lost_by_4
                        : cluster == 3 ? FIT.lost_by_3
                                       : 0;
    const double sms = std::max(1.0, std::floor(sm_count * (1 - lost / 132)));
    const double of_sm = std::ceil(t.blocks / sms), rounds = std::floor(of_sm / t.per_sm),
                 rest = of_sm - rounds * t.per_sm, step = step_of(t, p, sm_count).both;
    double work = rounds * std::max(t.per_sm * step, FIT.least_step);
    if (rest > 0) work += std::max(rest * step, FIT.least_step);
    work *= double(ceil_div(k_steps(p), t.splits)) * (cluster > 1 ? FIT.lockstep : 1);
    const double memory = (operand_bytes(p) + result_bytes(p)) / FIT.memory;
    return {std::max(work, memory) + FIT.blend_memory * std::min(work, memory),
            std::ceil(of_sm / t.per_sm) - 1};
}

// The cycles of the epilogues of an SM: of its last tile, and of the others.
inline double epilogue_cycles(const Choice& choice, const Tiling& t, const Problem& p,
                              double more_tiles) {
    const double size = t.block_m * t.block_n;
    const bool any = p.n % 8 != 0;
    if (choice.kernel == Kernel::swap_ab) {
        return (1 + more_tiles) * size *
               (FIT.store + any * FIT.any_swap_ab +
                p.fused * (FIT.fused_swap_ab + any * FIT.fused_any_swap_ab));
    }
    if (choice.kernel == Kernel::cluster_tile) {  // each split finishes a share of the tile
        const double more =
            any * FIT.any_cluster + p.fused * (FIT.fused_cluster + any * FIT.fused_any_cluster);
        return size / t.splits * (FIT.store + more) +
               more_tiles * (size * more + FIT.next_block + FIT.next_element * size);
    }
    const bool warps = choice.schedule.store_interval > 0;
    const double any_rows = any * (FIT.any_other + p.fused * FIT.fused_any_other);
    const double last = p.fused * (warps ? FIT.fused_warps : FIT.fused_other) + any_rows;
    const double next = p.fused * (warps ? 0 : FIT.fused_next) + any_rows;
    return size * (FIT.store + last) + more_tiles * (size * next + FIT.next_tile);
}

inline double kernel_cycles(const Choice& choice, const Tiling& t) {
    const double cluster = t.share_m * t.share_n * t.splits > 1 ? FIT.cluster_start : 0;
    switch (choice.kernel) {
        case Kernel::swap_ab: return FIT.swap_ab + (t.splits > 1 ? FIT.split_swap_ab : 0);
        case Kernel::cluster_tile:
            return cluster +
                   (t.splits > 1 ? FIT.split + FIT.split_element * t.block_m * t.block_n : 0);
        case Kernel::one_consumer: return cluster + FIT.one_consumer;
        case Kernel::single_wave: return cluster + FIT.persistent + FIT.single_wave;
        case Kernel::balanced: return cluster + FIT.persistent + FIT.balanced;
        default: return cluster + FIT.persistent;
    }
}

// Copies of the operands that TMA cannot read: a launch, reading and writing.
inline double copy_cycles(const Problem& p) {
    if (!p.a_needs_copy && !p.b_needs_copy) return 0;
    const double rows = double(p.a_needs_copy ? p.m : 0) + double(p.b_needs_copy ? p.n : 0);
    return FIT.copy + double(p.batch) * rows * double(p.k) * 4 / FIT.copied;
}

// The cycles that a choice needs.
inline double fitted_cycles(const Choice& choice, const Problem& p, int sm_count) {
    if (choice.kernel == Kernel::short_k) return short_k_cycles(choice.config, p, sm_count);
    const Tiling t = tiling_of(choice, p);
    if (choice.kernel == Kernel::split_k) {
        return workspace_cycles(t, p, sm_count) + copy_cycles(p);
    }
    const Work work = work_of(t, p, sm_count);
    return work.cycles + FIT.start + epilogue_cycles(choice, t, p, work.more_tiles) +
           kernel_cycles(choice, t) + copy_cycles(p);
}

}  // namespace thunderkittens::gemm
