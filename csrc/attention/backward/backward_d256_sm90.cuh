// Attention backward for Hopper, head dimensions above 128 (the formulas are in backward_sm90.cuh).
//
// dK and dV of 64 keys take half of the registers that a block has, so that is what a block owns:
// 64 keys of one key head. Two blocks are a cluster, neighbours in the keys, that walks the query
// blocks which see any of its 128 keys, 64 queries a step, over all query heads of the group. Roles
// (a warpgroup each):
//   producer  one thread: K and V once per work tile; Q and dO, of which each block loads half of
//             the rows for both; their rows' statistics. In the deterministic mode another one
//             waits for the semaphores of the tiles of dQ
//   dV        S^T = K Q^T, P, dV += P^T dO; writes the weights to shared memory
//   dK        dP^T = V dO^T, dS = P * (dP - delta), dK += dS^T Q; writes dS where the weights were,
//             and copies it to the other block
//   dQ        half of dQ's columns, for the keys of both blocks: dQ = dS K, added to memory from
//             registers
// The exchange of dS halves what is added to dQ in memory; the shared loads halve what is read of Q
// and dO. The accumulating warpgroups have their next scores in progress while they finish a step,
// and none of them waits for another block's dS: only dQ does.
// P^T and dS^T are register operands of dV and dK. dQ is summed as in backward_sm90.cuh: a tile's
// part is what one block computes.
#pragma once

#include "csrc/attention/backward/backward_d256.h"
#include "csrc/attention/backward/backward_scores.cuh"
#include "csrc/attention/common/layouts.cuh"

namespace thunderkittens::attention {

using namespace kittens;

template <BackwardConfig config>
struct BackwardD256Kernel {
    static constexpr DType dtype = config.dtype;
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    static constexpr bool score_mod = config.score_mod;
    static constexpr int head_dim = config.head_dim;
    static constexpr int value_dim = config.value_dim;
    static constexpr int block_m = config.block_m;  // queries of a step
    static constexpr int blocks = 2;                // of a cluster
    static constexpr int block_keys = 64;
    static constexpr int stages = config.stages;  // of Q
    static constexpr int shared_bytes = backward_d256_memory(config);
    static constexpr int threads = 4 * WARPGROUP_THREADS;
    static constexpr int dq_cols = head_dim / blocks;  // of a block
    static_assert(block_m == 64);

    // What a block computes of dQ at a time.
    static constexpr int dq_parts = dq_cols > 96 ? 2 : 1;
    static constexpr int dq_part_cols = dq_cols / dq_parts;
    static constexpr bool dq_shared = d256_dq_shared(config);
    // In the deterministic mode; one alone waits for the semaphores, and the warpgroup adds itself.
    static constexpr int dq_writers = dq_shared ? 3 : 1;

    // dO comes in parts of its columns where there is no room for two tiles of it.
    static constexpr int value_parts = d256_value_parts(config);
    static constexpr int value_slots = d256_value_slots(config);
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
    using Scheduler = BackwardScheduler<block_m, blocks * block_keys>;

    static constexpr int producer_registers = 32, dq_registers = head_dim > 192 ? 64 : 96;
    static constexpr int dkv_registers = (512 - producer_registers - dq_registers) / 2;
};

template <class Kernel>
struct BackwardD256Globals {
    Layout<typename Kernel::share> q, grad_out;
    Layout<typename Kernel::k_tile> k, dk;
    Layout<typename Kernel::k_half> k_peer;
    Layout<typename Kernel::v_tile> v, dv;
    typename Kernel::Scheduler scheduler;
    const float *lse_log2, *delta;   // as in BackwardGlobals
    float* dq;                       // cleared, unless deterministic
    float *partial_dk, *partial_dv;  // as in BackwardGlobals
    // Per tile of dQ and block of the cluster: key blocks that have added theirs.
    int* dq_semaphores;
    ScoreMod score_mod;
    float scale, scale_log2;
    bool need_dq, need_dk, need_dv;
    // Key blocks add to a tile of dQ in descending order, by its semaphore; the last one stores its
    // part. They are begun in the same order: under a causal mask blocks that begin together then
    // come to a tile one after the other.
    bool deterministic;
};

template <class Kernel>
struct BackwardD256Shared {
    typename Kernel::k_tile k;
    typename Kernel::v_tile v;
    typename Kernel::k_half k_peer;  // the other block's keys, this block's columns of dQ
    typename Kernel::q_tile q[Kernel::stages];
    typename Kernel::value_tile grad_out[Kernel::value_slots];
    typename Kernel::ds_tile own[2];   // weights, then dS, of this block's keys
    typename Kernel::ds_tile peer[2];  // dS of the other's
    sv<float, Kernel::dq_shared ? 32 * Kernel::dq_part_cols : 4> dq[2];
    typename Kernel::statistics lse[Kernel::stages], delta[Kernel::stages];

    WorkTileRing ring;
    int claimed[2];
    semaphore claim_full[2], claim_empty[2];
    semaphore k_full, v_full, k_empty, v_empty;
    // No product reads K (V) of the work tile any more, and every warp has seen it arrive: where a
    // work tile has no steps, no product keeps a late warp from missing a phase.
    semaphore k_done, v_done;
    semaphore q_full[Kernel::stages], q_empty[Kernel::stages];
    semaphore value_full[Kernel::value_slots], value_empty[Kernel::value_slots];
    semaphore weights_full[2];
    semaphore ds_full[2], ds_empty[2];
    semaphore dq_tile_full[2], dq_tile_empty[2];            // the step's tile of dQ is this block's
    semaphore dq_full[Kernel::dq_writers][2], dq_empty[2];  // halves of a tile

    __device__ __forceinline__ void init(bool need_dq, bool ordered_dq) {
        for (semaphore* s : {&k_full, &v_full, &k_empty, &v_empty}) init_semaphore(*s, 1);
        init_semaphore(k_done, (need_dq ? 2 : 1) * WARPGROUP_WARPS);
        init_semaphore(v_done, WARPGROUP_WARPS);
        ring.init((need_dq ? 3 : 2) * WARPGROUP_THREADS + (ordered_dq ? Kernel::dq_writers : 0));
        for (int i = 0; i < 2; ++i) {
            init_semaphore(claim_full[i], 1);
            init_semaphore(claim_empty[i], 1);
            init_semaphore(weights_full[i], WARPGROUP_WARPS);
            init_semaphore(ds_full[i], WARPGROUP_WARPS);
            init_semaphore(dq_tile_full[i], 1);
            init_semaphore(dq_tile_empty[i], 1);
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

// The query blocks of a work tile over the heads of a group.
template <class Kernel>
struct Steps {
    const BackwardD256Globals<Kernel>& g;
    const BackwardWorkTile& work;
    int j, head;  // a query block, and a head of the group

    __device__ __forceinline__ Steps(const BackwardD256Globals<Kernel>& _g,
                                     const BackwardWorkTile& _work)
        : g(_g),
          work(_work),
          j(read(work.begin)),
          head(j < read(work.end) ? 0 : g.scheduler.group) {}
    __device__ __forceinline__ bool more() const { return head < g.scheduler.group; }
    // True when the next step is of another head.
    __device__ __forceinline__ bool advance() {
        if (++j < read(work.end)) return false;
        j = read(work.begin);
        ++head;
        return true;
    }
};

template <class Kernel>
struct BackwardD256Producer {
    const BackwardD256Globals<Kernel>& g;
    BackwardD256Shared<Kernel>& shared;
    const int rank;

    // The index of the work tile with the key blocks of a section in descending order.
    __device__ __forceinline__ int descending(int index) const {
        const TileScheduler& tiles = g.scheduler.tiles;
        if (!g.deterministic || index >= tiles.work_tiles()) return index;
        const int section = index / (tiles.blocks * tiles.section_heads);
        const int first_head = section * tiles.section_heads;
        const int heads = ::min(tiles.section_heads, tiles.heads * tiles.batch - first_head);
        const int rest = index - first_head * tiles.blocks;
        const int level = tiles.blocks - 1 - rest / heads;
        return first_head * tiles.blocks + level * heads + rest % heads;
    }
    // The first block claims work tiles for both.
    __device__ __forceinline__ int next(int slot, int phase) const {
        if (rank == 0) {
            const int index = descending(arch::fetch_add_global(g.scheduler.next_work_tile, 1));
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
                                               const BackwardWorkTile& work, int head, int row,
                                               int column, semaphore& full) const {
        using share = typename Kernel::share;
#pragma unroll
        for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
            auto* to = tile.data + (stripe * Kernel::block_m + rank * share::rows) * share::cols;
            const int b = read(work.b);
            const ragged_coord at{head, read(work.q_begin), read(work.q_length),
                                  row + rank * share::rows, column + stripe * share::cols};
            source.load_to_blocks(reinterpret_cast<share&>(*to), b, at, full,
                                  (1 << Kernel::blocks) - 1);
        }
    }

    __device__ __forceinline__ void load_keys(const BackwardWorkTile& work, int phase) const {
        const int first = read(work.block) * Kernel::blocks * Kernel::block_keys;
        const int own = first + rank * Kernel::block_keys;
        const int other = first + (rank ^ 1) * Kernel::block_keys;
        const int b = read(work.b), head = read(work.key_head);
        const int begin = read(work.k_begin), length = read(work.k_length);
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
        const auto next_work_tile = [&] {
            const int index = next(claim_at.stage, claim_at.phase);
            claim_at.advance();
            return index;
        };
        shared.ring.claim_by(next_work_tile, g.scheduler, [&](const BackwardWorkTile& work) {
            load_keys(work, &work == &shared.ring.tiles[1]);
            for (Steps at(g, work); at.more(); at.advance()) {
                const int head = read(work.head) * g.scheduler.group + at.head;
                const int row = at.j * Kernel::block_m;
                const int64_t rows =
                    g.scheduler.rows.first(read(work.b), read(work.q_begin), head) + row;
                const int s = q_at.stage;
                constexpr uint32_t bytes = tma::transfer_bytes<typename Kernel::statistics>();
                wait(shared.q_empty[s], q_at.phase ^ 1);
                tma::expect(shared.q_full[s], shared.q[s], shared.lse[s], shared.delta[s]);
                arch::bulk_load(shared.lse[s].address(), g.lse_log2 + rows, bytes,
                                shared.q_full[s].address());
                arch::bulk_load(shared.delta[s].address(), g.delta + rows, bytes,
                                shared.q_full[s].address());
                load_share(shared.q[s], g.q, work, head, row, 0, shared.q_full[s]);
                q_at.advance();
                for (int part = 0; part < Kernel::value_parts; ++part) {
                    const int v = value_at.stage;
                    wait(shared.value_empty[v], value_at.phase ^ 1);
                    tma::expect(shared.value_full[v], shared.grad_out[v]);
                    load_share(shared.grad_out[v], g.grad_out, work, head, row,
                               part * Kernel::part_cols, shared.value_full[v]);
                    value_at.advance();
                }
            }
        });
    }
};

}  // namespace thunderkittens::attention
