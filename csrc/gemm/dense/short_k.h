// The kernel for a short k, short_k_sm90.cuh: which configurations have it, its resources, and which
// problems it computes. Host C++ only.
#pragma once

#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

constexpr int SHORT_K_THREADS = 256;

// It has the tiles of other kernels' configurations, but neither stages nor consumers.
constexpr bool has_short_k(const Config& c) {
    const bool plain = !c.swap_ab && !c.fused && !c.masked && !c.balanced && c.cluster_m == 1;
    return plain && c.block_m == 64 && (c.block_n == 64 || c.block_n == 128);
}
// The k that is in shared memory at a time: as much as a thread's registers hold on the way.
constexpr int short_k_block_k(const Config& c) { return c.block_n == 64 ? 128 : 64; }
// The tiles of the operands, the output's rows, the bias.
constexpr int short_k_shared_bytes(const Config& c) {
    const int operands = (c.block_m + c.block_n) * short_k_block_k(c) * 2;
    return operands + c.block_m * (c.block_n * 4 + 16) + (c.block_n * 4 + 127) / 128 * 128;
}

// Whether the kernel computes a problem. Its grid has the rows of tiles in the second dimension and
// the batch in the third, which end at 65535.
constexpr bool fits_short_k(const Problem& p) {
    constexpr int64_t most = 65535, limit = INT32_MAX - 1024;
    return !p.fused && p.m <= most * 64 && p.batch <= most && p.n <= limit && p.k <= limit;
}
// The elements from an operand's first to its last. The kernel counts their bytes in 31 bits, and
// those of 64 rows of the output in 32.
constexpr int64_t short_k_extent(int64_t batch, int64_t rows, int64_t columns, int64_t stride,
                                 int64_t batch_stride) {
    return (batch - 1) * batch_stride + (rows - 1) * stride + columns;
}
constexpr int64_t SHORT_K_EXTENT = int64_t{1} << 30, SHORT_K_OUT_STRIDE = int64_t{1} << 24;

}  // namespace thunderkittens::gemm
