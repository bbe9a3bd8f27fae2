// What the roles of backward_wide_sm90.cuh share, and the warpgroup that computes dQ.
#pragma once

#include "csrc/attention/backward_wide_sm90.cuh"

namespace thunderkittens::attention {

// What the roles share: rings, and how they are handed back.
template <class Kernel>
struct WideRole {
    const WideGlobals<Kernel>& g;
    WideShared<Kernel>& shared;
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
    // Of the semaphores of K and V: items alternate between the ring's two slots.
    __device__ __forceinline__ int phase(const BackwardItem& item) const {
        return &item == &shared.ring.items[1];
    }
    __device__ __forceinline__ int first_key(const BackwardItem& item) const {
        return (read(item.block) * Kernel::blocks + rank) * Kernel::block_keys;
    }
    // A gradient of this block's keys, in parts of its columns, leaves through the memory of the
    // tile itself.
    template <class Target, class Tile, class Part, int parts>
    __device__ __forceinline__ void send(const Target& target, float* sums, bool needed, Tile& tile,
                                         const Part (&gradient)[parts], semaphore& empty,
                                         const BackwardItem& item, int barrier) const {
        if (g.work.parts > 1) {
            warpgroup::sync(barrier);  // all threads have seen that the tile is no longer read
            signal(empty);
            if (!needed || first_key(item) >= read(item.k_length)) return;
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                store_part(sums, parts * Part::cols, gradient[part], item, rank, part * Part::cols);
            }
            return;
        }
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            auto to = tile.template subtile<Kernel::block_keys, Part::cols>({0, part});
            // Anew for each item: the addresses, known before the loop, would take registers.
            arch::pin_register(to.base);
            warpgroup::store(to, gradient[part]);
        }
        arch::fence_async_shared();
        warpgroup::sync(barrier);
        if (warpgroup::laneid() != 0) return;
        if (needed) {
            target.store(tile, read(item.b), read(item.key_head), read(item.k_begin),
                         read(item.k_length), first_key(item), 0);
            tma::store_async_read_wait();
        }
        arrive(empty);
    }
};

// Where a step's part of dQ goes.
template <class Kernel>
struct DqPlace {
    const WideGlobals<Kernel>& g;
    int tile, order;  // key blocks that come first

    __device__ __forceinline__ DqPlace(const WideGlobals<Kernel>& _g, const BackwardItem& item,
                                       const Steps<Kernel>& at)
        : g(_g),
          tile(read(item.tile) + at.head * g.work.tiles_of_head() + at.j),
          order(Kernel::Work::last_block(at.j, item) - read(item.block)) {}
    __device__ __forceinline__ float* data(int rank, int part) const {
        return g.dq + ((int64_t(tile) * Kernel::blocks + rank) * Kernel::dq_parts + part) *
                          (64 * Kernel::dq_part_cols);
    }
    __device__ __forceinline__ int* turn(int rank) const {
        return g.turns + Kernel::blocks * tile + rank;
    }
};

// One thread, which knows of this block's turns before the products are done.
template <class Kernel>
__device__ __forceinline__ void await_turns(const WideGlobals<Kernel>& g,
                                            WideShared<Kernel>& shared, int rank) {
    RingPosition<2> slot;
    shared.ring.receive([&](const BackwardItem& item) {
        for (Steps at(g, item); at.more(); at.advance()) {
            const DqPlace place(g, item, at);
            wait(shared.turn_empty[slot.stage], slot.phase ^ 1);
            while (arch::load_acquire_global(place.turn(rank)) < place.order) {
            }
            arrive(shared.turn_full[slot.stage]);
            slot.advance();
        }
    });
}

template <class Kernel>
__device__ __forceinline__ void transfer_half(float* tile, const WideShared<Kernel>& shared,
                                              int half, bool first) {
    constexpr int floats = 32 * Kernel::dq_part_cols, bytes = floats * int(sizeof(float));
    const uint32_t from = shared.dq[half].address();
    if (first)
        arch::bulk_store(tile + half * floats, from, bytes);
    else
        arch::bulk_store_add(tile + half * floats, from, bytes);
    tma::store_commit_group();
}

// Where dQ goes through shared memory: threads that share the steps in turns, each waiting for its
// tile's turn. So a turn is ended as soon as the tile has been added, and the next is awaited
// meanwhile.
template <class Kernel>
__device__ __forceinline__ void send_in_turns(const WideGlobals<Kernel>& g,
                                              WideShared<Kernel>& shared, int rank, int index) {
    static_assert(!Kernel::dq_shared || Kernel::dq_parts == 1, "a tile is handed on at once");
    int phase = 0, others = index;  // steps of other senders that come first
    shared.ring.receive([&](const BackwardItem& item) {
        for (Steps at(g, item); at.more(); at.advance()) {
            if (others-- > 0) continue;
            others = Kernel::senders - 1;
            const DqPlace place(g, item, at);
            while (arch::load_acquire_global(place.turn(rank)) < place.order) {
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
            arch::store_release_global(place.turn(rank), place.order + 1);
        }
    });
}

template <class Kernel>
struct QueryRole : WideRole<Kernel> {
    static constexpr int parts = Kernel::dq_parts, part_cols = Kernel::dq_part_cols;
    using gradient = rt_fl<16, part_cols>;
    using Base = WideRole<Kernel>;
    using Base::g, Base::shared, Base::rank, Base::ds_at;
    // The turn that is to be ended, in the step after: then the additions have long been done.
    int* owed = nullptr;
    int owed_order = 0;
    // Of the threads that send tiles in order.
    int sender = 0, dq_phase = 0;

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
        const bool sender = warpgroup::laneid() == 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (sender) tma::store_async_read_wait<1>();
            warpgroup::sync(3);
            stage(dq, half);
            arch::fence_async_shared();
            warpgroup::sync(3);
            if (!sender) continue;
            transfer_half<Kernel>(to, shared, half, false);
        }
    }
    // To the thread that waits for the tile's turn.
    __device__ __forceinline__ void hand_on(const gradient& dq) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait(shared.dq_empty[half], dq_phase ^ 1);
            stage(dq, half);
            this->signal_by_warp(shared.dq_full[sender][half]);
        }
        dq_phase ^= 1;
        sender = sender == Kernel::senders - 1 ? 0 : sender + 1;
    }
    __device__ __forceinline__ void end_turn() {
        if (owed == nullptr) return;
        arch::fence_gpu();
        warpgroup::sync(3);
        if (warpgroup::laneid() == 0) {
            arch::store_release_global(owed, owed_order + 1);
            arrive(shared.turn_empty[ds_at.stage ^ 1]);
        }
        owed = nullptr;
    }

    __device__ __forceinline__ void work(const BackwardItem& item) {
        wait(shared.k_full, this->phase(item));
        for (Steps at(g, item); at.more(); at.advance()) {
            const int slot = ds_at.stage;
            wait(shared.ds_full[slot], ds_at.phase);
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                gradient dq;
                start_product(dq, slot, part);
                if (!Kernel::dq_shared && part == 0) end_turn();
                warpgroup::mma_async_wait<0>(dq);
                if (part == parts - 1) this->release(shared.ds_empty[slot]);
                const DqPlace place(g, item, at);
                if constexpr (Kernel::dq_shared) {
                    if (g.in_order)
                        hand_on(dq);
                    else
                        add_by_copy(dq, place.data(rank, part));
                    continue;
                }
                if (g.in_order && part == 0) {
                    wait(shared.turn_full[slot], ds_at.phase);
                    owed = place.turn(rank);
                    owed_order = place.order;
                }
                add(dq, place.data(rank, part), g.in_order && place.order == 0);
            }
            ds_at.advance();
        }
        end_turn();
        this->signal_by_warp(shared.k_done);
    }
};

}  // namespace thunderkittens::attention
