// The producers of attention forward: TMA loads of queries, keys and values.
#pragma once

#include "csrc/attention/forward/forward_types_sm90.cuh"

namespace thunderkittens::attention {

// By one thread.
template <class Kernel>
__device__ __forceinline__ void produce(const ForwardGlobals<Kernel>& g,
                                        ForwardShared<Kernel>& shared) {
    int kv_head = 0;
    const auto load_keys = [&](auto& tile, const auto& from, const ForwardWorkTile<Kernel>& work,
                               int block, semaphore& full) {
        const Lengths& s = work.s;
        tma::expect(full, tile);
        from.load(tile, work.b, kv_head, s.k_begin, s.k_length, block * Kernel::block_n, full);
    };
    RingPosition<Kernel::stages> k_at, v_at;
    RingPosition<Kernel::q_slots> q_at;
    g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
        const ForwardWorkTile<Kernel> work(g, tile);
        if (!work.sees_keys()) return;
        const KeyBlocks& keys = work.keys;
        kv_head = work.head / g.group;
        const auto load_k = [&](int block) {
            wait(shared.k_empty[k_at.stage], k_at.phase ^ 1);
            load_keys(shared.k[k_at.stage], g.k, work, block, shared.k_full[k_at.stage]);
            k_at.advance();
        };
        const auto load_v = [&](int block) {
            wait(shared.v_empty[v_at.stage], v_at.phase ^ 1);
            load_keys(shared.v[v_at.stage], g.v, work, block, shared.v_full[v_at.stage]);
            v_at.advance();
        };
#pragma unroll
        for (int w = 0; w < Kernel::warpgroups; ++w) {
            auto& tile = shared.query(q_at.stage, w);
            auto& full = shared.q_full[q_at.stage][w];
            wait(shared.q_empty[q_at.stage][w], q_at.phase ^ 1);
            tma::expect(full, tile);
            g.q.load(tile, work.b, work.head, work.s.q_begin, work.s.q_length, work.row + 64 * w,
                     full);
            if (w == 0) load_k(keys.end - 1);
        }
        q_at.advance();
        for (int block = keys.end - 2; block >= keys.begin; --block) {
            load_k(block);
            load_v(block + 1);
        }
        load_v(keys.begin);
    });
}

// Of paged keys: whole warps, of which half load queries and keys and half load values where there
// are several, so that a slot of one ring need not wait for one of the other. The pieces of a tile
// go round the warps of a side. Each lane looks a piece up, one tile ahead, and knows where it is
// before its slot is free; then one lane issues the warp's transfers one after the other.
template <class Kernel, bool KEYS, bool VALUES>
struct PagedProducer {
    static constexpr int warps = KEYS && VALUES ? 1 : Kernel::producer_warps / 2;

    // Tiles of keys, or of values.
    template <class Tile>
    struct Side {
        Tile* tiles;
        semaphore *full, *empty;
        const Layout<Tile>& from;
        int page_rows;
        PageTable::Page next;  // of this lane's piece of the next tile
        RingPosition<Kernel::stages> at;
    };

    const ForwardGlobals<Kernel>& g;
    ForwardShared<Kernel>& shared;
    const int warp;  // of a side
    const int step = warps * g.pages.piece;
    const int first_row = warp * g.pages.piece;  // of this warp, in a tile
    const int row = first_row + laneid() * step;
    Side<typename Kernel::k_tile> k{
        shared.k, shared.k_full, shared.k_empty, g.k, g.pages.k_page_rows, {}, {}};
    Side<typename Kernel::v_tile> v{
        shared.v, shared.v_full, shared.v_empty, g.v, g.pages.v_page_rows, {}, {}};
    RingPosition<Kernel::q_slots> q_at;

    template <class Tile>
    __device__ __forceinline__ void look_up(Side<Tile>& side, const ForwardWorkTile<Kernel>& work,
                                            int block) const {
        if (row < Kernel::block_n)
            side.next = g.pages.page_of(work.b, block * Kernel::block_n + row, work.s.k_length);
    }
    template <class Tile>
    __device__ __forceinline__ void load(Side<Tile>& side, const ForwardWorkTile<Kernel>& work,
                                         int kv_head, int block) {
        const ragged_coord own = g.pages.place(side.next, kv_head, block * Kernel::block_n + row,
                                               work.s.k_length, side.page_rows);
        look_up(side, work, block - 1);
        const auto place_of = [&](int lane) -> ragged_coord {
            return {.head = kv_head,
                    .begin = arch::shuffle(own.begin, lane),
                    .length = arch::shuffle(own.length, lane),
                    .row = arch::shuffle(own.row, lane)};
        };
        ragged_coord place = place_of(0);
        Tile& tile = side.tiles[side.at.stage];
        semaphore& full = side.full[side.at.stage];
        wait(side.empty[side.at.stage], side.at.phase ^ 1);
        if (warp == 0 && arch::elect_one()) tma::expect(full, tile);
        int lane = 0;
#pragma unroll 1
        for (int at = first_row; at < Kernel::block_n; at += step) {
            const ragged_coord here = place;
            place = place_of(++lane);
            if (arch::elect_one()) tma::load_piece_async(tile, at, side.from.ragged, here, full);
        }
        side.at.advance();
    }
    __device__ __forceinline__ void load_query(const ForwardWorkTile<Kernel>& work, int w) {
        auto& tile = shared.query(q_at.stage, w);
        auto& full = shared.q_full[q_at.stage][w];
        wait(shared.q_empty[q_at.stage][w], q_at.phase ^ 1);
        if (arch::elect_one()) {
            tma::expect(full, tile);
            g.q.load(tile, work.b, work.head, work.s.q_begin, work.s.q_length, work.row + 64 * w,
                     full);
        }
    }

    __device__ __forceinline__ void run() {
        if (first_row >= Kernel::block_n) return;
        g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
            const ForwardWorkTile<Kernel> work(g, tile);
            if (!work.sees_keys()) return;
            const KeyBlocks& keys = work.keys;
            const int kv_head = work.head / g.group;
            if constexpr (KEYS) {
                look_up(k, work, keys.end - 1);
                if constexpr (VALUES) v.next = k.next;
                if (warp == 0) load_query(work, 0);
                load(k, work, kv_head, keys.end - 1);
                for (int w = 1; w < Kernel::warpgroups; ++w)
                    if (warp == 0) load_query(work, w);
                q_at.advance();
            } else {
                look_up(v, work, keys.end - 1);
            }
            int block = keys.end - 1;
            for (; block > keys.begin; --block) {
                if constexpr (KEYS) load(k, work, kv_head, block - 1);
                if constexpr (VALUES) load(v, work, kv_head, block);
            }
            if constexpr (VALUES) load(v, work, kv_head, block);
        });
    }
};

template <class Kernel>
__device__ __forceinline__ void produce_pages(const ForwardGlobals<Kernel>& g,
                                              ForwardShared<Kernel>& shared) {
    if constexpr (Kernel::producer_warps == 1) {
        PagedProducer<Kernel, true, true>{g, shared, 0}.run();
    } else {
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp % 2 == 0)
            PagedProducer<Kernel, true, false>{g, shared, warp / 2}.run();
        else
            PagedProducer<Kernel, false, true>{g, shared, warp / 2}.run();
    }
}

}  // namespace thunderkittens::attention
