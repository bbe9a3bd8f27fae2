// What the swap-AB kernels share, whatever the operands' format: the walk over tiles and over k,
// split-K over a cluster, the first loads of a block, and the transposed store.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/reduce_cluster_sm90.cuh"

namespace thunderkittens::swap_ab {

using namespace kittens;

// Split-K: the steps of k that fall to a block of the cluster.
template <class Globals>
__device__ __forceinline__ int2 range_of_k(const Globals& g, int rank) {
    return {g.k_steps * rank / g.splits, g.k_steps * (rank + 1) / g.splits};
}
template <class Globals>
__device__ __forceinline__ int rank_in_cluster(const Globals& g) {
    return g.splits > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
}
template <class Globals>
__device__ __forceinline__ int2 range_of_k(const Globals& g) {
    return range_of_k(g, rank_in_cluster(g));
}

// The walk over a range of k, rotated by some of its steps, which `turn` determines: blocks begin
// at different k, so that not all of them read the same lines of a at the same time.
struct RotatedK {
    int k, begin, end;

    RotatedK() = default;
    __device__ __forceinline__ RotatedK(const int2 range, uint32_t turn)
        : k(range.x + static_cast<int>(turn * 37u % uint32_t(range.y - range.x))),
          begin(range.x),
          end(range.y) {}
    __device__ __forceinline__ int steps() const { return end - begin; }
    __device__ __forceinline__ int after(int at) const { return at + 1 == end ? begin : at + 1; }
    __device__ __forceinline__ void advance() {
        if (++k == end) k = begin;
    }
};

// A tile of one product: its first row of a, its first column of the output (a row of the weight),
// and the walk over its k. `Index` is a signed type where both are divided, by what divides a tile.
template <int rows, int columns, class Index = uint32_t>
struct Tile {
    Index row, col;
    RotatedK ks;

    template <class Globals>
    __device__ __forceinline__ Tile(const Globals& g, uint32_t index, int rank) {
        const uint32_t column = g.m_tiles.divide(index);
        row = static_cast<Index>(index - column * g.m_tiles.value) * rows;
        col = static_cast<Index>(column) * columns;
        ks = RotatedK(range_of_k(g, rank), index);
    }
};
// Calls work(tile) for each of this block's tiles.
template <class Tile, class Globals, class Work>
__device__ __forceinline__ void for_each_tile(const Globals& g, int rank, Work work) {
    for (uint32_t i = blockIdx.x / g.splits; i < g.tiles; i += g.clusters) work(Tile(g, i, rank));
}

// Loads a block's first stages by load(stage, tile, k), by instructions that lie close to the
// kernel's first: those of load_stages come from memory when it begins. Blocks of a cluster are
// slower for it, and do without.
template <int stages, class Tile, class Globals, class Load>
__device__ __forceinline__ void load_first_stages(const Globals& g, Load load) {
    if (blockIdx.x >= g.tiles) return;
    const Tile tile(g, blockIdx.x, 0);
    const int count = min(stages, tile.ks.steps());
    int k = tile.ks.k;
#pragma unroll 1
    for (int i = 0; i < count; ++i, k = tile.ks.after(k)) load(i, tile, k);
}

// The producer: loads the stages of all tiles, but those that load_first_stages has loaded.
template <int stages, class Tile, class Globals, class Load>
__device__ __forceinline__ void load_stages(const Globals& g, semaphore (&empty)[stages], int rank,
                                            Load load) {
    gemm::sm90::Ring<stages> ring;
    int begun = -1;  // stages that load_first_stages has filled; not known before the first tile
    for_each_tile<Tile>(g, rank, [&](const Tile tile) {
        if (begun < 0) begun = g.splits == 1 ? min(stages, tile.ks.steps()) : 0;
        const RotatedK& ks = tile.ks;
        int k = ks.k;
        for (int step = ks.begin; step < ks.end; ++step, ring.advance(), k = ks.after(k)) {
            if (begun > 0) {
                --begun;
                continue;
            }
            wait(empty[ring.stage], ring.phase ^ 1);
            load(ring.stage, tile, k);
        }
    });
}

// The prologue of every thread of a kernel whose last warpgroup loads: one of its threads calls
// init(), which initialises the semaphores, and the others wait for it.
template <class Traits, class Init>
__device__ __forceinline__ void initialise(bool produces, Init init) {
    if (produces) {
        if (warpgroup::warpid() == 0 && arch::elect_one()) init();
        arch::sync_warp();
        arch::named_barrier_arrive(gemm::sm90::READY, Traits::threads);
    } else {
        arch::named_barrier_sync(gemm::sm90::READY, Traits::threads);
    }
}

// The roles: one thread of the last warpgroup calls produce(), the other warpgroups consume().
template <class Traits, class Globals, class Produce, class Consume>
__device__ __forceinline__ void run_roles(const Globals& g, bool produces, Produce produce,
                                          Consume consume) {
    if (produces) {
        if constexpr (Traits::moves_registers)
            warpgroup::decrease_registers<Traits::producer_registers>();
        if (warpgroup::warpid() == 0 && arch::elect_one()) produce();
        arch::sync_warp();
        if (g.splits > 1) cluster::wait();
    } else {
        if constexpr (Traits::moves_registers)
            warpgroup::increase_registers<Traits::consumer_registers>();
        consume();
    }
}

// Loads a part of the weight: the other tiles of the same columns, if there are any, find it in the
// L2 cache.
template <class Globals, class Shared, class GL>
__device__ __forceinline__ void load_weight(const Globals& g, Shared& to, const GL& from, int row,
                                            int k, semaphore& full) {
    const auto at = elements(0, 0, row, k);
    if (g.m_tiles.value == 1)
        tma::load_async<2, tma::CachePolicy::evict_first>(to, from, at, full);
    else
        tma::load_async<2>(to, from, at, full);
}

// Activates and stores four neighbouring elements of row m of out, those of them that it has.
template <class Globals>
__device__ __forceinline__ void finish_four(const Globals& g, uint32_t m, uint32_t n, float (&x)[4],
                                            int count) {
    gemm::sm90::activate(g.activation, x);
    const int64_t at = int64_t(m) * g.n + n;
    gemm::sm90::with_type(g.out, g.out_dtype, [&](auto* out) {
        gemm::sm90::store_four(out + at, x, g.vec4_aligned, count);
    });
}

// The transposed store of 16-bit results: an accumulator's rows are columns of the output. Writes
// a warp's columns to a tile in shared memory, where they are rows again, for TMA. pair(j, r) makes
// the results of register r of tile j, a pair of neighbouring rows.
template <int rows, class Out, class Pair>
__device__ __forceinline__ void store_transposed(Out& to, DType dtype, Pair pair) {
    rt_bf<rows, 16, col_l> out;
#pragma unroll
    for (int j = 0; j < rows / 16; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float2 x = pair(j, r);
            out.tiles[j][0].data[r] = dtype == DType::bf16
                                          ? arch::pack_bf16(x.x, x.y)
                                          : arch::bit_cast<bf16_2>(arch::pack_half(x.x, x.y));
        }
    }
    auto columns = to.template subtile<rows, 16>({0, warpgroup::warpid()});
    kittens::warp::store(columns, out);
}
// A thread's columns of the accumulator of 64 columns, of which it has two.
__device__ __forceinline__ uint32_t column_of_thread(int half) {
    return warpgroup::warpid() * 16 + laneid() / 4 + half * 8;
}

}  // namespace thunderkittens::swap_ab
