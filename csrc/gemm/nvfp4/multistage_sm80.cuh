// Product of many rows of 16-bit activations with a prepared NVFP4 weight, for every GPU from
// compute capability 8.0 on: the loop of portable/multistage_sm80.cuh, with codes and scales in its
// ring. What Hopper's kernels take as the first operand of a product, 16 rows of the weight by 16
// of k, is the second operand of two. A lane loads the words of a stage with one load for each 16
// columns, and makes fragments of them between the products of 16 of k before.
#pragma once

#include "csrc/gemm/common/group_tiles_sm80.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/nvfp4/portable.h"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"
#include "csrc/gemm/portable/multistage_sm80.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm80 {

using namespace kittens;
using gemm::PortableConfig, gemm::sm80::Source, gemm::sm80::TileOrigin;
using gemm::sm80::Groups, gemm::sm80::GroupTile;
using sm90::Nvfp4Weights;

// The fragments of 16 columns and 16 of k as the second operand of products.
template <class T>
__device__ __forceinline__ void make_operand(operand_b<T>& to, const Nvfp4Weights::Words& words,
                                             int k) {
    uint32_t rows[4];
    Nvfp4Weights::fragment<T>(words, k, rows);
    to.words[0] = rows[0], to.words[1] = rows[2];
    to.words[2] = rows[1], to.words[3] = rows[3];
}

template <PortableConfig C>
struct WeightTraits {
    static constexpr PortableConfig config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int warps = C.warps(), threads = C.threads(), stages = C.stages;
    static constexpr int warp_m = C.warp_m(), warp_n = C.warp_n();
    static constexpr int height = warp_m / 16, width = warp_n / 16;
    static constexpr int blocks_per_sm = 2;
    static constexpr bool has_semaphores = false, divides_k = false;
    static constexpr int pitch = warp_n + 8;

    using a_tile = st<T, C.block_m, gemm::BLOCK_K>;
    static constexpr int pieces = C.block_n / PIECE;  // of a stage
    struct Pieces {
        uint4 data[pieces][PIECE_BYTES / 16];
    };
    struct alignas(1024) Stage {
        a_tile a;
        Pieces b;
    };
    static_assert(sizeof(Stage) == weight_stage_bytes(C) && gemm::BLOCK_K == PIECE);
    struct Shared {
        Stage ring[stages];
    };
    static_assert(warps * warp_m * pitch * 4 <= weight_shared_bytes(C));

    struct Weights {
        // Pieces are copied by as many threads each, vector after vector. Of pieces behind the last
        // columns the first piece stands in the ring: nobody reads their sums.
        struct Copies {
            static constexpr int VECTORS = PIECE_BYTES / 16, of_piece = threads / pieces;
            static constexpr int count = (VECTORS + of_piece - 1) / of_piece;
            const uint8_t* from;
            uint32_t to;

            __device__ __forceinline__ Copies(const Pieces& first, const Source& source,
                                              uint32_t batch, uint32_t begin, uint32_t left,
                                              uint32_t) {
                const uint32_t piece = threadIdx.x / of_piece, vector = threadIdx.x % of_piece;
                to = arch::shared_address(&first) + piece * PIECE_BYTES + vector * 16;
                const uint32_t row = begin / PIECE + (piece * PIECE < left ? piece : 0);
                from =
                    source.data + batch * source.batch_stride + row * source.stride + vector * 16;
            }
            static __device__ __forceinline__ void advance(const uint8_t*&, const Source&, int) {}
            __device__ __forceinline__ void copy_whole(const uint8_t* at, int i,
                                                       uint32_t slot) const {
                constexpr int step = of_piece * 16;
                if (i < count - 1 || threadIdx.x % of_piece + i * of_piece < VECTORS) {
                    arch::cp_async<16>(to + slot + i * step, at + i * step);
                }
            }
            __device__ __forceinline__ void copy_ragged(const Source&, uint32_t slot, int, uint32_t,
                                                        uint32_t) const {
#pragma unroll
                for (int i = 0; i < count; ++i) copy_whole(from, i, slot);
            }
        };
        // The words of a stage, of which a lane makes fragments.
        struct Walker {
            uint32_t codes, scales;
            Nvfp4Weights::Words words[width];

            __device__ __forceinline__ Walker(const Pieces& source, int column, int) {
                const uint32_t strip = arch::shared_address(&source) + column / 16 * STRIP_BYTES;
                codes = strip + laneid() * Nvfp4Weights::LANE_CODES;
                scales = strip + Nvfp4Weights::scales_of(laneid());
            }
            __device__ __forceinline__ void begin(uint32_t slot) {
#pragma unroll
                for (int i = 0; i < width; ++i) {
                    const uint32_t at = slot + i * STRIP_BYTES;
                    words[i] = Nvfp4Weights::load_words(codes + at, scales + at);
                }
            }
            __device__ __forceinline__ void load(operand_b<T>& to, int columns, int k,
                                                 uint32_t) const {
                make_operand(to, words[columns / 16], k / 16);
            }
        };
    };

    struct Globals {
        Source a, b;
        uint32_t m, n, k, out_n;
        bool a_whole, b_whole;
        bool out_aligned, residual_aligned, aux_aligned;
        bool only_rounds;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        gemm::Epilogue epilogue;
        const float* scale;  // of the groups, or nullptr
        Groups groups;
    };
    // Of rows without a group there is nothing.
    static __device__ __forceinline__ gemm::sm80::Affine affine(const Globals& g,
                                                                const TileOrigin& at) {
        if (at.batch >= g.groups.count) return {0.f, nullptr};
        const float scale = g.scale != nullptr ? arch::load_global(g.scale + at.batch) : 1.f;
        return {Nvfp4Weights::FACTOR * scale, g.epilogue.bias};
    }
};

template <class Traits>
__global__ __launch_bounds__(Traits::threads, Traits::blocks_per_sm) void nvfp4_portable_kernel(
    const __grid_constant__ typename Traits::Globals g) {
    constexpr PortableConfig C = Traits::config;
    const GroupTile tile = g.groups.template at<C.block_m>(blockIdx.x);
    if (tile.group > g.groups.count) return;
    gemm::sm80::compute_tile<Traits>(
        g, {tile.group, tile.token, tile.column_tile * C.block_n, tile.end, g.n, 0, g.k},
        tile.group < g.groups.count);
}

}  // namespace sm80

template <gemm::PortableConfig C>
void launch_portable(const Params& p, Stream stream) {
    using Traits = sm80::WeightTraits<C>;
    constexpr int row_step = C.threads() / 8;
    const int64_t column_tiles = (p.n + C.block_n - 1) / C.block_n;
    const int64_t piece_row = pieces(p.k) * PIECE_BYTES;
    typename Traits::Globals globals{
        .a = gemm::sm80::make_source(p.a, p.a_stride, 0, true, row_step, C.block_m, 0),
        .b = {.data = static_cast<const uint8_t*>(p.weight),
              .batch_stride = pieces(p.n) * piece_row,
              .stride = piece_row,
              .k_step = PIECE_BYTES},
        .m = static_cast<uint32_t>(p.m),
        .n = static_cast<uint32_t>(p.n),
        .k = static_cast<uint32_t>(p.k),
        .out_n = static_cast<uint32_t>(p.n),
        .a_whole = true,
        .b_whole = true,
        .out_aligned = gemm::is_vec4_aligned(p.out, p.n, p.out_dtype),
        .residual_aligned = false,
        .aux_aligned = false,
        .only_rounds = p.activation == 0,
        .out_dtype = p.out_dtype,
        .out = p.out,
        .out_stride = p.n,
        .out_batch_stride = 0,
        .epilogue = {.bias = p.bias, .activation = static_cast<gemm::Activation>(p.activation)},
        .scale = p.scale,
        .groups = {p.offs, static_cast<uint32_t>(p.m), static_cast<uint32_t>(p.groups),
                   static_cast<uint32_t>(column_tiles)}};
    kittens::launch(kittens::LaunchOptions{.blocks_per_sm = Traits::blocks_per_sm},
                    sm80::nvfp4_portable_kernel<Traits>,
                    dim3(gemm::sm80::blocks_of(globals.groups, C.block_m)), dim3(C.threads()),
                    dim3(1), weight_shared_bytes(C), stream, globals);
}

}  // namespace thunderkittens::nvfp4_gemm
