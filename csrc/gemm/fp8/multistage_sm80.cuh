// Product of fp8 operands for every GPU from compute capability 8.0 on: the loop of
// portable/multistage_sm80.cuh, to which two neighbours along k are one element of 16 bits. A word
// of a fragment then has four elements, which become pairs of fp16 in registers. Products take them
// in another order than k's, the same of both operands. Sums are fp32; with block-wise scales those
// of a stage, 128 of k, are multiplied and added up.
//
// The bits of an e4m3 element, moved, are an fp16 number of 2^-8 times its value, which the sums
// are made good for. But they make no NaN of NaN. So warps notice such codes, and look then for the
// rows and columns that have some.
#pragma once

#include "csrc/gemm/common/group_tiles_sm80.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/fp8/portable.h"
#include "csrc/gemm/portable/multistage_sm80.cuh"

namespace thunderkittens::fp8_gemm {
namespace sm80 {

using namespace kittens;
using gemm::sm80::GroupTile, gemm::sm80::Source, gemm::sm80::TileOrigin;

// Elements of 8 bits as pairs of fp16.
template <DType dtype>
struct Wide {
    static constexpr bool is_e4m3 = dtype == DType::e4m3;
    static constexpr float factor = is_e4m3 ? 256.f : 1.f;

    // The lower and the upper two of four. In `marks` the top bits of bytes say that there was NaN.
    static __device__ __forceinline__ void pairs(uint32_t codes, uint32_t& low, uint32_t& high,
                                                 uint32_t& marks) {
        low = value(arch::permute_bytes(codes, 0, 0x1404));
        high = value(arch::permute_bytes(codes, 0, 0x3424));
        if constexpr (is_e4m3) marks |= (codes & 0x7f7f7f7fu) + 0x01010101u;
    }
    static __device__ __forceinline__ bool is_nan(uint32_t code) {
        return is_e4m3 && (code & 0x7f) == 0x7f;
    }

  private:
    static __device__ __forceinline__ uint32_t value(uint32_t upper_bytes) {
        if constexpr (!is_e4m3) return upper_bytes;
        return (upper_bytes >> 1 & 0x3f803f80u) | (upper_bytes & 0x80008000u);
    }
};

template <Config C>
struct Traits : gemm::sm80::Traits<loop_config(C)> {
    using Base = gemm::sm80::Traits<loop_config(C)>;
    using T = half;
    static constexpr Config own = C;
    static constexpr int b_unit = C.block_n;  // there are no gates
    static constexpr bool promotes = C.sums == Sums::promoted;
    using A = Wide<C.a_dtype>;
    using B = Wide<C.b_dtype>;

    // Of 32 of k a product takes either half.
    struct Codes {
        static __device__ __forceinline__ void widen_a(operand_a<T>& to, const operand_a<T>& codes,
                                                       int half, uint32_t& marks) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                A::pairs(codes.words[2 * half + r], to.words[r], to.words[2 + r], marks);
            }
        }
        static __device__ __forceinline__ void widen_b(operand_b<T>& to, const operand_b<T>& codes,
                                                       int half, uint32_t& marks) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                B::pairs(codes.words[2 * n + half], to.words[2 * n], to.words[2 * n + 1], marks);
            }
        }
    };
    struct Globals : Base::Globals {
        Scales scale_a, scale_b;
        bool is_1d1d;
        uint32_t elements;  // of k
        DType bias_dtype;
        gemm::sm80::Groups groups;
    };
};

template <class Traits>
using SumsOf = typename gemm::sm80::Multistage<Traits>::Sums;

// NaN to the sums in shared memory of the rows and columns of a warp that have such an element.
template <class Traits>
__device__ __forceinline__ void spread_nan(const typename Traits::Globals& g, const TileOrigin& at,
                                           const gemm::sm80::WarpTile<Traits>& tile) {
    const float nan = arch::bit_cast<float>(0x7fc00000u);
    const auto has_nan = [&](const Source& from, uint32_t line, auto is_nan) {
        const uint8_t* data = from.data + at.batch * from.batch_stride + line * from.stride;
        bool any = false;
        for (uint32_t k = laneid(); k < g.elements; k += WARP_THREADS) {
            any |= is_nan(uint32_t{arch::load_global(data + k)});
        }
        return arch::any_lane(any);
    };
    constexpr int rows = Traits::warp_m, columns = Traits::warp_n, pitch = Traits::pitch;
#pragma unroll 1
    for (int row = 0; row < rows && tile.m + row < at.m_end; ++row) {
        if (!has_nan(g.a, tile.m + row, &Traits::A::is_nan)) continue;
        for (int i = laneid(); i < columns; i += WARP_THREADS) {
            arch::store_shared(tile.sums + uint32_t((row * pitch + i) * 4), nan);
        }
    }
#pragma unroll 1
    for (int column = 0; column < columns && tile.n + column < g.n; ++column) {
        if (!has_nan(g.b, tile.n + column, &Traits::B::is_nan)) continue;
        for (int i = laneid(); i < rows; i += WARP_THREADS) {
            arch::store_shared(tile.sums + uint32_t((i * pitch + column) * 4), nan);
        }
    }
    arch::sync_warp();
}

// Block-wise scales: the sums of each stage are multiplied by theirs and added to the totals.
template <class Traits>
struct Promotion {
    static constexpr int height = Traits::height, width = Traits::width;
    const typename Traits::Globals& g;
    SumsOf<Traits> totals;
    const float *a, *b;
    int rows_left, columns_left;  // from this lane's first on

    __device__ __forceinline__ Promotion(const typename Traits::Globals& globals,
                                         const TileOrigin& at)
        : g(globals) {
        const uint32_t m = at.m + kittens::warpid() / Traits::config.warps_n * Traits::warp_m;
        const uint32_t n = at.n + kittens::warpid() % Traits::config.warps_n * Traits::warp_n;
        const int row = laneid() / 4, column = laneid() % 4 * 2;
        rows_left = static_cast<int>(at.m_end - m) - row;
        columns_left = static_cast<int>(g.n - n) - column;
        a = g.scale_a.data + (m + row) * g.scale_a.outer;
        b = g.scale_b.data + at.batch * g.scale_b.group +
            (g.is_1d1d ? n + column : n / BLOCK_K) * g.scale_b.outer;
#pragma unroll
        for (int i = 0; i < height; ++i) {
#pragma unroll
            for (int j = 0; j < width; ++j) zero(totals[i][j]);
        }
    }
    // So many behind this lane's first.
    __device__ __forceinline__ float scale_of_row(int row) const {
        return row < rows_left ? arch::load_global(a + row * g.scale_a.outer) : 0.f;
    }
    __device__ __forceinline__ float scale_of_column(int column) const {
        return column < columns_left ? arch::load_global(b + column * g.scale_b.outer) : 0.f;
    }
    __device__ __forceinline__ void add(SumsOf<Traits>& d) {
        // Of a 1D2D tile all columns have one scale.
        const float of_all = g.is_1d1d || columns_left <= 0 ? 1.f : arch::load_global(b);
        float of_rows[height][2];
#pragma unroll
        for (int i = 0; i < height; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) of_rows[i][r] = scale_of_row(i * 16 + r * 8) * of_all;
        }
#pragma unroll
        for (int j = 0; j < width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = j * 16 + half * 8;
                float2 of_columns{1.f, 1.f};
                if (g.is_1d1d) of_columns = {scale_of_column(column), scale_of_column(column + 1)};
#pragma unroll
                for (int i = 0; i < height; ++i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float2& sum = d[i][j].tiles[0][0].data[half * 2 + r];
                        float2& total = totals[i][j].tiles[0][0].data[half * 2 + r];
                        total.x += sum.x * (of_rows[i][r] * of_columns.x);
                        total.y += sum.y * (of_rows[i][r] * of_columns.y);
                        sum = {0.f, 0.f};
                    }
                }
            }
        }
        a += g.scale_a.inner, b += g.scale_b.inner;
    }
};

// Stores a tile whose sums are in shared memory: of each warp its own.
template <class Traits>
__device__ __forceinline__ void store(const typename Traits::Globals& g, const TileOrigin& at,
                                      const gemm::sm80::WarpTile<Traits>& tile) {
    constexpr int lanes = Traits::warp_n / 4, step = WARP_THREADS / lanes;
    const int col = laneid() % lanes * 4, count = min(int(g.n - tile.n) - col, 4);
    if (count <= 0) return;
    const bool has_group = at.batch < g.groups.count;
    constexpr float factor = Traits::A::factor * Traits::B::factor;
    float of_columns[4], bias[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        of_columns[i] = has_group ? factor : 0.f;
        if (i >= count || !has_group) continue;
        if constexpr (!Traits::promotes) {
            of_columns[i] *= arch::load_global(g.scale_b.data + at.batch * g.scale_b.group +
                                               (tile.n + col + i) * g.scale_b.outer);
        }
    }
    if (g.epilogue.bias != nullptr && has_group) {
        gemm::sm90::with_type(const_cast<void*>(g.epilogue.bias), g.bias_dtype, [&](auto* from) {
            gemm::sm90::load_four(bias, from + (tile.n + col), false, count);
        });
    }
#pragma unroll 1
    for (int row = laneid() / lanes; row < Traits::warp_m && tile.m + row < at.m_end; row += step) {
        const float4 sums =
            arch::load_shared<float4>(tile.sums + uint32_t((row * Traits::pitch + col) * 4));
        float x[4] = {sums.x, sums.y, sums.z, sums.w};
        float of_row = 1.f;
        if constexpr (!Traits::promotes) {
            if (has_group) {
                of_row = arch::load_global(g.scale_a.data + (tile.m + row) * g.scale_a.outer);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = x[i] * (of_row * of_columns[i]) + bias[i];
        gemm::sm90::activate(g.epilogue.activation, x);
        const int64_t place = int64_t{tile.m + row} * g.out_stride + tile.n + col;
        gemm::sm80::store_elements(g.out, g.out_dtype, place, x, g.out_aligned, count);
    }
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, Traits::blocks_per_sm) void fp8_portable_kernel(
    const __grid_constant__ typename Traits::Globals g) {
    constexpr Config C = Traits::own;
    const GroupTile tile = g.groups.template at<C.block_m>(blockIdx.x);
    if (tile.group > g.groups.count) return;
    const TileOrigin at{tile.group, tile.token, tile.column_tile * C.block_n, tile.end, g.n,
                        0,          g.k};
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_memory());
    gemm::sm80::init_ring<Traits>(shared);
    SumsOf<Traits> d;
#pragma unroll
    for (int i = 0; i < Traits::height; ++i) {
#pragma unroll
        for (int j = 0; j < Traits::width; ++j) zero(d[i][j]);
    }
    // Made behind the products, which leave no register.
    const auto of_warp = [&] {
        return gemm::sm80::WarpTile<Traits>(g, arch::shared_address(&shared), at);
    };
    const auto share = [&](SumsOf<Traits>& sums, uint32_t marks) {
        arch::sync_block();  // the ring becomes the memory of the sums
        of_warp().share(sums);
        if (arch::any_lane((marks & 0x80808080u) != 0)) spread_nan<Traits>(g, at, of_warp());
    };
    if (tile.group == g.groups.count || g.k == 0) {
        share(d, 0);
    } else {
        gemm::sm80::Multistage<Traits> loop(g, shared, at);
        if constexpr (Traits::promotes) {
            Promotion<Traits> promotion(g, at);
            loop.run(d, [&] { promotion.add(d); });
            share(promotion.totals, loop.marks);
        } else {
            loop.run(d);
            share(d, loop.marks);
        }
    }
    store<Traits>(g, at, of_warp());
}

}  // namespace sm80

template <Config C>
void launch_portable(const Params& p, Stream stream) {
    using Traits = sm80::Traits<C>;
    constexpr int row_step = loop_config(C).threads() / 8;
    const int64_t column_tiles = (p.n + C.block_n - 1) / C.block_n;
    typename Traits::Globals globals{};
    globals.a = gemm::sm80::make_source(p.a, p.a_stride / 2, 0, true, row_step, C.block_m, 0);
    globals.b = gemm::sm80::make_source(p.b, p.b_stride / 2, p.b_group_stride / 2, true, row_step,
                                        Traits::b_unit, 0);
    globals.a.k_short = globals.b.k_short = static_cast<int>(p.k % 2);
    globals.m = static_cast<uint32_t>(p.m);
    globals.n = globals.out_n = static_cast<uint32_t>(p.n);
    globals.k = static_cast<uint32_t>((p.k + 1) / 2);
    globals.elements = static_cast<uint32_t>(p.k);
    globals.a_whole = globals.b_whole = true;
    globals.out_aligned = gemm::is_vec4_aligned(p.out, p.n, p.out_dtype);
    globals.out_dtype = p.out_dtype;
    globals.out = p.out;
    globals.out_stride = p.n;
    globals.epilogue.bias = p.bias;
    globals.epilogue.activation = static_cast<gemm::Activation>(p.activation);
    globals.scale_a = p.scale_a;
    globals.scale_b = p.scale_b;
    globals.is_1d1d = p.is_1d1d;
    globals.bias_dtype = p.bias_dtype;
    globals.groups = {p.offs, globals.m, static_cast<uint32_t>(p.groups),
                      static_cast<uint32_t>(column_tiles)};
    kittens::launch(kittens::LaunchOptions{.blocks_per_sm = Traits::blocks_per_sm},
                    sm80::fp8_portable_kernel<Traits>,
                    dim3(gemm::sm80::blocks_of(globals.groups, C.block_m)), dim3(Traits::threads),
                    dim3(1), portable_bytes(C), stream, globals);
}

}  // namespace thunderkittens::fp8_gemm
