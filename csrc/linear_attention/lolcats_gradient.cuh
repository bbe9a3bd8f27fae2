// What the kernels of LoLCATS's gradient share: their roles, the rows' weights, tiles of registers.
#pragma once

#include "csrc/linear_attention/lolcats_backward.h"
#include "csrc/linear_attention/lolcats_state.cuh"
#include "kittens/arch/discard.cuh"

namespace thunderkittens::linear_attention {

// Warpgroups: 0 and 1 are the linear roles, one for each sign of the feature map.
constexpr int LOLCATS_GRADIENT_THREADS = 4 * WARPGROUP_THREADS;
constexpr int WINDOW_ROLE = 2, PRODUCER_ROLE = 3;
// Named barriers: each linear role's is 1 + its sign.
constexpr int WINDOW_BARRIER = 3, LINEAR_BARRIER = 4;

// Per chunk: float4 of each token, as LolcatsBackwardWorkspace::rows has them; float2, as weights.
using RowVector = sv<float, 4 * CHUNK>;
using WeightVector = sv<float, 2 * CHUNK>;
using RowsLayout = gl<float, 1, 1, -1, -1, RowVector>;
using WeightsLayout = gl<float, 1, 1, -1, -1, WeightVector>;

template <class K>
struct LolcatsGradient {
    using T = typename K::T;
    static constexpr int dim = K::head_dim, features = K::features;
    using projected_tile = st<T, CHUNK, features>;
    using projected_layout = gl<T, 1, -1, -1, features, projected_tile>;
    using scores = rt_fl<16, CHUNK>;
    using weights = rt<T, 16, CHUNK>;
    using output = rt_fl<16, dim>;
    static constexpr bool is_half = std::is_same_v<T, half>;
    static constexpr float scale = dim == 128 ? 0.08838834764831845f : 0.125f;  // of the scores
    static constexpr float unit = scale * LOG2_E;
    // Features of queries times their weights are small numbers in half.
    static constexpr float weight_unit = is_half ? 32.0f : 1.0f;
};

template <class K>
typename LolcatsGradient<K>::projected_layout projected_layout_of(void* data,
                                                                  const LolcatsProblem& p) {
    return typename LolcatsGradient<K>::projected_layout(static_cast<typename K::T*>(data), nullptr,
                                                         p.batch * p.heads, chunks_of(p) * CHUNK,
                                                         nullptr);
}

// The row of the lane's upper elements; the lower ones are 8 rows below.
__device__ __forceinline__ int lane_row() { return 16 * warpgroup::warpid() + laneid() / 4; }

// The same object, such that addresses in it are computed again in every round of a loop: all of
// them kept would not leave enough registers.
template <class Object>
__device__ __forceinline__ Object& recomputed(Object& object) {
    uint32_t zero = 0;
    arch::pin_register(zero);
    return *(&object + zero);
}

// By one thread of a warpgroup whose threads have synchronised, or not written anything.
__device__ __forceinline__ void signal(semaphore& s) {
    if (warpgroup::laneid() == 0) arrive(s);
}

// Before a product that overwrites the tiles.
template <any_register_tile... Tiles>
__device__ __forceinline__ void discard(Tiles&... tiles) {
    const auto discard_one = [](auto& tile) {
#pragma unroll
        for (int j = 0; j < std::remove_cvref_t<decltype(tile)>::width; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                arch::discard_register(tile.tiles[0][j].data[i].x);
                arch::discard_register(tile.tiles[0][j].data[i].y);
            }
        }
    };
    (discard_one(tiles), ...);
}

template <class T, any_register_tile From>
__device__ __forceinline__ void round_tile(rt<T, 16, From::cols>& to, const From& from) {
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = from.tiles[0][j].data[i];
            to.tiles[0][j].data[i] = pack_pair<T>(pair.x, pair.y);
        }
    }
}
template <any_register_tile Tile>
__device__ __forceinline__ void scale_tile(Tile& tile, float factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& pair = tile.tiles[0][j].data[i];
            pair = {pair.x * factor, pair.y * factor};
        }
    }
}
// Calls f(value, column, true for the lower row).
template <any_register_tile Tile, class F>
__device__ __forceinline__ void for_each_element(Tile& tile, F f) {
    const int column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f(tile.tiles[0][j].data[i].x, 16 * j + 8 * (i / 2) + column, i % 2 == 1);
            f(tile.tiles[0][j].data[i].y, 16 * j + 8 * (i / 2) + column + 1, i % 2 == 1);
        }
    }
}

// Stores the rows that exist of a chunk that begins at row `first`, which may be negative: TMA
// cannot store there.
template <int dim, class Out>
__device__ __forceinline__ void store_rows(Out* to, int length, int first,
                                           const rt_fl<16, dim>& tile) {
    const int row = first + lane_row();
#pragma unroll
    for (int j = 0; j < dim / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = row + 8 * (i % 2), column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
            if (at < 0 || at >= length) continue;
            const float2 pair = tile.tiles[0][j].data[i];
            arch::store_global(reinterpret_cast<packed_type<Out>*>(to + int64_t(at) * dim + column),
                               pack_pair<Out>(pair.x, pair.y));
        }
    }
}

}  // namespace thunderkittens::linear_attention
