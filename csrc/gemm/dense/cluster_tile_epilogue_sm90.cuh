// How cluster_tile_sm90.cuh stores its tiles: whole ones from the registers of the consumers; those
// that a cluster divides, and those with an epilogue, by the elements of their sums in shared
// memory.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/common/vec4_sm90.cuh"
#include "csrc/gemm/dense/cluster_tile_types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

template <class Traits>
__device__ __forceinline__ void sync_consumers() {
    arch::named_barrier_sync(READY + 1, Traits::consumer_threads);
}

// The sums go to shared memory, where the stages were.
template <class Traits>
__device__ __forceinline__ void share_sums(typename Traits::Shared& shared,
                                           const rt_fl<16, Traits::config.block_n>& d) {
    sync_consumers<Traits>();
    const uint32_t sums = shared.ring[0].a[0].address();
    const int row = kittens::warpid() * 16 + laneid() / 4, col = laneid() % 4 * 2;
#pragma unroll
    for (int j = 0; j < d.width; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = (row + r % 2 * 8) * Traits::pitch + j * 16 + r / 2 * 8 + col;
            arch::store_shared(sums + at * 4, d.tiles[0][j].data[r]);
        }
    }
}

// Stores a tile that is not divided, by warp, through shared memory where the consumer's rows of a
// were: 16 bytes per lane, or neighbouring words where rows are not aligned.
template <class Traits>
__device__ __forceinline__ void store_tile(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared,
                                           const ClusterTilePosition& at,
                                           const rt_fl<16, Traits::config.block_n>& d) {
    constexpr Config C = Traits::config;
    using staging = st<bf16, 16, 64>;
    constexpr int subtiles = C.block_n / staging::cols;
    static_assert(subtiles <= Traits::least_stages);
    const int consumer = warpgroup::groupid();
    // Where a's rows are adjacent in memory, a warp's share of a stage holds rows of other warps.
    if constexpr (C.a_m_major) warpgroup::sync(READY + 2 + consumer);
    const auto buffer = [&](int subtile) -> staging& {
        auto& buffers =
            reinterpret_cast<staging(&)[WARPGROUP_WARPS]>(shared.ring[subtile].a[consumer]);
        return buffers[warpgroup::warpid()];
    };
#pragma unroll
    for (int subtile = 0; subtile < subtiles; ++subtile) {
        rt_fl<16, staging::cols> sums;
        rt_bf<16, staging::cols> values;
        take_subtile(sums, d, subtile * staging::cols);
        round_to<typename Traits::T>(values, sums);
        kittens::warp::store(buffer(subtile), values);
    }
    arch::sync_warp();
    if (!g.vec8_aligned) {
        const uint32_t row = at.m + kittens::warpid() * 16;
        if (row >= g.m) return;
#pragma unroll 1
        for (uint32_t subtile = 0; subtile < subtiles; ++subtile) {
            const uint32_t n = at.n + subtile * staging::cols;
            if (n >= g.n) return;
            auto* to = static_cast<bf16*>(g.out) +
                       (at.batch * g.out_batch_stride + int64_t(row) * g.out_stride + n);
            if (g.vec2_aligned) {
                copy_rows(buffer(subtile), reinterpret_cast<uint32_t*>(to), g.out_stride / 2,
                          g.m - row, (g.n - n) / 2);
            } else {
                copy_rows(buffer(subtile), reinterpret_cast<uint16_t*>(to), g.out_stride, g.m - row,
                          g.n - n);
            }
        }
        return;
    }
    const int first = laneid() / 8, col = laneid() % 8 * 8;
    const uint32_t m = at.m + kittens::warpid() * 16 + first, n = at.n + col;
    auto* to =
        static_cast<bf16*>(g.out) + (at.batch * g.out_batch_stride + int64_t(m) * g.out_stride + n);
#pragma unroll
    for (int row = 0; row < 16; row += 4) {
        if (m + row < g.m) {
#pragma unroll
            for (int subtile = 0; subtile < subtiles; ++subtile) {
                if (n + subtile * staging::cols < g.n) {
                    arch::store_global_whole(
                        to + subtile * staging::cols,
                        arch::load_shared<uint4>(buffer(subtile).address_of(first + row, col)));
                }
            }
        }
        to += 4 * g.out_stride;
    }
}

// Stores neighbouring values as the output's type, those of them that the output has.
template <int width>
__device__ __forceinline__ void store_values(DType type, void* out, int64_t at,
                                             const float (&values)[width], int count) {
    if (type == DType::fp32) {
        auto* to = static_cast<float*>(out) + at;
        if constexpr (width == 4)
            store_four(to, values, true, count);
        else
            arch::store_global(to, values[0]);
        return;
    }
    uint16_t words[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
        words[i] = type == DType::bf16 ? arch::bit_cast<uint16_t>(convert<bf16>(values[i]))
                                       : arch::bit_cast<uint16_t>(convert<half>(values[i]));
    }
    auto* to = static_cast<uint16_t*>(out) + at;
    if (width == 4 && count >= 4) {
        arch::store_global(reinterpret_cast<uint2*>(to),
                           uint2{words[0] | uint32_t{words[1 % width]} << 16,
                                 words[2 % width] | uint32_t{words[3 % width]} << 16});
        return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
        if (i < count) arch::store_global(to + i, words[i]);
    }
}

// Adds neighbouring values of the output's type, times a factor.
template <int width>
__device__ __forceinline__ void add_values(float (&sum)[width], DType type, const void* values,
                                           int64_t at, float factor, int count) {
    with_type(const_cast<void*>(values), type, [&](auto* from) {
        float more[width];
        if constexpr (width == 4)
            load_four(more, from + at, true, count);
        else
            more[0] = convert<float>(arch::load_global(from + at));
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += factor * more[i];
    });
}

// What a fused epilogue does to neighbouring values of a row, behind the bias.
template <class Globals, int width>
__device__ __forceinline__ void fused_values(const Globals& g, uint32_t batch, uint32_t row,
                                             uint32_t n, float (&sum)[width], int count) {
    const Epilogue& e = g.epilogue;
    if (e.aux != nullptr)
        store_values(g.out_dtype, e.aux, (int64_t(batch) * g.m + row) * g.n + n, sum, count);
    activate(e.activation, sum);
    if (e.residual != nullptr) {
        add_values(sum, g.out_dtype, e.residual,
                   batch * e.residual_batch_stride + int64_t(row) * e.residual_stride + n, e.beta,
                   count);
    }
}

// Reduces and stores the block's share of the tile: `width` neighbours of a row at a time.
template <class Traits, int width>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterTilePosition& at) {
    constexpr Config C = Traits::config;
    using T = typename Traits::T;
    constexpr int groups = C.block_n / width;
    using Sums = std::conditional_t<width == 4, float4, float>;
    const uint32_t sums = shared.ring[0].a[0].address();
    const int rows = min(int(g.m) - int(at.m), C.block_m);
    const auto* bias = static_cast<const T*>(g.epilogue.bias);
    const uint32_t block = at.in_m + g.share_m * at.in_n, next = g.share_m * g.share_n;
#pragma unroll 1
    for (int i = at.rank * Traits::consumer_threads + int(threadIdx.x); i < rows * groups;
         i += g.splits * Traits::consumer_threads) {
        const int row = i / groups, col = i % groups * width;
        const uint32_t n = at.n + col;
        if (n >= g.n) continue;
        const uint32_t from = sums + (row * Traits::pitch + col) * 4;
        float sum[width] = {};
        const auto add = [&](const Sums& part) {
            const auto values = arch::bit_cast<detail::elements<float, width>>(part);
#pragma unroll
            for (int j = 0; j < width; ++j) sum[j] += values.v[j];
        };
        if (g.splits == 1) {
            add(arch::load_shared<Sums>(from));
        } else {
            Sums parts[MAX_CLUSTER_BLOCKS];
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < g.splits) {
                    parts[rank] = arch::load_cluster_shared<Sums>(
                        arch::map_shared_rank(from, block + next * rank));
                }
            }
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < g.splits) add(parts[rank]);
            }
        }
        const int count = min(int(g.n - n), width);
#pragma unroll
        for (int j = 0; j < width; ++j) {
            sum[j] *= g.epilogue.alpha;
            if (bias != nullptr && j < count)
                sum[j] += convert<float>(arch::load_global(bias + n + j));
        }
        if (g.fused) fused_values(g, at.batch, at.m + row, n, sum, count);
        store_values(g.out_dtype, g.out,
                     at.batch * g.out_batch_stride + int64_t(at.m + row) * g.out_stride + n, sum,
                     count);
    }
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
