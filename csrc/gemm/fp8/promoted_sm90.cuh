// The consumers of fp8 products whose sums are promoted.
//
// `promoted` and `fine`: a product of 64 x 128 x 128 (k) goes to registers of its own and is added
// to the sums in fp32, times the scales of its 128 of k where there are such. A consumer computes
// its 64 x 256 as two such products with the same a, one after the other: the second set of
// registers is then half as large as the sums, and while one consumer adds, the other one's
// products keep the tensor cores busy. The first step of a tile has no sums yet: in their place the
// registers still hold the tile before, which leaves in the shadow of its products.
#pragma once

#include "csrc/gemm/fp8/epilogue_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

// sum += part * the factors of a thread's two rows; the first part is the sum so far. Row by row:
// the register file has to serve the tensor cores, too, and a factor that an instruction shares
// with the one before it is not read again.
template <bool begins, int cols>
__device__ __forceinline__ void promote(rt_fl<16, cols>& sum, const rt_fl<16, cols>& part,
                                        int first, int last, float (&factor)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = first / 16; j < last / 16; ++j) {
#pragma unroll
            for (int r = row; r < 4; r += 2) {
                const float2 x = part.tiles[0][j].data[r];
                float2& s = sum.tiles[0][j].data[r];
                const float2 before = begins ? make_float2(0.f, 0.f) : s;
                s = make_float2(fmaf(x.x, factor[row], before.x), fmaf(x.y, factor[row], before.y));
            }
        }
    }
}

// Where the operands of a product lie, as the low words of descriptors, the same in all lanes.
template <Config C>
struct Operands {
    using K = Types<C>;
    static constexpr int step = int(sizeof(typename K::Stage)) >> 4;
    uint32_t first_a, first_b, a, b;

    __device__ __forceinline__ Operands(typename K::Shared& shared, int consumer) {
        auto& stage = shared.stages[0];
        const auto rows = stage.a.template subtile<64, BLOCK_K>({consumer * K::products_m, 0});
        first_a = arch::shuffle(
            static_cast<uint32_t>(operand_descriptor<K>(kittens::detail::operand_origin(rows))), 0);
        first_b = static_cast<uint32_t>(operand_descriptor<K>(stage.b.address()));
    }
    __device__ __forceinline__ void find(int stage) {
        a = first_a + stage * step, b = first_b + stage * step;
    }
    // Starts product i of the stage: in_m of 64 rows, in_n of product_cols columns.
    // `less` columns fewer: those of `d` stay as they are.
    template <int less = 0>
    __device__ __forceinline__ void multiply(rt_fl<16, K::product_cols>& d, int in_m,
                                             int in_n) const {
        const uint64_t rows = with_low_word<K>(a + low_word_of_rows(in_m * 64));
        const uint64_t columns = with_low_word<K>(b + low_word_of_rows(in_n * K::product_cols));
        warpgroup::mma_fence(d);
        issue_product<K, K::product_cols - less>(d, rows, columns, false);
        warpgroup::mma_commit_group();
    }
};

template <Config C>
__device__ __forceinline__ void consume_promoted(const typename Types<C>::Globals& g,
                                                 typename Types<C>::Shared& shared) {
    using K = Types<C>;
    const Place place(g);
    // Each warp has read scales itself.
    const auto release = [&](int stage) {
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.empty[stage]);
    };
    const int consumer = warpgroup::groupid();
    Ring<C.stages> ring;
    constexpr int cols = K::product_cols;
    rt_fl<16, cols> sums[K::products], part;
    Operands<C> operands(shared, consumer);
    Finished<C> finished;
    int scales_phase = 0;
    const bool keeps = g.out_dtype != DType::fp32 && g.tma_store && g.offs == nullptr;

    for_each_tile<C>(g, place, [&](const Tile& tile) {
        // The same in all lanes, as the compiler then knows: descriptors stay in uniform registers.
        ring.stage = arch::shuffle(ring.stage, 0), ring.phase = arch::shuffle(ring.phase, 0);
        const uint32_t row = tile.row + consumer * (K::products_m * 64) + warpgroup::warpid() * 16;
        const uint32_t own_row = row + laneid() / 4;
        const int in_tile = int(own_row - tile.row);
        const int k_blocks = tile.nothing ? 0 : g.k_blocks;
        const bool narrow = K::narrows_promoted && arch::shuffle(int(tile.narrow), 0) != 0;
        int stage = ring.stage;
        Epilogue<C> epilogue;
        const auto release_with_scales = [&](int which) {
            release(which);
            if constexpr (K::fine) {
                if (laneid() == 0) arrive(shared.scales_read[which]);
            }
        };
        // The factors of a stage's products, for each of its blocks of columns: found while the
        // last product of the stage before runs.
        constexpr int factor_sets = K::fine ? 1 : K::column_scales;
        float factors[factor_sets][2 * K::products_m];
        const auto read_scales = [&](int which) {
            float rows[2 * K::products_m], columns[factor_sets];
            const uint32_t scales = shared.scales[which].address();
#pragma unroll
            for (int r = 0; r < 2 * K::products_m; ++r) {
                const int at = in_tile + r / 2 * 64 + r % 2 * 8;
                rows[r] = arch::load_shared<float>(scales + at * 4);
            }
#pragma unroll
            for (int c = 0; c < factor_sets; ++c) {
                if (!K::fine) columns[c] = arch::load_shared<float>(scales + (C.block_m + c) * 4);
            }
#pragma unroll
            for (int c = 0; c < factor_sets; ++c) {
#pragma unroll
                for (int r = 0; r < 2 * K::products_m; ++r) {
                    factors[c][r] = K::fine ? rows[r] : rows[r] * columns[c];
                    arch::pin_register(factors[c][r]);
                }
            }
        };
        const auto step = [&]<bool blocks, bool begins>(int left) {
            const int previous = stage;
            stage = ring.stage;
#pragma unroll
            for (int i = 0; i < K::products; ++i) {
                const int in_m = i / K::products_n, in_n = i % K::products_n;
                if (K::two_widths && !blocks && narrow && in_n == K::products_n - 1)
                    operands.template multiply<K::less>(part, in_m, in_n);
                else
                    operands.multiply(part, in_m, in_n);
                // While the product runs: what comes before and after it.
                if (begins) {
                    finished.send(g, shared, finished.pieces * i / K::products,
                                  finished.pieces * (i + 1) / K::products);
                } else if (i == 0) {
                    release_with_scales(previous);
                }
                // Of its first and of its second block of columns.
                float first[2] = {1.f, 1.f}, second[2];
                if constexpr (blocks) {
                    constexpr bool wide = cols > 128;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        first[r] = factors[K::fine || wide ? 0 : in_n][2 * in_m + r];
                        second[r] = factors[wide ? 1 : 0][2 * in_m + r];
                    }
                }
                if (i == K::products - 1) {
                    ring.advance();
                    operands.find(ring.stage);
                    if (left > 0) {
                        wait(shared.full[ring.stage], ring.phase);
                        if constexpr (blocks) read_scales(ring.stage);
                    } else {
                        if constexpr (!blocks && TileScales<C>::copied) {
                            epilogue.take_scales(g, shared, in_tile, scales_phase);
                            scales_phase ^= 1;
                        }
                        epilogue.fetch_bias(g, tile);
                    }
                }
                warpgroup::mma_async_wait(part);
                if constexpr (K::fine) {
                    with_columns<1, false>(
                        reinterpret_cast<rt_fl<16, cols>(&)[1]>(part),
                        shared.scales[stage].address() + (C.block_m + in_n * cols) * sizeof(float),
                        [&](float2& x, int, int r, float2 s) {
                            x.x *= s.x * first[r];
                            x.y *= s.y * first[r];
                        });
                    first[0] = first[1] = 1.f;
                }
                if constexpr (!blocks || K::fine || cols <= 128) {
                    promote<begins>(sums[i], part, 0, cols, first);
                } else if (tile.col % 128 == 0) {
                    promote<begins>(sums[i], part, 0, 128, first);
                    promote<begins>(sums[i], part, 128, cols, second);
                } else {
                    promote<begins>(sums[i], part, 0, 64, first);
                    promote<begins>(sums[i], part, 64, cols, second);
                }
            }
        };
        const auto multiply = [&]<bool blocks>() {
            wait(shared.full[ring.stage], ring.phase);
            if constexpr (blocks) read_scales(ring.stage);
            operands.find(ring.stage);
            int left = arch::shuffle(k_blocks, 0) - 1;  // steps after this one
            step.template operator()<blocks, true>(left);
            for (--left; left >= 0; --left) step.template operator()<blocks, false>(left);
            release_with_scales(stage);
        };
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < K::products; ++i) kittens::warp::zero(sums[i]);
            finished.send(g, shared, 0, finished.pieces);
            if (!tile.nothing) epilogue.fetch_bias(g, tile);
        } else if (g.blocks) {
            multiply.template operator()<true>();
        } else if constexpr (!K::fine) {
            multiply.template operator()<false>();
        }
        if (!tile.nothing) epilogue.apply(g, shared, sums);
        if (keeps) {
            finished.keep(g, sums, row, tile.col);
            finished.narrow = narrow;
            return;
        }
#pragma unroll
        for (int i = 0; i < K::products; ++i) {
            store_now<C>(g, shared, sums[i], row + i / K::products_n * 64,
                         tile.col + i % K::products_n * cols, tile.end, i);
        }
        finished.clear();
    });
    finished.send(g, shared, 0, finished.pieces);
    if (laneid() == 0) tma::store_async_read_wait();
}

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
