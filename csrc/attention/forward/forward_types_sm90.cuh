// Attention forward for Hopper, what its roles share: tiles, shared memory, and where operands are.
// What the kernel does is in forward_sm90.cuh.
#pragma once

#include <algorithm>

#include "csrc/attention/common/layouts.cuh"
#include "csrc/attention/common/scores.cuh"
#include "csrc/attention/forward/forward.h"
#include "csrc/attention/forward/forward_work.cuh"
#include "csrc/attention/forward/softcap_polynomial.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <Config config>
struct ForwardKernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim;
    static constexpr int value_dim = config.value_dim;
    static constexpr int warpgroups = config.warpgroups;  // consumers
    static constexpr int block_m = 64 * warpgroups;
    static constexpr int block_n = config.block_n;
    static constexpr int stages = config.stages;
    static constexpr bool score_mod = config.score_mod;
    static constexpr bool softcap_only = config.softcap_only;
    // Softcap alone by polynomials, in FMAs. Without that code ALiBi is faster.
    static constexpr bool polynomial_softcap = score_mod && !has_softcap_only(config);
    static constexpr int blocks_per_sm = attention::blocks_per_sm(config);
    static constexpr bool moves_registers = warpgroups > 1;
    static constexpr int threads = forward_threads(config);
    static constexpr int producer_warps = threads / WARP_THREADS - 4 * warpgroups;
    static constexpr int producer_registers = warpgroups == 2 ? 24 : 32;
    static constexpr int consumer_registers = warpgroups == 2 ? 240 : 160;

    using q_tile = st<T, 64, head_dim>;
    using k_tile = st<T, block_n, head_dim>;
    using v_tile = st<T, block_n, value_dim>;
    // The output has shared memory of its own, for all columns at once or for a part of them; or it
    // reuses that of Q, and delays its next load.
    static constexpr bool separate_out = forward_memory(config).out_parts > 0;
    static constexpr int q_slots = forward_memory(config).q_slots;
    static constexpr int out_parts = separate_out ? forward_memory(config).out_parts : 1;
    using out_tile = st<T, 64, value_dim / out_parts>;
    static constexpr int shared_bytes = forward_memory(config).bytes;
};

template <class Kernel>
struct ForwardGlobals {
    Layout<typename Kernel::q_tile> q;
    Layout<typename Kernel::k_tile> k;
    Layout<typename Kernel::v_tile> v;
    Layout<typename Kernel::out_tile> out;
    float* lse;
    const float* sink;
    ForwardScheduler scheduler;
    ForwardSequences sequences;
    PageTable pages;
    ScoreMod score_mod;
    SoftcapPolynomial<typename Kernel::T> softcap_polynomial;
    int group;  // query heads per key head
};

template <class Kernel, bool SEPARATE>
struct QueryTiles {
    typename Kernel::q_tile q[Kernel::q_slots][Kernel::warpgroups];
    typename Kernel::out_tile out[Kernel::warpgroups];

    __device__ __forceinline__ auto& query(int slot, int w) { return q[slot][w]; }
    __device__ __forceinline__ auto& output(int w) { return out[w]; }
};
template <class Kernel>
struct QueryTiles<Kernel, false> {
    union Slot {
        typename Kernel::q_tile q;
        typename Kernel::out_tile out;
    } slots[Kernel::warpgroups];

    __device__ __forceinline__ auto& query(int, int w) { return slots[w].q; }
    __device__ __forceinline__ auto& output(int w) { return slots[w].out; }
};

template <class Kernel>
struct ForwardShared : QueryTiles<Kernel, Kernel::separate_out> {
    typename Kernel::k_tile k[Kernel::stages];
    typename Kernel::v_tile v[Kernel::stages];

    semaphore q_full[Kernel::q_slots][Kernel::warpgroups];
    semaphore q_empty[Kernel::q_slots][Kernel::warpgroups];
    semaphore k_full[Kernel::stages], k_empty[Kernel::stages];
    semaphore v_full[Kernel::stages], v_empty[Kernel::stages];
};

}  // namespace thunderkittens::attention
