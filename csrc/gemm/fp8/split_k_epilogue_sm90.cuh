// How split_k_sm90.cuh adds the sums of the blocks that divide the k of a tile, and stores tiles.
#pragma once

#include "csrc/gemm/common/reduce_cluster_sm90.cuh"
#include "csrc/gemm/common/vec4_sm90.cuh"
#include "csrc/gemm/fp8/split_k_types_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Stages a consumer's sums in shared memory, row by row.
template <class Traits, int width, class D>
__device__ __forceinline__ void stage_sums(typename Traits::Shared& shared, const D& d) {
    constexpr int pitch = sums_pitch(width);
    const uint32_t to = shared.ring.address() + (kittens::warpid() * 16 + laneid() / 4) * pitch +
                        laneid() % 4 * sizeof(float2);
    // No product reads the ring any more.
    arch::named_barrier_sync(DONE, Traits::consumers * WARPGROUP_THREADS);
#pragma unroll
    for (int i = 0; i < width / 8; ++i) {
        const auto& data = d.tiles[0][i / 2].data;
        arch::store_shared(to + i * 32, data[i % 2 * 2]);
        arch::store_shared(to + i * 32 + 8 * pitch, data[i % 2 * 2 + 1]);
    }
}

// A warp's 16 rows of sums: where they lie, where other blocks send theirs, and which of them this
// block finishes.
template <class Traits>
struct SplitKRows {
    const int rank = blockIdx.z, splits = gridDim.z;
    const int pitch, begin, end, each;
    const uint32_t sums, received;

    __device__ __forceinline__ SplitKRows(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared)
        : pitch(sums_pitch(g.width)),
          begin(first_of(rank)),
          end(first_of(rank + 1)),
          each(sent_bytes(g.width, splits)),
          sums(shared.ring.address() + kittens::warpid() * 16 * pitch),
          received(shared.ring.address() + uint32_t(sizeof(shared.ring)) -
                   (kittens::warpid() + 1) * (splits - 1) * each) {}
    __device__ __forceinline__ int first_of(int block) const { return 16 * block / splits; }
};

// Reduce-scatter: sends each other block the rows that it finishes, one lane for each, and waits
// for what they send.
template <class Traits>
__device__ __forceinline__ void scatter_rows(const typename Traits::Globals& g,
                                             typename Traits::Shared& shared,
                                             const SplitKRows<Traits>& rows) {
    const int consumer = warpgroup::groupid(), other = laneid();
    const bool sends = other < rows.splits && other != rows.rank;
    const uint32_t shares = g.share_m * g.share_n;
    const uint32_t to = arch::cluster_rank() + (other - rows.rank) * shares;
    arch::fence_async_shared();
    arch::sync_warp();
    if (!g.multicasts()) cluster::wait();  // the others' semaphores are there
    if (sends) {
        const int begin = rows.first_of(other), count = rows.first_of(other + 1) - begin;
        const int place = rows.rank - (rows.rank > other);
        arch::bulk_copy_to_cluster(arch::map_shared_rank(rows.received + place * rows.each, to),
                                   rows.sums + begin * rows.pitch, count * rows.pitch,
                                   arch::map_shared_rank(shared.there[consumer].address(), to));
    }
    wait_cluster(shared.there[consumer], 0);
    if (sends) arrive_remote_relaxed(shared.sent[consumer], static_cast<int>(to));
    arch::sync_warp();
}

// Adds the partial sums, applies scales and bias, rounds and stores. Neighbouring lanes have
// neighbouring vectors of four elements of a row.
template <class Traits, class O>
__device__ __forceinline__ void store_rows(const typename Traits::Globals& g,
                                           typename Traits::Shared& shared,
                                           const SplitKRows<Traits>& rows) {
    constexpr int count = 4;  // of fours at a time
    const int fours = g.width / 4;
    const uint32_t first_row = kittens::warpid() * 16;
    const uint32_t m = tile_row<Traits>(g) + first_row, n = tile_col<Traits>(g);
    const int rows_on = WARP_THREADS / fours, fours_on = WARP_THREADS % fours;
    int next_row = rows.begin + laneid() / fours, next_four = laneid() % fours;
#pragma unroll 1
    while (next_row < rows.end) {
        int row[count], col[count];
        float4 x[count];
        float scale[count];
#pragma unroll
        for (int j = 0; j < count; ++j) {
            row[j] = next_row, col[j] = next_four * 4;
            next_row += rows_on, next_four += fours_on;
            if (next_four >= fours) next_four -= fours, ++next_row;
        }
        const auto there = [&](int j) { return min(row[j], rows.end - 1); };
#pragma unroll
        for (int j = 0; j < count; ++j) {
            x[j] = arch::load_shared<float4>(rows.sums + there(j) * rows.pitch + col[j] * 4);
            scale[j] =
                arch::load_shared<float>(shared.of_rows.address() + (first_row + there(j)) * 4);
        }
        const auto with = [&](auto at, auto combine) {
#pragma unroll
            for (int j = 0; j < count; ++j) {
                const auto y = arch::load_shared<float4>(at(j) + col[j] * 4);
                combine(x[j].x, y.x), combine(x[j].y, y.y);
                combine(x[j].z, y.z), combine(x[j].w, y.w);
            }
        };
        const auto add = [](float& to, float y) { to += y; };
        const auto multiply = [](float& to, float y) { to *= y; };
#pragma unroll 1
        for (int i = 0; i < rows.splits - 1; ++i) {
            const uint32_t from = rows.received + i * rows.each;
            with([&](int j) { return from + (there(j) - rows.begin) * rows.pitch; }, add);
        }
#pragma unroll
        for (int j = 0; j < count; ++j) {
            x[j].x *= scale[j], x[j].y *= scale[j], x[j].z *= scale[j], x[j].w *= scale[j];
        }
        if (g.per_column) {
            with([&](int) { return shared.of_columns.address(); }, multiply);
        }
        if (g.bias != nullptr) with([&](int) { return shared.bias.address(); }, add);
#pragma unroll
        for (int j = 0; j < count; ++j) {
            const uint32_t at_m = m + row[j], at_n = n + col[j];
            if (row[j] >= rows.end || at_m >= g.m || at_n >= g.n) continue;
            const float values[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
            const int exist = g.n - at_n < 4 ? static_cast<int>(g.n - at_n) : 4;
            gemm::sm90::store_four(static_cast<O*>(g.out) + (int64_t(at_m) * g.n + at_n), values,
                                   g.vec4_aligned, exist);
        }
    }
}

template <class Traits>
__device__ __forceinline__ void reduce_and_store(const typename Traits::Globals& g,
                                                 typename Traits::Shared& shared) {
    const SplitKRows<Traits> rows(g, shared);
    arch::sync_warp();
    if (rows.splits > 1) scatter_rows<Traits>(g, shared, rows);
    if (g.out_dtype == DType::bf16)
        store_rows<Traits, bf16>(g, shared, rows);
    else
        store_rows<Traits, half>(g, shared, rows);
    // The others read this block's shared memory until they have what it sends.
    if (rows.splits > 1) wait_cluster(shared.sent[warpgroup::groupid()], 0);
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
