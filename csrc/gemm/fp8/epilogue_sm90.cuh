// The epilogue of an fp8 tile on Hopper: the scales of its rows and columns, the bias, the
// activation, rounding to the output's type, and the deferred store.
//
// A finished tile of a 16-bit type is rounded at once, kept in registers, and stored in subtiles of
// 128 bytes a row while the products of the next tile run: with promoted accumulation, while the
// first of them does, before which there are no sums. On the way all values pass through a warp's
// own staging buffers, so that no warp waits for another. Other types, and rows that TMA cannot
// store, are stored at once; the latter are copied by the warp.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/subtile_sm90.cuh"
#include "csrc/gemm/fp8/types_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

using gemm::sm90::Subtiles;

// A warp's staging buffer holds 16 rows of 128 bytes of the output. These two functions send it to
// (row, col), no further than row `end`.
template <Config C, class Staging>
__device__ __forceinline__ void send_by_tma(const typename KernelTraits<C>::Globals& g,
                                            const Staging& staging, uint32_t row, uint32_t col) {
    arch::fence_async_shared();
    arch::sync_warp();
    if (laneid() == 0) {
        const auto& words = reinterpret_cast<const typename KernelTraits<C>::out_tile&>(staging);
        constexpr int words_each = int(sizeof(typename Staging::T)) / 2;
        tma::store_async(g.out, words, elements(0, 0, row, static_cast<int>(col * words_each)));
    }
}
template <Config C, class Staging>
__device__ __forceinline__ void send(const typename KernelTraits<C>::Globals& g,
                                     const Staging& staging, uint32_t row, uint32_t col,
                                     uint32_t end) {
    using O = typename Staging::T;
    if (g.tma_store && (end == g.m || row + Staging::rows <= end)) {
        send_by_tma<C>(g, staging, row, col);
        return;
    }
    arch::sync_warp();
    if (row >= end || col >= g.n) return;
    const uint32_t rows = end - row, cols = g.n - col;
    O* to = reinterpret_cast<O*>(g.out.raw_ptr) + (int64_t(row) * g.n + col);
    if constexpr (sizeof(O) == 4) {
        gemm::sm90::copy_rows(staging, to, g.n, rows, cols);
    } else if (g.n % 2 == 0) {
        gemm::sm90::copy_rows(staging, reinterpret_cast<uint32_t*>(to), g.n / 2, rows, cols / 2);
    } else {
        gemm::sm90::copy_rows(staging, reinterpret_cast<uint16_t*>(to), g.n, rows, cols);
    }
}

// Rounds a warp's values to O and stores them at once, through its staging buffers in turn;
// `first_subtile` have gone before. The last subtile of a narrow tile begins earlier.
template <Config C, class O, int cols>
__device__ __forceinline__ void store_now(const typename KernelTraits<C>::Globals& g,
                                          typename KernelTraits<C>::Shared& shared,
                                          const rt_fl<16, cols>& d, uint32_t row, uint32_t col,
                                          uint32_t end, int first_subtile, bool narrow) {
    using staging = st<O, 16, 128 / int(sizeof(O))>;
    using Cut = Subtiles<cols, staging::cols>;
#pragma unroll
    for (int subtile = 0; subtile < Cut::count; ++subtile) {
        rt_fl<16, staging::cols> values;
        int first = Cut::first(subtile);
        if (KernelTraits<C>::two_widths && narrow && subtile == Cut::count - 1) {
            gemm::sm90::take_subtile(values, d, first - KernelTraits<C>::narrow_by);
            first -= KernelTraits<C>::narrow_by;
        } else {
            gemm::sm90::take_subtile(values, d, first);
        }
        auto& buffer = reinterpret_cast<staging&>(
            shared.out[kittens::warpid()][(first_subtile + subtile) % C.buffers]);
        if (laneid() == 0) tma::store_async_read_wait<C.buffers - 1>();
        arch::sync_warp();
        kittens::warp::store(buffer, values);
        send<C>(g, buffer, row, col + first, end);
    }
}
template <Config C, int cols>
__device__ __forceinline__ void store_now(const typename KernelTraits<C>::Globals& g,
                                          typename KernelTraits<C>::Shared& shared,
                                          const rt_fl<16, cols>& d, uint32_t row, uint32_t col,
                                          uint32_t end, int product, bool narrow = false) {
    const int before = product * Subtiles<cols, 64>::count;
    if (g.out_dtype == DType::fp32)
        store_now<C, float>(g, shared, d, row, col, end, before * 2, false);
    else if (g.out_dtype == DType::bf16)
        store_now<C, bf16>(g, shared, d, row, col, end, before, narrow);
    else
        store_now<C, half>(g, shared, d, row, col, end, before, narrow);
}

// The deferred store: a warp's finished values of a 16-bit type (bf16 stands for both) stay in
// registers while the next tile's products run, and are stored subtile by subtile, overlapped with
// them.
template <Config C>
struct DeferredStore {
    using Traits = KernelTraits<C>;
    using staging = typename Traits::out_tile;
    using Cut = Subtiles<C.block_n, staging::cols>;
    static constexpr int across = Cut::count;
    static constexpr int subtiles = across * Traits::products_m;

    rt_bf<16, C.block_n> values[Traits::products_m];
    uint32_t row = 0, col = 0;
    bool any = false;
    bool narrow = false;  // the tile, see common/raster.h

    // The first column of a subtile; the last subtile of a narrow tile begins earlier.
    static __device__ __forceinline__ int first_of(int subtile, bool narrow) {
        return Cut::first(subtile) - (narrow && subtile == across - 1 ? Traits::narrow_by : 0);
    }
    // Calls use(first) with the same as a constant, for indices of registers.
    template <class Use>
    static __device__ __forceinline__ void with_first(int subtile, bool narrow, Use use) {
        if (Traits::two_widths && narrow && subtile == across - 1)
            use(first_of(subtile, true));
        else
            use(first_of(subtile, false));
    }
    template <class O>
    __device__ __forceinline__ void pack(
        const rt_fl<16, Traits::product_cols> (&d)[Traits::products]) {
#pragma unroll
        for (int i = 0; i < Traits::products; ++i) {
            gemm::sm90::round_to<O>(values[i / Traits::products_n], d[i],
                                    i % Traits::products_n * Traits::product_cols);
        }
    }
    // Keeps a tile whose store is deferred.
    __device__ __forceinline__ void defer(
        const typename Traits::Globals& g,
        const rt_fl<16, Traits::product_cols> (&d)[Traits::products], uint32_t at_row,
        uint32_t at_col) {
        if (g.out_dtype == DType::bf16)
            pack<bf16>(d);
        else
            pack<half>(d);
        row = at_row, col = at_col;
        any = true;
    }
    // Where no store is deferred: so that no registers hold what was kept before.
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Traits::products_m; ++i) kittens::warp::zero(values[i]);
        any = false;
    }
    // Stores one subtile, through the warp's staging buffers in turn.
    __device__ __forceinline__ void send(const typename Traits::Globals& g,
                                         typename Traits::Shared& shared, int subtile) const {
        auto& buffer = shared.out[kittens::warpid()][subtile % C.buffers];
        // The last store from this buffer is as many stores ago as there are buffers, or may be the
        // last one if the number of subtiles is no multiple of them.
        constexpr int running = subtiles % C.buffers == 0 ? C.buffers - 1 : 0;
        if (laneid() == 0) tma::store_async_read_wait<running>();
        arch::sync_warp();
        const int in_row = subtile % across;
        with_first(in_row, narrow, [&](int first) { stage(buffer, subtile / across, first); });
        send_by_tma<C>(g, buffer, row + subtile / across * 64, col + first_of(in_row, narrow));
    }
    __device__ __forceinline__ void stage(staging& buffer, int product, int first) const {
        gemm::sm90::stage_subtile<rt_bf<16, staging::cols>>(values[product], first, buffer);
    }
    __device__ __forceinline__ void send(const typename Traits::Globals& g,
                                         typename Traits::Shared& shared, int begin,
                                         int end) const {
        if (!any) return;
#pragma unroll
        for (int subtile = begin; subtile < end; ++subtile) send(g, shared, subtile);
    }
};

// Where a consumer's threads share the values of columns.
template <Config C>
__device__ __forceinline__ auto& columns_of(typename KernelTraits<C>::Shared& shared) {
    const int consumer = warpgroup::groupid();
    if constexpr (KernelTraits<C>::columns_staged) {
        return reinterpret_cast<sv_fl<C.block_n>&>(shared.out[consumer * WARPGROUP_WARPS]);
    } else {
        return shared.apart.columns[consumer];
    }
}

// Where a column's value lies: those of the four columns that a thread has of 16 are side by side.
__device__ __forceinline__ int place_of(int col) {
    return col / 16 * 16 + col / 2 % 4 * 4 + col / 8 % 2 * 2 + col % 2;
}

// A value for each of a tile's columns: each thread of a consumer fetches a few before the
// products, and uses all that it needs after them, through shared memory.
template <Config C>
struct Columns {
    static constexpr int per_thread = (C.block_n + WARPGROUP_THREADS - 1) / WARPGROUP_THREADS;
    float values[per_thread];

    template <class Load>
    __device__ __forceinline__ void fetch(uint32_t first, uint32_t n, Load load) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const uint32_t col = first + i * WARPGROUP_THREADS + warpgroup::laneid();
            values[i] = col < n ? load(col) : 0.f;
        }
    }
    __device__ __forceinline__ void publish(sv_fl<C.block_n>& shared) const {
        const int barrier = READY + 1 + warpgroup::groupid();
        if (KernelTraits<C>::columns_staged && warpgroup::elect_leader())
            tma::store_async_read_wait();
        warpgroup::sync(barrier);  // the last readers are done
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int col = i * WARPGROUP_THREADS + warpgroup::laneid();
            if (col >= C.block_n) continue;
            shared.set(KernelTraits<C>::columns_placed ? place_of(col) : col, values[i]);
        }
        warpgroup::sync(barrier);
    }
};

// Replaces each of n values by its activation. Long ones take an eighth at a time, in a loop that
// hands the values on through the registers: unrolled, code that most calls skip would fill the
// instruction caches.
template <int n, class Value>
__device__ __forceinline__ void activate_in_chunks(gemm::Activation activation, Value value) {
    using gemm::Activation, gemm::sm90::activate;
    constexpr int chunks = 8, chunk = n / chunks;
    static_assert(n % chunks == 0);
    switch (activation) {
        case Activation::none: return;
        case Activation::relu: return activate<n>(Activation::relu, value);
        case Activation::silu: return activate<n>(Activation::silu, value);
        default: break;
    }
#pragma unroll 1
    for (int done = 0; done < chunks; ++done) {
        if (activation == Activation::gelu)
            activate<chunk>(Activation::gelu, value);
        else
            activate<chunk>(Activation::gelu_tanh, value);
#pragma unroll
        for (int i = 0; i < chunk; ++i) {
            const float first = value(i);
#pragma unroll
            for (int j = 1; j < chunks; ++j) value(i + (j - 1) * chunk) = value(i + j * chunk);
            value(i + (chunks - 1) * chunk) = first;
        }
    }
}

// Calls combine(register, row of products, row of two, values of its two columns) for all values of
// a warp's products, `across` of which are side by side. What belongs to the columns begins at
// `columns` in shared memory: in their order, or each at its place_of, which takes half as many
// loads and more registers.
template <int across, bool placed, int count, int cols, class Combine>
__device__ __forceinline__ void with_columns(rt_fl<16, cols> (&d)[count], uint32_t columns,
                                             Combine combine) {
    const uint32_t own = columns + laneid() % 4 * (placed ? sizeof(float4) : sizeof(float2));
#pragma unroll
    for (int in_n = 0; in_n < across; ++in_n) {
#pragma unroll
        for (int j = 0; j < cols / 8; j += placed ? 2 : 1) {
            const uint32_t from = own + (in_n * cols + j * 8) * sizeof(float);
            float2 pairs[placed ? 2 : 1];
            if constexpr (placed) {
                const auto four = arch::load_shared<float4>(from);
                pairs[0] = make_float2(four.x, four.y), pairs[1] = make_float2(four.z, four.w);
            } else {
                pairs[0] = arch::load_shared<float2>(from);
            }
#pragma unroll
            for (int i = in_n; i < count; i += across) {
#pragma unroll
                for (int r = 0; r < (placed ? 4 : 2); ++r) {
                    combine(d[i].tiles[0][j / 2].data[j % 2 * 2 + r], i / across, r % 2,
                            pairs[r / 2]);
                }
            }
        }
    }
}

// Where the scales of a tile's rows and columns lie, and the bias. With promoted accumulation and
// row-wise scales, a warp of the producers copies them to shared memory while the tile's products
// run, to where block-wise scales would be. Elsewhere a consumer's threads fetch them, and share
// those of columns: in the ping-pong schedule the scales while the tile's first product runs;
// otherwise after the last one, for want of registers.
template <Config C>
struct TileScales {
    using Traits = KernelTraits<C>;
    static constexpr bool copied = !Traits::fast && !Traits::is_1d1d;
    static constexpr bool early = copied || Traits::pingpong;
    static constexpr int columns_at = C.block_m * int(sizeof(float));
    static constexpr int bias_at = columns_at + C.block_n * int(sizeof(float));
    static_assert(!copied || bias_at + C.block_n * int(sizeof(float)) <=
                                 C.stages * scales_of_stage(C) * int(sizeof(float)));

    // Semaphores that otherwise only 1D1D scales need. A warp's lanes arrive with what each has
    // copied, and the warp with the bias.
    static constexpr int arrivals = WARP_THREADS + 1;
    static __device__ __forceinline__ semaphore& there(typename Traits::Shared& shared) {
        return shared.scales_read[0];
    }
    static __device__ __forceinline__ semaphore& used(typename Traits::Shared& shared) {
        return shared.scales_read[1];
    }
    static __device__ __forceinline__ uint32_t columns(typename Traits::Shared& shared) {
        if constexpr (copied)
            return shared.scales[0].address() + columns_at;
        else
            return columns_of<C>(shared).address();
    }
    static __device__ __forceinline__ uint32_t bias(typename Traits::Shared& shared) {
        if constexpr (copied)
            return shared.scales[0].address() + bias_at;
        else
            return columns_of<C>(shared).address();
    }
    static __device__ __forceinline__ void release(typename Traits::Shared& shared) {
        if constexpr (copied) arrive_by_warp(used(shared));
    }
};

// The epilogue's operands of one tile, and what they are applied to: all its register tiles.
template <Config C>
struct Epilogue {
    using Traits = KernelTraits<C>;
    using Where = TileScales<C>;
    float rows[Traits::products_m][2];  // scales of this thread's rows, two of each product
    Columns<C> scales, bias;

    // Fetches the scales that are not copied.
    __device__ __forceinline__ void fetch_scales(const typename Traits::Globals& g,
                                                 const Tile& tile, uint32_t row) {
        const bool per_column = g.scale_b.outer != 0;
        const float* scale_b = g.scale_b.data + int64_t(tile.group) * g.scale_b.group;
#pragma unroll
        for (int i = 0; i < 2 * Traits::products_m; ++i) {
            float& scale = rows[i / 2][i % 2];
            const uint32_t at = row + i / 2 * 64 + i % 2 * 8;
            scale = 1.f;
            if (at < tile.end) {
                scale = arch::load_global(g.scale_a.data + int64_t(at) * g.scale_a.outer);
            }
            if (!per_column) scale *= arch::load_global(scale_b);
        }
        if (per_column) {
            scales.fetch(tile.col, g.n, [&](uint32_t col) {
                return arch::load_global(scale_b + int64_t(col) * g.scale_b.outer);
            });
        }
    }
    __device__ __forceinline__ void publish_scales(const typename Traits::Globals& g,
                                                   typename Traits::Shared& shared) const {
        if (g.scale_b.outer != 0) scales.publish(columns_of<C>(shared));
    }
    // Reads this thread's rows of the scales that are copied.
    __device__ __forceinline__ void take_scales(const typename Traits::Globals& g,
                                                typename Traits::Shared& shared, int in_tile,
                                                int phase) {
        wait(Where::there(shared), phase);
        const uint32_t from = shared.scales[0].address();
#pragma unroll
        for (int i = 0; i < 2 * Traits::products_m; ++i) {
            const int at = in_tile + i / 2 * 64 + i % 2 * 8;
            rows[i / 2][i % 2] = arch::load_shared<float>(from + at * 4);
        }
        if (g.scale_b.outer == 0) {
            const float scale_b = arch::load_shared<float>(from + Where::columns_at);
#pragma unroll
            for (int i = 0; i < 2 * Traits::products_m; ++i) rows[i / 2][i % 2] *= scale_b;
        }
    }
    // Fetches the bias where it is not copied.
    __device__ __forceinline__ void fetch_bias(const typename Traits::Globals& g,
                                               const Tile& tile) {
        if (g.bias != nullptr && (!Where::copied || g.blockwise)) {
            bias.fetch(tile.col, g.n,
                       [&](uint32_t col) { return load_any(g.bias, g.bias_dtype, col); });
        }
    }

    // Scales by the row, then by the column, value by value where both are there: reading the
    // scales of columns takes as long as multiplying by both.
    template <int count, int cols>
    __device__ __forceinline__ void scale(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared,
                                          rt_fl<16, cols> (&d)[count]) const {
        const bool per_column = g.scale_b.outer != 0;
        const auto by_row = [&](float2& x, int in_m, int r) {
            x.x *= rows[in_m][r];
            x.y *= rows[in_m][r];
        };
        if (!Where::early || !per_column) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
#pragma unroll
                for (int j = 0; j < d[i].width; ++j) {
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        by_row(d[i].tiles[0][j].data[r], i / Traits::products_n, r % 2);
                }
            }
        }
        if (per_column) {
            if constexpr (!Where::early) publish_scales(g, shared);
            with_columns<Traits::products_n, Traits::columns_placed>(
                d, Where::columns(shared), [&](float2& x, int in_m, int r, float2 s) {
                    if (Where::early) by_row(x, in_m, r);
                    x.x *= s.x;
                    x.y *= s.y;
                });
        }
        if (g.bias == nullptr) Where::release(shared);
    }

    template <int count, int cols>
    __device__ __forceinline__ void apply(const typename Traits::Globals& g,
                                          typename Traits::Shared& shared,
                                          rt_fl<16, cols> (&d)[count]) const {
        static_assert(count == Traits::products);
        if constexpr (!Traits::is_1d1d) {
            if (!g.blockwise) scale(g, shared, d);
        }
        if (g.bias != nullptr) {
            const bool copied = Where::copied && !g.blockwise;
            if (!copied) bias.publish(columns_of<C>(shared));
            const uint32_t values = copied ? Where::bias(shared) : columns_of<C>(shared).address();
            with_columns<Traits::products_n, Traits::columns_placed>(
                d, values, [](float2& x, int, int, float2 b) {
                    x.x += b.x;
                    x.y += b.y;
                });
            if (copied)
                Where::release(shared);
            else if (Traits::columns_staged)
                warpgroup::sync(READY + 1 + warpgroup::groupid());
        }
        constexpr int each = rt_fl<16, cols>::elements_per_thread;
        const auto value = [&](int i) -> float& {
            float2& x = d[i / each].tiles[0][i % each / 8].data[i % 8 / 2];
            return i % 2 == 0 ? x.x : x.y;
        };
        if constexpr (Traits::pingpong) {
            activate_in_chunks<count * each>(g.activation, value);
        } else {
            gemm::sm90::activate<count * each>(g.activation, value);
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
