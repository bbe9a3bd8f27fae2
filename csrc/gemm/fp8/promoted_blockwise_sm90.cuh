// The consumers of fp8 products with scales of blocks, for the outputs that most calls have: of a
// 16-bit type, stored by TMA, with a bias or none. promoted_sm90.cuh does the rest.
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

// The factors of a thread's two rows in a stage, for each part of its columns that is in one block
// of b. A product of 192 columns has three parts of 64, and its tile begins or ends in the middle
// of a block; of narrower products each is a part.
template <Config C>
struct BlockFactors {
    using K = Types<C>;
    static constexpr bool uneven = C.block_n % 128 != 0;
    static constexpr int parts = uneven ? C.block_n / 64 : K::products_n;
    float of[parts][2];

    // `scales` are those of a stage, `row` is the thread's first row in the tile.
    __device__ __forceinline__ void read(uint32_t scales, int row, bool begins_block) {
        float rows[2], columns[parts];
#pragma unroll
        for (int r = 0; r < 2; ++r) rows[r] = arch::load_shared<float>(scales + (row + r * 8) * 4);
#pragma unroll
        for (int c = 0; c < K::column_scales; ++c) {
            columns[c] = arch::load_shared<float>(scales + (C.block_m + c) * 4);
        }
        if constexpr (uneven) {
            static_assert(parts == 3);
            columns[2] = columns[1];
            columns[1] = begins_block ? columns[0] : columns[1];
        }
#pragma unroll
        for (int c = 0; c < parts; ++c) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                of[c][r] = rows[r] * columns[c];
                arch::pin_register(of[c][r]);
            }
        }
    }
};

// Lets other warps go first. In a run of additions ptxas marks none so, and one consumer's run then
// keeps the other's from its products. The wait has nothing to wait for and is marked; the next
// instruction, which the producers have executed before, does nothing but keep it where it is.
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

// Two products side by side in a step. A tile's halves end in the shadow of products: the left one
// under the last product, which belongs to the right one, and that under the next tile's first.
template <Config C>
__device__ __forceinline__ void consume_block_halves(const typename Types<C>::Globals& g,
                                                     typename Types<C>::Shared& shared) {
    using K = Types<C>;
    static_assert(K::products_m == 1 && K::products_n == 2 && K::columns_staged);
    constexpr int cols = K::product_cols;
    const Place place(g);
    const int consumer = warpgroup::groupid();
    // Each warp has read scales itself.
    const auto release = [&](int stage) {
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.empty[stage]);
    };
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
    float bias[2] = {};  // of a column of each half
    const auto fetch_bias = [&](uint32_t index) {
        const uint32_t col = tile_at<C>(g, place, index).col + warpgroup::laneid();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = col + i * cols;
            if (at < g.n) bias[i] = load_any(g.bias, g.bias_dtype, at);
        }
    };
    // Each thread has fetched the bias of one of a half's columns, and sees all in the staging
    // buffers.
    const auto finish = [&](auto which) {
        constexpr int i = decltype(which)::value;
        arch::named_barrier_sync(SENT + consumer, SENDING_THREADS);
        if (g.bias != nullptr) {
            auto& columns = columns_of<C>(shared);
            columns.set(place_of(warpgroup::laneid()), bias[i]);
            warpgroup::sync(READY + 1 + consumer);
            with_columns<1, K::columns_placed>(reinterpret_cast<rt_fl<16, cols>(&)[1]>(sums[i]),
                                               columns.address(),
                                               [](float2& x, int, int, float2 b) {
                                                   x.x += b.x;
                                                   x.y += b.y;
                                               });
            warpgroup::sync(READY + 1 + consumer);
        }
        rt_bf<16, cols> rounded;
        if (g.out_dtype == DType::bf16)
            gemm::sm90::round_to<bf16>(rounded, sums[i]);
        else
            gemm::sm90::round_to<half>(rounded, sums[i]);
        stage_rounded<C, i>(shared, rounded, false);
        arch::named_barrier_arrive(STAGED + consumer, SENDING_THREADS);
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
            // Never repeated. Where a jump back lies between a product and its end, ptxas leaves
            // the additions to yield(); else it lets every second one yield.
            do {
                warpgroup::mma_async_wait(product);
                add_product<false>(sums[0], product, factors, 0);
                operands.multiply(product, 0, 1);
            } while (g.k_blocks < 0);
        }
        const int previous = ring.stage;
        ring.advance();
        finish(Left{});
        index += g.clusters;
        const bool more = arch::shuffle(int(index < g.order.total), 0) != 0;
        if (more) wait(shared.full[ring.stage], ring.phase);
        warpgroup::mma_async_wait(product);
        add_product<false>(sums[1], product, factors, 1);
        release(previous);
        if (!more) break;
        // The same in all lanes, as the compiler then knows: descriptors stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        operands.find(ring.stage);
        operands.multiply(product, 0, 0);
        read_scales();
        finish(Right{});
    }
    finish(Right{});
    arch::named_barrier_sync(SENT + consumer, SENDING_THREADS);
}

// One product in a step.
template <Config C>
__device__ __forceinline__ void consume_block_tiles(const typename Types<C>::Globals& g,
                                                    typename Types<C>::Shared& shared) {
    using K = Types<C>;
    static_assert(K::products == 1);
    constexpr int cols = K::product_cols;
    const int consumer = warpgroup::groupid();
    // Each warp has read scales itself.
    const auto release = [&](int stage) {
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.empty[stage]);
    };
    const int row_in_tile = consumer * 64 + warpgroup::warpid() * 16;
    const int own_row = row_in_tile + laneid() / 4;
    Ring<C.stages> ring;
    rt_fl<16, cols> sums[K::products], product;
    Operands<C> operands(shared, consumer);
    Finished<C> finished;

    for_each_tile<C>(g, Place(g), [&](const Tile& tile) {
        // The same in all lanes, as the compiler then knows: descriptors stay in uniform registers.
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
            // Before the product: a warp that reads later may find the stage handed back.
            read_scales();
            operands.multiply(product, 0, 0);
            // The first step has no sums yet: their registers still hold the tile before.
            if constexpr (begins)
                finished.send(g, shared, 0, finished.pieces);
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
            with_columns<K::products_n, K::columns_placed>(sums, columns.address(),
                                                           [](float2& x, int, int, float2 b) {
                                                               x.x += b.x;
                                                               x.y += b.y;
                                                           });
            if (K::columns_staged) warpgroup::sync(READY + 1 + consumer);
        }
        finished.keep(g, sums, tile.row + row_in_tile, tile.col);
    });
    finished.send(g, shared, 0, finished.pieces);
    if (laneid() == 0) tma::store_async_read_wait();
}

template <Config C>
__device__ __forceinline__ void consume_blocks(const typename Types<C>::Globals& g,
                                               typename Types<C>::Shared& shared) {
    static_assert(!Types<C>::fast && !Types<C>::fine);
    if constexpr (Types<C>::halves)
        consume_block_halves<C>(g, shared);
    else
        consume_block_tiles<C>(g, shared);
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
