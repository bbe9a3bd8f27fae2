// The epilogue of the swap-AB kernels that dequantize in registers, nvfp4_sm90.cuh and
// mxfp8_dequant_sm90.cuh; and the partial sums of stream-K.
#pragma once

#include "csrc/gemm/swap_ab/nvfp4_types_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

template <class Traits>
struct SplitKReduce;  // nvfp4_split_k_sm90.cuh

// Reduces the sums of a tile over warpgroups and the cluster, applies scale, bias and activation,
// and stores.
template <class Traits>
struct TileEpilogue {
    static constexpr Config C = Traits::config;
    static constexpr int THREADS = Traits::consumers * WARPGROUP_THREADS;
    static constexpr int PASSES = C.tokens / Traits::pass;
    // A thread has four columns of every STEP-th row, and loads AT_A_TIME of these at a time, so
    // that it waits for all of them once.
    static constexpr int FOURS = Traits::block_rows / 4;
    static constexpr int STEP = THREADS / FOURS;
    // The most rows that registers allow without spills.
    static constexpr int MOST = Traits::consumers < 4 ? 4 : C.k_groups == 1 ? 2 : 1;
    static constexpr int AT_A_TIME = Traits::pass <= STEP         ? 1
                                     : Traits::pass / STEP < MOST ? Traits::pass / STEP
                                                                  : MOST;
    static_assert(THREADS % FOURS == 0);
    static_assert(Traits::pass < STEP || Traits::pass % (STEP * AT_A_TIME) == 0);
    // Where a block has one tile, the sums of all rows fit the ring, which is not needed behind the
    // products.
    static constexpr int SUMS_BYTES = sizeof(Traits::Shared::sums) / C.k_groups;
    static constexpr bool ALL_FIT = requires(typename Traits::Globals& g) {
        g.one_pass;
    } && PASSES > 1 && SUMS_BYTES* PASSES <= int(sizeof(Traits::Shared::stages));
    int pass_number = 0;

    // `d` are the sums of this warpgroup's rows and its share of k.
    __device__ __forceinline__ void tile(const typename Traits::Globals& g,
                                         typename Traits::Shared& shared,
                                         const rt_fl<16, C.tokens>& d, const Tile& tile,
                                         int row_group, int k_group) {
        int row_of_lane = laneid() / 4;
        if constexpr (requires { Traits::row_of(0); }) row_of_lane = Traits::row_of(row_of_lane);
        const int column = row_group * PIECE + warpgroup::warpid() * 16 + row_of_lane;
        const float scale = scale_of(g, tile.group);
        const float4 bias = bias_of(g, tile);
        int passes = 1;
        uint32_t sums = shared.sums[0].address();
        if constexpr (ALL_FIT) {
            if (g.one_pass) {
                passes = PASSES;
                sums = arch::shared_address(&shared.stages);
                arch::named_barrier_sync(SUMS, THREADS);  // nobody multiplies any more
            }
        }
        // The registers are chosen by branches, so that the code that follows exists once.
#pragma unroll 1
        for (int pass = 0; pass < PASSES; pass += passes) {
            // Rows that the tile does not have are the last ones.
            if (tile.token + pass * Traits::pass >= tile.end) break;
            wait_until_read(g, shared);
            const bool empty = tile.group >= g.groups;
#pragma unroll
            for (int which = 0; which < PASSES; ++which) {
                if (which < pass || which >= pass + passes) continue;
                const uint32_t to = sums + k_group * uint32_t(SUMS_BYTES) +
                                    ((which - pass) * Traits::pass * Traits::pitch + column) * 4;
#pragma unroll
                for (int j = 0; j < Traits::pass / 16; ++j) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int row = j * 16 + r / 2 * 8 + laneid() % 4 * 2;
                        float2 pair = d.tiles[0][which * (Traits::pass / 16) + j].data[r];
                        if (empty) pair = {0.f, 0.f};
                        const uint32_t at = to + (row * Traits::pitch + r % 2 * 8) * 4;
                        arch::store_shared(at, pair.x);
                        arch::store_shared(at + Traits::pitch * 4, pair.y);
                    }
                }
            }
            wait_until_summed(g, shared);
            rows(g, tile, scale, bias, pass * Traits::pass, passes * Traits::pass, sums);
            if (g.splits > 1) {
                arch::sync_warp();
                if (laneid() < g.splits) arrive_remote(shared.read, laneid());
            }
            ++pass_number;
        }
    }
    // Called behind the last tile. Groups may leave a cluster without any tile, and it has not
    // waited for the other blocks then: a thread that arrives at the cluster's barrier has to wait
    // before it arrives again (PTX ISA, barrier.cluster).
    __device__ __forceinline__ void end(const typename Traits::Globals& g) const {
        if (g.splits > 1 && pass_number == 0) cluster::wait();
    }

  private:
    friend SplitKReduce<Traits>;
    static __device__ __forceinline__ uint32_t column_of(const Tile& tile) {
        return tile.row_tile * Traits::block_rows + threadIdx.x % FOURS * 4;
    }
    static __device__ __forceinline__ float4 bias_of(const typename Traits::Globals& g,
                                                     const Tile& tile) {
        float x[4] = {};
        if (g.bias != nullptr && tile.group < g.groups) {
            const uint32_t n = column_of(tile);
            const auto* bias = static_cast<const typename Traits::T*>(g.bias);
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                if (n + j < g.n) x[j] = convert<float>(arch::load_global(bias + n + j));
            }
        }
        return {x[0], x[1], x[2], x[3]};
    }
    __device__ __forceinline__ void wait_until_read(const typename Traits::Globals& g,
                                                    typename Traits::Shared& shared) {
        if (g.splits == 1)
            arch::named_barrier_sync(SUMS, THREADS);
        else if (pass_number > 0)
            wait_cluster(shared.read, (pass_number - 1) % 2);
    }
    __device__ __forceinline__ void wait_until_summed(const typename Traits::Globals& g,
                                                      typename Traits::Shared& shared) {
        if (g.splits == 1) {
            arch::named_barrier_sync(SUMS, THREADS);
        } else {
            if (pass_number == 0) cluster::wait();  // the others' semaphores are there
            arch::sync_warp();
            if (laneid() < g.splits) arrive_remote(shared.summed, laneid());
            wait_cluster(shared.summed, pass_number % 2);
        }
    }

    // Stores rows of the output from the sums of the warpgroups and of the cluster, in the order of
    // its blocks.
    static __device__ __forceinline__ void rows(const typename Traits::Globals& g, const Tile& tile,
                                                float scale, const float4& bias, int first,
                                                int rows_there, uint32_t sums) {
        const int rank = g.splits > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
        const int step = STEP * g.splits;
        const uint32_t n = column_of(tile);
        const int count = int(g.n) - int(n);
        if (count <= 0) return;
        const int end = min(rows_there, int(tile.end - tile.token) - first);
        int row = rank * STEP + int(threadIdx.x) / FOURS;
        uint32_t from = (row * Traits::pitch + threadIdx.x % FOURS * 4) * 4;
        int64_t at = int64_t(tile.token + first + row) * g.n + n;
        const int64_t apart = int64_t(step) * g.n;
#pragma unroll 1
        for (; row < end; row += AT_A_TIME * step) {
            float x[AT_A_TIME][4] = {};
            const auto add = [&](auto load, auto there) {
#pragma unroll
                for (int k_group = 0; k_group < C.k_groups; ++k_group) {
                    const uint32_t at = sums + k_group * uint32_t(SUMS_BYTES) + from;
#pragma unroll
                    for (int i = 0; i < AT_A_TIME; ++i) {
                        if (!there(i)) continue;
                        const float4 more = load(at + i * step * Traits::pitch * 4);
                        x[i][0] += more.x, x[i][1] += more.y, x[i][2] += more.z, x[i][3] += more.w;
                    }
                }
            };
            if (g.splits == 1) {
                // Rows that the tile does not have are added as well.
                add([](uint32_t address) { return arch::load_shared<float4>(address); },
                    [&](int i) { return Traits::consumers < 4 || row + i * step < end; });
            } else {
#pragma unroll 1
                for (int other = 0; other < g.splits; ++other) {
                    add(
                        [&](uint32_t address) {
                            return arch::load_cluster_shared<float4>(
                                arch::map_shared_rank(address, other));
                        },
                        [&](int i) { return row + i * step < end; });
                }
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i) {
                const float four[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = x[i][j] * Traits::W::FACTOR * scale + four[j];
                if (g.activation != gemm::Activation::none) {
                    gemm::sm90::activate(g.activation, x[i]);
                }
            }
            gemm::sm90::with_type(g.out, g.out_dtype, [&](auto* out) {
#pragma unroll
                for (int i = 0; i < AT_A_TIME; ++i) {
                    if (row + i * step >= end) continue;
                    gemm::sm90::store_four(out + at + i * apart, x[i], g.vec4_aligned, count);
                }
            });
            from += AT_A_TIME * step * Traits::pitch * 4;
            at += AT_A_TIME * apart;
        }
    }
};

// Stream-K over all tiles: each block has a range of k of the same size, and where a range ends
// within a tile, its partial sum goes through the workspace to the block that has the end of the
// tile's k, in the order of the registers. A block computes its last tile first, so that others
// seldom wait for it, and waits only for blocks of lower index, behind everything that others wait
// for. The GPU starts blocks in this order, so that there is always one that need not wait,
// whatever else runs on the GPU.
template <class Traits>
struct StreamKPartials {
    static constexpr Config C = Traits::config;
    static constexpr int VEC4S = C.tokens / 8;  // of a thread's sums, 16 bytes each
    static constexpr int THREADS = Traits::consumers * WARPGROUP_THREADS;

    static __device__ __forceinline__ uint64_t* flag(const typename Traits::Globals& g,
                                                     uint32_t block) {
        return g.flags + (block * (THREADS / 32) + threadIdx.x / 32);
    }
    static __device__ __forceinline__ void send(const typename Traits::Globals& g,
                                                const rt_fl<16, C.tokens>& d) {
        float4* to = partials_of<Traits>(g, blockIdx.x);
#pragma unroll
        for (int i = 0; i < VEC4S; ++i) {
            arch::store_global(to + i * THREADS, gemm::sm90::vec4_of(d, i));
        }
        arch::sync_warp();
        if (laneid() == 0) arch::store_release_global(flag(g, blockIdx.x), g.epoch);
    }
    // The fix-up: adds what the blocks before this one have of its first tile.
    static __device__ __forceinline__ void receive(const typename Traits::Globals& g,
                                                   rt_fl<16, C.tokens>& d) {
        const uint32_t multicast = g.multicast;
        const int own = blockIdx.x / multicast, rank = blockIdx.x % multicast;
        const int begin = g.stream_k.of(own).x / g.k_steps * g.k_steps;
        int from = own, x;
        do {
            --from;
            x = g.stream_k.of(from).x;
            const uint32_t block = from * multicast + rank;
            uint64_t* there = flag(g, block);
            if (laneid() == 0) {
                while (arch::load_acquire_global(there) != g.epoch) {
                }
                arch::store_global(there, uint64_t{0});
            }
            arch::sync_warp();
            const float4* partials = partials_of<Traits>(g, block);
#pragma unroll
            for (int i = 0; i < VEC4S; ++i) {
                gemm::sm90::add_vec4(d, i, arch::load_global(partials + i * THREADS));
            }
        } while (x > begin);
    }
};

}  // namespace sm90
}  // namespace thunderkittens::nvfp4_gemm
