// Attention forward for Hopper: out = softmax(scale * q k^T) v, one pass over the keys with a
// running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", 2022).
//
// A block works on 64 query rows per consumer warpgroup and walks the keys from the last visible
// block to the first. Roles:
//   producer   one thread of the first warpgroup: TMA loads of Q (a slot per consumer), and of K
//   and V
//              into two rings
//   consumers  2 or 3 warpgroups: S = Q K^T (operands in shared memory), softmax in registers, O +=
//   P V
//              with P in registers. The product S of the next key block is issued before O += P V
//              of the current one, so that the softmax of S runs while the tensor cores work on P
//              V; the consumers take turns in issuing ("ping-pong"), so that the softmax of one
//              runs under the products of the others.
// Only blocks that the mask cuts are masked, and blocks it hides are never visited. The grid is
// persistent; causal work is dealt longest first, back and forth over the blocks, which evens out
// their totals without a counter in memory.
#pragma once

#include <algorithm>

#include "csrc/attention/forward.h"
#include "csrc/attention/schedule.cuh"
#include "csrc/attention/softmax.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <Config config>
struct ForwardKernel {
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim;
    static constexpr int warpgroups = config.warpgroups;  // consumers
    static constexpr int block_m = 64 * warpgroups;
    static constexpr int block_n = config.block_n;
    static constexpr int stages = config.stages;
    static constexpr int threads = (warpgroups + 1) * WARPGROUP_THREADS;
    static constexpr int producer_registers = warpgroups == 2 ? 24 : 32;
    static constexpr int consumer_registers = warpgroups == 2 ? 240 : 160;

    using q_tile = st<T, 64, head_dim>;
    using kv_tile = st<T, block_n, head_dim>;
    using q_layout = gl<T, -1, -1, -1, -1, q_tile>;
    using kv_layout = gl<T, -1, -1, -1, -1, kv_tile>;

    // Whether the output has shared memory of its own, or reuses that of Q (and delays its next
    // load).
    static constexpr bool separate_out = forward_memory(config).separate_out;
    static constexpr int shared_bytes = forward_memory(config).bytes;
};

template <class Kernel>
struct ForwardGlobals {
    typename Kernel::q_layout q, out;
    typename Kernel::kv_layout k, v;
    float* lse;
    Schedule schedule;
    int q_length, k_length, group;  // group: query heads per key head
    int causal_offset;              // query i sees keys up to i + causal_offset
    float scale_log2;               // softmax scale * log2(e)
};

// The key blocks of a query block: [0, visible), of which those from `unmasked` on need a mask.
struct KeyRange {
    int visible, unmasked;
};
template <class Kernel>
__device__ __forceinline__ KeyRange key_range(const ForwardGlobals<Kernel>& g, int first_row) {
    constexpr int n = Kernel::block_n;
    // One past the last key that the last and the first row of the block see.
    const int last = min(g.k_length, first_row + Kernel::block_m + g.causal_offset);
    const int first = min(g.k_length, first_row + 1 + g.causal_offset);
    return {last > 0 ? (last + n - 1) / n : 0, first > 0 ? first / n : 0};
}

template <class Kernel, bool SEPARATE>
struct OutTiles {};
template <class Kernel>
struct OutTiles<Kernel, true> {
    typename Kernel::q_tile out[Kernel::warpgroups];
};

template <class Kernel>
struct ForwardShared : OutTiles<Kernel, Kernel::separate_out> {
    typename Kernel::q_tile q[Kernel::warpgroups];
    typename Kernel::kv_tile k[Kernel::stages];
    typename Kernel::kv_tile v[Kernel::stages];

    semaphore q_full[Kernel::warpgroups], q_empty[Kernel::warpgroups];
    semaphore k_full[Kernel::stages], k_empty[Kernel::stages];
    semaphore v_full[Kernel::stages], v_empty[Kernel::stages];
};

template <class Kernel>
__device__ __forceinline__ auto& out_tile(ForwardShared<Kernel>& shared, int consumer) {
    if constexpr (Kernel::separate_out)
        return shared.out[consumer];
    else
        return shared.q[consumer];
}

template <class Kernel>
__device__ __forceinline__ void produce(const ForwardGlobals<Kernel>& g,
                                        ForwardShared<Kernel>& shared) {
    RingPosition<Kernel::stages> k_at, v_at;
    int q_phase = 0;
    const auto load_k = [&](int b, int head, int block) {
        wait(shared.k_empty[k_at.stage], k_at.phase ^ 1);
        tma::expect(shared.k_full[k_at.stage], shared.k[k_at.stage]);
        tma::load_async(shared.k[k_at.stage], g.k, {b, head, block, 0}, shared.k_full[k_at.stage]);
        k_at.advance();
    };
    const auto load_v = [&](int b, int head, int block) {
        wait(shared.v_empty[v_at.stage], v_at.phase ^ 1);
        tma::expect(shared.v_full[v_at.stage], shared.v[v_at.stage]);
        tma::load_async(shared.v[v_at.stage], g.v, {b, head, block, 0}, shared.v_full[v_at.stage]);
        v_at.advance();
    };
    g.schedule.for_each_item([&](Schedule::Item item) {
        const auto [level, head, b] = item;
        const int query_block = g.schedule.blocks - 1 - level;
        const int kv_head = head / g.group;
        const int blocks = key_range(g, query_block * Kernel::block_m).visible;
        if (blocks == 0) return;
#pragma unroll
        for (int w = 0; w < Kernel::warpgroups; ++w) {
            wait(shared.q_empty[w], q_phase ^ 1);
            tma::expect(shared.q_full[w], shared.q[w]);
            tma::load_async(shared.q[w], g.q, {b, head, query_block * Kernel::warpgroups + w, 0},
                            shared.q_full[w]);
            if (w == 0) load_k(b, kv_head, blocks - 1);
        }
        q_phase ^= 1;
        for (int block = blocks - 2; block >= 0; --block) {
            load_k(b, kv_head, block);
            load_v(b, kv_head, block + 1);
        }
        load_v(b, kv_head, 0);
    });
}

template <class Kernel>
struct Consumer {
    using T = typename Kernel::T;
    static constexpr int warpgroups = Kernel::warpgroups;
    using scores = rt_fl<16, Kernel::block_n>;
    using weights = rt<T, 16, Kernel::block_n>;
    using output = rt_fl<16, Kernel::head_dim>;

    const ForwardGlobals<Kernel>& g;
    ForwardShared<Kernel>& shared;
    const int id;  // of this consumer
    RingPosition<Kernel::stages> k_at, v_at;
    int q_phase = 0;

    // Named barriers: 1.. one per consumer for its turn to issue products, then one for its own
    // threads.
    __device__ __forceinline__ void await_turn() {
        arch::named_barrier_sync(1 + id, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void pass_turn() {
        arch::named_barrier_arrive(1 + (id + 1) % warpgroups, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void sync_own() { warpgroup::sync(1 + warpgroups + id); }
    __device__ __forceinline__ void release(semaphore& s) {
        if (warpgroup::laneid() == 0) arrive(s);
    }

    __device__ __forceinline__ void issue_scores(scores& s) {
        wait(shared.k_full[k_at.stage], k_at.phase);
        warpgroup::mm_ABt(s, shared.q[id], shared.k[k_at.stage]);
    }
    __device__ __forceinline__ void release_k() {
        release(shared.k_empty[k_at.stage]);
        k_at.advance();
    }
    __device__ __forceinline__ void issue_output(output& o, const weights& p) {
        wait(shared.v_full[v_at.stage], v_at.phase);
        warpgroup::mma_AB(o, p, shared.v[v_at.stage]);
    }
    __device__ __forceinline__ void release_v() {
        release(shared.v_empty[v_at.stage]);
        v_at.advance();
    }

    __device__ __forceinline__ void mask(scores& s, int first_row, int block) const {
        mask_scores(s, first_row, block * Kernel::block_n, g.causal_offset, g.k_length);
    }

    __device__ __forceinline__ void first_step(weights& p, OnlineSoftmax& softmax, int first_row,
                                               int block) {
        scores s;
        issue_scores(s);
        warpgroup::mma_async_wait<0>(s);
        release_k();
        mask(s, first_row, block);
        softmax.update<true>(s, g.scale_log2);
        convert_scores(p, s);
    }

    // One key block: its scores, and the output of the block before it.
    template <bool MASKED>
    __device__ __forceinline__ void step(output& o, weights& p, OnlineSoftmax& softmax,
                                         int first_row, int block) {
        scores s;
        await_turn();
        issue_scores(s);
        issue_output(o, p);
        pass_turn();
        warpgroup::mma_async_wait<1>(s);
        release_k();
        if constexpr (MASKED) mask(s, first_row, block);
        const float2 rescale = softmax.update<MASKED>(s, g.scale_log2);
        warpgroup::mma_async_wait<0>(o);
        pin(s);  // p is an operand of the product until here
        release_v();
        convert_scores(p, s);
        scale_rows(o, rescale);
    }

    __device__ __forceinline__ void store(output& o, int b, int head, int first_row) {
        auto& tile = out_tile(shared, id);
        if constexpr (Kernel::separate_out) {
            // The previous store from this memory must have read it.
            if (warpgroup::laneid() == 0) tma::store_async_read_wait();
            sync_own();
        }
        warpgroup::store(tile, o);
        arch::fence_async_shared();
        sync_own();
        if (warpgroup::laneid() == 0) {
            tma::store_async(g.out, tile, elements(b, head, first_row, 0));
            if constexpr (!Kernel::separate_out) {
                tma::store_async_read_wait();
                arrive(shared.q_empty[id]);
            }
        }
    }
    // Rows that see no key. Q's slot may already be filling for the next item, so the zeros do not
    // pass through shared memory.
    __device__ __forceinline__ void store_zeros(int b, int head, int first_row) {
        constexpr int per_store = 16 / int(sizeof(T));
        const int row_stores = g.out.cols() / per_store;
        const int rows = min(64, g.q_length - first_row);
        for (int i = warpgroup::laneid(); i < rows * row_stores; i += WARPGROUP_THREADS) {
            const auto at =
                elements(b, head, first_row + i / row_stores, i % row_stores * per_store);
            arch::store_global(reinterpret_cast<uint4*>(g.out.at(at)), make_uint4(0, 0, 0, 0));
        }
    }
    __device__ __forceinline__ void store_lse(float2 lse, int b, int head, int first_row) {
        if (g.lse == nullptr || laneid() % 4 != 0) return;
        const int row = first_row + warpgroup::warpid() * 16 + laneid() / 4;
        float* rows = g.lse + (int64_t(b) * g.schedule.heads + head) * g.q_length;
        if (row < g.q_length) arch::store_global(rows + row, lse.x);
        if (row + 8 < g.q_length) arch::store_global(rows + row + 8, lse.y);
    }

    __device__ __forceinline__ void work(Schedule::Item item) {
        const int block_row = (g.schedule.blocks - 1 - item.level) * Kernel::block_m;
        const int first_row = block_row + 64 * id;
        const KeyRange keys = key_range(g, block_row);
        OnlineSoftmax softmax;
        if (keys.visible > 0) {
            output o;
            weights p;
            zero_tile(o);
            int block = keys.visible - 1;
            wait(shared.q_full[id], q_phase);
            q_phase ^= 1;
            first_step(p, softmax, first_row, block);
            for (--block; block >= keys.unmasked; --block)
                step<true>(o, p, softmax, first_row, block);
            for (; block >= 0; --block) step<false>(o, p, softmax, first_row, block);
            if constexpr (Kernel::separate_out) release(shared.q_empty[id]);
            issue_output(o, p);
            softmax.reduce_sum();
            warpgroup::mma_async_wait<0>(o);
            release_v();
            scale_rows(o, softmax.reciprocal_sum());
            store(o, item.batch, item.head, first_row);
        } else {
            store_zeros(item.batch, item.head, first_row);
        }
        store_lse(softmax.lse(), item.batch, item.head, first_row);
    }

    __device__ __forceinline__ void run() {
        if (id == warpgroups - 1) pass_turn();
        g.schedule.for_each_item([&](Schedule::Item item) { work(item); });
        // The turn that the last consumer passed on is still open; close it.
        if (id == 0) await_turn();
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, 1) void forward_kernel(
    const __grid_constant__ ForwardGlobals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<ForwardShared<Kernel>>();
    if (threadIdx.x == 0) {
        for (int w = 0; w < Kernel::warpgroups; ++w) {
            init_semaphore(shared.q_full[w], 1);
            init_semaphore(shared.q_empty[w], 1);
        }
        for (int s = 0; s < Kernel::stages; ++s) {
            init_semaphore(shared.k_full[s], 1);
            init_semaphore(shared.k_empty[s], Kernel::warpgroups);
            init_semaphore(shared.v_full[s], 1);
            init_semaphore(shared.v_empty[s], Kernel::warpgroups);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == 0) {
        warpgroup::decrease_registers<Kernel::producer_registers>();
        if (warpgroup::elect_leader()) produce(g, shared);
    } else {
        warpgroup::increase_registers<Kernel::consumer_registers>();
        Consumer<Kernel>{g, shared, role - 1}.run();
    }
}

template <Config config>
void launch_forward(const ForwardParams& params, Stream stream) {
    using Kernel = ForwardKernel<config>;
    static_assert(sizeof(ForwardShared<Kernel>) + 1024 <= Kernel::shared_bytes,
                  "forward_memory() must count all of the block's shared memory");
    using T = typename Kernel::T;
    const Problem& p = params.problem;
    const auto layout = [&]<class Layout>(const Operand& x, int64_t heads, int64_t length) {
        return Layout(static_cast<T*>(const_cast<void*>(x.data)), p.batch, heads, length,
                      p.head_dim, {x.batch_stride, x.head_stride, x.row_stride});
    };
    using QLayout = typename Kernel::q_layout;
    using KVLayout = typename Kernel::kv_layout;
    const int group = static_cast<int>(p.q_heads / p.kv_heads);
    const ForwardGlobals<Kernel> globals{
        .q = layout.template operator()<QLayout>(params.q, p.q_heads, p.q_length),
        .out = layout.template operator()<QLayout>(params.out, p.q_heads, p.q_length),
        .k = layout.template operator()<KVLayout>(params.k, p.kv_heads, p.k_length),
        .v = layout.template operator()<KVLayout>(params.v, p.kv_heads, p.k_length),
        .lse = params.lse,
        .schedule = {.blocks = int((p.q_length + Kernel::block_m - 1) / Kernel::block_m),
                     .heads = int(p.q_heads),
                     .batch = int(p.batch),
                     .section_heads = params.section_heads},
        .q_length = int(p.q_length),
        .k_length = int(p.k_length),
        .group = group,
        .causal_offset =
            std::min(band(p.causal, -1, -1, p.q_length, p.k_length).high, int(p.k_length)),
        .scale_log2 = params.scores.scale * 1.4426950408889634f};
    const auto blocks = unsigned(std::min(globals.schedule.items(), params.sm_count));
    kittens::launch(forward_kernel<Kernel>, dim3(blocks), dim3(Kernel::threads), dim3(1),
                    Kernel::shared_bytes, stream, globals);
}

}  // namespace thunderkittens::attention
