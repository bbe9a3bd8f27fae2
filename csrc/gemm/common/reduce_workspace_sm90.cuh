// Reduction of partial sums through a workspace in global memory, for the split-K kernel whose
// traits are `Traits` (SplitKTraits of dense/split_k_sm90.cuh). Sums are added in a fixed order, so
// that reruns give the same bits.
//
// Split-K reduces and scatters: a block stores for each of its peers the columns that the peer
// finishes, in the order of the registers, and adds what it gets to its own sums. Stream-K does a
// fix-up: the finishing peer gets all partial sums of the others, through the ring of stages,
// behind its last products. The two consumer warpgroups work independently, so that the first one's
// stores overlap with the last products of the second.
#pragma once

#include "csrc/gemm/common/cluster_sm90.cuh"
#include "csrc/gemm/common/stream_k.h"
#include "csrc/gemm/common/vec4_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// A segment of a block, and its tile. Consecutive blocks have the same range of k, of tiles in a
// compact rectangle, so that they read the same lines at the same time.
template <class Traits>
struct SegmentPosition {
    StreamKSegment segment;
    uint32_t tile, row, column;

    __device__ __forceinline__ SegmentPosition(const typename Traits::Globals& g,
                                               const StreamKSegment& s)
        : segment(s),
          tile(s.tile * gridDim.x + blockIdx.x),
          row(tile - g.rows.divide(tile) * g.rows.value),
          column(g.rows.divide(tile)) {}
    // The number, in the workspace, of the i-th partial sum that the block receives, or of the one
    // that it stores.
    __device__ __forceinline__ uint32_t partial(int i) const {
        return (segment.partial + i) * gridDim.x + blockIdx.x;
    }
    __device__ __forceinline__ uint32_t m(const typename Traits::Globals& g) const {
        return min(row * Traits::height, g.last_row);
    }
    __device__ __forceinline__ uint32_t n(const typename Traits::Globals& g) const {
        return column * static_cast<uint32_t>(g.width);
    }
};

// Where a partial sum lies in the workspace: by unit of columns, half and thread.
template <class Traits>
__device__ __forceinline__ float4* partial_at(const typename Traits::Globals& g, uint32_t number) {
    constexpr uint32_t threads = Traits::consumers * WARPGROUP_THREADS;
    return g.partials + int64_t(number) * g.width * (2 * threads / Traits::unit);
}

// Split-K: reduce-scatter among the peers of a tile. A thread has the same elements of the tile in
// every block, so that partial sums need no transposition.
template <class Traits>
struct SplitKReduce {
    using T = typename Traits::T;
    static constexpr uint32_t THREADS = Traits::consumers * WARPGROUP_THREADS;
    // Units of other blocks that a thread has in flight at a time.
    static constexpr int AHEAD = 8;
    const typename Traits::Globals& g;
    const int consumer = warpgroup::groupid();
    const SegmentPosition<Traits> at;
    const uint32_t splits = gridDim.z, rank = blockIdx.z;
    const uint32_t first_block = at.tile * splits;  // of the tile
    // The units of columns that this block finishes.
    const uint32_t first = rank * g.units_each + min(rank, g.units_more);
    const uint32_t end = first + g.units_each + (rank < g.units_more);
    // Where the thread keeps its own sums, in the first stage, and the distance to the next stage.
    const uint32_t own_sums, stage_bytes;

    __device__ __forceinline__ SplitKReduce(const typename Traits::Globals& globals,
                                            typename Traits::Shared& shared,
                                            const SegmentPosition<Traits>& position)
        : g(globals),
          at(position),
          own_sums(shared.tiles64[0].address() + warpgroup::groupid() * Traits::tile64_bytes +
                   warpgroup::laneid() * uint32_t(sizeof(float4))),
          stage_bytes((2 + g.width / 64) * Traits::tile64_bytes) {}

    __device__ __forceinline__ uint64_t* flag(uint32_t from, uint32_t to) const {
        return g.flags + (((first_block + from) * splits + to) * Traits::consumers + consumer);
    }
    __device__ __forceinline__ uint32_t own_at(uint32_t unit) const {
        const uint32_t i = unit - first;
        return own_sums + i / Traits::units_per_tile64 * stage_bytes +
               i % Traits::units_per_tile64 * Traits::unit_bytes;
    }
    static constexpr uint32_t half_bytes = Traits::unit_bytes / 2;

    __device__ __forceinline__ void send(const rt_fl<16, Traits::max_n>& d) const {
        float4* to = partial_at<Traits>(g, first_block + rank) + threadIdx.x;
        // The barrier is needed because a thread keeps its sums where operands of other warps were.
        warpgroup::sync(READY + 1 + consumer);
#pragma unroll
        for (uint32_t i = 0; i < Traits::max_n / Traits::unit; ++i) {
            if (int(i * Traits::unit) >= g.width) break;
            const float4 low = vec4_of(d, 2 * i), high = vec4_of(d, 2 * i + 1);
            if (i >= first && i < end) {
                arch::store_shared(own_at(i), low);
                arch::store_shared(own_at(i) + half_bytes, high);
            } else {
                arch::store_global(to + i * 2 * THREADS, low);
                arch::store_global(to + (i * 2 + 1) * THREADS, high);
            }
        }
        // One release for the warpgroup; each lane raises the flag for one peer, and waits for the
        // flag of that peer.
        warpgroup::sync(READY + 1 + consumer);
        const auto other = static_cast<uint32_t>(warpgroup::laneid());
        if (other < splits && other != rank) {
            arch::store_release_global(flag(rank, other), g.epoch);
            uint64_t* there = flag(other, rank);
            while (arch::load_acquire_global(there) != g.epoch) {
            }
            arch::store_global(there, uint64_t{0});
        }
        warpgroup::sync(READY + 1 + consumer);
    }

    // Adds the partial sums of the peers, one peer after the other.
    __device__ __forceinline__ void receive() const {
        uint32_t unit = first, other = rank == 0 ? 1 : 0;
#pragma unroll 1
        while (other < splits) {
            float4 more[AHEAD][2];
            uint32_t to[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                to[i] = 0;
                if (other < splits) {
                    to[i] = own_at(unit);
                    const float4* from = partial_at<Traits>(g, first_block + other) +
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

    // Stores the finished units: a thread has two neighbouring columns in each half of a unit, of
    // two rows.
    __device__ __forceinline__ void store() const {
        const uint32_t row = at.m(g) + consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
        uint32_t col = at.n(g) + first * Traits::unit + laneid() % 4 * 2;
        uint32_t* to = g.out + (row * g.out_stride + col / 2);
#pragma unroll 1
        for (uint32_t unit = first; unit < end; ++unit) {
#pragma unroll
            for (int half = 0; half < 2; ++half, col += 8, to += 4) {
                if (col >= g.n) continue;
                const auto sum = arch::load_shared<float4>(own_at(unit) + half * half_bytes);
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

// Stream-K: the helping peers store all of their partial sums, and the finishing peer does the
// fix-up, in the order of k.
template <class Traits>
struct StreamKFixup {
    using T = typename Traits::T;
    static constexpr uint32_t THREADS = Traits::consumers * WARPGROUP_THREADS;
    static constexpr int UNITS = Traits::max_n / Traits::unit;
    const typename Traits::Globals& g;
    const SegmentPosition<Traits>& at;
    const int consumer = warpgroup::groupid();

    __device__ __forceinline__ void send(const rt_fl<16, Traits::max_n>& d) const {
        const uint32_t partial = at.partial(0);
        float4* to = partial_at<Traits>(g, partial) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            if (i * Traits::unit >= g.width) break;
            arch::store_global(to + i * 2 * THREADS, vec4_of(d, 2 * i));
            arch::store_global(to + (i * 2 + 1) * THREADS, vec4_of(d, 2 * i + 1));
        }
        arch::fence_async_global();
        warpgroup::sync(READY + 1 + consumer);
        if (warpgroup::laneid() == 0) {
            arch::store_release_global(g.flags + (partial * Traits::consumers + consumer), g.epoch);
        }
    }

    // The fix-up: partial sums come through the ring of stages, behind the last step of k.
    __device__ __forceinline__ void receive(typename Traits::Shared& shared, int& slot, int& phase,
                                            rt_fl<16, Traits::max_n>& d) const {
        const int in_stage = (2 + g.width / 64) * Traits::tile64_bytes;
#pragma unroll 1
        for (int partial = 0; partial < at.segment.received; ++partial) {
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                if (i * Traits::unit >= g.width) break;
                if (i % Traits::units_at_a_time == 0) wait(shared.full[slot], phase);
                const uint32_t address = shared.tiles64[0].address() + slot * in_stage +
                                         (i % Traits::units_at_a_time * 2 * THREADS + threadIdx.x) *
                                             uint32_t(sizeof(float4));
                const auto low = arch::load_shared<float4>(address);
                const auto high = arch::load_shared<float4>(address + THREADS * sizeof(float4));
                add_vec4(d, 2 * i, low);
                add_vec4(d, 2 * i + 1, high);
                if (i % Traits::units_at_a_time == Traits::units_at_a_time - 1) {
                    warpgroup::sync(READY + 1 + consumer);
                    release_stage(shared.empty[slot]);
                    if (++slot == g.stages) slot = 0, phase ^= 1;
                }
            }
        }
    }

    // Stores the tile. The last row of tiles overlaps the one before; rows that both have are
    // stored by the one before alone.
    __device__ __forceinline__ void store(rt_fl<16, Traits::max_n>& d) const {
        if (g.bias != nullptr || g.alpha != 1.f) scale(d);
        const uint32_t row = at.m(g) + consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
        const uint32_t quarter = laneid() % 4, own = at.row * Traits::height;
        uint4* to = reinterpret_cast<uint4*>(g.out + row * g.out_stride);
        uint32_t col = at.n(g) + quarter * 8;
#pragma unroll
        for (int i = 0; i < UNITS; i += 2, col += 32) {
            if (i * Traits::unit >= g.width) break;
            uint32_t upper[4], lower[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& data = d.tiles[0][i + j / 2].data;
                upper[j] = rounded(data[j % 2 * 2]);
                lower[j] = rounded(data[j % 2 * 2 + 1]);
            }
            transpose(upper, quarter);
            transpose(lower, quarter);
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
    __device__ __forceinline__ void scale(rt_fl<16, Traits::max_n>& d) const {
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
    // Transposes 4 x 4 words among four lanes: lane i gets the i-th word of each.
    static __device__ __forceinline__ void transpose(uint32_t (&words)[4], uint32_t lane) {
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
