// The memory of a block of the backward kernels for head dimensions above 128
// (backward_d256_sm90.cuh). Host C++ only.
#pragma once

#include "csrc/attention/backward/backward.h"

namespace thunderkittens::attention {

// dO: parts of a tile's columns, and how many of them are in memory.
constexpr int d256_value_parts(const BackwardConfig& c) { return c.value_dim > 192 ? 2 : 1; }
constexpr int d256_value_slots(const BackwardConfig& c) { return c.value_dim > 192 ? 3 : 2; }

// Whether dQ leaves through shared memory.
constexpr bool d256_dq_shared(const BackwardConfig& c) { return c.value_dim <= 128; }

// K, V and half of the other block's K, the rings of Q and dO, dS twice of two blocks, dQ where
// it goes through shared memory, the rows' statistics, semaphores and alignment.
constexpr int backward_d256_memory(const BackwardConfig& c) {
    const int keys = 64 * (c.head_dim + c.value_dim + c.head_dim / 2) * 2;
    const int queries = c.stages * 64 * c.head_dim * 2 +
                        d256_value_slots(c) * 64 * (c.value_dim / d256_value_parts(c)) * 2;
    const int dq = d256_dq_shared(c) ? 64 * c.head_dim / 2 * 4 : 128;
    return keys + queries + dq + 4 * 64 * 64 * 2 + 2 * c.stages * 64 * 4 + 1024 + 768;
}

}  // namespace thunderkittens::attention
