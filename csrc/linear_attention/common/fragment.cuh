// What the kernels of the family do to accumulators in registers, in the layout that the tensor
// cores give them: a lane has parts of two rows of its warp's 16, and the four lanes of a quad
// share these rows. And what else every kernel needs: addresses that are not kept, signals.
#pragma once

#include "kittens/kittens.cuh"

namespace thunderkittens::linear_attention {

using namespace kittens;

__device__ __forceinline__ bool first_thread() { return threadIdx.x == 0; }
// The row of the lane's upper elements in a warpgroup's tile; the lower ones are 8 rows below.
__device__ __forceinline__ int lane_row() { return 16 * warpgroup::warpid() + laneid() / 4; }

// Rematerialization: the same object, such that addresses in it are computed again in every round
// of a loop. All of them kept would not leave enough registers.
template <class Object>
__device__ __forceinline__ Object& rematerialized(Object& object) {
    uint32_t zero = 0;
    arch::pin_register(zero);
    return *(&object + zero);
}

// By one thread of a warpgroup whose threads have synchronised, or not written anything.
__device__ __forceinline__ void signal(semaphore& s) {
    if (warpgroup::laneid() == 0) arrive(s);
}
// By each warp of a warpgroup, for what the warps have read or written on their own.
__device__ __forceinline__ void signal_by_warp(semaphore& s) {
    arch::sync_warp();
    if (laneid() == 0) arrive(s);
}

__device__ __forceinline__ float quad_sum(float x) {
    x += arch::shuffle_xor(x, 1);
    return x + arch::shuffle_xor(x, 2);
}
__device__ __forceinline__ float quad_maximum(float x) {
    x = fmaxf(x, arch::shuffle_xor(x, 1));
    return fmaxf(x, arch::shuffle_xor(x, 2));
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

// Keeps the compiler from moving uses of an accumulator above a wait.
template <any_register_tile Tile>
__device__ __forceinline__ void pin(Tile& tile) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            arch::pin_register(tile.tiles[0][j].data[i].x);
            arch::pin_register(tile.tiles[0][j].data[i].y);
        }
    }
}

// Before a product that overwrites the tiles: nothing in them is needed any more.
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

// Rounds an accumulator to the operand of a product.
template <any_register_tile To, any_register_tile From>
__device__ __forceinline__ void to_operand(To& to, const From& from) {
#pragma unroll
    for (int j = 0; j < From::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = from.tiles[0][j].data[i];
            to.tiles[0][j].data[i] = pack_pair<typename To::T>(pair.x, pair.y);
        }
    }
}

// Multiplies the lane's two rows, x the upper one's factor.
template <any_register_tile Tile>
__device__ __forceinline__ void scale_rows(Tile& tile, float2 factor) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float f = i % 2 ? factor.y : factor.x;
            float2& pair = tile.tiles[0][j].data[i];
            pair = {pair.x * f, pair.y * f};
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

// The lane's part of the sums of its two rows.
template <any_register_tile Tile>
__device__ __forceinline__ float2 sum_rows(const Tile& tile) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = tile.tiles[0][j].data[i];
            (i % 2 ? sum.y : sum.x) += pair.x + pair.y;
        }
    }
    return sum;
}

// The largest magnitude of this lane's elements.
template <any_register_tile Tile>
__device__ __forceinline__ float largest_magnitude(const Tile& tile, float most = 0.0f) {
#pragma unroll
    for (int j = 0; j < Tile::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = tile.tiles[0][j].data[i];
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    return most;
}

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) x = fmaxf(x, arch::shuffle_xor(x, d));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP_THREADS / 2; d > 0; d /= 2) x += arch::shuffle_xor(x, d);
    return x;
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
