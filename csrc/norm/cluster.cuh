// Rows that the blocks of a cluster divide: which columns a block has, and statistics of all of
// them by one exchange. A warp finds the mean of what it has, then squares and products of the
// distances from that mean, writes them to every block of the cluster, and each warp adds up what
// all have written (Chan, Golub and LeVeque, "Algorithms for computing the sample variance"): as
// exact as two passes, with one barrier.
#pragma once

#include "csrc/norm/units.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// The columns of a block.
struct Slice {
    int begin, end;

    __device__ __forceinline__ explicit Slice(const Params& p)
        : begin(static_cast<int>(arch::cluster_rank()) * p.slice),
          end(static_cast<int>(min(p.width, int64_t{begin} + p.slice))) {}
};

// Of the columns of a warp, or of a row: how many, their mean, or 0 where none is taken, and the
// squares of the distances from it. Of a gradient the sums of g = dy w, and of g times the
// distances.
struct Moments {
    float mean = 0, squares = 0, grad = 0, product = 0;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = WARP / 2; i > 0; i /= 2) x += arch::shuffle_xor(x, i);
    return x;
}

constexpr int CLUSTER_WARPS = MOST_SLICES * MAX_LANES / WARP;
// Of two rows: one is read while the next is written.
struct ClusterShared {
    float4 moments[2][CLUSTER_WARPS];
};
// Where a kernel begins: the others may write here once they have seen it.
__device__ __forceinline__ void begin_cluster() {
    arch::static_shared<ClusterShared>();
    arch::cluster_arrive_relaxed();
}

// The exchange of a row's moments, by the warps of a cluster. Blocks may write to each other after
// the cluster_wait() that follows begin_cluster().
template <bool LAYER, bool GRADIENT, int ENTRIES>
struct Exchange {
    int entries, own;  // warps of the cluster, and which of them this is
    float count = 0;   // elements of this one
    float counts[LAYER && GRADIENT ? ENTRIES : 1];  // and of those that this lane adds

    // `units` of a lane, of columns that are lanes * UNIT apart.
    __device__ __forceinline__ Exchange(const Params& p, int lanes, int units) {
        const int warps = lanes / WARP, block = static_cast<int>(arch::cluster_rank());
        entries = p.slices * warps;
        own = block * warps + kittens::warpid();
        if constexpr (LAYER) count = count_of(p, lanes, units, block, kittens::warpid());
        if constexpr (LAYER && GRADIENT) {
#pragma unroll
            for (int i = 0; i < ENTRIES; ++i) {
                const int entry = kittens::laneid() + i * WARP;
                counts[i] = count_of(p, lanes, units, entry / warps, entry % warps);
            }
        }
    }
    static __device__ __forceinline__ float count_of(const Params& p, int lanes, int units,
                                                     int block, int warp) {
        if (block >= p.slices) return 0;
        const int begin = block * p.slice;
        const int end = static_cast<int>(min(p.width, int64_t{begin} + p.slice));
        int count = 0;
#pragma unroll
        for (int u = 0; u < units; ++u) {
            const int first = begin + (u * lanes + warp * WARP) * UNIT;
            count += max(0, min(end - first, WARP * UNIT));
        }
        return static_cast<float>(count);
    }
    // The mean of a warp of the sums of its lanes.
    __device__ __forceinline__ float mean_of(float sum) const {
        sum = warp_sum(sum);
        return count > 0 ? sum / count : 0.0f;
    }
    __device__ __forceinline__ uint32_t at(int slot, int entry) const {
        return arch::shared_address(&arch::static_shared<ClusterShared>().moments[slot][0]) +
               static_cast<uint32_t>(16 * entry);
    }
    // Those of a warp, which all of its lanes have. To be followed by the cluster's barrier.
    __device__ __forceinline__ void give(const Params& p, int slot, const Moments& m) const {
        const int lane = kittens::laneid();
        if (lane >= p.slices) return;
        arch::store_cluster_shared(
            arch::map_shared_rank(at(slot, own), static_cast<uint32_t>(lane)),
            float4{m.mean, m.squares, GRADIENT ? m.grad : count, m.product});
    }
    // The largest of integers that the warps have, of a later row or slot than what was given.
    __device__ __forceinline__ uint32_t largest(const Params& p, int slot, uint32_t of_warp) const {
        give(p, slot, {.mean = bit_cast<float>(of_warp)});
        arch::cluster_arrive();
        arch::cluster_wait();
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int entry = kittens::laneid() + i * WARP;
            if (entry < entries) most = max(most, arch::load_shared<uint32_t>(at(slot, entry)));
        }
#pragma unroll
        for (int i = WARP / 2; i > 0; i /= 2) most = max(most, arch::shuffle_xor(most, i));
        return most;
    }
    // Those of the row.
    __device__ __forceinline__ Moments take(int slot, float width) const {
        float shifted = 0;  // sum of the distances from the first warp's mean
        Moments sum;
        const float pivot = LAYER ? arch::load_shared<float>(at(slot, 0)) : 0.0f;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int entry = kittens::laneid() + i * WARP;
            if (entry >= entries) continue;
            const auto m = arch::load_shared<float4>(at(slot, entry));
            sum.squares += m.y;
            if constexpr (GRADIENT) sum.grad += m.z, sum.product += m.w;
            if constexpr (LAYER) {
                const float distance = m.x - pivot;
                const float of_all = distance * (GRADIENT ? counts[GRADIENT ? i : 0] : m.z);
                shifted += of_all;
                sum.squares = fmaf(of_all, distance, sum.squares);
                if constexpr (GRADIENT) sum.product = fmaf(distance, m.z, sum.product);
            }
        }
#pragma unroll
        for (int i = WARP / 2; i > 0; i /= 2) {
            sum.squares += arch::shuffle_xor(sum.squares, i);
            if constexpr (GRADIENT) sum.product += arch::shuffle_xor(sum.product, i);
            if constexpr (LAYER) shifted += arch::shuffle_xor(shifted, i);
            if constexpr (LAYER && GRADIENT) sum.grad += arch::shuffle_xor(sum.grad, i);
        }
        if constexpr (LAYER) {
            const float distance = shifted / width;
            sum.mean = pivot + distance;
            sum.squares = fmaf(-shifted, distance, sum.squares);
            if (sum.squares < 0.0f) sum.squares = 0.0f;  // and NaN stays what it is
            if constexpr (GRADIENT) sum.product = fmaf(-distance, sum.grad, sum.product);
        }
        return sum;
    }
};

// Of rows that are not divided.
struct NoExchange {
    __device__ __forceinline__ NoExchange(const Params&, int, int) {}
};

// Entries that a lane adds, of blocks of so many lanes.
constexpr int entries_of_lane(int lanes) { return MOST_SLICES * lanes / WARP / WARP; }

}  // namespace sm90
}  // namespace thunderkittens::norm
