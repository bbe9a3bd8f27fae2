// What the roles of backward_d256_sm90.cuh share, and the warpgroup that computes dQ.
#pragma once

#include "csrc/attention/backward/backward_d256_sm90.cuh"

namespace thunderkittens::attention {

// What the roles share: rings, and how they are handed back.
template <class Kernel>
struct BackwardD256Role {
    const BackwardD256Globals<Kernel>& g;
    BackwardD256Shared<Kernel>& shared;
    const int rank;
    RingPosition<Kernel::stages> q_at;
    RingPosition<Kernel::value_slots> value_at;
    RingPosition<2> ds_at;

    static __device__ __forceinline__ void signal(semaphore& s) {
        if (warpgroup::laneid() == 0) arrive(s);
    }
    static __device__ __forceinline__ void signal_by_warp(semaphore& s) {
        arch::sync_warp();
        if (laneid() == 0) arrive(s);
    }
    // Both blocks fill the slot that this warpgroup has read.
    __device__ __forceinline__ void release(semaphore& s) const {
        if (warpgroup::laneid() == 0) {
            arrive(s);
            arrive_remote_relaxed(s, rank ^ 1);
        }
    }
    __device__ __forceinline__ void release_value() {
        release(shared.value_empty[value_at.stage]);
        value_at.advance();
    }
    // Of the semaphores of K and V: work tiles alternate between the ring's two slots.
    __device__ __forceinline__ int phase(const BackwardWorkTile& work) const {
        return &work == &shared.ring.tiles[1];
    }
    __device__ __forceinline__ int first_key(const BackwardWorkTile& work) const {
        return (read(work.block) * Kernel::blocks + rank) * Kernel::block_keys;
    }
    // A gradient of this block's keys, in parts of its columns, leaves through the memory of the
    // tile itself.
    template <class Target, class Tile, class Part, int parts>
    __device__ __forceinline__ void send(const Target& target, float* sums, bool needed, Tile& tile,
                                         const Part (&gradient)[parts], semaphore& empty,
                                         const BackwardWorkTile& work, int barrier) const {
        if (g.scheduler.head_splits > 1) {
            warpgroup::sync(barrier);  // all threads have seen that the tile is no longer read
            signal(empty);
            if (!needed || first_key(work) >= read(work.k_length)) return;
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                store_partial(sums, parts * Part::cols, gradient[part], work, rank,
                              part * Part::cols);
            }
            return;
        }
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            auto to = tile.template subtile<Kernel::block_keys, Part::cols>({0, part});
            // Anew for each work tile: the addresses, known before the loop, would take registers.
            arch::pin_register(to.base);
            warpgroup::store(to, gradient[part]);
        }
        arch::fence_async_shared();
        warpgroup::sync(barrier);
        if (warpgroup::laneid() != 0) return;
        if (needed) {
            target.store(tile, read(work.b), read(work.key_head), read(work.k_begin),
                         read(work.k_length), first_key(work), 0);
            tma::store_async_read_wait();
        }
        arrive(empty);
    }
};

// Where a step's part of dQ goes.
template <class Kernel>
struct DqPlace {
    const BackwardD256Globals<Kernel>& g;
    int tile, order;  // key blocks that come first

    __device__ __forceinline__ DqPlace(const BackwardD256Globals<Kernel>& _g,
                                       const BackwardWorkTile& work, const Steps<Kernel>& at)
        : g(_g),
          tile(read(work.dq_tile) + at.head * g.scheduler.tiles_of_head() + at.j),
          order(Kernel::Scheduler::last_block(at.j, work) - read(work.block)) {}
    __device__ __forceinline__ float* data(int rank, int part) const {
        return g.dq + ((int64_t(tile) * Kernel::blocks + rank) * Kernel::dq_parts + part) *
                          (64 * Kernel::dq_part_cols);
    }
    __device__ __forceinline__ int* semaphore_of(int rank) const {
        return g.dq_semaphores + Kernel::blocks * tile + rank;
    }
};

// One thread, which waits for the semaphores of the tiles of dQ while the products run.
template <class Kernel>
__device__ __forceinline__ void await_dq_semaphores(const BackwardD256Globals<Kernel>& g,
                                                    BackwardD256Shared<Kernel>& shared, int rank) {
    RingPosition<2> slot;
    shared.ring.receive([&](const BackwardWorkTile& work) {
        for (Steps at(g, work); at.more(); at.advance()) {
            const DqPlace place(g, work, at);
            wait(shared.dq_tile_empty[slot.stage], slot.phase ^ 1);
            while (arch::load_acquire_global(place.semaphore_of(rank)) < place.order) {
            }
            arrive(shared.dq_tile_full[slot.stage]);
            slot.advance();
        }
    });
}

template <class Kernel>
__device__ __forceinline__ void transfer_half(float* tile, const BackwardD256Shared<Kernel>& shared,
                                              int half, bool first) {
    constexpr int floats = 32 * Kernel::dq_part_cols, bytes = floats * int(sizeof(float));
    const uint32_t from = shared.dq[half].address();
    if (first)
        arch::bulk_store(tile + half * floats, from, bytes);
    else
        arch::bulk_store_add(tile + half * floats, from, bytes);
    tma::store_commit_group();
}

// dQ writers, where dQ goes through shared memory: threads that share the steps, each waiting for
// its tile's semaphore. So a tile is released as soon as dQ has been added to it, and the next is
// awaited meanwhile.
template <class Kernel>
__device__ __forceinline__ void write_dq_in_order(const BackwardD256Globals<Kernel>& g,
                                                  BackwardD256Shared<Kernel>& shared, int rank,
                                                  int index) {
    static_assert(!Kernel::dq_shared || Kernel::dq_parts == 1, "a tile is staged at once");
    int phase = 0, others = index;  // steps of other writers that come first
    shared.ring.receive([&](const BackwardWorkTile& work) {
        for (Steps at(g, work); at.more(); at.advance()) {
            if (others-- > 0) continue;
            others = Kernel::dq_writers - 1;
            const DqPlace place(g, work, at);
            while (arch::load_acquire_global(place.semaphore_of(rank)) < place.order) {
            }
            arch::fence_async();
            for (int half = 0; half < 2; ++half) {
                wait(shared.dq_full[index][half], phase);
                arch::fence_async_shared();
                transfer_half<Kernel>(place.data(rank, 0), shared, half, place.order == 0);
            }
            phase ^= 1;
            tma::store_async_read_wait<1>();
            arrive(shared.dq_empty[0]);
            tma::store_async_read_wait();
            arrive(shared.dq_empty[1]);
            tma::store_async_wait();
            arch::fence_async();
            arch::store_release_global(place.semaphore_of(rank), place.order + 1);
        }
    });
}

template <class Kernel>
struct DqRole : BackwardD256Role<Kernel> {
    static constexpr int parts = Kernel::dq_parts, part_cols = Kernel::dq_part_cols;
    using gradient = rt_fl<16, part_cols>;
    using Base = BackwardD256Role<Kernel>;
    using Base::g, Base::shared, Base::rank, Base::ds_at;
    // The semaphore of the tile that is to be released, in the step after: then the additions have
    // long been done.
    int* held = nullptr;
    int held_order = 0;
    // Of the writers.
    int dq_writer = 0, dq_phase = 0;

    __device__ __forceinline__ void start_product(gradient& dq, int slot, int part) const {
        constexpr int keys = Kernel::block_keys;
        warpgroup::mma_fence(dq);
        kittens::detail::wgmma_product<true, false>(
            dq, shared.own[slot],
            shared.k.template subtile<keys, part_cols>(
                {0, arch::warp_uniform(rank) * parts + part}),
            false);
        kittens::detail::wgmma_product<true, false>(
            dq, shared.peer[slot], shared.k_peer.template subtile<keys, part_cols>({0, part}),
            true);
        warpgroup::mma_commit_group();
    }

    // In the order of the accumulator's registers, which is that of memory.
    template <class F>
    static __device__ __forceinline__ void for_each_quad(const gradient& dq, int first, int count,
                                                         F f) {
#pragma unroll
        for (int j = 0; j < count; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto& data = dq.tiles[0][first + j].data;
                const float2 high = data[2 * half], low = data[2 * half + 1];
                f((2 * j + half) * 4 * WARPGROUP_THREADS + 4 * warpgroup::laneid(),
                  make_float4(high.x, high.y, low.x, low.y));
            }
        }
    }
    __device__ __forceinline__ void add(const gradient& dq, float* to, bool first) const {
        for_each_quad(dq, 0, gradient::width, [&](int at, const float4& values) {
            if (first)
                arch::store_global(reinterpret_cast<float4*>(to + at), values);
            else
                arch::reduce_add_global(to + at, values);
        });
    }
    // Half of a tile to shared memory.
    __device__ __forceinline__ void stage(const gradient& dq, int half) const {
        for_each_quad(dq, half * gradient::width / 2, gradient::width / 2,
                      [&](int at, const float4& values) {
                          arch::store_shared(shared.dq[half].address() + uint32_t(4 * at), values);
                      });
    }
    __device__ __forceinline__ void add_by_copy(const gradient& dq, float* to) const {
        const bool dq_writer = warpgroup::laneid() == 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (dq_writer) tma::store_async_read_wait<1>();
            warpgroup::sync(3);
            stage(dq, half);
            arch::fence_async_shared();
            warpgroup::sync(3);
            if (!dq_writer) continue;
            transfer_half<Kernel>(to, shared, half, false);
        }
    }
    // To the writer that waits for the tile's semaphore.
    __device__ __forceinline__ void stage_dq(const gradient& dq) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait(shared.dq_empty[half], dq_phase ^ 1);
            stage(dq, half);
            this->signal_by_warp(shared.dq_full[dq_writer][half]);
        }
        dq_phase ^= 1;
        dq_writer = dq_writer == Kernel::dq_writers - 1 ? 0 : dq_writer + 1;
    }
    __device__ __forceinline__ void release_tile() {
        if (held == nullptr) return;
        arch::fence_gpu();
        warpgroup::sync(3);
        if (warpgroup::laneid() == 0) {
            arch::store_release_global(held, held_order + 1);
            arrive(shared.dq_tile_empty[ds_at.stage ^ 1]);
        }
        held = nullptr;
    }

    __device__ __forceinline__ void process(const BackwardWorkTile& work) {
        wait(shared.k_full, this->phase(work));
        for (Steps at(g, work); at.more(); at.advance()) {
            const int slot = ds_at.stage;
            wait(shared.ds_full[slot], ds_at.phase);
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                gradient dq;
                start_product(dq, slot, part);
                if (!Kernel::dq_shared && part == 0) release_tile();
                warpgroup::mma_async_wait<0>(dq);
                if (part == parts - 1) this->release(shared.ds_empty[slot]);
                const DqPlace place(g, work, at);
                if constexpr (Kernel::dq_shared) {
                    if (g.deterministic)
                        stage_dq(dq);
                    else
                        add_by_copy(dq, place.data(rank, part));
                    continue;
                }
                if (g.deterministic && part == 0) {
                    wait(shared.dq_tile_full[slot], ds_at.phase);
                    held = place.semaphore_of(rank);
                    held_order = place.order;
                }
                add(dq, place.data(rank, part), g.deterministic && place.order == 0);
            }
            ds_at.advance();
        }
        release_tile();
        this->signal_by_warp(shared.k_done);
    }
};

}  // namespace thunderkittens::attention
