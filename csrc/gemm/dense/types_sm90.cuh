// What a GEMM kernel on Hopper works on: the types of its tiles, its shared memory, its parameters.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/dense/single_wave.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// The residual of a fused epilogue comes through the ring of stages, behind the last step of a
// tile, in subtiles of 128 bytes a row, two in a stage. To TMA it is a matrix of 16-bit words.
template <Config C>
struct Residual {};
template <Config C>
    requires(C.fused)
struct Residual<C> {
    using residual_tile = st<bf16, C.block_m, 64>;
    static constexpr int subtiles_per_stage = 2;
    gl<bf16, -1, 1, -1, -1, residual_tile> map;
};

// The timing of the deferred store: when the subtiles of a finished tile are stored, in steps of
// the next one.
template <Config C>
struct StorePipeline {
    int store_interval;  // between subtiles that epilogue warps take, or 0
};
template <Config C>
    requires(has_single_wave(C))
struct StorePipeline<C> {
    int store_interval;
    int steps;       // between subtiles of the deferred store
    int tail_steps;  // of the staggered tail: last steps that wait for the first consumer
};
template <Config C>
    requires(has_epilogue_warps(C))
struct StorePipeline<C> {
    int store_interval;  // as the schedule's
    int apart;           // steps between subtiles
    int early;           // by how much every other one comes before its time
    int last_store;      // the step by which all are stored, and the bias is read
    bool brings_bias;    // the thread that loads does, with a tile's first step
};

// The tensor map of the aux output, where epilogue warps store it.
template <Config C>
struct AuxOutput {};
template <Config C>
    requires(has_epilogue_warps(C))
struct AuxOutput<C> {
    gl<bf16, -1, 1, -1, -1, st<bf16, 16, 64>> map;
};

template <Config C>
struct KernelTraits {
    static constexpr Config config = C;
    static constexpr bool has_epilogue_warps = gemm::has_epilogue_warps(C);
    static constexpr bool has_single_wave = gemm::has_single_wave(C);
    // With a fused epilogue, in the layouts where that was found faster: subtiles of the deferred
    // store are stored every second step, and the last tile's consumers have a whole subtile of the
    // residual in flight.
    static constexpr bool spreads = has_epilogue_warps && C.dtype == DType::bf16 && !C.a_m_major;
    // Staging buffers that are handed to epilogue warps, each with semaphores behind those of the
    // stages.
    static constexpr int epilogue_buffers =
        has_epilogue_warps ? C.consumers * WARPGROUP_WARPS * 2 : 0;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int consumer_rows = 64;
    static_assert(
        C.block_m == C.consumers * consumer_rows,
        "a consumer warpgroup computes 64 rows: a second product that shares b's tile would "
        "leave no registers for the finished tile");

    using a_tile =
        std::conditional_t<C.a_m_major, st<T, BLOCK_K, C.block_m>, st<T, C.block_m, BLOCK_K>>;
    using b_tile =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, C.block_n>, st<T, C.block_n, BLOCK_K>>;
    // What one TMA copy loads: half of a tile, where that is a tile too. With a blocked gate the
    // two halves of b lie apart.
    static constexpr int a_parts = C.block_m >= 128 ? 2 : 1;
    static constexpr int b_parts = C.block_n % 128 == 0 ? 2 : 1;
    static constexpr int a_part_rows = C.block_m / a_parts;
    static constexpr int b_part_cols = C.block_n / b_parts;
    using a_part =
        std::conditional_t<C.a_m_major, st<T, BLOCK_K, a_part_rows>, st<T, a_part_rows, BLOCK_K>>;
    using b_part =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, b_part_cols>, st<T, b_part_cols, BLOCK_K>>;
    // The last copy of a narrow tile. Where b's rows lie along n, the full width is loaded.
    static constexpr bool two_widths = has_two_widths(C);
    static constexpr int narrow_by = two_widths && !C.b_n_major ? NARROW_BY : 0;
    using b_last = std::conditional_t<C.b_n_major, b_part, st<T, b_part_cols - narrow_by, BLOCK_K>>;
    // The column of z that is `offset` columns into a tile which begins at `col`. With a blocked
    // gate, the tile's second half is as far away as z's.
    template <class Globals>
    static __device__ __forceinline__ uint32_t column(const Globals& g, uint32_t col, int offset) {
        const bool apart = C.fused && g.epilogue.gate == Gate::blocked && offset >= C.block_n / 2;
        return apart ? col + g.out_n + (offset - C.block_n / 2) : col + offset;
    }
    template <class Globals>
    static __device__ __forceinline__ uint32_t first_column(const Globals& g, const auto& tile) {
        const int width = C.fused && g.epilogue.gate == Gate::blocked ? C.block_n / 2 : C.block_n;
        if constexpr (two_widths) return tile.column(width);
        return tile.n * width;
    }
    // The last row of tiles begins where it is whole, if there are as many rows, and computes some
    // of them a second time: tiles with few rows take longer than whole ones. Not with a fused
    // epilogue, whose residual may be what it writes.
    template <class Globals>
    static __device__ __forceinline__ uint32_t first_row(const Globals& g, uint32_t m) {
        constexpr uint32_t height = C.block_m;
        return C.fused ? m * height : min(m * height, last_row(g.m, height, C.a_m_major));
    }
    static __device__ __forceinline__ bool is_narrow(const auto& tile) {
        if constexpr (two_widths) return tile.narrow();
        return false;
    }

    // Staging of a warp's output: rows of 128 bytes, whatever the type of the output. To TMA, which
    // only copies, every output is a matrix of 16-bit words.
    using out_tile = st<bf16, 16, 64>;

    struct Stage {
        a_tile a;
        b_tile b;
    };
    // The rows of a stage that are a consumer's.
    static __device__ __forceinline__ auto rows_of(Stage& stage, int consumer) {
        if constexpr (C.a_m_major)
            return stage.a.template subtile<BLOCK_K, consumer_rows>({0, consumer});
        else
            return stage.a.template subtile<consumer_rows, BLOCK_K>({consumer, 0});
    }
    // As it is, a row for each stage that can be a tile's first (epilogue warps), or as fp32 for
    // each consumer.
    using Bias = std::conditional_t<has_epilogue_warps, sv<T, C.block_n>[C.stages],
                                    sv_fl<C.block_n>[C.consumers]>;
    // Behind those of the staging buffers, `empty` has one for the row of bias of each stage, at
    // which every warp arrives that has read it.
    static constexpr int first_bias_row = C.stages + epilogue_buffers;
    static constexpr int semaphores = first_bias_row + (has_epilogue_warps ? C.stages : 0);
    struct Shared {
        Stage stages[C.stages];
        out_tile out[C.consumers * WARPGROUP_WARPS][2];
        Bias bias;
        semaphore full[semaphores], empty[semaphores];
    };
    static_assert(sizeof(Stage) == sizeof(a_tile) + sizeof(b_tile) && sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "gemm.h knows another size");

    using b_layout = std::conditional_t<narrow_by == 0, gl<T, -1, 1, -1, -1, b_part>,
                                        gl<T, -1, 1, -1, -1, b_part, b_last>>;

    // What the first load needs comes first: parameters come from memory, in lines.
    struct Globals {
        int k_blocks;
        uint32_t blocks;  // of the grid
        bool a_batched, b_batched;
        bool evict_first_b;     // see Schedule
        bool one_wave;          // a tile per block, and the grid is that of the tiles
        bool store_only;        // sums are rounded to the operands' type, and TMA stores them
        bool tma_store;         // rows of the output are multiples of 16 bytes
        bool vec2_aligned;      // rows of a 16-bit output are multiples of 4 bytes
        bool aux_vec2_aligned;  // two neighbours of the aux output can be written as one
        bool packed;            // values are activated as they are rounded, to bf16
        StorePipeline<C> store_pipeline;
        std::conditional_t<two_widths, TwoWidthOrder, TileOrder> order;
        Epilogue epilogue;
        uint32_t m, n, out_n;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        TileMask mask;
        gl<T, -1, 1, -1, -1, a_part> a;
        b_layout b;
        gl<bf16, -1, 1, -1, -1, out_tile> out_map;
        Residual<C> residual;
        AuxOutput<C> aux;
    };

    static constexpr int threads = gemm::threads(C);
    // With two consumers, 65536 registers are 168 per thread at launch; the producer needs few.
    static constexpr bool producer_works = has_epilogue_warps || C.masked;
    static constexpr int producer_registers = producer_works ? 40 : 24;
    static constexpr int consumer_registers = producer_works ? 232 : 240;
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
