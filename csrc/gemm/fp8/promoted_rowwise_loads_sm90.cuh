// How the kernels of the commonest calls load, see promoted_rowwise_sm90.cuh: without groups or
// clusters.
#pragma once

#include "csrc/gemm/fp8/types_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// A tile without groups or clusters.
template <Config C>
__device__ __forceinline__ Tile whole_tile(const typename Types<C>::Globals& g,
                                           const gemm::UnevenPosition& at) {
    return {.group = 0,
            .row = at.m * C.block_m,
            .col = at.column(C.block_n),
            .end = g.m,
            .nothing = false,
            .narrow = at.narrow()};
}

// By one thread.
template <Config C>
__device__ __forceinline__ void load_whole(const typename Types<C>::Globals& g,
                                           typename Types<C>::Shared& shared) {
    using K = Types<C>;
    static_assert(K::a_parts == 1 && K::b_part::rows == C.block_n);
    uint32_t index = blockIdx.x;
    if (index >= g.order.total) return;
    // The first load waits for the place of the first tile: in most cases that is in the first
    // band, and takes one division. What finds others lies behind.
    const gemm::TileOrder& part = g.order.fewer;
    gemm::UnevenPosition at{};
    at.n = part.height.divide(index), at.m = index - at.n * part.height.value;
    at.wide = g.order.wide_of_fewer;
    bool known = index < part.total && index < part.band_tiles.value;
    const CUtensorMap* const a = g.a.template tensor_map<typename K::a_part>();
    Ring<C.stages> ring;
    while (true) {
        if (!known) at = g.order.in_matrix(index);
        known = false;
        const Tile tile = whole_tile<C>(g, at);
        const CUtensorMap* const b = tile.narrow ? g.b.template tensor_map<typename K::b_last>()
                                                 : g.b.template tensor_map<typename K::b_part>();
        const uint32_t bytes = sizeof(typename K::Stage) - (tile.narrow ? K::less * BLOCK_K : 0);
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
