// What runtime_tile_sm90.cuh works on: types, the position of a block in its cluster and that of
// its tile.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/runtime_tile.h"

namespace thunderkittens::gemm {
namespace sm90 {

// A consumer has an accumulator for each 64 of its rows.
template <DType dtype, int consumer_rows>
struct RuntimeTileTraits {
    using T = std::conditional_t<dtype == DType::bf16, bf16, half>;
    static constexpr int consumers = 2, rows = consumer_rows, tiles = rows / 64;
    static constexpr int least_width = LEAST_RUNTIME_WIDTH, width_step = RUNTIME_WIDTH_STEP,
                         most_width = most_runtime_width(rows);
    static constexpr int threads = RUNTIME_TILE_THREADS, stripe = 64;
    static constexpr int consumer_registers = 216, producer_registers = 72;
    using Sums = rt_fl<16, most_width>[tiles];
    using staging = st<bf16, 16, 64>;            // of a warp; bf16 stands for both types
    using warpgroup_staging = st<bf16, 64, 64>;  // the same memory, of all warps
    static constexpr int buffer_bytes = RUNTIME_TILE_BUFFER_BYTES,
                         subtiles = (most_width + staging::cols - 1) / staging::cols;
    struct Shared {
        semaphore full[RUNTIME_TILE_STAGES], empty[RUNTIME_TILE_STAGES];
    };
    static_assert(RUNTIME_TILE_SHARED_BYTES == MAX_SHARED_MEMORY &&
                  sizeof(warpgroup_staging) == buffer_bytes &&
                  sizeof(Shared) <= RUNTIME_TILE_SEMAPHORE_BYTES);

    // Rows, columns, a and b are those of the product after its operands have changed places, where
    // they do: the result is then stored transposed.
    struct Globals {
        CUtensorMap a, b, out;
        RuntimeTileRing ring;
        int steps, width;  // of k, and of a consumer's tile
        bool side_by_side, transposed;
        bool a_batched, b_batched, a_along_k, b_along_k;
        uint32_t clusters, share_a, share_b;  // blocks of a cluster that share a's and b's tiles
        TileOrder order;                      // of clusters
        uint32_t n;                           // columns of the result as it is stored
        float alpha;
        const void* bias;

        __device__ __forceinline__ uint32_t cluster_blocks() const { return share_a * share_b; }
        __device__ __forceinline__ int a_tiles() const { return side_by_side ? 1 : consumers; }
        __device__ __forceinline__ int b_tiles() const { return side_by_side ? consumers : 1; }
    };
};

// The place of a block in its cluster, and the blocks that share its tiles: those in its row have
// the same tile of a, those in its column that of b.
struct RuntimeTilePlace {
    uint32_t row = 0, column = 0;
    uint16_t a_blocks = 1, b_blocks = 1;

    template <class Globals>
    static __device__ __forceinline__ RuntimeTilePlace of(const Globals& g) {
        RuntimeTilePlace place;
        if (g.cluster_blocks() == 1) return place;
        const uint32_t rank = arch::cluster_rank();
        place.row = rank / g.share_a, place.column = rank % g.share_a;
        place.a_blocks = static_cast<uint16_t>(((1u << g.share_a) - 1) << (place.row * g.share_a));
        uint32_t b_blocks = 0;
        for (uint32_t i = 0; i < g.share_b; ++i) b_blocks |= 1u << (i * g.share_a + place.column);
        place.b_blocks = static_cast<uint16_t>(b_blocks);
        return place;
    }
    // The tile of a block, in blocks: clusters are dealt out in the raster's order.
    template <class Globals>
    __device__ __forceinline__ TilePosition tile(const Globals& g, uint32_t cluster) const {
        TilePosition at = g.order.at(cluster);
        at.m = at.m * g.share_b + row;
        at.n = at.n * g.share_a + column;
        return at;
    }
    template <class Globals>
    static __device__ __forceinline__ uint32_t first_cluster(const Globals& g) {
        return blockIdx.x / g.cluster_blocks();
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
