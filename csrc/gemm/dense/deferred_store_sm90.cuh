// The deferred store of a finished tile on Hopper: scale and bias, rounding to the output's type,
// and the way to memory. What a fused epilogue does before is in fused_epilogue_sm90.cuh.
//
// Values of a 16-bit type are rounded at once and kept in registers, half the size of the
// accumulators; they leave in store subtiles of 128 bytes a row while the tensor cores already work
// on the next tile. On the way they pass through a warp's own staging buffer, so that no warp waits
// for another. fp32 values do not fit beside the next accumulators and are stored before the next
// tile starts. Rows that TMA cannot store (no multiple of 16 bytes) are copied by the warp.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/dense/types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// A warp's staging buffer holds 16 rows of 128 bytes of the output. These two functions send it to
// memory, by TMA, or by the warp itself where TMA cannot store.
template <Config C, class Staging>
__device__ __forceinline__ void send_by_tma(const typename KernelTraits<C>::Globals& g,
                                            const Staging& staging, uint32_t batch, uint32_t row,
                                            uint32_t col) {
    arch::fence_async_shared();
    arch::sync_warp();
    if (laneid() == 0) {
        const auto& words = reinterpret_cast<const typename KernelTraits<C>::out_tile&>(staging);
        constexpr int words_each = int(sizeof(typename Staging::T)) / 2;
        tma::store_async(g.out_map, words,
                         elements(batch, 0, row, static_cast<int>(col * words_each)));
    }
}
template <Config C, class Staging>
__device__ __forceinline__ void send_by_warp(const typename KernelTraits<C>::Globals& g,
                                             const Staging& staging, uint32_t batch, uint32_t row,
                                             uint32_t col) {
    using O = typename Staging::T;
    arch::sync_warp();
    if (row >= g.m || col >= g.out_n) return;
    const uint32_t rows = g.m - row, cols = g.out_n - col;
    O* to = static_cast<O*>(g.out) + (batch * g.out_batch_stride + row * g.out_stride + col);
    if constexpr (sizeof(O) == 4) {
        copy_rows(staging, to, g.out_stride, rows, cols);
    } else if (g.vec2_aligned) {
        copy_rows(staging, reinterpret_cast<uint32_t*>(to), g.out_stride / 2, rows, cols / 2);
    } else {
        copy_rows(staging, reinterpret_cast<uint16_t*>(to), g.out_stride, rows, cols);
    }
}

// The position in z of a warp's 16 rows of a tile.
struct WarpRows {
    uint32_t batch = 0, row = 0, col = 0;
};

// The deferred store: a warp's finished values of a 16-bit type (bf16 stands for both) stay in
// registers while the next tile's products run, and are stored subtile by subtile, overlapped with
// them.
template <Config C>
struct DeferredStore {
    using Traits = KernelTraits<C>;
    using staging = typename Traits::out_tile;
    using Cut = Subtiles<C.block_n, staging::cols>;
    static constexpr int subtiles = Cut::count;

    rt_bf<16, C.block_n> values;
    WarpRows at;
    bool any = false;
    bool narrow = false;  // the tile, see common/raster.h

    // The first column of a subtile; the last subtile of a narrow tile begins earlier.
    static __device__ __forceinline__ int first_of(int subtile, bool narrow) {
        return Cut::first(subtile) - (narrow && subtile == subtiles - 1 ? int(NARROW_BY) : 0);
    }
    // The same as a constant, for indices of registers: calls use(first).
    template <class Use>
    static __device__ __forceinline__ void with_first(int subtile, bool narrow, Use use) {
        if (narrow && subtile == subtiles - 1)
            use(first_of(subtile, true));
        else
            use(Cut::first(subtile));
    }
    // The number of subtiles that are stored: with a gate half of the columns are left.
    static __device__ __forceinline__ int sent(const typename Traits::Globals& g) {
        return C.fused && g.epilogue.gate != Gate::none ? subtiles / 2 : subtiles;
    }

    template <class O>
    __device__ __forceinline__ void pack(const rt_fl<16, C.block_n>& d) {
        round_to<O>(values, d);
    }
    // Keeps a tile whose store is deferred.
    template <class O>
    __device__ __forceinline__ void defer(const rt_fl<16, C.block_n>& d, const WarpRows place,
                                          bool is_narrow) {
        pack<O>(d);
        at = place;
        narrow = is_narrow;
        any = true;
    }
    __device__ __forceinline__ void stage(int subtile, staging& buffer) const {
        using Subtile = rt_bf<16, staging::cols>;
        with_first(subtile, narrow,
                   [&](int first) { stage_subtile<Subtile>(values, first, buffer); });
    }
    // Waits until a staging buffer is free again. The last store from it is the one before the
    // last, or the last one where a tile has an odd number of subtiles.
    static __device__ __forceinline__ void wait_for_buffer(const typename Traits::Globals& g) {
        if (laneid() == 0) {
            if (sent(g) % 2 == 0)
                tma::store_async_read_wait<1>();
            else
                tma::store_async_read_wait();
        }
        arch::sync_warp();
    }
    // Stores one subtile, through the warp's two staging buffers in turn.
    __device__ __forceinline__ void send(const typename Traits::Globals& g,
                                         typename Traits::Shared& shared, int subtile) const {
        auto& buffer = shared.out[kittens::warpid()][subtile % 2];
        wait_for_buffer(g);
        stage(subtile, buffer);
        send_by_tma<C>(g, buffer, at.batch, at.row, at.col + first_of(subtile, narrow));
    }
    // Stores all subtiles at once, through the two staging buffers in turn.
    __device__ __forceinline__ void store_now(const typename Traits::Globals& g,
                                              typename Traits::Shared& shared) const {
#pragma unroll
        for (int subtile = 0; subtile < subtiles; ++subtile) {
            if (subtile >= sent(g)) break;
            auto& buffer = shared.out[kittens::warpid()][subtile % 2];
            wait_for_buffer(g);
            stage(subtile, buffer);
            const uint32_t to = at.col + first_of(subtile, narrow);
            if (g.tma_store)
                send_by_tma<C>(g, buffer, at.batch, at.row, to);
            else
                send_by_warp<C>(g, buffer, at.batch, at.row, to);
        }
    }
    // Called by one lane, for a buffer whose contents are visible to TMA.
    static __device__ __forceinline__ void store_subtile(const typename Traits::Globals& g,
                                                         const staging& buffer, const WarpRows at,
                                                         int subtile, bool narrow = false) {
        arch::tma_store(g.out_map.template tensor_map<staging>(), buffer.address(),
                        {static_cast<int>(at.col + first_of(subtile, narrow)),
                         static_cast<int>(at.row), 0, static_cast<int>(at.batch)});
    }
    // Stores all subtiles at once, each through a buffer of its own, buffer(i): one fence serves
    // them all, and one lane stores them as one group.
    template <class Buffer>
    __device__ __forceinline__ void send_all(const typename Traits::Globals& g,
                                             Buffer buffer) const {
        const int count = sent(g);
#pragma unroll
        for (int subtile = 0; subtile < subtiles; ++subtile) {
            if (subtile < count) stage(subtile, buffer(subtile));
        }
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) {
#pragma unroll
            for (int subtile = 0; subtile < subtiles; ++subtile) {
                if (subtile < count) store_subtile(g, buffer(subtile), at, subtile, narrow);
            }
            tma::store_commit_group();
        }
        arch::sync_warp();
    }
    // Stores a block's last tile, through the stages, which are free then. In a stage a consumer
    // writes only where its own rows of a were: others may still be reading the rest.
    __device__ __forceinline__ void send_last(const typename Traits::Globals& g,
                                              typename Traits::Shared& shared) const {
        static_assert(subtiles <= C.stages);
        send_all(g, [&](int subtile) -> staging& { return last_buffer(shared, subtile); });
    }
    // The same for accumulators, which are rounded and stored subtile by subtile: the first leaves
    // as early as possible, because 132 SMs that store at once wait for the L2 cache.
    template <class O>
    static __device__ __forceinline__ void send_last(const typename Traits::Globals& g,
                                                     typename Traits::Shared& shared,
                                                     const rt_fl<16, C.block_n>& d,
                                                     const WarpRows at, bool narrow = false) {
        const auto round = [&](staging& buffer, int first) {
            rt_fl<16, staging::cols> sums;
            rt_bf<16, staging::cols> values;
            take_subtile(sums, d, first);
            round_to<O>(values, sums);
            kittens::warp::store(buffer, values);
        };
#pragma unroll
        for (int subtile = 0; subtile < subtiles; ++subtile) {
            auto& buffer = last_buffer(shared, subtile);
            with_first(subtile, narrow, [&](int first) { round(buffer, first); });
            arch::fence_async_shared();
            arch::sync_warp();
            if (laneid() == 0) {
                store_subtile(g, buffer, at, subtile, narrow);
                tma::store_commit_group();
            }
        }
    }
    static __device__ __forceinline__ staging& last_buffer(typename Traits::Shared& shared,
                                                           int subtile) {
        auto& buffers =
            reinterpret_cast<staging(&)[C.consumers * WARPGROUP_WARPS]>(shared.stages[subtile].a);
        return buffers[kittens::warpid()];
    }
};

// Stores a warp's fp32 values at once, through its two staging buffers in turn.
template <Config C>
__device__ __forceinline__ void store_wide(const typename KernelTraits<C>::Globals& g,
                                           typename KernelTraits<C>::Shared& shared,
                                           const rt_fl<16, C.block_n>& d, uint32_t batch,
                                           uint32_t row, uint32_t col) {
    using staging = st_fl<16, 32>;
    using Cut = Subtiles<C.block_n, staging::cols>;
#pragma unroll
    for (int subtile = 0; subtile < Cut::count; ++subtile) {
        if (C.fused && g.epilogue.gate != Gate::none && subtile >= C.block_n / 64) break;
        auto& buffer = reinterpret_cast<staging&>(shared.out[kittens::warpid()][subtile % 2]);
        if (laneid() == 0) tma::store_async_read_wait<1>();
        arch::sync_warp();
        stage_subtile<rt_fl<16, staging::cols>>(d, Cut::first(subtile), buffer);
        const uint32_t to = col + Cut::first(subtile);
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
// and adds all that it needs after them, through shared memory. Kernels with epilogue warps use
// RegisterBias instead.
template <Config C>
struct Bias {
    static constexpr int per_thread = (C.block_n + WARPGROUP_THREADS - 1) / WARPGROUP_THREADS;
    typename KernelTraits<C>::T values[per_thread];  // a conversion here would wait for the load

    __device__ __forceinline__ void fetch(const typename KernelTraits<C>::Globals& g,
                                          uint32_t first) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int offset = i * WARPGROUP_THREADS + warpgroup::laneid();
            const uint32_t col = KernelTraits<C>::column(g, first, offset);
            const auto* bias = static_cast<const typename KernelTraits<C>::T*>(g.epilogue.bias);
            values[i] = typename KernelTraits<C>::T{};
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
