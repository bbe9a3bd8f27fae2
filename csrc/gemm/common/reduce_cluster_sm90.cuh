// Split-K over a cluster, for the swap-AB kernels: the blocks of a cluster divide k, and the
// reduction of their partial sums goes through distributed shared memory, in the order of the
// blocks, so that reruns give the same bits. On the way the sums are transposed back.
#pragma once

#include "csrc/gemm/common/vec4_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// Stores an accumulator to a tile in shared memory whose rows are its columns, `pitch` floats
// apart, from column `first` of the tile on.
template <int pitch, int rows>
__device__ __forceinline__ void store_sums(uint32_t to, const rt_fl<16, rows>& d, int first) {
#pragma unroll
    for (int j = 0; j < rows / 16; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int col = first + warpgroup::warpid() * 16 + laneid() / 4 + r % 2 * 8;
            const int row = j * 16 + r / 2 * 8 + laneid() % 4 * 2;
            const float2 pair = d.tiles[0][j].data[r];
            arch::store_shared(to + (row * pitch + col) * 4, pair.x);
            arch::store_shared(to + ((row + 1) * pitch + col) * 4, pair.y);
        }
    }
}

// All-to-all reduction: every block has its partial sums of a tile in shared memory, rows `pitch`
// floats apart, and each adds up a share of the elements over the `splits` blocks. The consumer
// warpgroup calls begin, store, sync_cluster, total and end, in this order.
template <int pitch>
struct ClusterReduce {
    uint32_t base;
    int splits, barrier;  // the named barrier of the warpgroup
    semaphore &summed, &read;
    int round = 0;

    // Waits until the sums of the tile before have been read.
    __device__ __forceinline__ void begin() {
        if (splits == 1)
            warpgroup::sync(barrier);
        else if (round > 0)
            wait_cluster(read, (round - 1) % 2);
    }
    // Stores the accumulators from column `first` of the tile on.
    template <int rows>
    __device__ __forceinline__ void store(const rt_fl<16, rows>& d, int first) const {
        store_sums<pitch>(base, d, first);
    }
    // Waits until all blocks of the cluster have stored their sums.
    __device__ __forceinline__ void sync_cluster() {
        if (splits == 1) {
            warpgroup::sync(barrier);
            return;
        }
        if (round == 0) cluster::wait();  // the others' semaphores are there
        arch::sync_warp();
        if (laneid() < splits) arrive_remote(summed, laneid());
        wait_cluster(summed, round % 2);
    }
    // The reduced sums of four neighbouring columns of a row.
    __device__ __forceinline__ void total(float (&sum)[4], int row, int col) const {
        const uint32_t at = base + (row * pitch + col) * 4;
        float4 total{};
        if (splits == 1) {
            total = arch::load_shared<float4>(at);
        } else {
            for (int i = 0; i < splits; ++i) {
                const auto part = arch::load_cluster_shared<float4>(arch::map_shared_rank(at, i));
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
        }
        sum[0] = total.x, sum[1] = total.y, sum[2] = total.z, sum[3] = total.w;
    }
    __device__ __forceinline__ void end() {
        if (splits > 1) {
            arch::sync_warp();
            if (laneid() < splits) arrive_remote(read, laneid());
        }
        ++round;
    }
};

// Gather to the first block, for one tile per cluster and warpgroup: the others send their partial
// sums in the order of the registers, without a transposition, and the first block adds them in the
// order of the blocks. It takes fewer barriers than the all-to-all reduction.
template <int rows>
struct ClusterGather {
    static constexpr int vec4s = rows / 8;  // of a thread's sums, 16 bytes each
    static constexpr int bytes = vec4s * WARPGROUP_THREADS * 16;
    uint32_t base;  // of what this warpgroup is sent: by block, vec4, thread
    semaphore& summed;

    __device__ __forceinline__ void send(const rt_fl<16, rows>& d, int rank) const {
        cluster::wait();  // the first block's semaphores are there
        const uint32_t to =
            arch::map_shared_rank(base + (rank - 1) * bytes + warpgroup::laneid() * 16, 0);
#pragma unroll
        for (int i = 0; i < vec4s; ++i) {
            arch::store_cluster_shared(to + i * WARPGROUP_THREADS * 16, vec4_of(d, i));
        }
        arch::sync_warp();
        if (laneid() == 0) arrive_remote(summed, 0);
    }
    __device__ __forceinline__ void receive(rt_fl<16, rows>& d, int splits) const {
        cluster::wait();
        wait_cluster(summed, 0);
        uint32_t from = base + warpgroup::laneid() * 16;
#pragma unroll 1
        for (int rank = 1; rank < splits; ++rank, from += bytes) {
#pragma unroll
            for (int i = 0; i < vec4s; ++i) {
                add_vec4(d, i, arch::load_shared<float4>(from + i * WARPGROUP_THREADS * 16));
            }
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
