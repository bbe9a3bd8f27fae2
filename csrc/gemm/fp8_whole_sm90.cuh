// Promoted sums with scales of whole rows or matrices, for the outputs that most calls have: of a
// 16-bit type, stored by TMA, without bias or activation. fp8_promoted_sm90.cuh does the rest.
//
// The values are the same, bit for bit. Here a tile's end lies in the shadow of products: its left
// half is scaled, rounded and staged while the last product runs, which belongs to the right half;
// and the right half while the next tile's first product does. A warp of the producers sends what
// is staged, so that the consumers issue no copies. What this kernel leaves out gives the registers
// of a sum and of its product different banks: an addition reads one from each, beside the tensor
// cores, which want the same registers. (Stores of pairs would tie a sum to an even or odd
// register, which are the banks, as products are; and so do loops of other kinds of sums.)
#pragma once

#include "csrc/gemm/fp8_promoted_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// Named barriers, one of each per consumer: half of a tile is staged; and has left the buffers.
constexpr int STAGED = READY + 5, SENT = READY + 7;
constexpr int SENDING_THREADS = WARPGROUP_THREADS + WARP_THREADS;

// Rounds half i of a finished tile, and writes it to the consumer's staging buffers.
template <Config C, int i>
__device__ __forceinline__ void stage_half(const typename Types<C>::Globals& g,
                                           typename Types<C>::Shared& shared,
                                           const rt_fl<16, Types<C>::product_cols>& d,
                                           bool narrow) {
    using K = Types<C>;
    using F = Finished<C>;
    using staging = typename K::out_tile;
    static_assert(F::pieces == 2 * C.buffers);
    rt_bf<16, K::product_cols> values;
    if (g.out_dtype == DType::bf16)
        gemm::sm90::round_to<bf16>(values, d);
    else
        gemm::sm90::round_to<half>(values, d);
    auto* buffers = &shared.out[warpgroup::groupid() * WARPGROUP_WARPS][0];
#pragma unroll
    for (int b = 0; b < C.buffers; ++b) {
        const int piece = i * C.buffers + b;
        auto& buffer = buffers[b * WARPGROUP_WARPS + warpgroup::warpid()];
        const auto stage = [&](int first) {
            gemm::sm90::stage_piece<rt_bf<16, staging::cols>>(values, first, buffer);
        };
        constexpr int before = i * K::product_cols;
        if (K::two_widths && narrow && piece == F::across - 1)
            stage(F::first_of(piece, true) - before);
        else
            stage(F::first_of(piece, false) - before);
    }
}

// What a warp of the producers does for a consumer: sends what that has staged.
template <Config C>
__device__ __forceinline__ void send_staged(const typename Types<C>::Globals& g,
                                            typename Types<C>::Shared& shared, int consumer) {
    using K = Types<C>;
    using tiles = typename K::out_tiles;
    const auto* buffers = &shared.out[consumer * WARPGROUP_WARPS][0];
    if (blockIdx.x >= g.order.total) return;  // as the consumers do
    arch::named_barrier_arrive(SENT + consumer, SENDING_THREADS);
    for_each_tile<C>(g, Place(g), [&](const Tile& tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            arch::named_barrier_sync(STAGED + consumer, SENDING_THREADS);
            if (laneid() == 0) {
#pragma unroll
                for (int b = 0; b < C.buffers; ++b) {
                    const auto& from = reinterpret_cast<const tiles&>(buffers[b * WARPGROUP_WARPS]);
                    const int first = Finished<C>::first_of(i * C.buffers + b, tile.narrow);
                    tma::store_async(g.out, from,
                                     elements(0, 0, tile.row + consumer * 64, tile.col + first));
                }
                tma::store_async_read_wait();
            }
            arch::sync_warp();
            arch::named_barrier_arrive(SENT + consumer, SENDING_THREADS);
        }
    });
}

template <Config C>
__device__ __forceinline__ void consume_whole(const typename Types<C>::Globals& g,
                                              typename Types<C>::Shared& shared) {
    using K = Types<C>;
    using Where = TileScales<C>;
    static_assert(K::products_m == 1 && K::products_n == 2 && !K::groups);
    constexpr int cols = K::product_cols;
    const Place place(g);
    const int consumer = warpgroup::groupid();
    // One arrival stands for the warpgroup, which wgmma reads shared memory as.
    const bool hands_back = warpgroup::warpid() == 0 && laneid() == 0;
    const auto release = [&](int stage) {
        if (hands_back) arrive(shared.empty[stage]);
    };
    const int own_row = consumer * 64 + warpgroup::warpid() * 16 + laneid() / 4;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[2], product;
    Operands<C> operands(shared, consumer);
    float one[2] = {1.f, 1.f};
    Epilogue<C> epilogue;
    int phase = 0;
    bool narrow = false;
    const auto finish = [&](auto which) {
        constexpr int i = decltype(which)::value;
        epilogue.take_scales(g, shared, own_row, phase);
        auto& half = reinterpret_cast<rt_fl<16, cols>(&)[1]>(sums[i]);
        constexpr int before = i * cols * int(sizeof(float));
        if (g.scale_b.outer == 0) {
#pragma unroll
            for (int j = 0; j < cols / 16; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    half[0].tiles[0][j].data[r].x *= epilogue.rows[0][r % 2];
                    half[0].tiles[0][j].data[r].y *= epilogue.rows[0][r % 2];
                }
            }
        } else {
            with_columns<1, K::columns_placed>(half, Where::columns(shared) + before,
                                               [&](float2& x, int, int r, float2 s) {
                                                   x.x = x.x * epilogue.rows[0][r] * s.x;
                                                   x.y = x.y * epilogue.rows[0][r] * s.y;
                                               });
        }
        if constexpr (i == 1) {
            Where::release(shared);
            phase ^= 1;
        }
        arch::named_barrier_sync(SENT + consumer, SENDING_THREADS);
        stage_half<C, i>(g, shared, sums[i], narrow);
        arch::named_barrier_arrive(STAGED + consumer, SENDING_THREADS);
    };
    using Left = std::integral_constant<int, 0>;
    using Right = std::integral_constant<int, 1>;

    uint32_t index = blockIdx.x;
    if (index >= g.order.total) return;
    Tile next = tile_at<C>(g, place, index);
    wait(shared.full[ring.stage], ring.phase);
    operands.find(ring.stage);
    operands.multiply(product, 0, 0);
    for (;;) {
        narrow = K::two_widths && arch::shuffle(int(next.narrow), 0) != 0;
        const auto multiply_right = [&] {
            if (K::two_widths && narrow)
                operands.template multiply<K::less>(product, 0, 1);
            else
                operands.multiply(product, 0, 1);
        };
        warpgroup::mma_async_wait(product);
        promote<true>(sums[0], product, 0, cols, one);
        multiply_right();
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
            multiply_right();
        }
        const int previous = ring.stage;
        ring.advance();
        finish(Left{});
        index += g.clusters;
        const bool more = arch::shuffle(int(index < g.order.total), 0) != 0;
        if (more) {
            if (K::two_widths) next = tile_at<C>(g, place, index);
            wait(shared.full[ring.stage], ring.phase);
        }
        warpgroup::mma_async_wait(product);
        promote<false>(sums[1], product, 0, cols, one);
        release(previous);
        if (!more) break;
        // The same in all lanes, as the compiler then knows: descriptors stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        operands.find(ring.stage);
        operands.multiply(product, 0, 0);
        finish(Right{});
    }
    finish(Right{});
    arch::named_barrier_sync(SENT + consumer, SENDING_THREADS);
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
