// What the portable kernel works on: the types of its tiles, its shared memory, its parameters.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/portable.h"
#include "kittens/kittens.cuh"
#include "kittens/pipeline/ring.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

using namespace kittens;

// An operand in memory, in bytes: rows of adjacent elements that begin at multiples of 16. A thread
// copies 16 bytes of every few rows, pass by pass; `in_unit`, `in_half` and `to_unit` lead from one
// of its vectors to the next (Copies, in copies_sm80.cuh).
struct Source {
    const uint8_t* data;
    int64_t batch_stride, stride;
    int64_t in_unit, to_half, to_unit;
    int64_t k_step;   // between the tiles of neighbouring stages
    int k_short = 0;  // bytes that the last element of k lacks, where it stands for two of 8 bits
};

// Where a block's tile is: its first row of a, and its first column of the output. Rows from m_end
// and columns from n_end on are not its own. It sums k elements, from k_begin on.
struct TileOrigin {
    uint32_t batch, m, n;
    uint32_t m_end, n_end, k_begin, k;
};

// What the sums of a tile are multiplied by, and the bias behind that.
struct Affine {
    float alpha;
    const void* bias;
};

template <PortableConfig C>
struct Traits {
    static constexpr PortableConfig config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int warps = C.warps(), threads = C.threads(), stages = C.stages;
    static constexpr int warp_m = C.warp_m(), warp_n = C.warp_n();
    // Columns in which a blocked gate takes turns.
    static constexpr int b_unit = warp_n;
    // Whether blocks begin at different k; not where k is adjacent in memory.
    static constexpr bool divides_k = false;
    // Base tiles of a warp's rectangle.
    static constexpr int height = warp_m / 16, width = warp_n / 16;
    // Two blocks of four warps fill the registers of a multiprocessor.
    static constexpr int blocks_per_sm = warps > 4 ? 1 : 2;
    static constexpr bool has_semaphores = gemm::has_semaphores(C);

    using a_tile =
        std::conditional_t<C.a_m_major, st<T, BLOCK_K, C.block_m>, st<T, C.block_m, BLOCK_K>>;
    using b_tile =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>, st<T, C.block_n, BLOCK_K>>;
    struct alignas(1024) Stage {
        a_tile a;
        b_tile b;
    };
    struct RingOnly {
        Stage ring[stages];
    };
    struct RingAndSemaphores : RingOnly {
        semaphore full[stages], empty[stages];
    };
    using Shared = std::conditional_t<has_semaphores, RingAndSemaphores, RingOnly>;
    static_assert(sizeof(Shared) == portable_shared_bytes(C), "portable.h knows another size");
    // A warp's sums, as rows of fp32 with a pitch that keeps pairs of them apart.
    static constexpr int pitch = warp_n + 8;
    static_assert(warps * warp_m * pitch * 4 <= int(sizeof(RingOnly)));

    struct Globals {
        Source a, b;
        uint32_t m, n, k;  // n columns of b, of which each gate takes two
        uint32_t out_n;
        TileOrder order;
        bool a_whole, b_whole;  // no vector reaches over the end of its row
        // Four neighbouring elements are aligned.
        bool out_aligned, residual_aligned, aux_aligned;
        bool only_rounds;  // the epilogue scales, adds a bias, and rounds
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        Epilogue epilogue;
    };
    static __device__ __forceinline__ Affine affine(const Globals& g, const TileOrigin&) {
        return {g.epilogue.alpha, g.epilogue.bias};
    }
};

}  // namespace sm80
}  // namespace thunderkittens::gemm
