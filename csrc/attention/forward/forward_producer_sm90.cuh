// The producer of attention forward: TMA loads of queries, keys and values.
#pragma once

#include "csrc/attention/forward/forward_types_sm90.cuh"

namespace thunderkittens::attention {

// By one thread; of paged keys by all warps that there are, whose lanes look up and load a piece of
// a tile each: a warp issues the transfers of its lanes one after the other. A look-up waits for
// memory, so it is made one block of keys ahead, for keys and values.
template <bool PAGED, class Kernel>
__device__ __forceinline__ void produce(const ForwardGlobals<Kernel>& g,
                                        ForwardShared<Kernel>& shared) {
    const bool leads = !PAGED || warpgroup::laneid() == 0;
    // Of the thread's piece, in a tile.
    const int piece_row = (laneid() * Kernel::producer_warps + warpgroup::warpid()) * g.pages.piece;
    int kv_head = 0;
    const auto load_keys = [&](auto& tile, const auto& from, const ForwardWorkTile<Kernel>& work,
                               int block, const PageTable::Page& page, int page_rows,
                               semaphore& full) {
        const int first = block * Kernel::block_n;
        const Lengths& s = work.s;
        if (leads) tma::expect(full, tile);
        if constexpr (PAGED) {
            arch::sync_warp();
            if (piece_row < Kernel::block_n) {
                const int key = first + piece_row;
                tma::load_piece_async(tile, piece_row, from.ragged,
                                      g.pages.place(page, kv_head, key, s.k_length, page_rows),
                                      full);
            }
        } else {
            from.load(tile, work.b, kv_head, s.k_begin, s.k_length, first, full);
        }
    };
    RingPosition<Kernel::stages> k_at, v_at;
    RingPosition<Kernel::q_slots> q_at;
    g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
        const ForwardWorkTile<Kernel> work(g, tile);
        if (!work.sees_keys()) return;
        const KeyBlocks& keys = work.keys;
        kv_head = work.head / g.group;
        const auto look_up = [&](int block) -> PageTable::Page {
            if constexpr (!PAGED) return {};
            if (piece_row >= Kernel::block_n) return {};
            return g.pages.page_of(work.b, block * Kernel::block_n + piece_row, work.s.k_length);
        };
        PageTable::Page k_page = look_up(keys.end - 1), v_page = k_page;
        PageTable::Page next_page = look_up(keys.end - 2);
        const auto load_k = [&](int block) {
            wait(shared.k_empty[k_at.stage], k_at.phase ^ 1);
            load_keys(shared.k[k_at.stage], g.k, work, block, k_page, g.pages.k_page_rows,
                      shared.k_full[k_at.stage]);
            k_at.advance();
        };
        const auto load_v = [&](int block) {
            wait(shared.v_empty[v_at.stage], v_at.phase ^ 1);
            load_keys(shared.v[v_at.stage], g.v, work, block, v_page, g.pages.v_page_rows,
                      shared.v_full[v_at.stage]);
            v_at.advance();
        };
#pragma unroll
        for (int w = 0; w < Kernel::warpgroups; ++w) {
            auto& tile = shared.query(q_at.stage, w);
            auto& full = shared.q_full[q_at.stage][w];
            wait(shared.q_empty[q_at.stage][w], q_at.phase ^ 1);
            if (leads) {
                tma::expect(full, tile);
                g.q.load(tile, work.b, work.head, work.s.q_begin, work.s.q_length,
                         work.row + 64 * w, full);
            }
            if (w == 0) load_k(keys.end - 1);
        }
        q_at.advance();
        for (int block = keys.end - 2; block >= keys.begin; --block) {
            k_page = next_page;
            next_page = look_up(block - 1);
            load_k(block);
            load_v(block + 1);
            v_page = k_page;
        }
        load_v(keys.begin);
    });
}

}  // namespace thunderkittens::attention
