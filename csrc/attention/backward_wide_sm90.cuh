// Attention backward for Hopper, head dimensions above 128 (the formulas are in backward_sm90.cuh).
//
// dK and dV of 64 keys take half of the registers that a block has, so that is what a block owns:
// 64 keys of one key head. Two blocks are a cluster, neighbours in the keys, that walks the query
// blocks which see any of its 128 keys, 64 queries a step, over all query heads of the group. Roles
// (a warpgroup each):
//   producer  one thread: K and V once per item; Q and dO, of which each block loads half of the
//             rows for both; their rows' statistics. Another one waits for this block's turns at
//             the tiles of dQ, where they are added in a fixed order
//   values    S^T = K Q^T, P, dV += P^T dO; writes the weights to shared memory
//   keys      dP^T = V dO^T, dS = P * (dP - delta), dK += dS^T Q; writes dS where the weights were,
//             and copies it to the other block
//   queries   half of dQ's columns, for the keys of both blocks: dQ = dS K, added to memory from
//             registers
// The exchange of dS halves what is added to dQ in memory; the shared loads halve what is read of Q
// and dO. The accumulating warpgroups have their next scores in progress while they finish a step,
// and none of them waits for another block's dS: only dQ does.
// P^T and dS^T are register operands of dV and dK. dQ is summed as in backward_sm90.cuh: a tile's
// part is what one block computes.
#pragma once

#include "csrc/attention/backward_scores.cuh"
#include "csrc/attention/backward_wide.h"
#include "csrc/attention/layouts.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <BackwardConfig config>
struct WideKernel {
    static constexpr DType dtype = config.dtype;
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    static constexpr bool modified = config.modified;
    static constexpr int head_dim = config.head_dim;
    static constexpr int value_dim = config.value_dim;
    static constexpr int block_m = config.block_m;  // queries of a step
    static constexpr int blocks = 2;                // of a cluster
    static constexpr int block_keys = 64;
    static constexpr int stages = config.stages;  // of Q
    static constexpr int shared_bytes = wide_backward_memory(config);
    static constexpr int threads = 4 * WARPGROUP_THREADS;
    static constexpr int dq_cols = head_dim / blocks;  // of a block
    static_assert(block_m == 64);

    // What a block computes of dQ at a time.
    static constexpr int dq_parts = dq_cols > 96 ? 2 : 1;
    static constexpr int dq_part_cols = dq_cols / dq_parts;
    static constexpr bool dq_shared = wide_dq_shared(config);
    static constexpr int senders = dq_shared ? 3 : 1;  // of dQ in order; wait for turns alone if 1

    // dO comes in parts of its columns where there is no room for two tiles of it.
    static constexpr int value_parts = wide_value_parts(config);
    static constexpr int value_slots = wide_value_slots(config);
    static constexpr int part_cols = value_dim / value_parts;

    // Half of K's columns must begin with a stripe of the swizzle.
    static constexpr int k_swizzle = dq_cols % 64 == 0 ? 128 : 64;
    using k_tile = st<T, block_keys, head_dim, true, k_swizzle>;
    using k_half = st<T, block_keys, dq_cols, true, k_swizzle>;
    using v_tile = st<T, block_keys, value_dim>;
    using q_tile = st<T, block_m, head_dim>;
    using value_tile = st<T, block_m, part_cols>;  // of dO
    using ds_tile = st<T, block_keys, block_m>;    // dS^T
    using statistics = sv<float, block_m>;
    // What a block loads of a stripe of Q or dO, for both.
    using share = st<T, block_m / blocks, 64>;
    using Work = BackwardWork<block_m, blocks * block_keys>;

    static constexpr int producer_registers = 32, query_registers = head_dim > 192 ? 64 : 96;
    static constexpr int key_registers = (512 - producer_registers - query_registers) / 2;
};

template <class Kernel>
struct WideGlobals {
    Layout<typename Kernel::share> q, grad_out;
    Layout<typename Kernel::k_tile> k, dk;
    Layout<typename Kernel::k_half> k_peer;
    Layout<typename Kernel::v_tile> v, dv;
    typename Kernel::Work work;
    const float *lse_log2, *delta;  // as in BackwardGlobals
    float* dq;                      // cleared, unless in order
    float *part_dk, *part_dv;       // as in BackwardGlobals
    int* turns;  // per tile of dQ and part of it: key blocks that have been added
    Modification modification;
    float scale, scale_log2;
    bool need_dq, need_dk, need_dv;
    // Key blocks take turns at a tile of dQ, the last one first; that stores its part. They are
    // begun in the same order: under a causal mask blocks that begin together then come to a tile
    // one after the other.
    bool in_order;
};

template <class Kernel>
struct WideShared {
    typename Kernel::k_tile k;
    typename Kernel::v_tile v;
    typename Kernel::k_half k_peer;  // the other block's keys, this block's columns of dQ
    typename Kernel::q_tile q[Kernel::stages];
    typename Kernel::value_tile grad_out[Kernel::value_slots];
    typename Kernel::ds_tile own[2];   // weights, then dS, of this block's keys
    typename Kernel::ds_tile peer[2];  // dS of the other's
    sv<float, Kernel::dq_shared ? 32 * Kernel::dq_part_cols : 4> dq[2];
    typename Kernel::statistics lse[Kernel::stages], delta[Kernel::stages];

    ItemRing ring;
    int claimed[2];
    semaphore claim_full[2], claim_empty[2];
    semaphore k_full, v_full, k_empty, v_empty;
    // No product reads K (V) of the item any more, and every warp has seen it arrive: where an item
    // has no steps, no product keeps a late warp from missing a phase.
    semaphore k_done, v_done;
    semaphore q_full[Kernel::stages], q_empty[Kernel::stages];
    semaphore value_full[Kernel::value_slots], value_empty[Kernel::value_slots];
    semaphore weights_full[2];
    semaphore ds_full[2], ds_empty[2];
    semaphore turn_full[2], turn_empty[2];  // it is this block's turn at the step's tile of dQ
    semaphore dq_full[Kernel::senders][2], dq_empty[2];  // halves of a tile

    __device__ __forceinline__ void init(bool need_dq, bool turns) {
        for (semaphore* s : {&k_full, &v_full, &k_empty, &v_empty}) init_semaphore(*s, 1);
        init_semaphore(k_done, (need_dq ? 2 : 1) * WARPGROUP_WARPS);
        init_semaphore(v_done, WARPGROUP_WARPS);
        ring.init((need_dq ? 3 : 2) * WARPGROUP_THREADS + (turns ? Kernel::senders : 0));
        for (int i = 0; i < 2; ++i) {
            init_semaphore(claim_full[i], 1);
            init_semaphore(claim_empty[i], 1);
            init_semaphore(weights_full[i], WARPGROUP_WARPS);
            init_semaphore(ds_full[i], WARPGROUP_WARPS);
            init_semaphore(turn_full[i], 1);
            init_semaphore(turn_empty[i], 1);
            init_semaphore(dq_empty[i], 1);
            for (auto& halves : dq_full) init_semaphore(halves[i], WARPGROUP_WARPS);
            // By the readers of both blocks, or of the weights alone.
            init_semaphore(ds_empty[i], need_dq ? Kernel::blocks : WARPGROUP_WARPS);
        }
        // Two warpgroups of each block read a slot that both blocks fill, and each of their threads
        // reads statistics, which this block fills alone.
        for (auto& s : q_full) init_semaphore(s, 1);
        for (auto& s : q_empty) init_semaphore(s, 2 * Kernel::blocks + 2 * WARPGROUP_THREADS);
        for (auto& s : value_full) init_semaphore(s, 1);
        for (auto& s : value_empty) init_semaphore(s, 2 * Kernel::blocks);
        arch::mbarrier_init_fence();
    }
};

// The query blocks of an item over the heads of a group.
template <class Kernel>
struct Steps {
    const WideGlobals<Kernel>& g;
    const BackwardItem& item;
    int j, head;  // a query block, and a head of the group

    __device__ __forceinline__ Steps(const WideGlobals<Kernel>& _g, const BackwardItem& _item)
        : g(_g), item(_item), j(read(item.begin)), head(j < read(item.end) ? 0 : g.work.group) {}
    __device__ __forceinline__ bool more() const { return head < g.work.group; }
    // True when the next step is of another head.
    __device__ __forceinline__ bool advance() {
        if (++j < read(item.end)) return false;
        j = read(item.begin);
        ++head;
        return true;
    }
};

template <class Kernel>
struct WideProducer {
    const WideGlobals<Kernel>& g;
    WideShared<Kernel>& shared;
    const int rank;

    // The number of the item with the key blocks of a section in descending order.
    __device__ __forceinline__ int turned(int index) const {
        const Schedule& schedule = g.work.schedule;
        if (!g.in_order || index >= schedule.items()) return index;
        const int section = index / (schedule.blocks * schedule.section_heads);
        const int first_head = section * schedule.section_heads;
        const int heads =
            ::min(schedule.section_heads, schedule.heads * schedule.batch - first_head);
        const int rest = index - first_head * schedule.blocks;
        const int level = schedule.blocks - 1 - rest / heads;
        return first_head * schedule.blocks + level * heads + rest % heads;
    }
    // The first block claims items for both.
    __device__ __forceinline__ int next(int slot, int phase) const {
        if (rank == 0) {
            const int index = turned(arch::fetch_add_global(g.work.next_item, 1));
            wait_cluster(shared.claim_empty[slot], phase ^ 1);
            arch::store_cluster_shared(
                arch::map_shared_rank(arch::shared_address(&shared.claimed[slot]), 1), index);
            arrive_remote(shared.claim_full[slot], 1);
            return index;
        }
        wait_cluster(shared.claim_full[slot], phase);
        const int index = read(shared.claimed[slot]);
        arrive_remote(shared.claim_empty[slot], 0);
        return index;
    }

    // This block's rows of a tile of Q or dO, to both blocks.
    template <class Tile, class Source>
    __device__ __forceinline__ void load_share(Tile& tile, const Source& source,
                                               const BackwardItem& item, int head, int row,
                                               int column, semaphore& full) const {
        using share = typename Kernel::share;
#pragma unroll
        for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
            auto* to = tile.data + (stripe * Kernel::block_m + rank * share::rows) * share::cols;
            source.load_to_blocks(reinterpret_cast<share&>(*to), read(item.b), head,
                                  read(item.q_begin), read(item.q_length), row + rank * share::rows,
                                  full, column + stripe * share::cols, (1 << Kernel::blocks) - 1);
        }
    }

    __device__ __forceinline__ void load_keys(const BackwardItem& item, int phase) const {
        const int first = read(item.block) * Kernel::blocks * Kernel::block_keys;
        const int own = first + rank * Kernel::block_keys;
        const int other = first + (rank ^ 1) * Kernel::block_keys;
        const int b = read(item.b), head = read(item.key_head);
        const int begin = read(item.k_begin), length = read(item.k_length);
        wait(shared.k_empty, phase ^ 1);
        tma::expect_bytes(shared.k_full,
                          sizeof(shared.k) + (g.need_dq ? sizeof(shared.k_peer) : 0));
        g.k.load(shared.k, b, head, begin, length, own, shared.k_full);
        if (g.need_dq) {
            g.k_peer.load(shared.k_peer, b, head, begin, length, other, shared.k_full,
                          rank * Kernel::dq_cols);
        }
        wait(shared.v_empty, phase ^ 1);
        tma::expect(shared.v_full, shared.v);
        g.v.load(shared.v, b, head, begin, length, own, shared.v_full);
    }

    __device__ __forceinline__ void run() const {
        RingPosition<Kernel::stages> q_at;
        RingPosition<Kernel::value_slots> value_at;
        RingPosition<2> claim_at;
        const auto next_item = [&] {
            const int index = next(claim_at.stage, claim_at.phase);
            claim_at.advance();
            return index;
        };
        shared.ring.claim_by(next_item, g.work, [&](const BackwardItem& item) {
            load_keys(item, &item == &shared.ring.items[1]);
            for (Steps at(g, item); at.more(); at.advance()) {
                const int head = read(item.head) * g.work.group + at.head;
                const int row = at.j * Kernel::block_m;
                const int64_t rows =
                    g.work.rows.first(read(item.b), read(item.q_begin), head) + row;
                const int s = q_at.stage;
                constexpr uint32_t bytes = tma::transfer_bytes<typename Kernel::statistics>();
                wait(shared.q_empty[s], q_at.phase ^ 1);
                tma::expect(shared.q_full[s], shared.q[s], shared.lse[s], shared.delta[s]);
                arch::bulk_load(shared.lse[s].address(), g.lse_log2 + rows, bytes,
                                shared.q_full[s].address());
                arch::bulk_load(shared.delta[s].address(), g.delta + rows, bytes,
                                shared.q_full[s].address());
                load_share(shared.q[s], g.q, item, head, row, 0, shared.q_full[s]);
                q_at.advance();
                for (int part = 0; part < Kernel::value_parts; ++part) {
                    const int v = value_at.stage;
                    wait(shared.value_empty[v], value_at.phase ^ 1);
                    tma::expect(shared.value_full[v], shared.grad_out[v]);
                    load_share(shared.grad_out[v], g.grad_out, item, head, row,
                               part * Kernel::part_cols, shared.value_full[v]);
                    value_at.advance();
                }
            }
        });
    }
};

}  // namespace thunderkittens::attention
