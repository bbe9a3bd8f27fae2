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

// Neighbouring values of the output's type.
template <int width>
__device__ __forceinline__ void load_values(float (&values)[width], DType type, const void* from,
                                            int64_t at, int count) {
    with_type(const_cast<void*>(from), type, [&](auto* data) {
        if constexpr (width == 4)
            load_four(values, data + at, true, count);
        else
            values[0] = convert<float>(arch::load_global(data + at));
    });
}

// Reduces and stores the block's share of the tile: `width` neighbours of a row at a time, a thread
// always the same columns. Of a tile that is not divided a thread loads several rows of the
// residual at once, so that it waits once for them.
template <class Traits, int width, bool divided>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterTilePosition& at) {
    constexpr Config C = Traits::config;
    using T = typename Traits::T;
    // Threads side by side in a row, and rows apart.
    constexpr int groups = C.block_n / width, threads = Traits::consumer_threads;
    constexpr int lanes = groups < threads ? groups : threads, step = threads / lanes;
    constexpr int rows_at_a_time = divided ? 1 : 4;
    using Sums = std::conditional_t<width == 4, float4, float>;
    const Epilogue& e = g.epilogue;
    const int splits = divided ? g.splits : 1, rows = min(int(g.m) - int(at.m), C.block_m);
    const uint32_t block = at.in_m + g.share_m * at.in_n, next = g.share_m * g.share_n;
    const int lane = int(threadIdx.x) % lanes, line = int(threadIdx.x) / lanes;
    if (line >= step) return;
    const auto reduced = [&](int row, int col, float(&sum)[width]) {
        const auto add = [&](const Sums& part) {
            const auto values = arch::bit_cast<detail::elements<float, width>>(part);
#pragma unroll
            for (int j = 0; j < width; ++j) sum[j] += values.v[j];
        };
        const uint32_t from = shared.ring[0].a[0].address() + (row * Traits::pitch + col) * 4;
        if constexpr (!divided) {
            add(arch::load_shared<Sums>(from));
        } else {
            Sums parts[MAX_CLUSTER_BLOCKS];
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < splits) {
                    parts[rank] = arch::load_cluster_shared<Sums>(
                        arch::map_shared_rank(from, block + next * rank));
                }
            }
#pragma unroll
            for (int rank = 0; rank < MAX_CLUSTER_BLOCKS; ++rank) {
                if (rank < splits) add(parts[rank]);
            }
        }
    };
#pragma unroll 1
    for (int col = lane * width; col < C.block_n; col += lanes * width) {
        const uint32_t n = at.n + col;
        const int count = min(int(g.n) - int(n), width);
        if (count <= 0) return;
        float bias[width] = {};
        if (e.bias != nullptr) {
#pragma unroll
            for (int j = 0; j < width; ++j) {
                const T* from = static_cast<const T*>(e.bias) + n + j;
                if (j < count) bias[j] = convert<float>(arch::load_global(from));
            }
        }
#pragma unroll 1
        for (int first = at.rank * step + line; first < rows;
             first += splits * step * rows_at_a_time) {
            float residual[rows_at_a_time][width] = {};
            if (e.residual != nullptr) {
#pragma unroll
                for (int i = 0; i < rows_at_a_time; ++i) {
                    const int row = first + i * step;
                    if (row >= rows) break;
                    load_values(residual[i], g.out_dtype, e.residual,
                                at.batch * e.residual_batch_stride +
                                    int64_t(at.m + row) * e.residual_stride + n,
                                count);
                }
            }
#pragma unroll
            for (int i = 0; i < rows_at_a_time; ++i) {
                const int row = first + i * step;
                if (row >= rows) break;
                float sum[width] = {};
                reduced(row, col, sum);
#pragma unroll
                for (int j = 0; j < width; ++j) sum[j] = sum[j] * e.alpha + bias[j];
                if (e.aux != nullptr) {
                    store_values(g.out_dtype, e.aux,
                                 (int64_t(at.batch) * g.m + at.m + row) * g.n + n, sum, count);
                }
                activate(e.activation, sum);
                if (e.residual != nullptr) {
#pragma unroll
                    for (int j = 0; j < width; ++j) sum[j] += e.beta * residual[i][j];
                }
                store_values(g.out_dtype, g.out,
                             at.batch * g.out_batch_stride + int64_t(at.m + row) * g.out_stride + n,
                             sum, count);
            }
        }
    }
}
template <class Traits>
__device__ __forceinline__ void finish_share(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const ClusterTilePosition& at) {
    const bool divided = g.splits > 1;
    if (g.vec4_aligned)
        divided ? finish_share<Traits, 4, true>(g, shared, at)
                : finish_share<Traits, 4, false>(g, shared, at);
    else
        divided ? finish_share<Traits, 1, true>(g, shared, at)
                : finish_share<Traits, 1, false>(g, shared, at);
}

}  // namespace sm90
}  // namespace thunderkittens::gemm
