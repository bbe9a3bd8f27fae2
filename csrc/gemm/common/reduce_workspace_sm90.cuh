// A block's place, and the ways in which blocks that divide the k of a tile exchange sums through
// memory, for a kernel whose types and parameters are D (DividedTypes of dense/split_k_sm90.cuh).
// Sums are added in a fixed order: reruns give the same bits.
//
// Either a block gives every other one of its tile the columns that this one finishes, in the order
// of the registers, and adds what it gets to its own sums. Or the tile's owner gets all sums of the
// others, through the ring of stages, behind its last products. The two consumer warpgroups do so
// apart from each other, so that the first gives and stores under the last products of the second.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/stream_k.h"

namespace thunderkittens::gemm {
namespace sm90 {

// What a block computes at a time. Blocks that follow each other have the same part of k of tiles
// in a rectangle, so that they read the same lines at a time.
template <class D>
struct DividedPlace {
    Segment segment;
    uint32_t tile, row, column;

    __device__ __forceinline__ DividedPlace(const typename D::Globals& g, const Segment& s)
        : segment(s),
          tile(s.tile * gridDim.x + blockIdx.x),
          row(tile - g.rows.divide(tile) * g.rows.value),
          column(g.rows.divide(tile)) {}
    // The i-th that it takes, or the one that it gives.
    __device__ __forceinline__ uint32_t part(int i) const {
        return (segment.part + i) * gridDim.x + blockIdx.x;
    }
    __device__ __forceinline__ uint32_t m(const typename D::Globals& g) const {
        return min(row * D::height, g.last_row);
    }
    __device__ __forceinline__ uint32_t n(const typename D::Globals& g) const {
        return column * static_cast<uint32_t>(g.width);
    }
};

// Where sums of a tile are kept for other blocks: unit, half, thread.
template <class D>
__device__ __forceinline__ float4* divided_part(const typename D::Globals& g, uint32_t number) {
    constexpr uint32_t threads = D::consumers * WARPGROUP_THREADS;
    return g.parts + int64_t(number) * g.width * (2 * threads / D::unit);
}

// What becomes of a consumer's sums. A thread has the same elements of a tile in every block.
template <class D>
struct DividedSums {
    using T = typename D::T;
    static constexpr uint32_t THREADS = D::consumers * WARPGROUP_THREADS;
    // Units of other blocks that a thread waits for at a time.
    static constexpr int AHEAD = 8;
    const typename D::Globals& g;
    const int consumer = warpgroup::groupid();
    const DividedPlace<D> at;
    const uint32_t splits = gridDim.z, rank = blockIdx.z;
    const uint32_t first_block = at.tile * splits;  // of the tile
    // The units that this block finishes.
    const uint32_t first = rank * g.units_each + min(rank, g.units_more);
    const uint32_t end = first + g.units_each + (rank < g.units_more);
    // Where the thread keeps its sums: a stage, and how far apart stages are.
    const uint32_t kept, stage_bytes;

    __device__ __forceinline__ DividedSums(const typename D::Globals& globals,
                                           typename D::Shared& shared, const DividedPlace<D>& place)
        : g(globals),
          at(place),
          kept(shared.parts[0].address() + warpgroup::groupid() * D::part_bytes +
               warpgroup::laneid() * uint32_t(sizeof(float4))),
          stage_bytes((2 + g.width / 64) * D::part_bytes) {}

    __device__ __forceinline__ uint64_t* mark(uint32_t from, uint32_t to) const {
        return g.marks + (((first_block + from) * splits + to) * D::consumers + consumer);
    }
    __device__ __forceinline__ uint32_t kept_at(uint32_t unit) const {
        const uint32_t i = unit - first;
        return kept + i / D::units_per_part * stage_bytes + i % D::units_per_part * D::unit_bytes;
    }
    static constexpr uint32_t half_bytes = D::unit_bytes / 2;

    __device__ __forceinline__ void give(const rt_fl<16, D::most_columns>& d) const {
        float4* to = divided_part<D>(g, first_block + rank) + threadIdx.x;
        // A thread keeps its sums where rows of other warps were, too.
        warpgroup::sync(READY + 1 + consumer);
#pragma unroll
        for (uint32_t i = 0; i < D::most_columns / D::unit; ++i) {
            if (int(i * D::unit) >= g.width) break;
            const auto& data = d.tiles[0][i].data;
            const float4 low = make_float4(data[0].x, data[0].y, data[1].x, data[1].y);
            const float4 high = make_float4(data[2].x, data[2].y, data[3].x, data[3].y);
            if (i >= first && i < end) {
                arch::store_shared(kept_at(i), low);
                arch::store_shared(kept_at(i) + half_bytes, high);
            } else {
                arch::store_global(to + i * 2 * THREADS, low);
                arch::store_global(to + (i * 2 + 1) * THREADS, high);
            }
        }
        // One fence for the warpgroup. A lane per block.
        warpgroup::sync(READY + 1 + consumer);
        const auto other = static_cast<uint32_t>(warpgroup::laneid());
        if (other < splits && other != rank) {
            arch::store_release_global(mark(rank, other), g.mark);
            uint64_t* there = mark(other, rank);
            while (arch::load_acquire_global(there) != g.mark) {
            }
            arch::store_global(there, uint64_t{0});
        }
        warpgroup::sync(READY + 1 + consumer);
    }

    // Adds what the others have given, one after the other.
    __device__ __forceinline__ void take() const {
        uint32_t unit = first, other = rank == 0 ? 1 : 0;
#pragma unroll 1
        while (other < splits) {
            float4 more[AHEAD][2];
            uint32_t to[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                to[i] = 0;
                if (other < splits) {
                    to[i] = kept_at(unit);
                    const float4* from = divided_part<D>(g, first_block + other) +
                                         (unit * 2 * THREADS + threadIdx.x);
                    more[i][0] = arch::load_global(from);
                    more[i][1] = arch::load_global(from + THREADS);
                }
                if (++unit == end) {
                    unit = first, ++other;
                    if (other == rank) ++other;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (to[i] == 0) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t at = to[i] + half * half_bytes;
                    float4 sum = arch::load_shared<float4>(at);
                    sum.x += more[i][half].x, sum.y += more[i][half].y;
                    sum.z += more[i][half].z, sum.w += more[i][half].w;
                    arch::store_shared(at, sum);
                }
            }
        }
    }

    // A thread has two neighbours in each half of a unit's columns, of two rows.
    __device__ __forceinline__ void store() const {
        const uint32_t row = at.m(g) + consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
        uint32_t col = at.n(g) + first * D::unit + laneid() % 4 * 2;
        uint32_t* to = g.out + (row * g.out_stride + col / 2);
#pragma unroll 1
        for (uint32_t unit = first; unit < end; ++unit) {
#pragma unroll
            for (int half = 0; half < 2; ++half, col += 8, to += 4) {
                if (col >= g.n) continue;
                const auto sum = arch::load_shared<float4>(kept_at(unit) + half * half_bytes);
                float bias[2] = {};
                if (g.bias != nullptr) {
                    const T* from = static_cast<const T*>(g.bias) + col;
                    bias[0] = convert<float>(arch::load_global(from));
                    bias[1] = convert<float>(arch::load_global(from + 1));
                }
                const float x = g.alpha * sum.x + bias[0], y = g.alpha * sum.y + bias[1];
                const float z = g.alpha * sum.z + bias[0], w = g.alpha * sum.w + bias[1];
                arch::store_global(to, arch::bit_cast<uint32_t>(pack_pair<T>(x, y)));
                arch::store_global(to + 8 * g.out_stride,
                                   arch::bit_cast<uint32_t>(pack_pair<T>(z, w)));
            }
        }
    }
};

// The same of tiles with an owner: the others give it all of their sums, which it adds in the order
// of k.
template <class D>
struct OwnedSums {
    using T = typename D::T;
    static constexpr uint32_t THREADS = D::consumers * WARPGROUP_THREADS;
    static constexpr int UNITS = D::most_columns / D::unit;
    const typename D::Globals& g;
    const DividedPlace<D>& at;
    const int consumer = warpgroup::groupid();

    __device__ __forceinline__ void give(const rt_fl<16, D::most_columns>& d) const {
        const uint32_t part = at.part(0);
        float4* to = divided_part<D>(g, part) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            if (i * D::unit >= g.width) break;
            const auto& data = d.tiles[0][i].data;
            arch::store_global(to + i * 2 * THREADS,
                               make_float4(data[0].x, data[0].y, data[1].x, data[1].y));
            arch::store_global(to + (i * 2 + 1) * THREADS,
                               make_float4(data[2].x, data[2].y, data[3].x, data[3].y));
        }
        arch::fence_async_global();
        warpgroup::sync(READY + 1 + consumer);
        if (warpgroup::laneid() == 0) {
            arch::store_release_global(g.marks + (part * D::consumers + consumer), g.mark);
        }
    }

    // They come through the ring, behind the last step.
    __device__ __forceinline__ void take(typename D::Shared& shared, int& slot, int& phase,
                                         rt_fl<16, D::most_columns>& d) const {
        const int in_stage = (2 + g.width / 64) * D::part_bytes;
#pragma unroll 1
        for (int part = 0; part < at.segment.taken; ++part) {
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                if (i * D::unit >= g.width) break;
                if (i % D::units_at_once == 0) wait(shared.full[slot], phase);
                const uint32_t address =
                    shared.parts[0].address() + slot * in_stage +
                    (i % D::units_at_once * 2 * THREADS + threadIdx.x) * uint32_t(sizeof(float4));
                const auto low = arch::load_shared<float4>(address);
                const auto high = arch::load_shared<float4>(address + THREADS * sizeof(float4));
                auto& data = d.tiles[0][i].data;
                data[0].x += low.x, data[0].y += low.y, data[1].x += low.z, data[1].y += low.w;
                data[2].x += high.x, data[2].y += high.y, data[3].x += high.z, data[3].y += high.w;
                if (i % D::units_at_once == D::units_at_once - 1) {
                    warpgroup::sync(READY + 1 + consumer);
                    release_stage(shared.empty[slot]);
                    if (++slot == g.stages) slot = 0, phase ^= 1;
                }
            }
        }
    }

    // Rows that the tile before has as well are that one's.
    __device__ __forceinline__ void store(rt_fl<16, D::most_columns>& d) const {
        if (g.bias != nullptr || g.alpha != 1.f) scale(d);
        const uint32_t row = at.m(g) + consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
        const uint32_t quarter = laneid() % 4, own = at.row * D::height;
        uint4* to = reinterpret_cast<uint4*>(g.out + row * g.out_stride);
        uint32_t col = at.n(g) + quarter * 8;
#pragma unroll
        for (int i = 0; i < UNITS; i += 2, col += 32) {
            if (i * D::unit >= g.width) break;
            uint32_t upper[4], lower[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& data = d.tiles[0][i + j / 2].data;
                upper[j] = rounded(data[j % 2 * 2]);
                lower[j] = rounded(data[j % 2 * 2 + 1]);
            }
            turn(upper, quarter);
            turn(lower, quarter);
            if (col >= g.n) continue;
            if (row >= own) {
                arch::store_global(to + col / 8,
                                   make_uint4(upper[0], upper[1], upper[2], upper[3]));
            }
            if (row + 8 >= own) {
                arch::store_global(to + g.out_stride * 2 + col / 8,
                                   make_uint4(lower[0], lower[1], lower[2], lower[3]));
            }
        }
    }

  private:
    __device__ __forceinline__ void scale(rt_fl<16, D::most_columns>& d) const {
        uint32_t col = at.n(g) + laneid() % 4 * 2;
#pragma unroll
        for (int i = 0; i < UNITS * 2; ++i, col += 8) {
            if (i * 8 >= g.width) break;
            float2 bias = make_float2(0, 0);
            if (g.bias != nullptr && col < g.n) {
                const T* from = static_cast<const T*>(g.bias) + col;
                bias.x = convert<float>(arch::load_global(from));
                bias.y = convert<float>(arch::load_global(from + 1));
            }
            auto& data = d.tiles[0][i / 2].data;
#pragma unroll
            for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) {
                data[j].x = g.alpha * data[j].x + bias.x, data[j].y = g.alpha * data[j].y + bias.y;
            }
        }
    }
    static __device__ __forceinline__ uint32_t rounded(const float2& sum) {
        return arch::bit_cast<uint32_t>(pack_pair<T>(sum.x, sum.y));
    }
    // Of four lanes' words, lane i gets the i-th of each.
    static __device__ __forceinline__ void turn(uint32_t (&words)[4], uint32_t lane) {
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) {
            const bool upper = (lane & apart) != 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if ((i & apart) != 0) continue;
                const uint32_t kept = upper ? words[i + apart] : words[i];
                const uint32_t sent = upper ? words[i] : words[i + apart];
                const uint32_t got = arch::shuffle_xor(sent, apart);
                words[i] = upper ? got : kept;
                words[i + apart] = upper ? kept : got;
            }
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
