// The clock cycles that the kernels of the dense GEMM need: one model of all of them, fitted to an
// H200, which choose.cpp compares. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>

#include "csrc/common/math.h"
#include "csrc/gemm/dense/runtime_tile.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {

// The constants of the model: cycles of an H200's SM, unless they say otherwise. They are fitted to
// 592 products, drawn and listed, each with some sixty kernels and clusters
// (docs/experiments/gemm.md).
struct Fit {
    // A step of 64 of k: its products, times what tiles of a size lose; a line of 128 bytes that
    // the SM asks of the L2 cache.
    double large = 0.349, middle = 0.419, small = 0.361, smallest = 0.507, asked = 1.223;
    double off_line = 1.869;  // lines that a row takes more where none begins at one
    double same_line = 31.5;  // lines that the L2 cache gives per cycle where all SMs ask for them
    double blend = 1.098;     // of the shorter of products and loads
    double pairs = 1.367, lockstep = 1.579;  // blocks that wait for one, for several
    // Bytes per cycle: of memory, which all kernels wait for at least, and of that an SM's; through
    // the L2 cache. The share of an operand that is read again. What counts of the shorter of the
    // L2 cache and the steps, and of that and memory.
    double memory = 2430, memory_of_sm = 38, cached = 12500, again = 1.717, blend_cached = 1.221,
           blend_memory = 0.1;
    // A kernel before its first product and after its last, and more or less of some of them.
    double start = 1610, cluster_start = 490, single_wave = -2500, single_wave_64x64 = -4500;
    // An element of a tile: its store; more where the output's rows begin anywhere; its fused
    // epilogue, there too, and behind another tile.
    double store = 0.123, any_persistent = 0.523;
    double fused_cluster = 0.929, fused_any_cluster = 2.495, fused_swap_ab = 0.3,
           fused_short = 0.126;
    double fused_persistent = 0.415, fused_next = 0.504;
    // A block of a cluster tile behind the first, and its elements.
    double next_block = 115, next_element = 0.198;
    // Split-K: over a cluster, of swap-AB, and through a workspace.
    double split = 1470, split_element = 0.464, split_swap_ab = 1320;
    double workspace = 8000, workspace_element = 0.65;
    // A short k: a tile, a step, and bytes per cycle that are read and written.
    double short_tile = 1830, short_step = 2590, short_read = 101.2, short_written = 18.6;
    // Copies of operands that TMA cannot read: a launch, and bytes per cycle.
    double copy = 7920, copied = 2280;
};
constexpr Fit FIT;

// How far off the lines of 128 bytes rows begin that begin at multiples of `alignment` bytes.
inline double off_lines(int64_t alignment) {
    return 1 - double(std::min<int64_t>(alignment, 128)) / 128;
}
// TMA asks the L2 cache for these lines, of which a row of a box that does not begin at one takes
// more. So many are a row, in the mean.
inline double lines_of(int64_t alignment) { return 1 + FIT.off_line * off_lines(alignment); }

// How a choice divides a problem: tiles, the blocks that share loads or the k of a tile, the blocks
// of a cluster, those that an SM holds, and blocks in all.
struct Tiling {
    double block_m, block_n;
    int share_m = 1, share_n = 1, splits = 1, cluster = 1, per_sm = 1;
    double blocks = 0, tiles = 0;

    double size() const { return block_m * block_n; }
};

inline Tiling tiling_of(const Choice& choice, const Problem& p) {
    const Config& c = choice.config;
    const Schedule& s = choice.schedule;
    Tiling t{.block_m = double(c.block_m), .block_n = double(c.block_n)};
    if (choice.kernel == Kernel::cluster_tile || choice.kernel == Kernel::runtime_tile) {
        t.share_m = s.share_m, t.share_n = s.share_n, t.per_sm = s.per_sm;
    }
    t.splits = s.splits;
    t.cluster = choice.kernel == Kernel::split_k ? 1 : t.share_m * t.share_n * t.splits;
    const int64_t rows = round_up(ceil_div(p.m, c.block_m), t.share_m);
    if (s.columns > 0) {  // of two widths: tiles as wide as their mean
        const double more = std::min(1.0, double(s.extra_rows) / double(rows));
        const double width = double(p.n) / (s.columns + more);
        t.block_n = std::min(t.block_n, std::ceil(width / 8) * 8);
        t.tiles = double(rows * s.columns + s.extra_rows);
    } else {
        t.tiles = double(p.batch * rows * round_up(ceil_div(p.n, c.block_n), t.share_n));
    }
    t.blocks = choice.kernel == Kernel::split_k ? s.blocks : t.tiles * t.splits;
    return t;
}

// The SMs that clusters of so many blocks leave work to: of an H200's 132, those of its GPCs.
inline double sms_for(int cluster, int sm_count) {
    const int most = cluster >= 5 && cluster < 8 ? 96 : cluster >= 3 ? 120 : 132;
    return std::max(1, sm_count * most / 132);
}

inline int64_t k_steps(const Problem& p) { return std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)); }

// A step of k of a block: its products and its loads, which disturb each other.
inline double step_cycles(const Tiling& t, const Problem& p, int sm_count) {
    const double a = lines_of(p.a_alignment) * std::min(t.block_m, double(p.m)),
                 b = lines_of(p.b_alignment) * std::min(t.block_n, double(p.n));
    const double share = t.size() >= 128 * 128  ? FIT.large
                         : t.size() >= 128 * 96 ? FIT.middle
                         : t.size() >= 64 * 128 ? FIT.small
                                                : FIT.smallest;
    const double products = t.size() / 32 * share;
    // The blocks at work at a time that read the same rows of b, and the same columns of a.
    const double at_a_time = std::min(t.blocks, double(sm_count)) / t.splits;
    const double rows = double(p.batch) * std::ceil(double(p.m) / t.block_m),
                 columns = double(p.batch) * std::ceil(double(p.n) / t.block_n);
    const double of_b = std::max(1.0, at_a_time / columns) / t.share_m * b,
                 of_a = std::max(1.0, at_a_time / rows) / t.share_n * a;
    const double loads =
        std::max(FIT.asked * (a / t.share_n + b / t.share_m), std::max(of_a, of_b) / FIT.same_line);
    return std::max(products, loads) + FIT.blend * std::min(products, loads);
}

inline double bytes_of(const Problem& p) {
    const double m = double(p.m), n = double(p.n), k = double(p.k);
    return 2 * double(p.batch) * ((m + n) * k + m * n);
}
// The bytes that come through the L2 cache: the operands, and a part of them again where several
// blocks load them, because what is on its way to one of these, others do not find there yet; and
// the result.
inline double cached_bytes(const Tiling& t, const Problem& p) {
    const auto again = [](double size, double block, int share) {
        const double readers = std::ceil(std::ceil(size / block) / share);
        return FIT.again * (1 - 1 / std::max(1.0, readers));
    };
    const double m = double(p.m), n = double(p.n);
    return bytes_of(p) +
           2 * double(p.batch) * double(p.k) *
               (m * again(n, t.block_n, t.share_n) + n * again(m, t.block_m, t.share_m));
}

// The epilogues of an SM, of its last tile and of `more` others, and what a kernel takes besides.
inline double epilogue_cycles(const Choice& choice, const Tiling& t, const Problem& p,
                              double more) {
    const bool any = p.n % 8 != 0, warps = choice.schedule.store_interval > 0;
    const double fused = p.fused, size = t.size(), splits = t.splits;
    switch (choice.kernel) {
        case Kernel::split_k: return FIT.workspace + FIT.workspace_element * size;
        case Kernel::swap_ab:
            return (t.splits > 1 ? FIT.split_swap_ab : 0) +
                   (1 + more) * std::min(t.block_m, double(p.m)) * t.block_n *
                       (FIT.store + fused * FIT.fused_swap_ab);
        case Kernel::cluster_tile: {  // each split finishes a share of the tile
            const double element = fused * (FIT.fused_cluster + any * FIT.fused_any_cluster);
            return size / splits * (FIT.store + element) +
                   more * (FIT.next_block + size * (FIT.next_element + element)) +
                   (t.splits > 1 ? FIT.split + FIT.split_element * size * (splits - 1) / splits
                                 : 0) +
                   (t.cluster > 1 ? FIT.cluster_start : 0);
        }
        default: {
            const double rows = any * FIT.any_persistent, exposed = warps ? 0 : fused;
            return size * (FIT.store + exposed * FIT.fused_persistent + rows) +
                   more * size * (exposed * FIT.fused_next + rows) +
                   (choice.kernel == Kernel::single_wave         ? FIT.single_wave
                    : choice.kernel == Kernel::single_wave_64x64 ? FIT.single_wave_64x64
                                                                 : 0);
        }
    }
}

inline double short_k_cycles(const Config& c, const Problem& p, int sm_count) {
    const double tiles =
        double(p.batch) * double(ceil_div(p.m, c.block_m)) * double(ceil_div(p.n, c.block_n));
    const double of_sm = std::ceil(tiles / sm_count);
    const auto more_steps = static_cast<double>(ceil_div(p.k, short_k_block_k(c)) - 1);
    const double tile = FIT.short_tile +
                        2 * double(c.block_m + c.block_n) * double(p.k) / FIT.short_read +
                        c.block_m * c.block_n * (2 / FIT.short_written + p.fused * FIT.fused_short);
    return FIT.start + more_steps * FIT.short_step * std::ceil(of_sm / 2) + of_sm * tile;
}

// Copies of the operands that TMA cannot read: a launch, reading and writing.
inline double copy_cycles(const Problem& p) {
    if (!p.a_needs_copy && !p.b_needs_copy) return 0;
    const double rows = double(p.a_needs_copy ? p.m : 0) + double(p.b_needs_copy ? p.n : 0);
    return FIT.copy + double(p.batch) * rows * double(p.k) * 4 / FIT.copied;
}

// The longer of two, and a part of the shorter.
inline double longer(double a, double b, double blend) {
    return std::max(a, b) + blend * std::min(a, b);
}

// A run-time tile in persistent clusters: a step waits for its products, or for its loads, which
// come through the L2 cache.
inline double runtime_tile_cycles(const Choice& choice, const Problem& p, int sm_count) {
    const Tiling t = tiling_of(choice, p);
    const double waves = std::ceil(t.tiles / choice.schedule.blocks);
    const double a = (1 + 0.9 * off_lines(p.a_alignment)) * t.block_m / t.share_n,
                 b = (1 + 0.9 * off_lines(p.b_alignment)) * t.block_n / t.share_m;
    const double products = 1.05 * t.size() / 32 + 30,
                 loads = 3.4 * (a + b) * choice.schedule.blocks / sm_count,
                 arrives = 1.6 * (t.block_m + t.block_n);
    const double step = std::max({products, loads, arrives});
    return 3000 + waves * (double(k_steps(p)) * step + 0.07 * t.size() + 700);
}

// What no kernel is faster than.
constexpr double LEAST_CYCLES = 1500;

// The cycles that a choice needs.
inline double cycles_of(const Choice& choice, const Problem& p, int sm_count) {
    if (choice.kernel == Kernel::short_k) return short_k_cycles(choice.config, p, sm_count);
    if (choice.kernel == Kernel::runtime_tile) return runtime_tile_cycles(choice, p, sm_count);
    const Tiling t = tiling_of(choice, p);
    const bool split_k = choice.kernel == Kernel::split_k;
    const double sms = sms_for(t.cluster, sm_count), of_sm = std::ceil(t.blocks / sms);
    const double steps = split_k ? std::ceil(double(k_steps(p)) * t.tiles / std::max(1.0, t.blocks))
                                 : of_sm * double(ceil_div(k_steps(p), t.splits));
    const double wait = t.cluster > 2 ? FIT.lockstep : t.cluster == 2 ? FIT.pairs : 1;
    const double work = steps * step_cycles(t, p, sm_count) * wait,
                 cached = cached_bytes(t, p) / FIT.cached;
    const double both = longer(work, cached, FIT.blend_cached);
    const double at_a_time = std::clamp(t.blocks, 1.0, double(sm_count)),
                 memory = bytes_of(p) / std::min(FIT.memory, FIT.memory_of_sm * at_a_time);
    const double cycles = FIT.start + longer(both, memory, FIT.blend_memory) +
                          epilogue_cycles(choice, t, p, std::ceil(of_sm / t.per_sm) - 1);
    return std::max(cycles, LEAST_CYCLES) + copy_cycles(p);
}

}  // namespace thunderkittens::gemm
