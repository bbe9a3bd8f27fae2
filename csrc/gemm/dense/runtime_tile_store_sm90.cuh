// The epilogue of tiles whose width is known at run time: the factor, the bias, rounding, and the
// store by TMA in subtiles of 64 columns.
#pragma once

#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/dense/runtime_tile_types_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// Scales 64 rows of a tile and adds the bias: of their columns, or of the rows where the result is
// stored transposed.
template <class Traits, class Sums>
__device__ __forceinline__ void scale_and_add_bias(const typename Traits::Globals& g, Sums& d,
                                                   uint32_t row, uint32_t col) {
    const auto at = [&](uint32_t i) {
        const auto* bias = static_cast<const typename Traits::T*>(g.bias);
        return bias != nullptr && i < g.n ? convert<float>(arch::load_global(bias + i)) : 0.f;
    };
    float of_row[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (g.transposed) of_row[r] = at(row + warpgroup::warpid() * 16 + laneid() / 4 + r * 8);
    }
#pragma unroll
    for (int j = 0; j < d.width * 2; ++j) {
        float of_col[2] = {};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (!g.transposed && j * 8 < g.width)
                of_col[c] = at(col + j * 8 + laneid() % 4 * 2 + c);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2& sums = d.tiles[0][j / 2].data[j % 2 * 2 + r];
            sums.x = g.alpha * sums.x + (of_row[r] + of_col[0]);
            sums.y = g.alpha * sums.y + (of_row[r] + of_col[1]);
        }
    }
}

// The last subtile of a width that 64 does not divide begins earlier, and stores some values a
// second time. Warps store by themselves; a transposed subtile the warpgroup stores together.
template <class Traits>
struct RuntimeTileStore {
    using Globals = typename Traits::Globals;
    static constexpr int cols = Traits::staging::cols;
    const Globals& g;
    char* buffers;  // and the ring after them
    int consumer;
    bool sends;  // this thread sends what its warp, or its warpgroup, has staged
    uint32_t batch = 0, row = 0, col = 0;
    int turn = 0;  // of the staging buffers

    // Calls use(first column as a constant) for a first column between low and high.
    template <int low, int high, class Use>
    static __device__ __forceinline__ void with_first(int first, Use use) {
        if constexpr (low >= high)
            use(std::integral_constant<int, high>{});
        else if (first == high)
            use(std::integral_constant<int, high>{});
        else
            with_first<low, high - Traits::width_step>(first, use);
    }
    __device__ __forceinline__ void sync() const {
        if (g.transposed)
            warpgroup::sync(1 + consumer);
        else
            arch::sync_warp();
    }
    __device__ __forceinline__ int first_column(int subtile) const {
        return min(subtile * cols, g.width - cols);
    }
    // Rounds a subtile into a buffer.
    template <int subtile, class Sums>
    __device__ __forceinline__ void stage(char* buffer, const Sums& d) const {
        constexpr int begin = subtile * cols, last = Traits::most_width - cols;
        constexpr int earliest = subtile == 0 ? 0 : begin - cols + Traits::width_step;
        with_first<earliest, (begin < last ? begin : last)>(first_column(subtile), [&](auto first) {
            rt_fl<16, cols> sums;
            take_subtile(sums, d, decltype(first)::value);
            rt_bf<16, cols> values;
            round_to<typename Traits::T>(values, sums);
            if (g.transposed) {
                rt_bf<cols, 16, col_l> columns;
                kittens::warp::transpose_sep(columns, values);
                auto& all = reinterpret_cast<typename Traits::warpgroup_staging&>(*buffer);
                auto own = all.template subtile<cols, 16>({0, warpgroup::warpid()});
                kittens::warp::store(own, columns);
            } else {
                auto* own = reinterpret_cast<typename Traits::staging*>(buffer);
                kittens::warp::store(own[warpgroup::warpid()], values);
            }
        });
        arch::fence_async_shared();
        sync();
    }
    __device__ __forceinline__ void send(int tile, int subtile, const char* buffer) const {
        const auto* own = reinterpret_cast<const typename Traits::staging*>(buffer);
        const int top = int(row) + tile * 64, left = int(col) + first_column(subtile);
        const int warp = warpgroup::warpid();
        if (g.transposed)
            arch::tma_store(&g.out, own->address(), {top, left, 0, int(batch)});
        else
            arch::tma_store(&g.out, own[warp].address(), {left, top + warp * 16, 0, int(batch)});
    }
    // 64 rows of a tile that another follows.
    template <int subtile = 0, class Sums>
    __device__ __forceinline__ void followed(int tile, const Sums& d) {
        if constexpr (subtile < Traits::subtiles) {
            if (subtile * cols >= g.width) return;
            char* const buffer =
                buffers + (consumer * g.ring.buffers + turn) * Traits::buffer_bytes;
            turn ^= 1;
            if (sends) tma::store_async_read_wait<1>();
            sync();
            stage<subtile>(buffer, d);
            if (sends) {
                send(tile, subtile, buffer);
                tma::store_commit_group();
            }
            followed<subtile + 1>(tile, d);
        }
    }
    // Of a block's last tile, which is staged in the ring once no consumer reads it.
    __device__ __forceinline__ void begin_last() const {
        if (sends) tma::store_async_read_wait<0>();
        arch::named_barrier_sync(1 + Traits::consumers, Traits::consumers * WARPGROUP_THREADS);
    }
    template <int subtile = 0, class Sums>
    __device__ __forceinline__ void last(int tile, const Sums& d) const {
        if constexpr (subtile < Traits::subtiles) {
            if (subtile * cols >= g.width) return;
            const int index = (consumer * Traits::tiles + tile) * Traits::subtiles + subtile;
            char* const buffer = buffers + index * Traits::buffer_bytes;
            stage<subtile>(buffer, d);
            if (sends) send(tile, subtile, buffer);
            last<subtile + 1>(tile, d);
        }
    }
    __device__ __forceinline__ void end_last() const {
        if (!sends) return;
        tma::store_commit_group();
        tma::store_async_read_wait<0>();
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
