// The producer of attention forward: TMA loads of queries, keys and values.
#pragma once

#include "csrc/attention/forward_types_sm90.cuh"

namespace thunderkittens::attention {

// By one thread; of paged keys by all warps that there are. A lane has a piece of the tiles, which it
// looks up and loads: a warp issues the transfers of its lanes one after the other. A look-up waits
// for memory, so it is made one block of keys ahead. The pieces of keys go round the warps from
// the first on, those of values from the third, so that few pieces do not wait for each other.
template <bool PAGED, class Kernel>
struct Producer {
    const ForwardGlobals<Kernel>& g;
    ForwardShared<Kernel>& shared;
    RingPosition<Kernel::stages> k_at{}, v_at{};
    RingPosition<Kernel::q_slots> q_at{};
    int kv_head = 0;

    // Tiles of keys, or of values.
    struct Side {
        int row;  // of the thread's piece
        int page_rows;
        PageTable::Page next{};  // where that is in the next tile

        // Whether any lane of the warp has a piece.
        __device__ __forceinline__ bool has_piece(const PageTable& pages) const {
            return row - laneid() * Kernel::producer_warps * pages.piece < Kernel::block_n;
        }
    };
    Side k = side(0, g.pages.k_page_rows);
    Side v = side(Kernel::producer_warps / 2, g.pages.v_page_rows);

    __device__ __forceinline__ void run() {
        g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
            const ForwardWorkTile<Kernel> work(g, tile);
            if (!work.sees_keys()) return;
            const KeyBlocks& keys = work.keys;
            kv_head = work.head / g.group;
            look_up(k, work, keys.end - 1);
            look_up(v, work, keys.end - 1);
#pragma unroll
            for (int w = 0; w < Kernel::warpgroups; ++w) {
                if (!PAGED || warpgroup::warpid() == 0) load_query(work, w);
                if (w == 0) load_k(work, keys.end - 1);
            }
            q_at.advance();
            for (int block = keys.end - 2; block >= keys.begin; --block) {
                load_k(work, block);
                load_v(work, block + 1);
            }
            load_v(work, keys.begin);
        });
    }

  private:
    __device__ __forceinline__ Side side(int turn, int page_rows) const {
        if constexpr (!PAGED) return {};
        const int warp = (warpgroup::warpid() + turn) % Kernel::producer_warps;
        return {(laneid() * Kernel::producer_warps + warp) * g.pages.piece, page_rows};
    }
    __device__ __forceinline__ void look_up(Side& side, const ForwardWorkTile<Kernel>& work,
                                            int block) const {
        if constexpr (PAGED) {
            if (side.row >= Kernel::block_n) return;
            side.next =
                g.pages.page_of(work.b, block * Kernel::block_n + side.row, work.s.k_length);
        }
    }
    __device__ __forceinline__ void load_query(const ForwardWorkTile<Kernel>& work, int w) {
        auto& tile = shared.query(q_at.stage, w);
        auto& full = shared.q_full[q_at.stage][w];
        wait(shared.q_empty[q_at.stage][w], q_at.phase ^ 1);
        if (PAGED && laneid() != 0) return;
        tma::expect(full, tile);
        g.q.load(tile, work.b, work.head, work.s.q_begin, work.s.q_length, work.row + 64 * w, full);
    }
    __device__ __forceinline__ void load_k(const ForwardWorkTile<Kernel>& work, int block) {
        load(shared.k, g.k, k, work, block, k_at, shared.k_empty, shared.k_full);
    }
    __device__ __forceinline__ void load_v(const ForwardWorkTile<Kernel>& work, int block) {
        load(shared.v, g.v, v, work, block, v_at, shared.v_empty, shared.v_full);
    }
    template <class Tiles, class From, class Position>
    __device__ __forceinline__ void load(Tiles& tiles, const From& from, Side& side,
                                         const ForwardWorkTile<Kernel>& work, int block,
                                         Position& at, semaphore (&empty)[Kernel::stages],
                                         semaphore (&full)[Kernel::stages]) {
        const int first = block * Kernel::block_n;
        const Lengths& s = work.s;
        auto& tile = tiles[at.stage];
        if constexpr (PAGED) {
            if (side.has_piece(g.pages)) {
                const ragged_coord place =
                    g.pages.place(side.next, kv_head, first + side.row, s.k_length, side.page_rows);
                look_up(side, work, block - 1);
                wait(empty[at.stage], at.phase ^ 1);
                if (side.row == 0) tma::expect(full[at.stage], tile);
                if (side.row < Kernel::block_n) {
                    tma::load_piece_async(tile, side.row, from.ragged, place, full[at.stage]);
                }
            }
        } else {
            wait(empty[at.stage], at.phase ^ 1);
            tma::expect(full[at.stage], tile);
            from.load(tile, work.b, kv_head, s.k_begin, s.k_length, first, full[at.stage]);
        }
        at.advance();
    }
};

}  // namespace thunderkittens::attention
