// The consumers of promoted accumulation with row-wise or tensor-wise scales alone, for the
// commonest outputs: of a 16-bit type, stored by TMA, without bias or activation. promoted_sm90.cuh
// does the rest.
//
// The values are the same, bit for bit. Here the epilogue of a tile overlaps with products: its
// left half is scaled, rounded and staged while the last product runs, which belongs to the right
// half; and the right half while the next tile's first two do. A store warp sends what is staged,
// so that the consumers issue no copies. What this kernel leaves out gives the registers of a sum
// and of its product different banks: an addition reads one from each, beside the tensor cores,
// which want the same registers. (Stores of pairs would tie a sum to an even or odd register, which
// are the banks, as products are; and so do loops of other kinds of sums.)
//
// Tiles of 128 x 176 have one product in a step, and a deferred store under the next tile's first
// one. These kernels alone have tiles of two widths there.
#pragma once

#include "csrc/gemm/fp8/promoted_rowwise_loads_sm90.cuh"
#include "csrc/gemm/fp8/store_warps_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Scales and rounds half i of a tile in one sequence, because rounding has half the rate and
// another pipe.
template <Config C, int i, class O, bool per_column, int cols>
__device__ __forceinline__ void scale_and_round(typename KernelTraits<C>::Shared& shared,
                                                const Epilogue<C>& epilogue,
                                                const rt_fl<16, cols>& sums,
                                                rt_bf<16, cols>& rounded) {
    constexpr int before = i * cols * int(sizeof(float));
    const uint32_t own = TileScales<C>::columns(shared) + before + laneid() % 4 * sizeof(float4);
#pragma unroll
    for (int j = 0; j < cols / 16; ++j) {
        float4 four{};
        if constexpr (per_column) four = arch::load_shared<float4>(own + j * 16 * sizeof(float));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float2 x = sums.tiles[0][j].data[r];
            x.x *= epilogue.rows[0][r % 2];
            x.y *= epilogue.rows[0][r % 2];
            if constexpr (per_column) {
                x.x *= r / 2 == 0 ? four.x : four.z;
                x.y *= r / 2 == 0 ? four.y : four.w;
            }
            rounded.tiles[0][j].data[r] = arch::bit_cast<bf16_2>(pack_pair<O>(x.x, x.y));
        }
    }
}
template <Config C, int i, int cols>
__device__ __forceinline__ void round_half(const typename KernelTraits<C>::Globals& g,
                                           typename KernelTraits<C>::Shared& shared,
                                           const Epilogue<C>& epilogue, const rt_fl<16, cols>& sums,
                                           rt_bf<16, cols>& rounded) {
    if (g.scale_b.outer == 0) {
        if (g.out_dtype == DType::bf16)
            scale_and_round<C, i, bf16, false>(shared, epilogue, sums, rounded);
        else
            scale_and_round<C, i, half, false>(shared, epilogue, sums, rounded);
    } else {
        if (g.out_dtype == DType::bf16)
            scale_and_round<C, i, bf16, true>(shared, epilogue, sums, rounded);
        else
            scale_and_round<C, i, half, true>(shared, epilogue, sums, rounded);
    }
}

// Hands half i of a tile over to the store warp.
template <Config C, int i, class Rounded>
__device__ __forceinline__ void stage_half(typename KernelTraits<C>::Shared& shared,
                                           const Rounded& rounded, int consumer, bool narrow) {
    arch::named_barrier_sync(HALF_STORED + consumer, STORE_THREADS);
    stage_rounded<C, i>(shared, rounded, narrow);
    arch::named_barrier_arrive(HALF_STAGED + consumer, STORE_THREADS);
}

// Two products side by side in a step. The end of a tile is spread over three products: under its
// last one the left half is scaled, rounded and staged; under the next tile's first one the right
// half is scaled and rounded, and under the second one staged.
template <Config C>
__device__ __forceinline__ void consume_rowwise_halves(const typename KernelTraits<C>::Globals& g,
                                                       typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    using Where = TileScales<C>;
    static_assert(Traits::products_m == 1 && Traits::products_n == 2 && Traits::columns_placed &&
                  !Traits::groups);
    constexpr int cols = Traits::product_cols;
    const ClusterPosition place(g);
    const int consumer = warpgroup::groupid();
    // One arrival stands for the warpgroup, because wgmma reads shared memory for all of it.
    const bool releases = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (releases) arrive(shared.empty[stage]);
    };
    const int own_row = consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[2], product;
    rt_bf<16, cols> rounded;
    Operands<C> operands(shared, consumer);
    float one[2] = {1.f, 1.f};
    Epilogue<C> epilogue;
    int phase = 0;
    const auto finish_half = [&](auto which) {
        constexpr int i = decltype(which)::value;
        epilogue.take_scales(g, shared, own_row, phase);
        round_half<C, i>(g, shared, epilogue, sums[i], rounded);
        if constexpr (i == 1) {
            Where::release(shared);
            phase ^= 1;
        }
    };
    using Left = std::integral_constant<int, 0>;
    using Right = std::integral_constant<int, 1>;

    uint32_t index = blockIdx.x;
    if (index >= g.order.total) return;
    const auto is_narrow = [&](uint32_t index) {
        return Traits::two_widths && arch::shuffle(int(tile_at<C>(g, place, index).narrow), 0) != 0;
    };
    bool narrow = is_narrow(index);
    wait(shared.full[ring.stage], ring.phase);
    operands.find(ring.stage);
    operands.multiply(product, 0, 0);
    // The first tile stages zeros as the right half of the one before, so that nothing depends on
    // whether there is one; nobody stores them.
    kittens::warp::zero(sums[1]);
    kittens::warp::zero(rounded);
    bool before_narrow = false;
    for (;;) {
        warpgroup::mma_async_wait(product);
        promote<true>(sums[0], product, 0, cols, one);
        operands.multiply_last(product, 0, 1, narrow);
        stage_half<C, 1>(shared, rounded, consumer, before_narrow);
        kittens::warp::zero(sums[1]);
        // A step ends where its last product is issued: so between an addition and the next product
        // there is no branch, and what that needs is found on the way.
        for (int left = arch::shuffle(g.k_blocks, 0) - 1; left > 0; --left) {
            const int previous = ring.stage;
            ring.advance();
            operands.find(ring.stage);
            wait(shared.full[ring.stage], ring.phase);
            warpgroup::mma_async_wait(product);
            promote<false>(sums[1], product, 0, cols, one);
            operands.multiply(product, 0, 0);
            release(previous);
            warpgroup::mma_async_wait(product);
            promote<false>(sums[0], product, 0, cols, one);
            operands.multiply_last(product, 0, 1, narrow);
        }
        const int previous = ring.stage;
        ring.advance();
        finish_half(Left{});
        stage_half<C, 0>(shared, rounded, consumer, false);
        index += g.clusters;
        const bool more = arch::shuffle(int(index < g.order.total), 0) != 0;
        bool next_narrow = false;
        if (more) {
            next_narrow = is_narrow(index);
            wait(shared.full[ring.stage], ring.phase);
        }
        warpgroup::mma_async_wait(product);
        promote<false>(sums[1], product, 0, cols, one);
        release(previous);
        if (!more) break;
        // The shuffles tell the compiler that the values are the same in all lanes: descriptors
        // stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        operands.find(ring.stage);
        operands.multiply(product, 0, 0);
        finish_half(Right{});
        before_narrow = narrow;
        narrow = next_narrow;
    }
    finish_half(Right{});
    stage_half<C, 1>(shared, rounded, consumer, narrow);
    arch::named_barrier_sync(HALF_STORED + consumer, STORE_THREADS);
}

// One product in a step. The store of a tile is deferred: it overlaps with the next tile's first
// product, before which there are no sums.
template <Config C>
__device__ __forceinline__ void consume_rowwise_tiles(const typename KernelTraits<C>::Globals& g,
                                                      typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    static_assert(Traits::products == 1);
    constexpr int cols = Traits::product_cols;
    // The shuffle tells the compiler that the value is the same in all lanes.
    const int consumer = arch::shuffle(int(warpgroup::groupid()), 0);
    // One arrival stands for the warpgroup, because wgmma reads shared memory for all of it.
    const bool releases = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (releases) arrive(shared.empty[stage]);
    };
    const int row_in_tile = consumer * 64 + warpgroup::warpid() * 16;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[Traits::products], product;
    Operands<C> operands(shared, consumer);
    DeferredStore<C> deferred;
    float one[2] = {1.f, 1.f};
    int phase = 0;
    for_each_tile<C>(g, ClusterPosition(g), [&](const Tile& tile) {
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        const bool narrow = Traits::two_widths && arch::shuffle(int(tile.narrow), 0) != 0;
        int left = arch::shuffle(g.k_blocks, 0) - 1;  // steps after this one
        int previous = 0;
        const auto next_stage = [&] {
            operands.find(ring.stage);
            wait(shared.full[ring.stage], ring.phase);
        };
        const auto step = [&]<bool begins>() {
            next_stage();
            operands.multiply_last(product, 0, 0, narrow);
            if constexpr (begins)
                deferred.send(g, shared, 0, deferred.subtiles);
            else
                release(previous);
            previous = ring.stage;
            ring.advance();
            warpgroup::mma_async_wait(product);
            promote<begins>(sums[0], product, 0, cols, one);
        };
        step.template operator()<true>();
        // Several steps without a jump back between an addition and the next product.
        constexpr int together = 4;
        for (; left % together != 0; --left) step.template operator()<false>();
        for (; left > 0; left -= together) {
#pragma unroll
            for (int i = 0; i < together; ++i) step.template operator()<false>();
        }
        release(previous);
        Epilogue<C> epilogue;
        epilogue.take_scales(g, shared, row_in_tile + laneid() / 4, phase);
        phase ^= 1;
        epilogue.scale(g, shared, sums);
        deferred.defer(g, sums, tile.row + row_in_tile, tile.col);
        deferred.narrow = narrow;
    });
    deferred.send(g, shared, 0, deferred.subtiles);
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
