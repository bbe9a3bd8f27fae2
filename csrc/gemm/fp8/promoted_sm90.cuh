// The consumers of fp8 products with promoted accumulation.
//
// A product of 64 x 128 x 128 (k) goes to registers of its own and is added to the sums in fp32,
// times the block-wise scales of its 128 of k where there are such. A consumer computes its 64 x
// 256 as two such products with the same a, one after the other: the second set of registers is
// then half as large as the sums, and while one consumer adds, the other one's products keep the
// tensor cores busy. The first step of a tile has no sums yet: in their place the registers still
// hold the tile before, whose deferred store overlaps with this step's products.
#pragma once

#include "csrc/gemm/fp8/epilogue_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// sum += product * the factors of a thread's two rows; the first product is the sum so far. Row by
// row: the register file has to serve the tensor cores, too, and a factor that an instruction
// shares with the one before it is not read again.
template <bool begins, int cols>
__device__ __forceinline__ void promote(rt_fl<16, cols>& sum, const rt_fl<16, cols>& product,
                                        int first, int last, float (&factor)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = first / 16; j < last / 16; ++j) {
#pragma unroll
            for (int r = row; r < 4; r += 2) {
                const float2 x = product.tiles[0][j].data[r];
                float2& s = sum.tiles[0][j].data[r];
                const float2 before = begins ? make_float2(0.f, 0.f) : s;
                s = make_float2(fmaf(x.x, factor[row], before.x), fmaf(x.y, factor[row], before.y));
            }
        }
    }
}

// The operands of a product in shared memory, as the low words of their descriptors, the same in
// all lanes.
template <Config C>
struct Operands {
    using Traits = KernelTraits<C>;
    static constexpr int step = int(sizeof(typename Traits::Stage)) >> 4;
    uint32_t first_a, first_b, a, b;

    __device__ __forceinline__ Operands(typename Traits::Shared& shared, int consumer) {
        auto& stage = shared.stages[0];
        const auto rows = stage.a.template subtile<64, BLOCK_K>({consumer * Traits::products_m, 0});
        first_a = arch::shuffle(static_cast<uint32_t>(operand_descriptor<Traits>(
                                    kittens::detail::operand_origin(rows))),
                                0);
        first_b = static_cast<uint32_t>(operand_descriptor<Traits>(stage.b.address()));
    }
    __device__ __forceinline__ void find(int stage) {
        a = first_a + stage * step, b = first_b + stage * step;
    }
    // Starts product (in_m, in_n) of the stage: of 64 rows and product_cols columns, or `narrow_by`
    // columns fewer, of which those of `d` stay as they are.
    template <int narrow_by = 0>
    __device__ __forceinline__ void multiply(rt_fl<16, Traits::product_cols>& d, int in_m,
                                             int in_n) const {
        const uint64_t rows = with_low_word<Traits>(a + low_word_of_rows(in_m * 64));
        const uint64_t columns =
            with_low_word<Traits>(b + low_word_of_rows(in_n * Traits::product_cols));
        warpgroup::mma_fence(d);
        issue_product<Traits, Traits::product_cols - narrow_by>(d, rows, columns, false);
        warpgroup::mma_commit_group();
    }
    // The last product of a row of products, which a narrow tile has narrower.
    __device__ __forceinline__ void multiply_last(rt_fl<16, Traits::product_cols>& d, int in_m,
                                                  int in_n, bool narrow) const {
        if (Traits::two_widths && narrow)
            multiply<Traits::narrow_by>(d, in_m, in_n);
        else
            multiply(d, in_m, in_n);
    }
};

// The factors of a stage's products, for each of its blocks of columns; with 1D1D scales, of its
// rows alone.
template <Config C>
struct PromotedFactors {
    using Traits = KernelTraits<C>;
    static constexpr int sets = Traits::is_1d1d ? 1 : Traits::column_scales;
    float of[sets][2 * Traits::products_m];

    // `row` is the thread's first row in the tile.
    __device__ __forceinline__ void read(uint32_t scales, int row) {
        float rows[2 * Traits::products_m], columns[sets];
#pragma unroll
        for (int r = 0; r < 2 * Traits::products_m; ++r) {
            const int at = row + r / 2 * 64 + r % 2 * 8;
            rows[r] = arch::load_shared<float>(scales + at * 4);
        }
#pragma unroll
        for (int c = 0; c < sets; ++c) {
            if (!Traits::is_1d1d)
                columns[c] = arch::load_shared<float>(scales + (C.block_m + c) * 4);
        }
#pragma unroll
        for (int c = 0; c < sets; ++c) {
#pragma unroll
            for (int r = 0; r < 2 * Traits::products_m; ++r) {
                of[c][r] = Traits::is_1d1d ? rows[r] : rows[r] * columns[c];
                arch::pin_register(of[c][r]);
            }
        }
    }
    // Those of a product's first and second block of columns.
    __device__ __forceinline__ void take(int in_m, int in_n, float (&first)[2],
                                         float (&second)[2]) const {
        constexpr bool wide = Traits::product_cols > 128;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            first[r] = of[Traits::is_1d1d || wide ? 0 : in_n][2 * in_m + r];
            second[r] = of[wide ? 1 : 0][2 * in_m + r];
        }
    }
};

// Adds a product of the columns from `in_n` on, times the factors `first` of its first block of
// columns and `second` of its second one, to its sums. With 1D1D scales those of columns, which lie
// at `columns`, come first.
template <Config C, bool blockwise, bool begins, int cols>
__device__ __forceinline__ void add_promoted(rt_fl<16, cols>& sums, rt_fl<16, cols>& product,
                                             float (&first)[2], float (&second)[2],
                                             uint32_t columns, bool begins_block) {
    using Traits = KernelTraits<C>;
    if constexpr (Traits::is_1d1d) {
        with_columns<1, false>(reinterpret_cast<rt_fl<16, cols>(&)[1]>(product), columns,
                               [&](float2& x, int, int r, float2 s) {
                                   x.x *= s.x * first[r];
                                   x.y *= s.y * first[r];
                               });
        first[0] = first[1] = 1.f;
    }
    if constexpr (!blockwise || Traits::is_1d1d || cols <= 128) {
        promote<begins>(sums, product, 0, cols, first);
    } else if (begins_block) {
        promote<begins>(sums, product, 0, 128, first);
        promote<begins>(sums, product, 128, cols, second);
    } else {
        promote<begins>(sums, product, 0, 64, first);
        promote<begins>(sums, product, 64, cols, second);
    }
}

// Releases a stage, of which each warp has read scales itself.
template <Config C>
__device__ __forceinline__ void release_scaled(typename KernelTraits<C>::Shared& shared,
                                               int stage) {
    arrive_by_warp(shared.empty[stage]);
    if constexpr (KernelTraits<C>::is_1d1d) {
        if (laneid() == 0) arrive(shared.scales_read[stage]);
    }
}

// Stores a tile at once; `row` is the warp's first one.
template <Config C, int count, int cols>
__device__ __forceinline__ void store_products_now(const typename KernelTraits<C>::Globals& g,
                                                   typename KernelTraits<C>::Shared& shared,
                                                   const rt_fl<16, cols> (&sums)[count],
                                                   const Tile& tile, uint32_t row) {
    constexpr int across = KernelTraits<C>::products_n;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        store_now<C>(g, shared, sums[i], row + i / across * 64, tile.col + i % across * cols,
                     tile.end, i);
    }
}

template <Config C>
__device__ __forceinline__ void consume_promoted(const typename KernelTraits<C>::Globals& g,
                                                 typename KernelTraits<C>::Shared& shared) {
    using Traits = KernelTraits<C>;
    const ClusterPosition place(g);
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    constexpr int cols = Traits::product_cols;
    rt_fl<16, cols> sums[Traits::products], product;
    Operands<C> operands(shared, consumer);
    DeferredStore<C> deferred;
    int scales_phase = 0;
    const bool keeps = g.out_dtype != DType::fp32 && g.tma_store && g.offs == nullptr;

    for_each_tile<C>(g, place, [&](const Tile& tile) {
        // The shuffles tell the compiler that the values are the same in all lanes: descriptors
        // stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        const uint32_t row =
            tile.row + consumer * (Traits::products_m * 64) + warpgroup::warpid() * 16;
        const int in_tile = int(row + laneid() / 4 - tile.row);
        const int k_blocks = tile.nothing ? 0 : g.k_blocks;
        const bool narrow = Traits::narrows_promoted && arch::shuffle(int(tile.narrow), 0) != 0;
        int stage = ring.stage;
        Epilogue<C> epilogue;
        PromotedFactors<C> factors;  // found while the last product of the stage before runs
        const auto read_scales = [&](int which) {
            factors.read(shared.scales[which].address(), in_tile);
        };
        const auto step = [&]<bool blockwise, bool begins>(int left) {
            const int previous = stage;
            stage = ring.stage;
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) {
                const int in_m = i / Traits::products_n, in_n = i % Traits::products_n;
                if (Traits::two_widths && !blockwise && narrow && in_n == Traits::products_n - 1)
                    operands.template multiply<Traits::narrow_by>(product, in_m, in_n);
                else
                    operands.multiply(product, in_m, in_n);
                // While the product runs: the deferred store or the release of the stage before,
                // and the wait for the next.
                if (begins) {
                    deferred.send(g, shared, deferred.subtiles * i / Traits::products,
                                  deferred.subtiles * (i + 1) / Traits::products);
                } else if (i == 0) {
                    release_scaled<C>(shared, previous);
                }
                float first[2] = {1.f, 1.f}, second[2];
                if constexpr (blockwise) factors.take(in_m, in_n, first, second);
                if (i == Traits::products - 1) {
                    ring.advance();
                    operands.find(ring.stage);
                    if (left > 0) {
                        wait(shared.full[ring.stage], ring.phase);
                        if constexpr (blockwise) read_scales(ring.stage);
                    } else {
                        if constexpr (!blockwise && TileScales<C>::copied) {
                            epilogue.take_scales(g, shared, in_tile, scales_phase);
                            scales_phase ^= 1;
                        }
                        epilogue.fetch_bias(g, tile);
                    }
                }
                warpgroup::mma_async_wait(product);
                add_promoted<C, blockwise, begins>(
                    sums[i], product, first, second,
                    shared.scales[stage].address() + (C.block_m + in_n * cols) * sizeof(float),
                    tile.col % 128 == 0);
            }
        };
        const auto multiply = [&]<bool blockwise>() {
            wait(shared.full[ring.stage], ring.phase);
            if constexpr (blockwise) read_scales(ring.stage);
            operands.find(ring.stage);
            int left = arch::shuffle(k_blocks, 0) - 1;  // steps after this one
            step.template operator()<blockwise, true>(left);
            for (--left; left >= 0; --left) step.template operator()<blockwise, false>(left);
            release_scaled<C>(shared, stage);
        };
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < Traits::products; ++i) kittens::warp::zero(sums[i]);
            deferred.send(g, shared, 0, deferred.subtiles);
            if (!tile.nothing) epilogue.fetch_bias(g, tile);
        } else if (g.blockwise) {
            multiply.template operator()<true>();
        } else if constexpr (!Traits::is_1d1d) {
            multiply.template operator()<false>();
        }
        if (!tile.nothing) epilogue.apply(g, shared, sums);
        if (keeps) {
            deferred.defer(g, sums, row, tile.col);
            deferred.narrow = narrow;
            return;
        }
        store_products_now<C>(g, shared, sums, tile, row);
        deferred.clear();
    });
    deferred.send(g, shared, 0, deferred.subtiles);
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
