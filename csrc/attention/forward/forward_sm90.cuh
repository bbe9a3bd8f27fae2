// Attention forward for Hopper: out = softmax(scale * q k^T) v, one pass over the keys with a
// running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", 2022).
//
// A block works on 64 query rows per consumer warpgroup and walks the keys from the last visible
// block to the first. Roles:
//   producer   one thread of the last warpgroup: TMA loads of Q (a slot or two per consumer), and
//              of K and V into two rings
//   consumers  1 to 3 warpgroups: S = Q K^T (operands in shared memory), softmax in registers,
//              O += P V with P in registers. The product S of the next key block is issued before
//              O += P V of the current one, so that the softmax of S runs while the tensor cores
//              work on P V; the consumers take turns in issuing ("ping-pong"), so that the softmax
//              of one runs under the products of the others.
// A query sees a band of keys. Blocks that the band's edges cut are masked, from the last key down
// those of the upper edge, then whole ones, then those of the lower edge; blocks outside are never
// visited. The grid is persistent, with a static schedule: work tiles in
// longest-processing-time-first order, dealt back and forth over the blocks, which evens out their
// totals without a counter.
#pragma once

#include "csrc/attention/forward/forward_producer_sm90.cuh"

namespace thunderkittens::attention {

template <class Kernel>
struct Consumer {
    using T = typename Kernel::T;
    static constexpr int warpgroups = Kernel::warpgroups;
    using scores = rt_fl<16, Kernel::block_n>;
    using weights = rt<T, 16, Kernel::block_n>;
    using output = rt_fl<16, Kernel::value_dim>;

    const ForwardGlobals<Kernel>& g;
    ForwardShared<Kernel>& shared;
    const int id;  // of this consumer
    RingPosition<Kernel::stages> k_at, v_at;
    RingPosition<Kernel::q_slots> q_at;

    // What a step needs to know of the work tile it belongs to.
    struct Rows {
        const Lengths& s;
        int begin;                         // the last block
        int unmasked_begin, unmasked_end;  // blocks outside need a mask
        int row;                           // of this thread: its upper one
        float slope;                       // of ALiBi

        __device__ __forceinline__ Int2 columns(int offset, int block) const {
            const int column = block * Kernel::block_n + 2 * (laneid() % 4);
            return {row + offset - column, row + 8 + offset - column};
        }
    };

    // Named barriers: 1.. one per consumer for its turn to issue products, then one for its own
    // threads.
    __device__ __forceinline__ void await_turn() {
        if constexpr (warpgroups > 1) arch::named_barrier_sync(1 + id, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void pass_turn() {
        if constexpr (warpgroups > 1)
            arch::named_barrier_arrive(1 + (id + 1) % warpgroups, 2 * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void sync_own() { warpgroup::sync(1 + warpgroups + id); }
    __device__ __forceinline__ void release(semaphore& s) {
        if (warpgroup::laneid() == 0) arrive(s);
    }

    // After the work tile's last scores, so that another Q arrives under the softmax.
    __device__ __forceinline__ void release_query() {
        if constexpr (Kernel::separate_out) release(shared.q_empty[q_at.stage][id]);
    }

    __device__ __forceinline__ void issue_scores(scores& s) {
        wait(shared.k_full[k_at.stage], k_at.phase);
        warpgroup::mm_ABt(s, shared.query(q_at.stage, id), shared.k[k_at.stage]);
    }
    __device__ __forceinline__ void release_k() {
        release(shared.k_empty[k_at.stage]);
        k_at.advance();
    }
    __device__ __forceinline__ void issue_output(output& o, const weights& p) {
        wait(shared.v_full[v_at.stage], v_at.phase);
        warpgroup::mma_AB(o, p, shared.v[v_at.stage]);
    }
    __device__ __forceinline__ void release_v() {
        release(shared.v_empty[v_at.stage]);
        v_at.advance();
    }

    // MASKED: this block of keys may need a mask.
    template <bool MASKED>
    __device__ __forceinline__ Shift modify_and_mask(scores& s, const Rows& rows, int block) const {
        Shift shift;
        if constexpr (Kernel::score_mod) {
            shift = g.score_mod.template apply<T>(s, rows.columns(rows.s.diagonal, block),
                                                  {rows.slope, rows.slope});
        } else if constexpr (Kernel::softcap_only) {
            g.score_mod.template cap<T>(s);
        }
        if (MASKED && (block >= rows.unmasked_end || block < rows.unmasked_begin)) {
            const Int2 last = rows.columns(rows.s.high, block);
            const int end = rows.s.k_length - 1 - block * Kernel::block_n - 2 * (laneid() % 4);
            mask_outside(s, rows.columns(rows.s.low, block),
                         {::min(last.x, end), ::min(last.y, end)});
        }
        return shift;
    }

    // Scores to weights; returns whether what has been accumulated must be multiplied by `rescale`.
    template <bool MASKED>
    __device__ __forceinline__ bool weigh(scores& s, OnlineSoftmax& softmax, const Rows& rows,
                                          int block, float2& rescale) const {
        if constexpr (Kernel::polynomial_softcap && !MASKED) {
            if (g.softcap_polynomial.update(s, softmax)) return false;
        }
        const Shift shift = modify_and_mask<MASKED>(s, rows, block);
        return softmax.update(s, g.score_mod.unit_log2, shift, rescale);
    }

    // The product with the weights of the block before, which may be overwritten from here on.
    __device__ __forceinline__ void await_output(output& o, scores& s) {
        warpgroup::mma_async_wait<0>(o);
        pin(s);
        release_v();
    }

    // An unmasked block of a kernel with softcap alone. Its first weights are computed while the
    // product before may still read its operand, and packed between the exponentials of the others.
    // The wait lies on the path of all warps, without which the compiler serialises the products.
    __device__ __forceinline__ void weigh_and_pack(output& o, weights& p, scores& s,
                                                   OnlineSoftmax& softmax, const Rows& rows,
                                                   int block) {
        constexpr int first = scores::width * 3 / 8;
        const auto& cap = g.softcap_polynomial;
        const auto bound = cap.bound_of(s, softmax);
        const auto polynomial = cap.fit(bound.largest);
        if (bound.short_form) cap.template add_weights<0, first>(s, softmax, polynomial);
        await_output(o, s);
        if (bound.short_form) {
            cap.template add_weights<first, scores::width>(s, softmax, polynomial);
            convert_scores(p, s);
            return;
        }
        float2 rescale = {1.0f, 1.0f};
        bool grown = false;
        if (!cap.update_by_long_form(s, softmax, bound)) {
            const Shift shift = modify_and_mask<false>(s, rows, block);
            grown = softmax.update(s, g.score_mod.unit_log2, shift, rescale);
        }
        convert_scores(p, s);
        if (grown) scale_rows(o, rescale);
    }

    // A block of keys that only later rows see, those of the next consumers.
    __device__ __forceinline__ void skip_block() {
        wait(shared.k_full[k_at.stage], k_at.phase);
        release_k();
        wait(shared.v_full[v_at.stage], v_at.phase);
        release_v();
    }

    // The work tile's first block of keys; it takes a turn if it is not that of the other
    // consumers.
    __device__ __forceinline__ void first_step(weights& p, OnlineSoftmax& softmax, const Rows& rows,
                                               int block, bool takes_turn) {
        scores s;
        if (takes_turn) await_turn();
        issue_scores(s);
        if (takes_turn) pass_turn();
        warpgroup::mma_async_wait<0>(s);
        release_k();
        if (block == rows.begin) release_query();
        const Shift shift = modify_and_mask<true>(s, rows, block);
        softmax.start(s, g.score_mod.unit_log2, shift);
        convert_scores(p, s);
    }

    // One key block: its scores, and the output of the block before it.
    template <bool MASKED>
    __device__ __forceinline__ void step(output& o, weights& p, OnlineSoftmax& softmax,
                                         const Rows& rows, int block) {
        scores s;
        await_turn();
        issue_scores(s);
        issue_output(o, p);
        pass_turn();
        warpgroup::mma_async_wait<1>(s);
        release_k();
        if (block == rows.begin) release_query();
        if constexpr (Kernel::softcap_only && !MASKED) {
            weigh_and_pack(o, p, s, softmax, rows, block);
        } else {
            float2 rescale = {1.0f, 1.0f};
            const bool grown = weigh<MASKED>(s, softmax, rows, block, rescale);
            await_output(o, s);
            convert_scores(p, s);
            if (grown) scale_rows(o, rescale);
        }
    }

    __device__ __forceinline__ void store(output& o, const ForwardWorkTile<Kernel>& work,
                                          int first_row) {
        using part_tile = rt_fl<16, Kernel::out_tile::cols>;
        auto& tile = shared.output(id);
#pragma unroll
        for (int part = 0; part < Kernel::out_parts; ++part) {
            if constexpr (Kernel::separate_out) {
                // The previous store from this memory must have read it.
                if (warpgroup::laneid() == 0) tma::store_async_read_wait();
                sync_own();
            }
            warpgroup::store(tile,
                             reinterpret_cast<part_tile&>(o.tiles[0][part * part_tile::width]));
            arch::fence_async_shared();
            sync_own();
            if (warpgroup::laneid() == 0) {
                g.out.store(tile, work.b, work.head, work.s.q_begin, work.s.q_length, first_row,
                            part * part_tile::cols);
            }
        }
        if constexpr (!Kernel::separate_out) {
            if (warpgroup::laneid() == 0) {
                tma::store_async_read_wait();
                arrive(shared.q_empty[q_at.stage][id]);
            }
        }
    }
    // Rows that see no key. Q's slot may already be filling for the next work tile, so the zeros do
    // not pass through shared memory.
    __device__ __forceinline__ void store_zeros(const ForwardWorkTile<Kernel>& work,
                                                int first_row) const {
        constexpr int per_store = 16 / int(sizeof(T));
        const int row_stores = g.out.columns() / per_store;
        const int rows = ::min(64, work.s.q_length - first_row);
        for (int i = warpgroup::laneid(); i < rows * row_stores; i += WARPGROUP_THREADS) {
            T* at = g.out.at(work.b, work.head, work.s.q_begin, first_row + i / row_stores,
                             i % row_stores * per_store);
            arch::store_global(reinterpret_cast<uint4*>(at), make_uint4(0, 0, 0, 0));
        }
    }
    __device__ __forceinline__ void store_lse(float2 lse, const ForwardWorkTile<Kernel>& work,
                                              int row) const {
        if (g.lse == nullptr || laneid() % 4 != 0) return;
        const bool packed = g.out.packed;
        const int64_t line = packed ? work.head : int64_t(work.b) * g.scheduler.heads + work.head;
        float* rows = g.lse + line * g.sequences.q_length + work.s.q_begin;
        if (row < work.s.q_length) arch::store_global(rows + row, lse.x);
        if (row + 8 < work.s.q_length) arch::store_global(rows + row + 8, lse.y);
    }
    __device__ __forceinline__ float2 sink(int head) const {
        const float logit = arch::load_global_readonly(g.sink + head) * LOG2_E;
        return {logit, logit};
    }

    __device__ __forceinline__ void attend(const ForwardWorkTile<Kernel>& work) {
        const int first_row = work.row + 64 * id;
        const int row = first_row + warpgroup::warpid() * 16 + laneid() / 4;
        const KeyBlocks& keys = work.keys;
        Rows rows{work.s, keys.begin, keys.unmasked_begin, keys.unmasked_end, row, 0.0f};
        if constexpr (Kernel::score_mod) rows.slope = g.score_mod.slope(work.b, work.head);
        OnlineSoftmax softmax;
        output o;
        weights p;
        zero_tile(o);
        int block = keys.end - 1;
        wait(shared.q_full[q_at.stage][id], q_at.phase);
        bool skips = false;
        if constexpr (warpgroups == 3 || Kernel::block_n <= 64) {
            const int own_end = ::min(work.s.k_length, first_row + 64 + work.s.high);
            skips = block > keys.begin && block * Kernel::block_n >= own_end;
            if (skips) skip_block(), --block;
        }
        first_step(p, softmax, rows, block, skips);
#pragma unroll 1
        for (--block; block >= keys.begin; --block) {
            for (; block >= keys.unmasked_begin && block < keys.unmasked_end; --block)
                step<false>(o, p, softmax, rows, block);
            if (block < keys.begin) break;
            step<true>(o, p, softmax, rows, block);
        }
        issue_output(o, p);
        softmax.reduce_sum();
        float2 factor = {1.0f, 1.0f};
        if (g.sink != nullptr) factor = softmax.add_sink(sink(work.head));
        const float2 reciprocal = softmax.reciprocal_sum();
        factor = {factor.x * reciprocal.x, factor.y * reciprocal.y};
        warpgroup::mma_async_wait<0>(o);
        release_v();
        scale_rows(o, factor);
        store(o, work, first_row);
        q_at.advance();
        store_lse(softmax.lse(), work, row);
    }
    // Work tiles without keys, and those that exist only because other sequences are longer.
    __device__ __forceinline__ void attend_nothing(const ForwardWorkTile<Kernel>& work) {
        if (work.row < 0) return;
        OnlineSoftmax softmax;
        if (g.sink != nullptr) softmax.add_sink(sink(work.head));
        const int first_row = work.row + 64 * id;
        store_zeros(work, first_row);
        store_lse(softmax.lse(), work, first_row + warpgroup::warpid() * 16 + laneid() / 4);
    }
    // Rows behind the last packed sequence.
    __device__ __forceinline__ void attend_rest() const {
        const int heads = g.scheduler.heads, step = static_cast<int>(gridDim.x) * warpgroups;
        ForwardWorkTile<Kernel> work(g, {0, 0, g.sequences.batch});
        const int64_t row_tiles = int64_t(heads) * ((work.s.q_length + 63) / 64);
        for (int64_t i = int64_t(blockIdx.x) * warpgroups + id; i < row_tiles; i += step) {
            work.head = static_cast<int>(i % heads);
            const int first_row = 64 * static_cast<int>(i / heads);
            store_zeros(work, first_row);
            store_lse({-INFINITY, -INFINITY}, work,
                      first_row + warpgroup::warpid() * 16 + laneid() / 4);
        }
    }

    __device__ __forceinline__ void run() {
        if (id == warpgroups - 1) pass_turn();
        g.scheduler.for_each_work_tile([&](TileScheduler::WorkTile tile) {
            const ForwardWorkTile<Kernel> work(g, tile);
            if (work.sees_keys())
                attend(work);
            else
                attend_nothing(work);
        });
        if (g.out.packed) attend_rest();
        // The turn that the last consumer passed on is still open; close it.
        if (id == 0) await_turn();
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    }
};

// Early, so that the first transfers need not wait for the map.
template <class Tile>
__device__ __forceinline__ void prefetch_map(const Layout<Tile>& layout) {
    if (layout.packed)
        tma::prefetch_map<Tile>(layout.ragged);
    else
        tma::prefetch_map<Tile>(layout.dense);
}

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, Kernel::blocks_per_sm) void forward_kernel(
    const __grid_constant__ ForwardGlobals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<ForwardShared<Kernel>>();
    if (threadIdx.x == 0) {
        prefetch_map(g.q);
        prefetch_map(g.k);
        prefetch_map(g.v);
        prefetch_map(g.out);
        for (int w = 0; w < Kernel::warpgroups; ++w) {
            for (int slot = 0; slot < Kernel::q_slots; ++slot) {
                init_semaphore(shared.q_full[slot][w], 1);
                init_semaphore(shared.q_empty[slot][w], 1);
            }
        }
        for (int s = 0; s < Kernel::stages; ++s) {
            init_semaphore(shared.k_full[s], 1);
            init_semaphore(shared.k_empty[s], Kernel::warpgroups);
            init_semaphore(shared.v_full[s], 1);
            init_semaphore(shared.v_empty[s], Kernel::warpgroups);
        }
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    // In a stream of calls this kernel starts under the end of what is before it.
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == Kernel::warpgroups) {
        if constexpr (Kernel::moves_registers)
            warpgroup::decrease_registers<Kernel::producer_registers>();
        if (g.pages.piece > 0) {
            produce_pages(g, shared);
        } else if (warpgroup::elect_leader()) {
            produce(g, shared);
        }
    } else {
        if constexpr (Kernel::moves_registers)
            warpgroup::increase_registers<Kernel::consumer_registers>();
        Consumer<Kernel>{g, shared, role}.run();
    }
}

template <Config config>
void launch_forward(const ForwardParams& params, Stream stream) {
    using Kernel = ForwardKernel<config>;
    static_assert(sizeof(ForwardShared<Kernel>) + 1024 <= Kernel::shared_bytes,
                  "forward_memory() must count all of the block's shared memory");
    const Problem& p = params.problem;
    const Sequences& s = params.sequences;
    const int64_t q_rows = p.varlen ? s.total_q : p.q_length;
    const int64_t k_rows = p.varlen ? s.total_k : p.k_length;
    const PagedKeys& pages = params.pages;
    const auto keys_of = [&]<class Tile>(const Operand& x, int64_t columns, int64_t page_rows) {
        if (pages.k_lengths == nullptr)
            return Layout<Tile>(x, p.varlen, p.batch, p.kv_heads, k_rows, columns);
        return Layout<Tile>(x, p.kv_heads, (pages.pages - 1) * page_rows + pages.page_size, columns,
                            int(piece_rows(pages, Kernel::block_n)));
    };
    const ForwardGlobals<Kernel> globals {
        .q = {params.q, p.varlen, p.batch, p.q_heads, q_rows, p.head_dim},
        .k = keys_of.template operator()<typename Kernel::k_tile>(params.k, p.head_dim,
                                                                  pages.k_page_rows),
        .v = keys_of.template operator()<typename Kernel::v_tile>(params.v, p.value_dim,
                                                                  pages.v_page_rows),
        .out = {params.out, p.varlen, p.batch, p.q_heads, q_rows, p.value_dim},
        .lse = params.lse,
        .sink = params.scores.sink,
        .scheduler = ForwardScheduler(
            {.blocks = std::max(1, int((p.q_length + Kernel::block_m - 1) / Kernel::block_m)),
             .heads = int(p.q_heads),
             .batch = int(p.batch),
             .section_heads = params.section_heads}),
        .sequences = {p, s, pages},
        .pages = {pages, Kernel::block_n},
        .score_mod = ScoreMod(params.scores),
        .softcap_polynomial = SoftcapPolynomial<typename Kernel::T>(params.scores),
        .group = int(p.q_heads / p.kv_heads)
    };
    const auto blocks = unsigned(
        std::clamp(globals.scheduler.work_tiles(), 1, Kernel::blocks_per_sm * params.sm_count));
    kittens::launch({.dependent = true}, forward_kernel<Kernel>, dim3(blocks),
                    dim3(Kernel::threads), dim3(1), Kernel::shared_bytes, stream, globals);
}

}  // namespace thunderkittens::attention
