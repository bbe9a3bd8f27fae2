// What the swap-AB kernels that dequantize a weight in registers cost, NVFP4's and MXFP8's: cycles
// of an SM, fitted to 1129 timings of 80 products on an H200 (docs/experiments/nvfp4.md).
// Pure functions; host C++ only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/common/math.h"

namespace thunderkittens::nvfp4_gemm {

constexpr double MEMORY_BYTES = 1388, CACHE_BYTES = 3966;  // per cycle, of all SMs
constexpr double SPLIT_CYCLES = 518;                       // of a reduction, for each split

// Of a tile shape: to begin and to end, a step of k, a tile beside its steps, to add up the sums of
// a cluster.
struct SwapAbCosts {
    double start, step, tile, reduction;
};

// Tiles of so many steps of k. A block reads `weight` and `rows` bytes a step.
struct SwapAbWork {
    int64_t tiles, steps;
    double weight, rows;
    double readers;  // blocks that read the same part of the weight at about the same time

    double step_cycles(const SwapAbCosts& costs, double blocks) const {
        return std::max({costs.step, blocks * (weight + rows) / CACHE_BYTES,
                         blocks * weight / readers / MEMORY_BYTES});
    }
    // Of split-K over clusters of `blocks` blocks, `clusters` at a time.
    double cycles(const SwapAbCosts& costs, int splits, int blocks, int64_t clusters) const {
        const auto waves = double(ceil_div(tiles, clusters));
        const double step = step_cycles(costs, double(tiles) * blocks / waves);
        return costs.start + waves * (double(ceil_div(steps, splits)) * step + costs.tile) +
               (splits > 1 ? costs.reduction + splits * SPLIT_CYCLES : 0);
    }
};

}  // namespace thunderkittens::nvfp4_gemm
