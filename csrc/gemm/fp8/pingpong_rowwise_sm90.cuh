// Fp8 products in the ping-pong schedule with fast accumulation and row-wise scales alone, tiles of
// 128 x 176, for the commonest outputs: of a 16-bit type, stored by TMA, without bias or
// activation. pingpong_sm90.cuh does the rest.
//
// The values are the same, bit for bit. What this kernel leaves out is code: consumers, which are
// at different places of it at a time, then find it in the instruction caches. So there are no
// clusters, and the two products of a consumer end one after the other, in a loop: the registers of
// the second one move to those of the first. Scales pass through shared memory, those of rows too,
// so that none stays in registers while products run.
#pragma once

#include "csrc/gemm/fp8/pingpong_sm90.cuh"
#include "csrc/gemm/fp8/promoted_rowwise_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// The scales of a consumer's tile. A thread fetches one of a row and some of columns before the
// products, and shares them with the others while the first product runs; where one scale is for
// all columns, it is multiplied into those of rows.
template <Config C>
struct PingpongScales {
    using Traits = KernelTraits<C>;
    using Shared = typename Traits::Shared;
    float row;
    Columns<C> columns;

    static __device__ __forceinline__ bool of_columns(const typename Traits::Globals& g) {
        return g.scale_b.outer != 0;
    }
    __device__ __forceinline__ void fetch(const typename Traits::Globals& g, const Tile& tile) {
        static_assert(C.block_m == WARPGROUP_THREADS);
        const uint32_t at = tile.row + warpgroup::laneid();
        row = 1.f;
        if (at < g.m) row = arch::load_global(g.scale_a.data + int64_t(at) * g.scale_a.outer);
        if (of_columns(g)) {
            columns.fetch(tile.col, g.n, [&](uint32_t col) {
                return arch::load_global(g.scale_b.data + int64_t(col) * g.scale_b.outer);
            });
        } else {
            columns.values[0] = arch::load_global(g.scale_b.data);
        }
    }
    __device__ __forceinline__ void publish(const typename Traits::Globals& g, Shared& shared,
                                            int consumer) const {
        const int barrier = READY + 1 + consumer;
        warpgroup::sync(barrier);  // the last readers are done
        const float of_row = of_columns(g) ? row : row * columns.values[0];
        shared.apart.rows[consumer].set(warpgroup::laneid(), of_row);
        if (of_columns(g)) {
#pragma unroll
            for (int i = 0; i < Columns<C>::per_thread; ++i) {
                const int col = i * WARPGROUP_THREADS + warpgroup::laneid();
                if (col >= C.block_n) continue;
                shared.apart.columns[consumer].set(place_of(col), columns.values[i]);
            }
        }
        warpgroup::sync(barrier);
    }
    // Scales by the row, then by the column, as Epilogue::scale; 64 rows from `first` on.
    static __device__ __forceinline__ void apply(const typename Traits::Globals& g, Shared& shared,
                                                 int consumer, rt_fl<16, C.block_n>& sums,
                                                 int first) {
        const int own = first + warpgroup::warpid() * 16 + laneid() / 4;
        const uint32_t from = shared.apart.rows[consumer].address() + own * sizeof(float);
        float rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows[r] = arch::load_shared<float>(from + r * 8 * sizeof(float));
        }
        if (of_columns(g)) {
            auto& product = reinterpret_cast<rt_fl<16, C.block_n>(&)[1]>(sums);
            with_columns<1, true>(product, shared.apart.columns[consumer].address(),
                                  [&](float2& x, int, int r, float2 s) {
                                      x.x = x.x * rows[r] * s.x;
                                      x.y = x.y * rows[r] * s.y;
                                  });
            return;
        }
#pragma unroll
        for (int j = 0; j < sums.width; ++j) {
#pragma unroll
            for (int r = 0; r < sums.packed_per_base; ++r) {
                sums.tiles[0][j].data[r].x *= rows[r % 2];
                sums.tiles[0][j].data[r].y *= rows[r % 2];
            }
        }
    }
};

// Rounds to a 16-bit type (bf16 stands for both).
template <Config C>
__device__ __forceinline__ rt_bf<16, C.block_n> rounded(const typename KernelTraits<C>::Globals& g,
                                                        const rt_fl<16, C.block_n>& sums) {
    rt_bf<16, C.block_n> values;
    if (g.out_dtype == DType::bf16)
        gemm::sm90::round_to<bf16>(values, sums);
    else
        gemm::sm90::round_to<half>(values, sums);
    return values;
}

// Stores a warp's values of a product, in subtiles through its two staging buffers in turn; which
// buffer is first depends on the product, as there are three subtiles.
template <Config C>
__device__ __forceinline__ void send_product(const typename KernelTraits<C>::Globals& g,
                                             typename KernelTraits<C>::Shared& shared,
                                             const rt_bf<16, C.block_n>& values, const Tile& tile,
                                             uint32_t row, int product) {
    using Traits = KernelTraits<C>;
    using F = DeferredStore<C>;
    using staging = typename Traits::out_tile;
    static_assert(C.buffers == 2 && F::across % 2 == 1);
    const bool narrow = Traits::two_widths && tile.narrow;
#pragma unroll
    for (int subtile = 0; subtile < F::across; ++subtile) {
        auto& buffer = shared.out[kittens::warpid()][(subtile + product) % C.buffers];
        if (laneid() == 0) tma::store_async_read_wait<C.buffers - 1>();
        arch::sync_warp();
        F::with_first(subtile, narrow, [&](int first) {
            gemm::sm90::stage_subtile<rt_bf<16, staging::cols>>(values, first, buffer);
        });
        arch::sync_warp();
        if (laneid() == 0) {
            const int col = static_cast<int>(tile.col) + F::first_of(subtile, narrow);
            tma::store_async(g.out, buffer, elements(0, 0, row, col));
        }
    }
}

template <Config C>
__device__ __forceinline__ void consume_pingpong_rowwise(const typename KernelTraits<C>::Globals& g,
                                                         typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    static_assert(Traits::products_m == 2);
    // The shuffle tells the compiler that the value is the same in all lanes: a tile's position
    // stays in uniform registers.
    const int consumer = arch::shuffle(int(warpgroup::groupid()), 0);
    // One arrival stands for the warpgroup, because wgmma reads shared memory for all of it.
    const bool releases = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (releases) arrive(shared.empty[stage]);
    };
    Ring<C.stages> ring;
    rt_fl<16, C.block_n> sums[Traits::products_m];
    PingpongScales<C> scales;
    uint32_t index = blockIdx.x;
    const auto skip = [&] {  // skips the other consumer's tile
        ring.stage += g.k_blocks;
        const int rounds = ring.stage / C.stages;
        ring.stage -= rounds * C.stages;
        ring.phase ^= rounds & 1;
    };
    constexpr int stage_step = int(sizeof(typename Traits::Stage)) >> 4;
    constexpr int b_after_a = int(sizeof(typename Traits::a_tile)) >> 4;
    const auto first_stage =
        static_cast<uint32_t>(operand_descriptor<Traits>(shared.stages[0].a.address()));
    bool first = consumer == 0;
    if (consumer == 1) index += g.clusters, skip();
    for (; index < g.order.total; index += 2 * g.clusters, skip()) {
        const Tile tile = rowwise_tile<C>(g, g.order.in_matrix(index));
        const uint32_t row = tile.row + warpgroup::warpid() * 16;
        scales.fetch(g, tile);
        if (!first) arch::named_barrier_sync(MAY_MULTIPLY + consumer, 2 * WARPGROUP_THREADS);
        first = false;
        const bool follows = index + g.clusters < g.order.total;
        const auto multiply_all = [&]<class B>() {
            const auto start = [&](bool accumulate) {
                const uint32_t at = arch::shuffle(first_stage + ring.stage * stage_step, 0);
                wait(shared.full[ring.stage], ring.phase);
                multiply_at<Traits, B>(sums, at, at + b_after_a, accumulate);
            };
            start(false);
            scales.publish(g, shared, consumer);
            int previous = ring.stage;
            ring.advance();
            for (int k = 1; k < g.k_blocks; ++k, ring.advance()) {
                start(true);
                warpgroup::mma_async_wait<1>();
                release(previous);
                previous = ring.stage;
            }
            // The hand-over comes early: a product of this consumer is still running when the other
            // one's first is issued.
            if (follows)
                arch::named_barrier_arrive(MAY_MULTIPLY + 1 - consumer, 2 * WARPGROUP_THREADS);
#pragma unroll
            for (int i = 0; i < Traits::products_m; ++i) {
                warpgroup::mma_async_wait(reinterpret_cast<rt_fl<16, B::rows>&>(sums[i]));
            }
            release(previous);
        };
        if (Traits::two_widths && tile.narrow)
            multiply_all.template operator()<typename Traits::narrow_b>();
        else
            multiply_all.template operator()<typename Traits::b_tile>();
#pragma unroll 1
        for (int i = 0; i < Traits::products_m; ++i) {
            scales.apply(g, shared, consumer, sums[0], i * 64);
            const auto values = rounded<C>(g, sums[0]);
            sums[0] = sums[1];
            send_product<C>(g, shared, values, tile, row + i * 64, i);
        }
    }
    if (laneid() == 0) tma::store_async_read_wait();
}

// The kernel: as dense/prologue_sm90.cuh says, the way to the first load is short.
template <Config C>
__device__ __forceinline__ void run_pingpong_rowwise(const typename KernelTraits<C>::Globals& g,
                                                     typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    constexpr int ready_threads = C.consumers * WARPGROUP_THREADS + WARP_THREADS;
    if (warpgroup::groupid() == C.consumers) {
        if (warpgroup::warpid() == 0) {
            if (arch::elect_one()) {
                gemm::sm90::init_stages<C.stages>(shared, 1, 1);
                arch::mbarrier_init_fence();
            }
            arch::sync_warp();
            arch::named_barrier_arrive(READY, ready_threads);
        }
        if (warpgroup::warpid() == 1) {
            if (arch::elect_one()) prefetch_maps<Traits>(g);
            arch::sync_warp();
        }
        warpgroup::decrease_registers<Traits::producer_registers>();
        arch::wait_for_dependencies();
        arch::launch_dependents();
        if (warpgroup::elect_leader()) produce_rowwise<C>(g, shared);
    } else {
        arch::named_barrier_sync(READY, ready_threads);
        warpgroup::increase_registers<Traits::consumer_registers>();
        arch::wait_for_dependencies();
        consume_pingpong_rowwise<C>(g, shared);
    }
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
