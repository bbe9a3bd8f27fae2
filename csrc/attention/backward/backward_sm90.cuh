// Attention backward for Hopper, head dimensions up to 128 (Dao, "FlashAttention-2", 2023, section
// 3.1.2):
//
//   P = exp(scale * Q K^T - LSE)     dV = P^T dO     dP = dO V^T
//   dS = P * (dP - delta)            dQ = scale * dS K     dK = scale * dS^T Q
//
// A block owns 128 keys of one key head, holds their K and V in shared memory and dK and dV in
// registers, and walks the query blocks that see them, over all query heads of the group, so that
// dK and dV of a group are summed in registers. Where that leaves SMs idle, several blocks share
// the heads of a group, and backward_prepost_sm90.cuh adds what each has, in a fixed order. Roles:
//   producer   one thread: K and V once per work tile; Q, dO and their rows' statistics into a ring
//   consumers  two warpgroups of 64 keys each. They compute the transposed scores S^T = K Q^T and
//              dP^T = V dO^T, so that P^T and dS^T leave the softmax as register operands of dV and
//              dK. dS^T goes through shared memory once, for dQ, whose tile the two share.
//   dQ writers threads that add the consumers' parts of dQ to memory, by bulk reductions;
//              reductions from registers hold the consumers up (they made the whole kernel 4 to 6 %
//              slower)
// The products of a step are issued so that the tensor cores have work while a consumer waits, and
// the consumers take turns with them (ping-pong), half a step apart. dQ is one step behind: it is
// the only product that needs the other consumer's dS.
// dQ is summed over the key blocks in fp32 in global memory, in the order of the accumulator's
// registers; backward_prepost_sm90.cuh puts the elements in order afterwards. The order of the sum
// varies between runs, unless the writers go by the tiles' semaphores (the deterministic mode).
#pragma once

#include "csrc/attention/backward/backward_scores.cuh"
#include "csrc/attention/common/layouts.cuh"

namespace thunderkittens::attention {

using namespace kittens;

enum class QueryGradient { none, any_order, deterministic };

template <BackwardConfig CONFIG, QueryGradient QUERY_GRADIENT>
struct BackwardKernel {
    static constexpr BackwardConfig config = CONFIG;
    static constexpr DType dtype = config.dtype;
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    static constexpr bool need_dq = QUERY_GRADIENT != QueryGradient::none;
    static constexpr bool deterministic = QUERY_GRADIENT == QueryGradient::deterministic;
    static constexpr bool score_mod = config.score_mod;
    static constexpr int head_dim = config.head_dim;
    static constexpr int block_m = config.block_m;  // queries of a step
    static constexpr int block_n = 128;             // keys of a block
    static constexpr int stages = config.stages;
    static constexpr int shared_bytes = backward_memory(config);
    static constexpr int warpgroups = 2;
    static constexpr int threads = (warpgroups + 1) * WARPGROUP_THREADS;

    // The dQ tile of a step is block_m x head_dim; each consumer computes 64 rows of it, or half of
    // the columns.
    static constexpr bool split_rows = block_m == 128;
    static constexpr int dq_parts = 2;
    // Any order: one per part. Deterministic: a whole tile each, three at a time, as a tile takes
    // about two steps until the next key block may add its own.
    static constexpr int dq_writers = deterministic ? 3 : dq_parts;
    static constexpr int part_cols = split_rows ? head_dim : head_dim / 2;
    static constexpr int part_floats = 64 * part_cols;
    static constexpr int dq_tile_floats = dq_parts * part_floats;
    static_assert(block_m == 64 || block_m == 128);

    // Tiles of a consumer. A part of K's columns must begin with a stripe of the swizzle.
    using k_tile = st<T, 64, head_dim, true, head_dim == 96 ? 32 : 0>;
    using v_tile = st<T, 64, head_dim>;
    using ds_tile = st<T, 64, block_m>;       // dS^T
    using q_tile = st<T, block_m, head_dim>;  // Q and dO
    using part_tile = st<T, 64, part_cols>;
    using statistics = sv<float, block_m>;
    using Scheduler = BackwardScheduler<block_m, block_n>;

    // dV can start before dS is computed where the registers of both fit.
    static constexpr bool early_dv = block_m == 64;
};

template <class Kernel>
struct BackwardGlobals {
    Layout<typename Kernel::q_tile> q, grad_out;
    Layout<typename Kernel::k_tile> k;
    Layout<typename Kernel::v_tile> v, dk, dv;
    typename Kernel::Scheduler scheduler;
    const float*
        lse_log2;        // per row of the workspace: LSE * log2(e), +inf for rows that see nothing
    const float* delta;  // likewise: rowsum(out * grad_out) - grad_lse
    float* dq;           // likewise, head_dim each, in the accumulator's order
    // Where groups are split, likewise, per key and part; else null.
    float *partial_dk, *partial_dv;
    int* dq_semaphores;  // per tile of dQ and consumer: key blocks that have added theirs
    ScoreMod score_mod;
    float scale, scale_log2;
    bool need_dk, need_dv;
};

// Where a consumer leaves dS and dQ for others; dK and dV leave through it when it is no longer
// needed.
template <class Kernel>
union BackwardStaging {
    struct {
        typename Kernel::ds_tile ds[2];  // of a step, in turns
        sv<float, Kernel::part_floats> dq;
    };
    typename Kernel::v_tile gradients[2];

    static_assert(sizeof(typename Kernel::v_tile) <= sizeof(ds) &&
                      2 * sizeof(typename Kernel::v_tile) <= sizeof(ds) + sizeof(dq),
                  "dV must fit beside dQ, which is on its way when dV is stored");
};

template <class Kernel>
struct BackwardShared {
    typename Kernel::k_tile k[2];
    typename Kernel::v_tile v[2];
    typename Kernel::q_tile q[Kernel::stages], grad_out[Kernel::stages];
    BackwardStaging<Kernel> staging[2];
    typename Kernel::statistics lse[Kernel::stages], delta[Kernel::stages];

    WorkTileRing ring;
    semaphore k_full, v_full, kv_empty;
    semaphore dq_full[Kernel::dq_writers], dq_empty[2];
    semaphore step_done;  // dS of the step is written, and dQ of the step before has read its own
    semaphore q_full[Kernel::stages], grad_out_full[Kernel::stages], empty[Kernel::stages];
};

// The j-th query block of a work tile. In the deterministic mode the last comes first: key blocks
// further on, which begin later and wait for this one, then have the tiles that it has left.
template <class Kernel>
__device__ __forceinline__ int query_block(const BackwardWorkTile& work, int j) {
    return Kernel::deterministic ? read(work.begin) + read(work.end) - 1 - j : j;
}

template <class Kernel>
__device__ __forceinline__ void produce(const BackwardGlobals<Kernel>& g,
                                        BackwardShared<Kernel>& shared) {
    RingPosition<Kernel::stages> at;
    int kv_phase = 0;
    shared.ring.claim(g.scheduler, [&](const BackwardWorkTile& work) {
        wait(shared.kv_empty, kv_phase ^ 1);
        kv_phase ^= 1;
        tma::expect(shared.k_full, shared.k);
        tma::expect(shared.v_full, shared.v);
        for (int w = 0; w < 2; ++w) {
            const int row = read(work.block) * Kernel::block_n + 64 * w;
            g.k.load(shared.k[w], read(work.b), read(work.key_head), read(work.k_begin),
                     read(work.k_length), row, shared.k_full);
            g.v.load(shared.v[w], read(work.b), read(work.key_head), read(work.k_begin),
                     read(work.k_length), row, shared.v_full);
        }
        for (int i = 0; i < g.scheduler.group; ++i) {
            const int head = read(work.head) * g.scheduler.group + i;
            const int64_t rows = g.scheduler.rows.first(read(work.b), read(work.q_begin), head);
            for (int j = read(work.begin); j < read(work.end); ++j) {
                const int m = query_block<Kernel>(work, j);
                const int s = at.stage, row = m * Kernel::block_m;
                constexpr int bytes = sizeof(typename Kernel::statistics);
                wait(shared.empty[s], at.phase ^ 1);
                tma::expect(shared.q_full[s], shared.q[s], shared.lse[s]);
                g.q.load(shared.q[s], read(work.b), head, read(work.q_begin), read(work.q_length),
                         row, shared.q_full[s]);
                arch::bulk_load(shared.lse[s].address(), g.lse_log2 + rows + row, bytes,
                                shared.q_full[s].address());
                tma::expect(shared.grad_out_full[s], shared.grad_out[s], shared.delta[s]);
                g.grad_out.load(shared.grad_out[s], read(work.b), head, read(work.q_begin),
                                read(work.q_length), row, shared.grad_out_full[s]);
                arch::bulk_load(shared.delta[s].address(), g.delta + rows + row, bytes,
                                shared.grad_out_full[s].address());
                at.advance();
            }
        }
    });
}

// Adds dQ to memory. Deterministic: the key blocks of a tile in ascending order, by the tile's
// semaphore, of which the first is stored.
template <class Kernel>
struct DqWriter {
    const BackwardGlobals<Kernel>& g;
    BackwardShared<Kernel>& shared;
    const int index;

    __device__ __forceinline__ int* semaphore_of(int tile) const {
        return g.dq_semaphores + 2 * tile;
    }
    __device__ __forceinline__ void await(int tile, int count) const {
        while (arch::load_acquire_global(semaphore_of(tile)) < count) {
        }
    }
    __device__ __forceinline__ void transfer(int tile, int part, bool first) const {
        float* to = g.dq + int64_t(tile) * Kernel::dq_tile_floats + part * Kernel::part_floats;
        const uint32_t from = shared.staging[part].dq.address();
        constexpr int bytes = Kernel::part_floats * int(sizeof(float));
        if (first)
            arch::bulk_store(to, from, bytes);
        else
            arch::bulk_store_add(to, from, bytes);
    }
    // The next key block may add to the tile.
    __device__ __forceinline__ void announce(int tile, int count) const {
        tma::store_async_wait();
        arch::fence_async();
        arch::store_release_global(semaphore_of(tile), count);
    }
    __device__ __forceinline__ void await_parts(int& phase) const {
        wait(shared.dq_full[index], phase);
        phase ^= 1;
        // Here rather than in the consumers, whom it would hold up.
        arch::fence_async_shared();
    }

    __device__ __forceinline__ void run() const {
        int phase = 0, others = index;  // steps of other writers that come first
        shared.ring.receive([&](const BackwardWorkTile& work) {
            for (int i = 0; i < g.scheduler.group; ++i) {
                for (int j = read(work.begin); j < read(work.end); ++j) {
                    if (Kernel::deterministic && others-- > 0) continue;
                    others = Kernel::dq_writers - 1;
                    const int m = query_block<Kernel>(work, j);
                    const int tile = read(work.dq_tile) + i * g.scheduler.tiles_of_head() + m;
                    if constexpr (Kernel::deterministic) {
                        const int place =
                            read(work.block) - Kernel::Scheduler::first_block(m, read(work.low));
                        await(tile, place);
                        await_parts(phase);
                        arch::fence_async();
                        for (int part = 0; part < 2; ++part) transfer(tile, part, place == 0);
                        tma::store_commit_group();
                        tma::store_async_read_wait();
                        for (int part = 0; part < 2; ++part) arrive(shared.dq_empty[part]);
                        announce(tile, place + 1);
                    } else {
                        await_parts(phase);
                        transfer(tile, index, false);
                        tma::store_commit_group();
                        tma::store_async_read_wait();
                        arrive(shared.dq_empty[index]);
                    }
                }
            }
        });
        tma::store_async_wait();
    }
};

template <class Kernel>
struct BackwardConsumer {
    using T = typename Kernel::T;
    using scores = rt_fl<16, Kernel::block_m>;  // transposed: rows are keys
    using weights = rt<T, 16, Kernel::block_m>;
    using gradient = rt_fl<16, Kernel::head_dim>;
    using dq_part = rt_fl<16, Kernel::part_cols>;

    const BackwardGlobals<Kernel>& g;
    BackwardShared<Kernel>& shared;
    const int id;
    RingPosition<Kernel::stages> at;
    int kv_phase = 0, dq_phase = 0;
    int dq_writer = 0;  // of this step's dQ, deterministic
    int step_parity = 0;
    int step_phase = 0;
    Weights<Kernel, BackwardGlobals<Kernel>> weighing{g};

    // Named barriers: 1, 2 a consumer's own; 3, 4 its turn; 5 both.
    __device__ __forceinline__ void sync_own() { warpgroup::sync(1 + id); }
    __device__ __forceinline__ void sync_both() {
        arch::named_barrier_sync(5, 2 * WARPGROUP_THREADS);
    }
    // A consumer's turn is from its dQ and dK to the next step's S and dP; meanwhile the other is
    // at the elements of its own. Left alone they fall into step, and the tensor cores idle.
    __device__ __forceinline__ void await_turn() {
        arch::named_barrier_sync(3 + id, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void pass_turn() {
        arch::named_barrier_arrive(4 - id, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void begin() {
        if (id == 1) pass_turn();
    }
    // Leaves no arrival behind.
    __device__ __forceinline__ void end() {
        if (id == 0) await_turn();
    }
    __device__ __forceinline__ void release(semaphore& s) {
        if (warpgroup::laneid() == 0) arrive(s);
    }
    __device__ __forceinline__ auto& staging() { return shared.staging[id]; }

    // In a register that the warp shares.
    static __device__ __forceinline__ int uniform(const int& field) {
        return arch::warp_uniform(read(field));
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

    // This consumer's part of dQ into shared memory, for its writer.
    __device__ __forceinline__ void stage_dq(const dq_part& dq) {
        wait(shared.dq_empty[id], dq_phase ^ 1);
        dq_phase ^= 1;
        const uint32_t to = staging().dq.address_of(4 * warpgroup::laneid());
#pragma unroll
        for (int j = 0; j < dq_part::width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 high = dq.tiles[0][j].data[2 * half],
                             low = dq.tiles[0][j].data[2 * half + 1];
                arch::store_shared(to + uint32_t((2 * j + half) * 16 * WARPGROUP_THREADS),
                                   make_float4(high.x, high.y, low.x, low.y));
            }
        }
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.dq_full[Kernel::deterministic ? dq_writer : id]);
        if constexpr (Kernel::deterministic)
            dq_writer = dq_writer == Kernel::dq_writers - 1 ? 0 : dq_writer + 1;
    }
    __device__ __forceinline__ void issue_dq(dq_part& dq, int self, int buffer) {
        warpgroup::mma_fence(dq);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            auto& ds = shared.staging[w].ds[buffer];
            if constexpr (Kernel::split_rows) {
                product(dq, ds.template subtile<64, 64>({0, self}), shared.k[w], w > 0);
            } else {
                product(dq, ds, shared.k[w].template subtile<64, Kernel::part_cols>({0, self}),
                        w > 0);
            }
        }
        warpgroup::mma_commit_group();
    }
    template <class A, class B>
    __device__ __forceinline__ void product(dq_part& dq, const A& a, const B& b, bool accumulate) {
        kittens::detail::wgmma_product<true, false>(dq, a, b, accumulate);
    }
    // Both consumers' dS of the step before can be read, and their older ones overwritten.
    __device__ __forceinline__ void await_step() {
        wait(shared.step_done, step_phase);
        step_phase ^= 1;
        arch::fence_async_shared();
    }

    // One query block. dQ is one step behind, so that no consumer waits for the other's dS.
    template <bool FIRST>
    __device__ __forceinline__ void step(gradient& dk, gradient& dv, const BackwardWorkTile& work,
                                         int m, bool masked) {
        const int stage = at.stage;
        // Anew in each step: the products' descriptors, all known before the loop, would take
        // registers throughout.
        const int self = arch::warp_uniform(id);
        scores s, dp;
        weights p, ds;
        wait(shared.q_full[stage], at.phase);
        warpgroup::mm_ABt(s, shared.k[self], shared.q[stage]);
        wait(shared.grad_out_full[stage], at.phase);
        warpgroup::mm_ABt(dp, shared.v[self], shared.grad_out[stage]);
        pass_turn();
        warpgroup::mma_async_wait<1>(s);
        weighing.weigh(s, p, work, m, masked, shared.lse[stage],
                       [this](const BackwardWorkTile& of) {
                           return read(of.block) * Kernel::block_n + 64 * id;
                       });
        if constexpr (Kernel::early_dv && !Kernel::score_mod) convert_scores(p, s);
        if constexpr (Kernel::early_dv) warpgroup::mma_AB(dv, p, shared.grad_out[stage]);
        warpgroup::mma_async_wait<Kernel::early_dv ? 1 : 0>(dp);
        with_row_statistic(dp, shared.delta[stage], [](float& x, float delta) { x -= delta; });
        multiply(ds, s, dp);
        if constexpr (!Kernel::early_dv) {
            convert_scores(p, s);
            warpgroup::mma_AB(dv, p, shared.grad_out[stage]);
        }
        if constexpr (Kernel::need_dq) {
            dq_part dq;
            if constexpr (!FIRST) await_step();
            warpgroup::store(staging().ds[step_parity], ds);
            await_turn();
            if constexpr (!FIRST) issue_dq(dq, self, step_parity ^ 1);
            warpgroup::mma_AB(dk, ds, shared.q[stage]);
            if constexpr (!FIRST) warpgroup::mma_async_wait<1>(dq);
            arch::sync_warp();
            if (laneid() == 0) arrive(shared.step_done);
            if constexpr (!FIRST) stage_dq(dq);
        } else {
            await_turn();
            warpgroup::mma_AB(dk, ds, shared.q[stage]);
        }
        warpgroup::mma_async_wait<0>();
        arrive(shared.empty[stage]);  // every thread, as each has read statistics
        at.advance();
        step_parity ^= 1;
    }

    __device__ __forceinline__ void finish_steps() {
        if constexpr (Kernel::need_dq) {
            const int self = arch::warp_uniform(id);
            dq_part dq;
            await_step();
            issue_dq(dq, self, step_parity ^ 1);
            warpgroup::mma_async_wait<0>(dq);
            stage_dq(dq);
        }
    }

    __device__ __forceinline__ void process(const BackwardWorkTile& work) {
        gradient dk, dv;
        zero_tile(dk);
        zero_tile(dv);
        wait(shared.k_full, kv_phase);
        wait(shared.v_full, kv_phase);
        kv_phase ^= 1;
        // The last work tile's dK and dV have left the memory that dS and dQ go through.
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
        sync_own();
        const int begin = uniform(work.begin), end = uniform(work.end);
        if (begin < end) await_turn();
        const int unmasked_begin = uniform(work.unmasked_begin),
                  unmasked_end = uniform(work.unmasked_end);
        for (int i = 0; i < g.scheduler.group; ++i) {
            weighing.find_slope(work, i);
            int j = begin;
            if (i == 0 && j < end) {
                const int m = Kernel::deterministic ? end - 1 : j;
                step<true>(dk, dv, work, m, m < unmasked_begin || m >= unmasked_end);
                ++j;
            }
            for (; j < end; ++j) {
                const int m = Kernel::deterministic ? begin + end - 1 - j : j;
                step<false>(dk, dv, work, m, m < unmasked_begin || m >= unmasked_end);
            }
        }
        if (begin < end) {
            pass_turn();
            finish_steps();
        }
        warpgroup::mma_async_wait<0>();
        pin(dk);
        pin(dv);
        release(shared.kv_empty);
        store(dk, dv, work);
    }

    // dV and dK leave through the memory of dS and dQ, so that K and V of the next work tile come
    // in meanwhile; the partials of a split as they are.
    __device__ __forceinline__ void store(gradient& dk, gradient& dv,
                                          const BackwardWorkTile& work) {
        scale_rows(dk, make_float2(g.scale, g.scale));
        if (g.scheduler.head_splits > 1) {
            if (read(work.block) * Kernel::block_n + 64 * id >= read(work.k_length)) return;
            if (g.need_dv) store_partial(g.partial_dv, Kernel::head_dim, dv, work, id);
            if (g.need_dk) store_partial(g.partial_dk, Kernel::head_dim, dk, work, id);
            return;
        }
        if constexpr (Kernel::need_dq) sync_both();  // the other consumer's last dQ has read dS
        store(g.dv, g.need_dv, staging().gradients[0], dv, work);
        if constexpr (Kernel::need_dq) wait(shared.dq_empty[id], dq_phase ^ 1);
        store(g.dk, g.need_dk, staging().gradients[1], dk, work);
    }
    template <class Target, class Tile>
    __device__ __forceinline__ void store(const Target& target, bool needed, Tile& tile,
                                          const gradient& values, const BackwardWorkTile& work) {
        if (!needed) return;
        warpgroup::store(tile, values);
        arch::fence_async_shared();
        sync_own();
        if (warpgroup::laneid() == 0) {
            target.store(tile, read(work.b), read(work.key_head), read(work.k_begin),
                         read(work.k_length), read(work.block) * Kernel::block_n + 64 * id, 0);
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
        for (int w = 0; w < 2; ++w) {
            init_semaphore(shared.dq_empty[w], 1);
        }
        for (int w = 0; w < Kernel::dq_writers; ++w) {
            init_semaphore(shared.dq_full[w], (Kernel::deterministic ? 2 : 1) * WARPGROUP_WARPS);
        }
        init_semaphore(shared.step_done, 2 * WARPGROUP_WARPS);
        shared.ring.init(2 * WARPGROUP_THREADS + (Kernel::need_dq ? Kernel::dq_writers : 0));
        for (int s = 0; s < Kernel::stages; ++s) {
            init_semaphore(shared.q_full[s], 1);
            init_semaphore(shared.grad_out_full[s], 1);
            init_semaphore(shared.empty[s], 2 * WARPGROUP_THREADS);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == 0) {
        warpgroup::decrease_registers<24>();
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0 && arch::elect_one()) produce(g, shared);
        if constexpr (Kernel::need_dq) {
            if (warp >= 1 && warp <= Kernel::dq_writers && arch::elect_one()) {
                DqWriter<Kernel>{g, shared, warp - 1}.run();
            }
        }
    } else {
        warpgroup::increase_registers<240>();
        BackwardConsumer<Kernel> consumer{g, shared, role - 1};
        consumer.begin();
        shared.ring.receive([&](const BackwardWorkTile& work) { consumer.process(work); });
        consumer.end();
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
}

}  // namespace thunderkittens::attention
