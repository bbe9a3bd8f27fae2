// The portable gradient of attention: what a kernel is, its parameters, and its shared memory.
#pragma once

#include <algorithm>

#include "csrc/attention/backward/backward_scheduler.cuh"
#include "csrc/attention/common/layouts.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <BackwardConfig CONFIG>
struct PortableBackwardKernel {
    static constexpr BackwardConfig config = CONFIG;
    static constexpr DType dtype = config.dtype;
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    static constexpr bool score_mod = config.score_mod;
    static constexpr int head_dim = config.head_dim, value_dim = config.values();
    static constexpr int block_m = config.block_m, block_n = config.block_n;
    static constexpr int stages = config.stages;
    static constexpr int warp_keys = config.warp_keys, column_warps = config.column_warps;
    static constexpr int key_tiles = warp_keys / 16;  // of a warp
    static constexpr int warps = portable_backward_warps(config);
    static constexpr int threads = 32 * warps;
    static constexpr int blocks_per_sm = portable_backward_blocks_per_sm(config);
    static constexpr int shared_bytes = portable_backward_memory(config);
    static constexpr bool shares_keys = column_warps > 1;
    // Queries of a warp, and how many of them at a time: its scores must fit registers.
    static constexpr int warp_queries = block_m / column_warps;
    static constexpr int queries = std::min(warp_queries, 32);
    static_assert(stages == 1 || stages == 2);
    static_assert(!shares_keys || warp_queries == queries);

    // dQ: rows and columns of a warp, 32 rows where the columns can be divided so.
    static constexpr bool whole_rows = (head_dim / 16) % (warps * 32 / block_m) == 0;
    static constexpr int dq_rows = whole_rows ? 32 : 16;
    static constexpr int dq_column_warps = warps * dq_rows / block_m;
    static constexpr int dq_tiles = head_dim / 16 / dq_column_warps;

    using k_tile = st<T, block_n, head_dim>;
    using v_tile = st<T, block_n, value_dim>;
    using q_tile = st<T, block_m, head_dim>;
    using grad_out_tile = st<T, block_m, value_dim>;
    using p_tile = st<T, block_n, block_m>;  // P^T and dS^T
    using statistics = sv<float, block_m>;
    using Scheduler = BackwardScheduler<block_m, block_n>;
};

template <class Kernel>
struct PortableBackwardGlobals {
    StridedRows<typename Kernel::T> q, k, v, grad_out, dk, dv;
    typename Kernel::Scheduler scheduler;
    // As those of the kernel for Hopper; sums are in tiles of 16 x 16.
    const float *lse_log2, *delta;
    float *dq, *partial_dk, *partial_dv;
    int* dq_semaphores;  // per tile of dQ: key blocks that have added theirs
    ScoreMod score_mod;
    float scale, scale_log2;
    int head_dim, value_dim;
    bool deterministic;
};

template <class Kernel, bool SHARES>
struct PortableExchange {
    typename Kernel::p_tile p, ds;
};
template <class Kernel>
struct PortableExchange<Kernel, false> {
    typename Kernel::p_tile ds;
};
template <class Kernel>
struct PortableBackwardShared : PortableExchange<Kernel, Kernel::shares_keys> {
    typename Kernel::k_tile k;
    typename Kernel::v_tile v;
    typename Kernel::q_tile q[Kernel::stages];
    typename Kernel::grad_out_tile grad_out[Kernel::stages];
    typename Kernel::statistics lse[Kernel::stages], delta[Kernel::stages];
    BackwardWorkTile work;
};

// Statistics of some of a step's queries.
struct QueryStatistics {
    uint32_t first;

    __device__ __forceinline__ uint32_t address_of(int query) const {
        return first + uint32_t(query * int(sizeof(float)));
    }
};

// One tile of 16 x 16 of sums in memory: the registers one after the other, of all lanes.
template <class F>
__device__ __forceinline__ void with_sums(const rt_fl<16, 16>& tile, float* to, F f) {
    to += laneid();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f(to + 64 * i, tile.tiles[0][0].data[i].x);
        f(to + 64 * i + 32, tile.tiles[0][0].data[i].y);
    }
}

}  // namespace thunderkittens::attention
