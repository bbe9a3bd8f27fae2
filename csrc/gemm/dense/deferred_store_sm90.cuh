// What happens to a finished tile on Hopper: scale and bias, rounding to the output's type, and the
// way to memory. What a fused epilogue does before is in fused_epilogue_sm90.cuh.
//
// Values of a 16-bit type are rounded at once and kept in registers, half the size of the
// accumulators; they leave in pieces of 128 bytes a row while the tensor cores already work on the
// next tile. On the way they pass through a warp's own staging buffer, so that no warp waits for
// another. fp32 values do not fit beside the next accumulators and leave before it starts. Rows
// that TMA cannot store (no multiple of 16 bytes) are copied by the warp.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/dense/types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// A warp's staging buffer holds 16 rows of 128 bytes of the output; these send it there, by TMA,
// and by the warp itself where TMA cannot store.
template <Config C, class Staging>
__device__ __forceinline__ void send_by_tma(const typename Types<C>::Globals& g,
                                            const Staging& staging, uint32_t batch, uint32_t row,
                                            uint32_t col) {
    arch::fence_async_shared();
    arch::sync_warp();
    if (laneid() == 0) {
        const auto& words = reinterpret_cast<const typename Types<C>::out_tile&>(staging);
        constexpr int words_each = int(sizeof(typename Staging::T)) / 2;
        tma::store_async(g.out_map, words,
                         elements(batch, 0, row, static_cast<int>(col * words_each)));
    }
}
template <Config C, class Staging>
__device__ __forceinline__ void send_by_warp(const typename Types<C>::Globals& g,
                                             const Staging& staging, uint32_t batch, uint32_t row,
                                             uint32_t col) {
    using O = typename Staging::T;
    arch::sync_warp();
    if (row >= g.m || col >= g.out_n) return;
    const uint32_t rows = g.m - row, cols = g.out_n - col;
    O* to = static_cast<O*>(g.out) + (batch * g.out_batch_stride + row * g.out_stride + col);
    if constexpr (sizeof(O) == 4) {
        copy_rows(staging, to, g.out_stride, rows, cols);
    } else if (g.pairs) {
        copy_rows(staging, reinterpret_cast<uint32_t*>(to), g.out_stride / 2, rows, cols / 2);
    } else {
        copy_rows(staging, reinterpret_cast<uint16_t*>(to), g.out_stride, rows, cols);
    }
}

// Where a warp's 16 rows of a tile are in z.
struct Place16 {
    uint32_t batch = 0, row = 0, col = 0;
};

// A warp's finished values of 16-bit type (bf16 stands for both), kept in registers while the next
// tile's products run, and sent piece by piece in their shadow.
template <Config C>
struct Finished {
    using K = Types<C>;
    using staging = typename K::out_tile;
    using Split = Pieces<C.block_n, staging::cols>;
    static constexpr int pieces = Split::count;

    rt_bf<16, C.block_n> values;
    Place16 at;
    bool any = false;
    using Narrow = typename K::Narrow;
    Narrow narrow = false;  // the tile, see common/raster.h

    // The last piece of a narrow tile begins earlier.
    static __device__ __forceinline__ int first_of(int piece, Narrow narrow) {
        if constexpr (C.varied) {
            return min(Split::first(piece), C.block_n - staging::cols - int(narrow));
        }
        return Split::first(piece) - (narrow && piece == pieces - 1 ? int(NARROWER) : 0);
    }
    // The same as a constant: calls use(first) where the piece is one of the tile's. `lack`: how
    // many columns of the piece the tile has not.
    template <int lack = 0, class Use>
    static __device__ __forceinline__ void with_first(int piece, Narrow narrow, Use use) {
        if constexpr (!C.varied) {
            if (narrow && piece == pieces - 1)
                use(first_of(piece, true));
            else
                use(Split::first(piece));
        } else if constexpr (lack < staging::cols) {
            const int all = lack + (pieces - 1 - piece) * staging::cols;
            if (lack == 0 ? int(narrow) <= all : K::has_lack(all) && int(narrow) == all)
                use(Split::first(piece) - lack);
            else if ((piece + 1) * staging::cols > narrowest(C))
                with_first<lack + int(NARROWER)>(piece, narrow, use);
        }
    }
    // Whether a piece is one of the tile's.
    static __device__ __forceinline__ bool has(int piece, Narrow narrow) {
        if constexpr (!C.varied) return true;
        return piece * staging::cols < narrowest(C) ||
               piece * staging::cols + int(narrow) < C.block_n;
    }
    // With a gate half of the columns are left.
    static __device__ __forceinline__ int sent(const typename K::Globals& g) {
        return C.fused && g.epilogue.gate != Gate::none ? pieces / 2 : pieces;
    }

    template <class O>
    __device__ __forceinline__ void pack(const rt_fl<16, C.block_n>& d) {
        round_to<O>(values, d);
    }
    // Keeps a tile that is sent later.
    template <class O>
    __device__ __forceinline__ void keep(const rt_fl<16, C.block_n>& d, const Place16 place,
                                         Narrow is_narrow) {
        pack<O>(d);
        at = place;
        narrow = is_narrow;
        any = true;
    }
    __device__ __forceinline__ void stage(int piece, staging& buffer) const {
        using Part = rt_bf<16, staging::cols>;
        with_first(piece, narrow, [&](int first) { stage_piece<Part>(values, first, buffer); });
    }
    // Before a warp writes the next of its two staging buffers: the last store from there is the
    // one before last, or the last where a tile has an odd number of pieces.
    static __device__ __forceinline__ void wait_for_buffer(const typename K::Globals& g,
                                                           int piece) {
        if (laneid() == 0) {
            if (C.varied ? piece > 0 : sent(g) % 2 == 0)
                tma::store_async_read_wait<1>();
            else
                tma::store_async_read_wait();
        }
        arch::sync_warp();
    }
    // Through the warp's two staging buffers in turn.
    __device__ __forceinline__ void send(const typename K::Globals& g, typename K::Shared& shared,
                                         int piece) const {
        if (!has(piece, narrow)) return;
        auto& buffer = shared.out[kittens::warpid()][piece % 2];
        wait_for_buffer(g, piece);
        stage(piece, buffer);
        send_by_tma<C>(g, buffer, at.batch, at.row, at.col + first_of(piece, narrow));
    }
    // At once, through the two staging buffers in turn.
    __device__ __forceinline__ void send_now(const typename K::Globals& g,
                                             typename K::Shared& shared) const {
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            if (piece >= sent(g) || !has(piece, narrow)) break;
            auto& buffer = shared.out[kittens::warpid()][piece % 2];
            wait_for_buffer(g, piece);
            stage(piece, buffer);
            const uint32_t to = at.col + first_of(piece, narrow);
            if (g.tma_store)
                send_by_tma<C>(g, buffer, at.batch, at.row, to);
            else
                send_by_warp<C>(g, buffer, at.batch, at.row, to);
        }
    }
    // By one lane, from a buffer whose contents TMA sees.
    static __device__ __forceinline__ void store_piece(const typename K::Globals& g,
                                                       const staging& buffer, const Place16 at,
                                                       int piece, Narrow narrow = false) {
        arch::tma_store(g.out_map.template tensor_map<staging>(), buffer.address(),
                        {static_cast<int>(at.col + first_of(piece, narrow)),
                         static_cast<int>(at.row), 0, static_cast<int>(at.batch)});
    }
    // All at once, each piece through a buffer of its own, buffer(i): one fence serves them, and
    // one lane sends them as one group.
    template <class Buffer>
    __device__ __forceinline__ void send_all(const typename K::Globals& g, Buffer buffer) const {
        const int count = sent(g);
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            if (piece < count) stage(piece, buffer(piece));
        }
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) {
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) {
                if (piece < count && has(piece, narrow))
                    store_piece(g, buffer(piece), at, piece, narrow);
            }
            tma::store_commit_group();
        }
        arch::sync_warp();
    }
    // Of a narrow tile: all at once, through the warp's staging buffers. Rows of whole pieces leave
    // by the warp itself, 16 bytes per lane, which is faster than a fence and TMA when nothing else
    // is to be done meanwhile; the rest by TMA. Nothing is read from the buffers afterwards.
    __device__ __forceinline__ void send_soon(const typename K::Globals& g,
                                              typename K::Shared& shared) const {
        static_assert(pieces <= 2);
        auto& buffers = shared.out[kittens::warpid()];
        const auto buffer = [&](int piece) -> staging& { return buffers[piece]; };
        arch::sync_warp();
        // The whole tile, not the warp's rows: a branch that is the same for a block.
        const uint32_t first_row = at.row - warpgroup::warpid() * 16;
        if (first_row + C.block_m <= g.m && at.col + C.block_n <= g.n) {
#pragma unroll
            for (int piece = 0; piece < pieces; ++piece) stage(piece, buffer(piece));
            arch::sync_warp();
            const int row = laneid() / 8, col = laneid() % 8 * 8;
            auto* to = static_cast<bf16*>(g.out) + (at.batch * g.out_batch_stride +
                                                    (at.row + row) * g.out_stride + at.col + col);
#pragma unroll
            for (int first = 0; first < 16; first += 4) {
#pragma unroll
                for (int piece = 0; piece < pieces; ++piece) {
                    arch::store_global(
                        reinterpret_cast<uint4*>(to + Split::first(piece)),
                        arch::load_shared<uint4>(buffer(piece).address_of(first + row, col)));
                }
                to += 4 * g.out_stride;
            }
            return;
        }
        send_all(g, buffer);
        if (laneid() == 0) tma::store_async_read_wait();
    }
    // After the last tile, when the stages are free. Of a stage a consumer writes only where its
    // own rows of a were: others may still be reading the rest.
    __device__ __forceinline__ void send_last(const typename K::Globals& g,
                                              typename K::Shared& shared) const {
        static_assert(pieces <= C.stages);
        send_all(g, [&](int piece) -> staging& { return last_buffer(shared, piece); });
    }
    // The same of sums, which are rounded and sent piece by piece: the first leaves as early as can
    // be, for 132 SMs that store at once wait for the L2 cache.
    template <class O>
    static __device__ __forceinline__ void send_last(const typename K::Globals& g,
                                                     typename K::Shared& shared,
                                                     const rt_fl<16, C.block_n>& d,
                                                     const Place16 at, Narrow narrow = false) {
        const auto round = [&](staging& buffer, int first) {
            rt_fl<16, staging::cols> sums;
            rt_bf<16, staging::cols> values;
            take_piece(sums, d, first);
            round_to<O>(values, sums);
            kittens::warp::store(buffer, values);
        };
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            if (!has(piece, narrow)) return;
            auto& buffer = last_buffer(shared, piece);
            with_first(piece, narrow, [&](int first) { round(buffer, first); });
            arch::fence_async_shared();
            arch::sync_warp();
            if (laneid() == 0) {
                store_piece(g, buffer, at, piece, narrow);
                tma::store_commit_group();
            }
        }
    }
    static __device__ __forceinline__ staging& last_buffer(typename K::Shared& shared, int piece) {
        auto& buffers =
            reinterpret_cast<staging(&)[C.consumers * WARPGROUP_WARPS]>(shared.stages[piece].a);
        return buffers[kittens::warpid()];
    }
};

// Stores a warp's fp32 values at once, through its two staging buffers in turn.
template <Config C>
__device__ __forceinline__ void store_wide(const typename Types<C>::Globals& g,
                                           typename Types<C>::Shared& shared,
                                           const rt_fl<16, C.block_n>& d, uint32_t batch,
                                           uint32_t row, uint32_t col) {
    using staging = st_fl<16, 32>;
    using Split = Pieces<C.block_n, staging::cols>;
#pragma unroll
    for (int piece = 0; piece < Split::count; ++piece) {
        if (C.fused && g.epilogue.gate != Gate::none && piece >= C.block_n / 64) break;
        auto& buffer = reinterpret_cast<staging&>(shared.out[kittens::warpid()][piece % 2]);
        if (laneid() == 0) tma::store_async_read_wait<1>();
        arch::sync_warp();
        stage_piece<rt_fl<16, staging::cols>>(d, Split::first(piece), buffer);
        const uint32_t to = col + Split::first(piece);
        if (g.tma_store)
            send_by_tma<C>(g, buffer, batch, row, to);
        else
            send_by_warp<C>(g, buffer, batch, row, to);
    }
}

template <class Tile>
__device__ __forceinline__ void scale(Tile& d, float factor) {
#pragma unroll
    for (int j = 0; j < d.width; ++j) {
#pragma unroll
        for (int r = 0; r < d.packed_per_base; ++r) {
            d.tiles[0][j].data[r].x *= factor, d.tiles[0][j].data[r].y *= factor;
        }
    }
}

// The bias of a tile's columns: each thread of a consumer fetches a few values before the products,
// and adds all that it needs after them, through shared memory. For kernels whose warps finish
// tiles apart see KeptBias.
template <Config C>
struct Bias {
    static constexpr int per_thread = (C.block_n + WARPGROUP_THREADS - 1) / WARPGROUP_THREADS;
    typename Types<C>::T values[per_thread];  // a conversion here would wait for the load

    __device__ __forceinline__ void fetch(const typename Types<C>::Globals& g, uint32_t first) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int offset = i * WARPGROUP_THREADS + warpgroup::laneid();
            const uint32_t col = Types<C>::column(g, first, offset);
            const auto* bias = static_cast<const typename Types<C>::T*>(g.epilogue.bias);
            values[i] = typename Types<C>::T{};
            if (col < g.n) values[i] = arch::load_global(bias + col);
        }
    }
    __device__ __forceinline__ void share(sv_fl<C.block_n>& shared) const {
        warpgroup::sync(READY + 1 + warpgroup::groupid());  // the last tile's readers are done
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int col = i * WARPGROUP_THREADS + warpgroup::laneid();
            if (col < C.block_n) shared.set(col, convert<float>(values[i]));
        }
    }
    __device__ __forceinline__ void add(sv_fl<C.block_n>& shared, rt_fl<16, C.block_n>& d) const {
        share(shared);
        warpgroup::sync(READY + 1 + warpgroup::groupid());
#pragma unroll
        for (int j = 0; j < C.block_n / 16; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int col = j * 16 + half * 8 + 2 * (laneid() % 4);
                const float2 pair = arch::load_shared<float2>(shared.address_of(col));
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    d.tiles[0][j].data[2 * half + r].x += pair.x;
                    d.tiles[0][j].data[2 * half + r].y += pair.y;
                }
            }
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
