// Attention backward for Hopper, head dimensions up to 128 (Dao, "FlashAttention-2", 2023, section
// 3.1.2):
//
//   P = exp(scale * Q K^T - LSE)     dV = P^T dO     dP = dO V^T
//   dS = P * (dP - delta)            dQ = scale * dS K     dK = scale * dS^T Q
//
// A block owns 128 keys of one key head, holds their K and V in shared memory and dK and dV in
// registers, and walks the query blocks that see them, over all query heads of the group, so that
// dK and dV of a group are summed in registers. Roles:
//   producer   one thread: K and V once per item; Q, dO and their rows' statistics into a ring
//   consumers  two warpgroups of 64 keys each. They compute the transposed scores S^T = K Q^T and
//              dP^T = V dO^T, so that P^T and dS^T leave the softmax as register operands of dV and
//              dK. dS^T goes through shared memory once, for dQ, whose tile the two share.
// dQ is summed over the key blocks in fp32 in global memory, by vector reductions in the order of
// the accumulator's registers (16 bytes a thread, 512 a warp, no shared memory);
// backward_rows_sm90.cuh puts the elements in order afterwards. The sum's order varies between
// runs.
#pragma once

#include <algorithm>

#include "csrc/attention/attention.h"
#include "csrc/attention/schedule.cuh"
#include "csrc/attention/softmax.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <BackwardConfig config, bool NEED_DQ, bool ORDERED>
struct BackwardKernel {
    static constexpr bool need_dq = NEED_DQ;
    static constexpr bool ordered = ORDERED && NEED_DQ;
    using T = std::conditional_t<config.dtype == DType::bf16, bf16, half>;
    static constexpr int head_dim = config.head_dim;
    static constexpr int block_m = config.block_m;  // queries of a step
    static constexpr int block_n = 128;             // keys of a block
    static constexpr int stages = config.stages;
    static constexpr int warpgroups = 2;
    static constexpr int threads = (warpgroups + 1) * WARPGROUP_THREADS;

    using kv_tile = st<T, 64, head_dim>;      // of one consumer
    using q_tile = st<T, block_m, head_dim>;  // Q and dO
    using ds_tile = st<T, 64, block_m>;       // dS^T of one consumer
    using statistics = sv<float, block_m>;
    using kv_layout = gl<T, -1, -1, -1, -1, kv_tile>;
    using q_layout = gl<T, -1, -1, -1, -1, q_tile>;

    // The dQ tile of a step is block_m x head_dim; each consumer computes a 64 x 64 part of it.
    static_assert(block_m * head_dim == 64 * 128, "dQ of a step must be two parts of 64 x 64");
    static constexpr bool split_rows = block_m == 128;  // parts are rows, else columns, of the tile
    static constexpr int dq_tile_floats = block_m * head_dim;
    // dV can start before dS is computed where the registers of both fit.
    static constexpr bool early_dv = block_m == 64;
};

template <class Kernel>
struct BackwardGlobals {
    typename Kernel::q_layout q, grad_out;
    typename Kernel::kv_layout k, v, dk, dv;
    const float*
        lse_log2;  // (batch, q_heads, padded rows): LSE * log2(e), +inf for rows that see nothing
    const float* delta;  // likewise: rowsum(out * grad_out) - grad_lse
    float* dq;           // (batch, q_heads, padded rows * head_dim), in the accumulator's order
    Schedule schedule;   // over key blocks and key heads
    int* next_item;      // counter, 0 at first
    int* turns;          // per tile of dQ: key blocks that have been added; 0 at first
    int q_length, k_length, group, q_heads;
    int q_blocks, padded_rows;
    int causal_offset;
    float scale, scale_log2;
    bool need_dk, need_dv;

    // First query block that sees a key from `first_key` on.
    __device__ __forceinline__ int first_block(int first_key) const {
        const int row = first_key - causal_offset;
        return row <= 0 ? 0 : ::min(row / Kernel::block_m, q_blocks);
    }
    // Query blocks below this one need a mask.
    __device__ __forceinline__ int masked_end(int first_key) const {
        if (first_key + Kernel::block_n > k_length) return q_blocks;
        const int row =
            first_key + Kernel::block_n - 1 - causal_offset;  // sees all keys of the block
        return row <= 0 ? 0 : ::min((row + Kernel::block_m - 1) / Kernel::block_m, q_blocks);
    }
};

template <class Kernel, bool ORDERED>
struct DqStaging {};
template <class Kernel>
struct DqStaging<Kernel, true> {
    sv<float, Kernel::dq_tile_floats> dq;
};

template <class Kernel>
struct BackwardShared : DqStaging<Kernel, Kernel::ordered> {
    typename Kernel::kv_tile k[2], v[2];
    typename Kernel::q_tile q[Kernel::stages], grad_out[Kernel::stages];
    typename Kernel::ds_tile ds[2][2];  // [step % 2][consumer]
    typename Kernel::statistics lse[Kernel::stages], delta[Kernel::stages];

    int items[2];
    semaphore item_full[2], item_empty[2];
    semaphore k_full, v_full, kv_empty;
    semaphore dq_full, dq_empty;
    semaphore q_full[Kernel::stages], grad_out_full[Kernel::stages], empty[Kernel::stages];
};

// The producer claims items, in their order, and hands them on.
template <class Kernel, class Work>
__device__ __forceinline__ void claim_items(const BackwardGlobals<Kernel>& g,
                                            BackwardShared<Kernel>& shared, Work work) {
    RingPosition<2> at;
    while (true) {
        const int index = arch::fetch_add_global(g.next_item, 1);
        wait(shared.item_empty[at.stage], at.phase ^ 1);
        arch::store_shared(arch::shared_address(&shared.items[at.stage]), index);
        arrive(shared.item_full[at.stage]);
        at.advance();
        if (index >= g.schedule.items()) return;
        work(g.schedule.item(index));
    }
}
template <class Kernel, class Work>
__device__ __forceinline__ void receive_items(const BackwardGlobals<Kernel>& g,
                                              BackwardShared<Kernel>& shared, Work work) {
    RingPosition<2> at;
    while (true) {
        wait(shared.item_full[at.stage], at.phase);
        // The slot stays filled while the item is worked on, so that it can be read again instead of
        // being kept in registers.
        const uint32_t slot = arch::shared_address(&shared.items[at.stage]);
        if (arch::load_shared<int>(slot) >= g.schedule.items()) return;
        work([&] { return g.schedule.item(arch::load_shared<int>(slot)); });
        arrive(shared.item_empty[at.stage]);
        at.advance();
    }
}

template <class Kernel>
__device__ __forceinline__ void produce(const BackwardGlobals<Kernel>& g,
                                        BackwardShared<Kernel>& shared) {
    RingPosition<Kernel::stages> at;
    int kv_phase = 0;
    claim_items(g, shared, [&](Schedule::Item item) {
        const auto [block, kv_head, b] = item;
        wait(shared.kv_empty, kv_phase ^ 1);
        kv_phase ^= 1;
        tma::expect(shared.k_full, shared.k);
        for (int w = 0; w < 2; ++w) {
            tma::load_async(shared.k[w], g.k, {b, kv_head, 2 * block + w, 0}, shared.k_full);
        }
        tma::expect(shared.v_full, shared.v);
        for (int w = 0; w < 2; ++w) {
            tma::load_async(shared.v[w], g.v, {b, kv_head, 2 * block + w, 0}, shared.v_full);
        }
        const int first = g.first_block(block * Kernel::block_n);
        for (int head = kv_head * g.group; head < (kv_head + 1) * g.group; ++head) {
            const int64_t rows = (int64_t(b) * g.q_heads + head) * g.padded_rows;
            for (int m = first; m < g.q_blocks; ++m) {
                const int s = at.stage;
                const int64_t row = rows + int64_t(m) * Kernel::block_m;
                constexpr int bytes = sizeof(typename Kernel::statistics);
                wait(shared.empty[s], at.phase ^ 1);
                tma::expect(shared.q_full[s], shared.q[s], shared.lse[s]);
                tma::load_async(shared.q[s], g.q, {b, head, m, 0}, shared.q_full[s]);
                arch::bulk_load(shared.lse[s].address(), g.lse_log2 + row, bytes,
                                shared.q_full[s].address());
                tma::expect(shared.grad_out_full[s], shared.grad_out[s], shared.delta[s]);
                tma::load_async(shared.grad_out[s], g.grad_out, {b, head, m, 0},
                                shared.grad_out_full[s]);
                arch::bulk_load(shared.delta[s].address(), g.delta + row, bytes,
                                shared.grad_out_full[s].address());
                at.advance();
            }
        }
    });
}

// Adds the tiles of dQ to memory, the key blocks of a tile in ascending order.
template <class Kernel>
__device__ __forceinline__ void send_in_order(const BackwardGlobals<Kernel>& g,
                                              BackwardShared<Kernel>& shared) {
    int phase = 0;
    receive_items(g, shared, [&](auto item) {
        const auto [block, kv_head, b] = item();
        const int first = g.first_block(block * Kernel::block_n);
        for (int head = kv_head * g.group; head < (kv_head + 1) * g.group; ++head) {
            for (int m = first; m < g.q_blocks; ++m) {
                const int64_t tile = (int64_t(b) * g.q_heads + head) * g.q_blocks + m;
                wait(shared.dq_full, phase);
                phase ^= 1;
                while (arch::load_acquire_global(g.turns + tile) != block) {
                }
                arch::fence_async();
                arch::bulk_store_add(g.dq + tile * Kernel::dq_tile_floats, shared.dq.address(),
                                     Kernel::dq_tile_floats * int(sizeof(float)));
                tma::store_commit_group();
                tma::store_async_read_wait();
                arrive(shared.dq_empty);
                tma::store_async_wait();
                arch::fence_async();
                arch::store_release_global(g.turns + tile, block + 1);
            }
        }
    });
}

template <class Kernel>
struct BackwardConsumer {
    using T = typename Kernel::T;
    using scores = rt_fl<16, Kernel::block_m>;  // transposed: rows are keys
    using weights = rt<T, 16, Kernel::block_m>;
    using gradient = rt_fl<16, Kernel::head_dim>;
    using dq_part = rt_fl<16, 64>;

    const BackwardGlobals<Kernel>& g;
    BackwardShared<Kernel>& shared;
    const int id;
    RingPosition<Kernel::stages> at;
    int kv_phase = 0;
    int dq_phase = 0;
    int ds_buffer = 0;

    __device__ __forceinline__ void sync_both() {
        arch::named_barrier_sync(1, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void sync_own() { warpgroup::sync(2 + id); }

    // Calls f(x, value of the statistic of x's query) on every element of a transposed tile.
    template <class F>
    static __device__ __forceinline__ void with_statistic(scores& tile,
                                                          const typename Kernel::statistics& rows,
                                                          F f) {
        const uint32_t address = rows.address_of(2 * (laneid() % 4));
#pragma unroll
        for (int j = 0; j < 2 * scores::width; ++j) {
            const float2 pair =
                arch::load_shared<float2>(address + uint32_t(8 * j * sizeof(float)));
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float2& x = tile.tiles[0][j / 2].data[2 * (j % 2) + k];
                f(x.x, pair.x);
                f(x.y, pair.y);
            }
        }
    }

    // Scores of queries that do not see the key become -inf.
    __device__ __forceinline__ void mask(scores& s, int first_key, int m) const {
        const int key = first_key + 64 * id + 16 * warpgroup::warpid() + laneid() / 4;
        const int column = m * Kernel::block_m + 2 * (laneid() % 4);
        constexpr int nowhere = 1 << 30;
        const int first_high = key < g.k_length ? key - g.causal_offset - column : nowhere;
        const int first_low = key + 8 < g.k_length ? key + 8 - g.causal_offset - column : nowhere;
        for_each_element(s, [&](float& x, int at, bool low) {
            if (at < (low ? first_low : first_high)) x = -INFINITY;
        });
    }

    __device__ __forceinline__ void send_dq(const dq_part& dq, int tile) {
        const int first = id * (64 * 64) + 4 * warpgroup::laneid();
        if constexpr (Kernel::ordered) {
            wait(shared.dq_empty, dq_phase ^ 1);
            dq_phase ^= 1;
        }
#pragma unroll
        for (int j = 0; j < dq_part::width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 high = dq.tiles[0][j].data[2 * half],
                             low = dq.tiles[0][j].data[2 * half + 1];
                const float4 four = make_float4(high.x, high.y, low.x, low.y);
                const int at = first + (2 * j + half) * 4 * WARPGROUP_THREADS;
                if constexpr (Kernel::ordered) {
                    arch::store_shared(shared.dq.address_of(at), four);
                } else {
                    arch::reduce_add_global(g.dq + int64_t(tile) * Kernel::dq_tile_floats + at, four);
                }
            }
        }
        if constexpr (Kernel::ordered) {
            arch::fence_async_shared();
            sync_own();
            if (warpgroup::laneid() == 0) arrive(shared.dq_full);
        }
    }

    __device__ __forceinline__ void issue_dq(dq_part& dq) {
        auto& ds = shared.ds[ds_buffer];
        warpgroup::mma_fence(dq);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            if constexpr (Kernel::split_rows) {
                product(dq, ds[w].template subtile<64, 64>({0, id}), shared.k[w], w > 0);
            } else {
                product(dq, ds[w], shared.k[w].template subtile<64, 64>({0, id}), w > 0);
            }
        }
        warpgroup::mma_commit_group();
    }
    template <class A, class B>
    static __device__ __forceinline__ void product(dq_part& dq, const A& a, const B& b,
                                                   bool accumulate) {
        kittens::detail::wgmma_product<true, false>(dq, a, b, accumulate);
    }

    // One query block.
    __device__ __forceinline__ void step(gradient& dk, gradient& dv, int first_key, int m,
                                         bool masked, int dq_tile) {
        const int stage = at.stage;
        scores s, dp;
        wait(shared.q_full[stage], at.phase);
        warpgroup::mm_ABt(s, shared.k[id], shared.q[stage]);
        wait(shared.grad_out_full[stage], at.phase);
        warpgroup::mm_ABt(dp, shared.v[id], shared.grad_out[stage]);
        warpgroup::mma_async_wait<1>(s);
        if (masked) mask(s, first_key, m);
        with_statistic(s, shared.lse[stage], [&](float& x, float lse) {
            x = arch::exp2_approx(fmaf(x, g.scale_log2, -lse));
        });
        weights p, ds;
        if constexpr (Kernel::early_dv) {
            convert_scores(p, s);
            warpgroup::mma_AB(dv, p, shared.grad_out[stage]);
            warpgroup::mma_async_wait<1>(dp);
        } else {
            warpgroup::mma_async_wait<0>(dp);
        }
        with_statistic(dp, shared.delta[stage], [](float& x, float delta) { x -= delta; });
        multiply(ds, s, dp);
        if constexpr (!Kernel::early_dv) {
            convert_scores(p, s);
            warpgroup::mma_AB(dv, p, shared.grad_out[stage]);
        }
        if constexpr (Kernel::need_dq) {
            // The other consumer's dQ of two steps ago, which read this buffer, came before the
            // last barrier.
            warpgroup::store(shared.ds[ds_buffer][id], ds);
            arch::fence_async_shared();
            sync_both();
            dq_part dq;
            issue_dq(dq);
            warpgroup::mma_AB(dk, ds, shared.q[stage]);
            warpgroup::mma_async_wait<1>(dq);
            send_dq(dq, dq_tile);
        } else {
            warpgroup::mma_AB(dk, ds, shared.q[stage]);
        }
        warpgroup::mma_async_wait<0>();
        if (warpgroup::laneid() == 0) arrive(shared.empty[stage]);
        at.advance();
        ds_buffer ^= 1;
    }
    static __device__ __forceinline__ void multiply(weights& product, const scores& a,
                                                    const scores& b) {
#pragma unroll
        for (int j = 0; j < scores::width; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 x = a.tiles[0][j].data[k], y = b.tiles[0][j].data[k];
                product.tiles[0][j].data[k] = pack_pair<T>(x.x * y.x, x.y * y.y);
            }
        }
    }

    template <class Item>
    __device__ __forceinline__ void work(Item item) {
        gradient dk, dv;
        zero_tile(dk);
        zero_tile(dv);
        wait(shared.k_full, kv_phase);
        wait(shared.v_full, kv_phase);
        kv_phase ^= 1;
        accumulate(dk, dv, item());
        pin(dk);
        pin(dv);
        const auto [block, kv_head, b] = item();
        store(dk, dv, b, kv_head, 2 * block + id);
    }
    __device__ __forceinline__ void accumulate(gradient& dk, gradient& dv, Schedule::Item item) {
        const int first_key = item.level * Kernel::block_n;
        const int first = g.first_block(first_key), masked_end = g.masked_end(first_key);
        int tile = (item.batch * g.q_heads + item.head * g.group) * g.q_blocks;
        for (int head = 0; head < g.group; ++head) {
            for (int m = first; m < g.q_blocks; ++m) {
                step(dk, dv, first_key, m, m < masked_end, tile + m);
            }
            tile += g.q_blocks;
        }
    }

    // dK and dV leave through the memory of K and V.
    __device__ __forceinline__ void store(gradient& dk, gradient& dv, int b, int kv_head,
                                          int tile) {
        scale_rows(dk, make_float2(g.scale, g.scale));
        sync_both();  // the other consumer's last dQ has read K
        warpgroup::store(shared.k[id], dk);
        warpgroup::store(shared.v[id], dv);
        arch::fence_async_shared();
        sync_own();
        if (warpgroup::laneid() == 0) {
            if (g.need_dk) tma::store_async(g.dk, shared.k[id], {b, kv_head, tile, 0});
            if (g.need_dv) tma::store_async(g.dv, shared.v[id], {b, kv_head, tile, 0});
            tma::store_async_read_wait();
            arrive(shared.kv_empty);
        }
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, 1) void backward_kernel(
    const __grid_constant__ BackwardGlobals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<BackwardShared<Kernel>>();
    if (threadIdx.x == 0) {
        init_semaphore(shared.k_full, 1);
        init_semaphore(shared.v_full, 1);
        init_semaphore(shared.kv_empty, 2);
        init_semaphore(shared.dq_full, 2);
        init_semaphore(shared.dq_empty, 1);
        for (int i = 0; i < 2; ++i) {
            init_semaphore(shared.item_full[i], 1);
            init_semaphore(shared.item_empty[i], 2 * WARPGROUP_THREADS + Kernel::ordered);
        }
        for (int s = 0; s < Kernel::stages; ++s) {
            init_semaphore(shared.q_full[s], 1);
            init_semaphore(shared.grad_out_full[s], 1);
            init_semaphore(shared.empty[s], 2);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == 0) {
        warpgroup::decrease_registers<Kernel::ordered ? 40 : 24>();
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0 && arch::elect_one()) produce(g, shared);
        if constexpr (Kernel::ordered) {
            if (warp == 1 && arch::elect_one()) send_in_order(g, shared);
        }
    } else {
        warpgroup::increase_registers<Kernel::ordered ? 232 : 240>();
        BackwardConsumer<Kernel> consumer{g, shared, role - 1};
        receive_items(g, shared, [&](auto item) { consumer.work(item); });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
}

}  // namespace thunderkittens::attention
