// The clock cycles that the kernels of fp8_gemm need for a problem: one model of all of them, which
// choose.cpp compares. Pure functions of the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/common/math.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {

// The constants of the model: cycles of an H200's SM, unless they say otherwise. They are fitted to
// 392 products, each with some twenty kernels and clusters (docs/experiments/fp8.md).
struct Fit {
    // A step of 128 of k: its products, times what tiles of a width gain or lose; promoted sums, of
    // wide tiles and of others, and block-wise scales.
    double wide = 0.825, medium = 0.785, narrow = 0.755, narrowest = 0.641, of_64 = 0.96;
    double promoted = 1.08, promoted_narrow = 1.17;
    double blocks = 1.13, blocks_split_k = 1.19;
    // A line of 128 bytes that the SM asks of the L2 cache, and one that it receives.
    double asked = 0.517, received = 0.912;
    // What rows that do not begin at lines cost more; lines that the L2 cache gives per cycle to
    // all SMs, and where all of them ask for the same ones.
    double off_line = 0.429, off_line_l2 = 1.54, l2 = 111, same_line = 56.2;
    double blend = 0.486;  // of the shorter of products and loads, which disturb each other
    // Of swap-AB, 128 of k of a stage: at least, and for a row of a.
    double swap_ab_step = 154, swap_ab_row = 6.23;
    // A kernel before its first product and after its last; of a cluster; its steps.
    double start = 1865, swap_ab = 1536, split_k = 1594, tiled = 2896, pingpong = 24;
    double cluster_start = 623, lockstep = 0.965, share_two = 1.04, share_four = 0.98;
    // What the tiles behind the first cost besides; an element of a tile.
    double next_swap_ab = 1709, next_split_k = 4762, next_tiled = 1335;
    double next_pingpong = 1022;
    double store_swap_ab = 0.143, store_split_k = 0.173, store_tiled = 0.0558;
    // Split-K: a kernel, each block more, and an element of a tile; the same of swap-AB, and where
    // all blocks add.
    double split = 87, split_more = 452, split_element = 0.117;
    double split_swap_ab = 131, split_swap_ab_element = 0.0392;
    double reduced_swap_ab = 1526;
    // Bytes of memory per cycle, of the GPU, and of the shorter of that and the steps.
    double memory = 2266, blend_memory = 0.525;
    // SMs that clusters of so many blocks leave without work, of 132: 39 of three run at a time, 30
    // of four, 15 of eight.
    double lost_by_3 = 15, lost_by_4 = 12, lost_by_6 = 28, lost_by_8 = 12;
};
constexpr Fit FIT;

// The bytes at multiples of which rows of the operands begin, up to a line.
inline int64_t alignment_of(const Problem& p) { return std::gcd(round_up(p.k, 16), int64_t{128}); }
inline bool in_lines(const Problem& p) { return alignment_of(p) == 128; }

// How a choice divides a problem: tiles, blocks that share loads or the k of a tile.
struct Tiling {
    double block_m, block_n, tiles;
    int share_m, share_n, splits = 1;
    double steps = 0;  // of 128 of k, of a block

    int cluster() const { return share_m * share_n * splits; }
};

inline Tiling tiling_of(const Choice& choice, const Problem& p) {
    const Config& c = choice.config;
    const Schedule& s = choice.schedule;
    const bool swap_ab = choice.kernel == Kernel::swap_ab;
    const double rows = double(round_up(ceil_div(p.m, c.block_m), s.cluster_m));
    Tiling t{.block_m = double(c.block_m),
             .block_n = double(c.block_n),
             .tiles = rows * double(round_up(ceil_div(p.n, c.block_n), s.cluster_n)),
             .share_m = s.cluster_m,
             .share_n = s.cluster_n};
    if (swap_ab || choice.kernel == Kernel::split_k) t.splits = s.splits;
    if (s.columns > 0) {  // balanced: tiles as wide as their mean
        const double extra = s.extra_rows * s.cluster_m;
        const double width = double(p.n) / (s.columns + std::min(1.0, extra / rows));
        t.block_n = std::min(t.block_n, std::ceil(width / 8) * 8);
        t.tiles = rows * s.columns + extra;
    }
    const int64_t steps = ceil_div(ceil_div(p.k, c.block_k), t.splits);
    t.steps = double(steps * (c.block_k / BLOCK_K));
    return t;
}

// The products of a step of a block.
inline double product_cycles(const Choice& choice, const Tiling& t, const Problem& p) {
    const Config& c = choice.config;
    if (choice.kernel == Kernel::swap_ab) {
        return std::max(FIT.swap_ab_step, FIT.swap_ab_row * c.block_m) *
               (p.blockwise ? FIT.blocks : 1);
    }
    double rate = c.block_n >= 256   ? FIT.wide
                  : c.block_n >= 176 ? FIT.medium
                  : c.block_n >= 128 ? FIT.narrow
                                     : FIT.narrowest * (c.block_n == 64 ? FIT.of_64 : 1);
    if (c.sums != Sums::fast) rate *= c.block_n >= 176 ? FIT.promoted : FIT.promoted_narrow;
    const double blocks = choice.kernel == Kernel::split_k ? FIT.blocks_split_k : FIT.blocks;
    // To read its rows of a from shared memory takes a narrower tile as long.
    const double width = std::max(t.block_n, 96.0);
    return t.block_m * width / 32 * rate * (p.blockwise ? blocks : 1);
}

// A step of a block, with `at_a_time` blocks at work.
inline double step_cycles(const Choice& choice, const Tiling& t, const Problem& p,
                          double at_a_time) {
    const double off = 1 - double(alignment_of(p)) / 128, lines = 1 + FIT.off_line * off;
    const double rows_a = std::min(t.block_m, double(p.m)),
                 rows_b = std::min(t.block_n, double(p.n));
    const double a = lines * rows_a, b = lines * rows_b;
    // The blocks at work at a time that read the same rows of b, and the same columns of a.
    const double rows = std::ceil(double(p.m) / t.block_m),
                 columns = std::ceil(double(p.n) / t.block_n);
    const double of_b = std::max(1.0, at_a_time / columns / t.splits) / t.share_m * b,
                 of_a = std::max(1.0, at_a_time / rows / t.splits) / t.share_n * a;
    const double all = at_a_time * (rows_a / t.share_n + rows_b / t.share_m);
    const double loads = std::max({FIT.asked * (a / t.share_n + b / t.share_m),
                                   FIT.received * (a + b), std::max(of_a, of_b) / FIT.same_line,
                                   all * (1 + FIT.off_line_l2 * off) / FIT.l2});
    const double products = product_cycles(choice, t, p);
    return std::max(products, loads) + FIT.blend * std::min(products, loads);
}

// What a block does beside its steps, with `more` tiles behind its first one.
inline double other_cycles(const Choice& choice, const Tiling& t, double more) {
    const double size = t.block_m * t.block_n;
    const int others = t.splits - 1;
    switch (choice.kernel) {
        case Kernel::swap_ab: {
            const bool gathers = others <= senders(choice.config) && more == 0;
            const double split = FIT.split_swap_ab + FIT.split_swap_ab_element * size * others +
                                 (gathers ? 0 : FIT.reduced_swap_ab);
            return FIT.swap_ab + size * FIT.store_swap_ab +
                   more * (FIT.next_swap_ab + size * FIT.store_swap_ab) + (others > 0 ? split : 0);
        }
        case Kernel::split_k: {
            const double split = FIT.split + FIT.split_more * others + FIT.split_element * size;
            return FIT.split_k + size * FIT.store_split_k / t.splits +
                   more * (FIT.next_split_k + size * FIT.store_split_k) + (others > 0 ? split : 0);
        }
        default: {
            const bool pingpong = is_pingpong(choice.config);
            const double next = pingpong ? FIT.next_pingpong : FIT.next_tiled;
            return FIT.tiled + (pingpong ? FIT.pingpong : 0) + size * FIT.store_tiled + more * next;
        }
    }
}

// The cycles that a choice needs.
inline double fitted_cycles(const Choice& choice, const Problem& p, int sm_count) {
    const Tiling t = tiling_of(choice, p);
    const int cluster = t.cluster();
    const double lost = cluster == 8   ? FIT.lost_by_8
                        : cluster >= 5 ? FIT.lost_by_6
                        : cluster == 4 ? FIT.lost_by_4
                        : cluster == 3 ? FIT.lost_by_3
                                       : 0;
    const double sms = std::max(1.0, std::floor(sm_count * (1 - lost / 132)));
    const double blocks = t.tiles * t.splits, of_sm = std::ceil(blocks / sms);
    const int shares = t.share_m * t.share_n;
    const double shared = shares >= 4 ? FIT.share_four : shares > 1 ? FIT.share_two : 1;
    const double steps = of_sm * t.steps * step_cycles(choice, t, p, std::min(blocks, sms)) *
                         (cluster > 1 ? FIT.lockstep : 1) * shared;
    const double bytes = double(p.m + p.n) * double(p.k) + 2 * double(p.m) * double(p.n);
    const double memory = bytes / FIT.memory;
    return std::max(steps, memory) + FIT.blend_memory * std::min(steps, memory) + FIT.start +
           other_cycles(choice, t, of_sm - 1) + (cluster > 1 ? FIT.cluster_start : 0);
}

}  // namespace thunderkittens::fp8_gemm
