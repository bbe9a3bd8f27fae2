// Single whole tiles have a kernel of their own, see single_sm90.cuh: which configurations, and its
// resources. A warp loads, and the warps of one warpgroup have a staging buffer each.
#pragma once

#include "csrc/gemm/gemm.h"

namespace thunderkittens::gemm {

constexpr bool has_single(const Config& c) { return !c.streamed && c.block_n == 64; }
constexpr int SINGLE_THREADS = 128 + 32;
constexpr int single_shared_bytes(const Config& c) {
    const int bytes =
        c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 + 4 * 16 * 128 + c.stages * 16;
    return (bytes + 127) / 128 * 128;
}

}  // namespace thunderkittens::gemm
