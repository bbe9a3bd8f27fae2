// The consumers of promoted accumulation with block-wise (1D2D) scales, for the commonest outputs:
// of a 16-bit type, stored by TMA, with a bias or none. promoted_sm90.cuh does the rest.
//
// The sums are the same, bit for bit, as those of `promoted`. What this kernel leaves out lets the
// compiler keep a sum and its product in registers of different banks: an addition then reads one
// from each, beside the tensor cores, which use the same registers. Stores of pairs would tie a sum
// to an even or odd register (those are the banks), as products tie theirs, and so do several kinds
// of loops over the same sums.
#pragma once

#include "csrc/gemm/fp8/store_warps_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// The factors of a thread's two rows in a stage, for each part of its columns that lies in one
// block of b. A product of 192 columns has three parts of 64, because its tile begins or ends in
// the middle of a block; narrower products are a part each.
template <Config C>
struct BlockFactors {
    using Traits = KernelTraits<C>;
    static constexpr bool uneven = C.block_n % 128 != 0;
    static constexpr int column_parts = uneven ? C.block_n / 64 : Traits::products_n;
    float of[column_parts][2];

    // `scales` are those of a stage, `row` is the thread's first row in the tile.
    __device__ __forceinline__ void read(uint32_t scales, int row, bool begins_block) {
        float rows[2], columns[column_parts];
#pragma unroll
        for (int r = 0; r < 2; ++r) rows[r] = arch::load_shared<float>(scales + (row + r * 8) * 4);
#pragma unroll
        for (int c = 0; c < Traits::column_scales; ++c) {
            columns[c] = arch::load_shared<float>(scales + (C.block_m + c) * 4);
        }
        if constexpr (uneven) {
            static_assert(column_parts == 3);
            columns[2] = columns[1];
            columns[1] = begins_block ? columns[0] : columns[1];
        }
#pragma unroll
        for (int c = 0; c < column_parts; ++c) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                of[c][r] = rows[r] * columns[c];
                arch::pin_register(of[c][r]);
            }
        }
    }
};

// Lets other warps issue first. ptxas marks no instruction in a run of additions as a point to
// yield, and one consumer's run then keeps the other's from its products. The wait has nothing to
// wait for, and ptxas marks it; the next instruction, which the producers have executed before,
// does nothing but keep it where it is.
__device__ __forceinline__ void yield() {
    arch::wgmma_wait<7>();
    arch::launch_dependents();
}

// sum += product * factors, or sum = product * factors. Row by row, as promote() does.
template <bool begins, Config C, int cols>
__device__ __forceinline__ void add_product(rt_fl<16, cols>& sum, const rt_fl<16, cols>& product,
                                            const BlockFactors<C>& factors, int in_n) {
    constexpr bool uneven = BlockFactors<C>::uneven;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = 0; j < cols / 16; ++j) {
            const float factor = factors.of[uneven ? j / 4 : in_n][row];
#pragma unroll
            for (int r = row; r < 4; r += 2) {
                const float2 x = product.tiles[0][j].data[r];
                float2& s = sum.tiles[0][j].data[r];
                const float2 before = begins ? make_float2(0.f, 0.f) : s;
                s = make_float2(fmaf(x.x, factor, before.x), fmaf(x.y, factor, before.y));
            }
            const int added = (row * cols / 16 + j + 1) * 4;  // of 64
            if (!begins && !uneven && (added == 16 || added == 40)) yield();
        }
    }
}

// Adds the bias, rounds and stages half i of a tile. Each thread has fetched the bias of one of the
// half's columns, and sees all of them in the staging buffers.
template <Config C, int i, int cols>
__device__ __forceinline__ void stage_biased_half(const typename KernelTraits<C>::Globals& g,
                                                  typename KernelTraits<C>::Shared& shared,
                                                  rt_fl<16, cols>& sums, float bias, int consumer) {
    arch::named_barrier_sync(HALF_STORED + consumer, STORE_THREADS);
    if (g.bias != nullptr) {
        auto& columns = columns_of<C>(shared);
        columns.set(place_of(warpgroup::laneid()), bias);
        warpgroup::sync(READY + 1 + consumer);
        with_columns<1, KernelTraits<C>::columns_placed>(
            reinterpret_cast<rt_fl<16, cols>(&)[1]>(sums), columns.address(),
            [](float2& x, int, int, float2 b) {
                x.x += b.x;
                x.y += b.y;
            });
        warpgroup::sync(READY + 1 + consumer);
    }
    rt_bf<16, cols> rounded;
    if (g.out_dtype == DType::bf16)
        gemm::sm90::round_to<bf16>(rounded, sums);
    else
        gemm::sm90::round_to<half>(rounded, sums);
    stage_rounded<C, i>(shared, rounded, false);
    arch::named_barrier_arrive(HALF_STAGED + consumer, STORE_THREADS);
}

// Two products side by side in a step. The epilogue of a tile's halves overlaps with products: that
// of the left half with the last product, which belongs to the right one, and that of the right
// half with the next tile's first.
template <Config C>
__device__ __forceinline__ void consume_blockwise_halves(const typename KernelTraits<C>::Globals& g,
                                                         typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    static_assert(Traits::products_m == 1 && Traits::products_n == 2 && Traits::columns_staged);
    constexpr int cols = Traits::product_cols;
    const ClusterPosition place(g);
    const int consumer = warpgroup::groupid();
    // Each warp has read scales itself.
    const auto release = [&](int stage) { arrive_by_warp(shared.empty[stage]); };
    const int own_row = consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[2], product;
    Operands<C> operands(shared, consumer);
    BlockFactors<C> factors;
    const auto next_stage = [&] {
        operands.find(ring.stage);
        wait(shared.full[ring.stage], ring.phase);
    };
    const auto read_scales = [&] {
        factors.read(shared.scales[ring.stage].address(), own_row, false);
    };
    float bias[2] = {};  // of one column of each half
    const auto fetch_bias = [&](uint32_t index) {
        const uint32_t col = tile_at<C>(g, place, index).col + warpgroup::laneid();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = col + i * cols;
            if (at < g.n) bias[i] = load_any(g.bias, g.bias_dtype, at);
        }
    };
    const auto stage_half = [&](auto which) {
        constexpr int i = decltype(which)::value;
        stage_biased_half<C, i>(g, shared, sums[i], bias[i], consumer);
    };
    using Left = std::integral_constant<int, 0>;
    using Right = std::integral_constant<int, 1>;

    uint32_t index = first_index(g);
    if (index >= g.order.total) return;
    next_stage();
    operands.multiply(product, 0, 0);
    read_scales();
    for (;;) {
        if (g.bias != nullptr) fetch_bias(index);
        warpgroup::mma_async_wait(product);
        add_product<true>(sums[0], product, factors, 0);
        operands.multiply(product, 0, 1);
        kittens::warp::zero(sums[1]);
        // A step ends where its second product runs, and the next one begins with its addition.
        for (int left = arch::shuffle(g.k_blocks, 0) - 1; left > 0; --left) {
            const int previous = ring.stage;
            ring.advance();
            next_stage();
            warpgroup::mma_async_wait(product);
            add_product<false>(sums[1], product, factors, 1);
            operands.multiply(product, 0, 0);
            release(previous);
            read_scales();
            // A loop that is never repeated. Where a jump back lies between a product and its end,
            // ptxas leaves the additions to yield(); else it lets every second one yield.
            do {
                warpgroup::mma_async_wait(product);
                add_product<false>(sums[0], product, factors, 0);
                operands.multiply(product, 0, 1);
            } while (g.k_blocks < 0);
        }
        const int previous = ring.stage;
        ring.advance();
        stage_half(Left{});
        index += g.clusters;
        const bool more = arch::shuffle(int(index < g.order.total), 0) != 0;
        if (more) wait(shared.full[ring.stage], ring.phase);
        warpgroup::mma_async_wait(product);
        add_product<false>(sums[1], product, factors, 1);
        release(previous);
        if (!more) break;
        // The shuffles tell the compiler that the values are the same in all lanes: descriptors
        // stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        operands.find(ring.stage);
        operands.multiply(product, 0, 0);
        read_scales();
        stage_half(Right{});
    }
    stage_half(Right{});
    arch::named_barrier_sync(HALF_STORED + consumer, STORE_THREADS);
}

// One product in a step.
template <Config C>
__device__ __forceinline__ void consume_blockwise_tiles(const typename KernelTraits<C>::Globals& g,
                                                        typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    static_assert(Traits::products == 1);
    constexpr int cols = Traits::product_cols;
    const int consumer = warpgroup::groupid();
    // Each warp has read scales itself.
    const auto release = [&](int stage) { arrive_by_warp(shared.empty[stage]); };
    const int row_in_tile = consumer * 64 + warpgroup::warpid() * 16;
    const int own_row = row_in_tile + laneid() / 4;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[Traits::products], product;
    Operands<C> operands(shared, consumer);
    DeferredStore<C> deferred;

    for_each_tile<C>(g, ClusterPosition(g), [&](const Tile& tile) {
        // The shuffles tell the compiler that the values are the same in all lanes: descriptors
        // stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        const bool begins_block = tile.col % 128 == 0;
        BlockFactors<C> factors;
        const auto next_stage = [&] {
            operands.find(ring.stage);
            wait(shared.full[ring.stage], ring.phase);
        };
        const auto read_scales = [&] {
            factors.read(shared.scales[ring.stage].address(), own_row, begins_block);
        };
        int left = arch::shuffle(g.k_blocks, 0) - 1;  // steps after this one
        int previous;
        next_stage();
        const auto step = [&]<bool begins>() {
            // The scales are read before the product, because a warp that reads later may find the
            // stage released.
            read_scales();
            operands.multiply(product, 0, 0);
            // The first step has no sums yet: their registers still hold the tile before.
            if constexpr (begins)
                deferred.send(g, shared, 0, deferred.subtiles);
            else
                release(previous);
            warpgroup::mma_async_wait(product);
            add_product<begins>(sums[0], product, factors, 0);
            previous = ring.stage;
            ring.advance();
        };
        const auto next_step = [&] {
            next_stage();
            step.template operator()<false>();
        };
        step.template operator()<true>();
        // Several steps without a jump back between an addition and the next product.
        constexpr int together = 4;
        for (; left % together != 0; --left) next_step();
        for (; left > 0; left -= together) {
#pragma unroll
            for (int i = 0; i < together; ++i) next_step();
        }
        release(previous);
        if (g.bias != nullptr) {
            Columns<C> bias;
            bias.fetch(tile.col, g.n,
                       [&](uint32_t col) { return load_any(g.bias, g.bias_dtype, col); });
            auto& columns = columns_of<C>(shared);
            bias.publish(columns);
            with_columns<Traits::products_n, Traits::columns_placed>(
                sums, columns.address(), [](float2& x, int, int, float2 b) {
                    x.x += b.x;
                    x.y += b.y;
                });
            if (Traits::columns_staged) warpgroup::sync(READY + 1 + consumer);
        }
        deferred.defer(g, sums, tile.row + row_in_tile, tile.col);
    });
    deferred.send(g, shared, 0, deferred.subtiles);
    if (laneid() == 0) tma::store_async_read_wait();
}

template <Config C>
__device__ __forceinline__ void consume_blockwise(const typename KernelTraits<C>::Globals& g,
                                                  typename KernelTraits<C>::Shared& shared) {
    static_assert(!KernelTraits<C>::fast && !KernelTraits<C>::is_1d1d);
    if constexpr (KernelTraits<C>::store_warps)
        consume_blockwise_halves<C>(g, shared);
    else
        consume_blockwise_tiles<C>(g, shared);
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
