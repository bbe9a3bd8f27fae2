// The producer of the kernels for row-wise scales (promoted_rowwise_sm90.cuh,
// pingpong_rowwise_sm90.cuh): without groups or clusters.
#pragma once

#include "csrc/gemm/fp8/types_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// The position of a tile without groups or clusters.
template <Config C>
__device__ __forceinline__ Tile rowwise_tile(const typename KernelTraits<C>::Globals& g,
                                             const gemm::TwoWidthPosition& at) {
    return {.group = 0,
            .row = at.m * C.block_m,
            .col = at.column(C.block_n),
            .end = g.m,
            .nothing = false,
            .narrow = at.narrow()};
}

// Called by one thread.
template <Config C>
__device__ __forceinline__ void produce_rowwise(const typename KernelTraits<C>::Globals& g,
                                                typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    static_assert(Traits::a_parts == 1 && Traits::b_part::rows == C.block_n);
    uint32_t index = blockIdx.x;
    if (index >= g.order.total) return;
    // The first load waits for the position of the first tile: in most cases that is in the first
    // raster group, and takes one division. The search for others comes behind the loads.
    const gemm::TileOrder& base = g.order.base;
    gemm::TwoWidthPosition at{};
    at.n = base.height.divide(index), at.m = index - at.n * base.height.value;
    at.wide = g.order.wide_of_base;
    bool known = index < base.total && index < base.group_tiles.value;
    const CUtensorMap* const a = g.a.template tensor_map<typename Traits::a_part>();
    Ring<C.stages> ring;
    while (true) {
        if (!known) at = g.order.in_matrix(index);
        known = false;
        const Tile tile = rowwise_tile<C>(g, at);
        const CUtensorMap* const b = tile.narrow
                                         ? g.b.template tensor_map<typename Traits::b_last>()
                                         : g.b.template tensor_map<typename Traits::b_part>();
        const uint32_t bytes =
            sizeof(typename Traits::Stage) - (tile.narrow ? Traits::narrow_by * BLOCK_K : 0);
        for (int k = 0; k < g.k_blocks; ++k, ring.advance()) {
            auto& stage = shared.stages[ring.stage];
            const auto load = [&](const auto& to, const CUtensorMap* from, uint32_t row) {
                arch::tma_load<tma::CachePolicy::normal>(to.address(), from,
                                                         {k * BLOCK_K, static_cast<int>(row), 0, 0},
                                                         shared.full[ring.stage].address());
            };
            wait(shared.empty[ring.stage], ring.phase ^ 1);
            tma::expect_bytes(shared.full[ring.stage], bytes);
            load(stage.a, a, tile.row);
            load(stage.b, b, tile.col);
        }
        index += g.clusters;
        if (index >= g.order.total) return;
    }
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
