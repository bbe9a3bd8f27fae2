// Grouped product for every GPU from compute capability 8.0 on: the loop of
// portable/multistage_sm80.cuh. A block has one tile, which it finds by walking over the groups; it
// has none where their ends leave fewer tiles than there may be. Where rows or columns are divided,
// tiles begin with their group; where k is, a block begins at its group's k.
#pragma once

#include "csrc/gemm/common/group_tiles_sm80.cuh"
#include "csrc/gemm/grouped/portable.h"
#include "csrc/gemm/portable/multistage_sm80.cuh"

namespace thunderkittens::grouped_gemm {
namespace sm80 {

using namespace kittens;
using gemm::PortableConfig, gemm::sm80::GroupTile, gemm::sm80::TileOrigin;

template <PortableConfig C>
struct Traits : gemm::sm80::Traits<C> {
    static constexpr bool divides_k = C.a_m_major;
    struct Globals : gemm::sm80::Traits<C>::Globals {
        Grouped grouped;
        gemm::sm80::Groups groups;
    };
    // Of rows and columns without a group there is nothing.
    static __device__ __forceinline__ gemm::sm80::Affine affine(const Globals& g,
                                                                const TileOrigin& at) {
        if (at.batch >= g.groups.count) return {0.f, nullptr};
        return {g.epilogue.alpha, g.epilogue.bias};
    }
};

// The tile of a block, if it has one, and whether that has products.
struct Found {
    TileOrigin at;
    bool exists, has_products;
};
template <class Traits>
__device__ __forceinline__ Found find(const typename Traits::Globals& g) {
    constexpr PortableConfig C = Traits::config;
    TileOrigin at{.m_end = g.m, .n_end = g.n, .k_begin = 0, .k = g.k};
    if constexpr (Traits::divides_k) {
        const gemm::TilePosition tile = g.order.at(blockIdx.x);
        at.batch = tile.batch, at.m = tile.m * C.block_m, at.n = tile.n * C.block_n;
        uint32_t begin = 0, end = 0;
#pragma unroll 1
        for (uint32_t group = 0; group <= tile.batch; ++group) {
            begin = end;
            const int last = arch::load_global(g.groups.offs + group);
            end = min(max(uint32_t(max(last, 0)), begin), g.k);
        }
        at.k_begin = begin, at.k = end - begin;
        return {at, true, end > begin};
    } else {
        const bool rows = g.grouped == Grouped::rows;
        static_assert(C.block_m == C.block_n);
        const GroupTile tile = g.groups.template at<C.block_m>(blockIdx.x);
        at.batch = tile.group;
        at.m = rows ? tile.token : tile.column_tile * C.block_m;
        at.n = rows ? tile.column_tile * C.block_n : tile.token;
        (rows ? at.m_end : at.n_end) = tile.end;
        return {at, tile.group <= g.groups.count, tile.group < g.groups.count};
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, Traits::blocks_per_sm) void grouped_portable_kernel(
    const __grid_constant__ typename Traits::Globals g) {
    const Found found = find<Traits>(g);
    if (!found.exists) return;
    gemm::sm80::compute_tile<Traits>(g, found.at, found.has_products);
}

}  // namespace sm80

template <gemm::PortableConfig C>
void launch_portable(const Params& params, Stream stream) {
    using Traits = sm80::Traits<C>;
    const gemm::Params& p = params.product;
    const bool rows = params.grouped == Grouped::rows;
    gemm::TileOrder order{};
    if constexpr (Traits::divides_k) {
        order = gemm::make_order({.block_m = C.block_m, .block_n = C.block_n, .raster_group = 8},
                                 p.m, p.n, p.batch);
    }
    typename Traits::Globals globals{gemm::sm80::make_globals<C>(p, order), params.grouped, {}};
    const auto tiles = [](int64_t size, int block) {
        return static_cast<uint32_t>((size + block - 1) / block);
    };
    globals.groups = {params.offs, rows ? globals.m : globals.n, static_cast<uint32_t>(p.batch),
                      rows ? tiles(p.n, C.block_n) : tiles(p.m, C.block_m)};
    const unsigned blocks =
        Traits::divides_k ? globals.order.total : gemm::sm80::blocks_of(globals.groups, C.block_m);
    kittens::launch(kittens::LaunchOptions{.blocks_per_sm = Traits::blocks_per_sm},
                    sm80::grouped_portable_kernel<Traits>, dim3(blocks), dim3(C.threads()), dim3(1),
                    sizeof(typename Traits::Shared), stream, globals);
}

}  // namespace thunderkittens::grouped_gemm
