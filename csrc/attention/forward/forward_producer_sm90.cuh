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
// go round the warps of a side. The lanes of a warp look up 32 pieces at a time, those of several
// tiles, while the 32 before are loaded; one lane issues the transfers. The instructions that a
// warp takes for a tile count: its scheduler issues none for the consumers meanwhile, and a slot
// that is free waits for them.
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
        PageTable::Page own, next;  // of this lane's piece, now and in the next group
        int lane;                   // that has the next piece
        RingPosition<Kernel::stages> at;
    };

    const ForwardGlobals<Kernel>& g;
    ForwardShared<Kernel>& shared;
    const int warp;  // of a side
    const int step = warps * g.pages.piece;
    const int first_row = warp * g.pages.piece;  // of this warp, in a tile
    // Of a tile, and of the group of tiles whose pieces the lanes have.
    const int tile_pieces = (Kernel::block_n - first_row + step - 1) / step;
    const int group = WARP_THREADS / tile_pieces;
    // From the first key of the group's first tile to that of this lane's piece.
    const int offset =
        first_row + laneid() % tile_pieces * step - laneid() / tile_pieces * Kernel::block_n;
    PageTable::Row pages;  // of a work tile's sequence
    Side<typename Kernel::k_tile> k{
        shared.k, shared.k_full, shared.k_empty, g.k, g.pages.k_page_rows, {}, {}, 0, {}};
    Side<typename Kernel::v_tile> v{
        shared.v, shared.v_full, shared.v_empty, g.v, g.pages.v_page_rows, {}, {}, 0, {}};
    RingPosition<Kernel::q_slots> q_at;

    // Of the group whose first tile is `block`.
    template <class Tile>
    __device__ __forceinline__ void look_up(Side<Tile>& side, const ForwardWorkTile<Kernel>& work,
                                            int block) const {
        side.next = g.pages.page_of(pages, block * Kernel::block_n + offset, work.s.k_length);
    }
    template <class Tile>
    __device__ __forceinline__ void begin(Side<Tile>& side, const ForwardWorkTile<Kernel>& work,
                                          int block) const {
        look_up(side, work, block);
        side.lane = group * tile_pieces;
    }
    template <class Tile>
    __device__ __forceinline__ void load(Side<Tile>& side, const ForwardWorkTile<Kernel>& work,
                                         int kv_head, int block) {
        if (side.lane == group * tile_pieces) {
            side.own = side.next;
            look_up(side, work, block - group);
            side.lane = 0;
        }
        const auto place_of = [&](int lane, int at) -> ragged_coord {
            return g.pages.place(
                {arch::shuffle(side.own.page, lane), arch::shuffle(side.own.first, lane)}, kv_head,
                block * Kernel::block_n + at, work.s.k_length, side.page_rows);
        };
        ragged_coord place = place_of(side.lane, first_row);
        Tile& tile = side.tiles[side.at.stage];
        semaphore& full = side.full[side.at.stage];
        wait(side.empty[side.at.stage], side.at.phase ^ 1);
        if (warp == 0 && arch::elect_one()) tma::expect(full, tile);
#pragma unroll 1
        for (int at = first_row; at < Kernel::block_n; at += step) {
            if (arch::elect_one()) tma::load_piece_async(tile, at, side.from.ragged, place, full);
            ++side.lane;
            if (at + step < Kernel::block_n) place = place_of(side.lane, at + step);
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
        g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
            const ForwardWorkTile<Kernel> work(g, tile);
            if (!work.sees_keys()) return;
            const KeyBlocks& keys = work.keys;
            const int kv_head = work.head / g.group;
            pages = g.pages.row_of(work.b);
            int block = keys.end - 1;
            if constexpr (KEYS) begin(k, work, block);
            if constexpr (VALUES) begin(v, work, block);
            if constexpr (KEYS) {
                if (warp == 0) load_query(work, 0);
                load(k, work, kv_head, block);
                for (int w = 1; w < Kernel::warpgroups; ++w)
                    if (warp == 0) load_query(work, w);
                q_at.advance();
            }
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
        if (warp / 2 * g.pages.piece >= Kernel::block_n) return;
        if (warp % 2 == 0)
            PagedProducer<Kernel, true, false>{g, shared, warp / 2}.run();
        else
            PagedProducer<Kernel, false, true>{g, shared, warp / 2}.run();
    }
}

}  // namespace thunderkittens::attention
