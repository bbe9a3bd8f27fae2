// What cluster_tile_sm90.cuh works on: types, and the position of a block.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {
namespace sm90 {

template <Config C>
struct ClusterTileTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int rows = C.block_m / C.consumers;  // of a consumer
    using a_tile = std::conditional_t<C.a_m_major, st<T, BLOCK_K, rows>, st<T, rows, BLOCK_K>>;
    using b_tile =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>, st<T, C.block_n, BLOCK_K>>;
    static constexpr int threads = gemm::threads(C), stages = C.stages;
    static constexpr int consumer_threads = C.consumers * WARPGROUP_THREADS;
    static constexpr int pitch = C.block_n + 4;  // of the sums, in floats
    static constexpr int stage_bytes = (C.block_m + C.block_n) * BLOCK_K * 2;
    static constexpr int most_per_sm = most_cluster_tiles_per_sm(C);
    // What the sums, or the tile that is stored, needs.
    static constexpr int least_stages =
        std::max(C.block_n / 64, (C.block_m * pitch * 4 + stage_bytes - 1) / stage_bytes);
    struct Stage {
        a_tile a[C.consumers];
        b_tile b;
    };
    struct Semaphores {
        semaphore full[stages], empty[stages];
    };
    struct Shared {
        Semaphores& semaphores;
        Stage* ring;  // and then the sums
    };
    static_assert(sizeof(Stage) % 1024 == 0 && rows == 64 && stages <= WARP_THREADS);
    static_assert(sizeof(Stage) == stage_bytes &&
                  least_stages <= cluster_tile_stages(C, most_per_sm));
    static_assert(sizeof(Semaphores) <= 1024 && 1024 + sizeof(Stage) * stages == shared_bytes(C),
                  "gemm.h knows another size");

    // What one copy of TMA brings: 64 elements, 128 bytes, of some rows as they lie in memory. The
    // tile of a consumer in a has one such stripe; that in b has several where its rows lie along
    // n.
    static constexpr int stripe = 64;
    static constexpr int b_stripes = C.b_n_major ? C.block_n / stripe : 1;
    static constexpr int a_rows = 64, b_rows = C.b_n_major ? BLOCK_K : C.block_n;  // of a stripe

    struct Globals {
        CUtensorMap a, b;
        int stages, splits;
        uint32_t share_m, share_n;    // blocks that share b's and a's tiles: the cluster along m, n
        uint32_t a_blocks, b_blocks;  // masks of those of the cluster's first block
        int a_slice, b_slice;         // rows of a stripe that a block loads for those
        int part, longer;             // steps of k of a block, and blocks that have one more
        bool a_batched, b_batched;
        bool vec4_aligned;                // four neighbouring elements of the output are aligned
        bool store_only;                  // sums are only rounded, to the operands' type
        bool vec8_aligned, vec2_aligned;  // the same of eight of them, and of two
        uint32_t m, n;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        Epilogue epilogue;

        __device__ __forceinline__ uint32_t cluster_blocks() const {
            return share_m * share_n * splits;
        }
    };
};

// The position of a block: its tile, its place in the cluster, whose sizes along m and n are powers
// of two, and the range of k that it multiplies. Divisions would delay the first load.
struct ClusterTilePosition {
    uint32_t batch, m, n;
    uint32_t in_m, in_n, part_rank;  // of the first block that has this block's part of k
    int rank, first, end;

    template <class Traits>
    static __device__ __forceinline__ ClusterTilePosition of(const typename Traits::Globals& g) {
        ClusterTilePosition at{.batch = blockIdx.z,
                               .m = blockIdx.x * Traits::config.block_m,
                               .n = blockIdx.y * Traits::config.block_n,
                               .in_m = blockIdx.x & (g.share_m - 1),
                               .in_n = blockIdx.y & (g.share_n - 1)};
        if (g.splits > 1) {
            at.batch = blockIdx.z / g.splits;
            at.rank = static_cast<int>(blockIdx.z - at.batch * g.splits);
            at.part_rank = at.rank * g.share_m * g.share_n;
        }
        at.first = at.rank * g.part + min(at.rank, g.longer);
        at.end = at.first + g.part + (at.rank < g.longer);
        return at;
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
