// What a GEMM kernel on Hopper works on: types of its tiles, its shared memory, its parameters.
#pragma once

#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/dense/single_wave.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// The residual of a fused epilogue comes through the ring of stages, behind the last step of a
// tile, in parts of 128 bytes a row, two in a stage. To TMA it is a matrix of 16-bit words.
template <Config C>
struct Residual {};
template <Config C>
    requires(C.fused)
struct Residual<C> {
    using part = st<bf16, C.block_m, 64>;
    static constexpr int parts_per_stage = 2;
    gl<bf16, -1, 1, -1, -1, part> map;
};

// When the pieces of a finished tile leave, in steps of the next one.
template <Config C>
struct Pace {
    int spacing;  // between pieces that other warps finish, or 0
};
template <Config C>
    requires(has_once(C))
struct Pace<C> {
    int spacing;
    int steps;  // between pieces that leave as they are
    int held;   // last steps of the second consumer that wait for the first one's
};
template <Config C>
    requires(has_finishers(C))
struct Pace<C> {
    int spacing;       // as the schedule's
    int apart;         // steps between pieces
    int early;         // by how much every other one comes before its time
    int sending;       // the step by which all have left, and the bias is taken
    bool brings_bias;  // the thread that loads does, with a tile's first step
};

// The map of z, where other warps finish tiles and z is kept.
template <Config C>
struct Kept {};
template <Config C>
    requires(has_finishers(C))
struct Kept<C> {
    gl<bf16, -1, 1, -1, -1, st<bf16, 16, 64>> map;
};

// Tiles of widths that vary, rows of b along k: the maps of what is behind the first half of a
// tile's columns, for each kind of tiles.
template <Config C>
struct Varied {};
template <Config C>
    requires(C.varied)
struct Varied<C> {
    CUtensorMap maps[C.b_n_major ? 1 : 4];
};

template <Config C>
struct Types {
    static constexpr Config config = C;
    // How many columns a tile lacks, or whether it is narrow.
    using Narrow = std::conditional_t<C.varied, uint32_t, bool>;
    // Whether tiles of widths that vary can lack so many.
    static __host__ __device__ constexpr bool has_lack(int lack) {
        return lack % varied_unit(C) == 0 && lack >= C.block_n - widest(C) &&
               lack <= C.block_n - narrowest(C);
    }
    static constexpr bool has_finishers = gemm::has_finishers(C);
    static constexpr bool has_once = gemm::has_once(C);
    // With a fused epilogue, where that has been timed: pieces that leave as they are do so every
    // second step, and the last tile's consumers have a whole piece of the residual on its way.
    static constexpr bool spreads = has_finishers && C.dtype == DType::bf16 && !C.a_m_major;
    // Staging buffers that are handed over, each with semaphores behind those of the stages.
    static constexpr int handed = has_finishers ? C.consumers * WARPGROUP_WARPS * 2 : 0;
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
    // What is loaded at a time: half of a tile, where that is a tile too. With a gate of whole
    // halves those of b lie apart.
    static constexpr int a_parts = C.block_m >= 128 ? 2 : 1;
    static constexpr int b_parts = C.block_n % 128 == 0 ? 2 : 1;
    static constexpr int a_part_rows = C.block_m / a_parts;
    static constexpr int b_part_cols = C.block_n / b_parts;
    using a_part =
        std::conditional_t<C.a_m_major, st<T, BLOCK_K, a_part_rows>, st<T, a_part_rows, BLOCK_K>>;
    using b_part =
        std::conditional_t<C.b_n_major, st<T, BLOCK_K, b_part_cols>, st<T, b_part_cols, BLOCK_K>>;
    // The last part of a narrow tile. Rows of b along n are loaded as they are.
    static constexpr bool two_widths = has_two_widths(C);
    static constexpr int less = two_widths && !C.b_n_major ? NARROWER : 0;
    using b_last = std::conditional_t<C.b_n_major, b_part, st<T, b_part_cols - less, BLOCK_K>>;
    // The column of z that is `offset` columns into a tile which begins at `col`. With a gate of
    // whole halves, the tile's second half is as far away as z's.
    template <class Globals>
    static __device__ __forceinline__ uint32_t column(const Globals& g, uint32_t col, int offset) {
        const bool apart = C.fused && g.epilogue.gate == Gate::blocked && offset >= C.block_n / 2;
        return apart ? col + g.out_n + (offset - C.block_n / 2) : col + offset;
    }
    template <class Globals>
    static __device__ __forceinline__ uint32_t first_column(const Globals& g, const auto& tile) {
        const int width = C.fused && g.epilogue.gate == Gate::blocked ? C.block_n / 2 : C.block_n;
        if constexpr (C.varied)
            return tile.col;
        else if constexpr (two_widths)
            return tile.column(width);
        return tile.n * width;
    }
    // The last tile begins where it is whole, if there are as many rows, and computes some of them
    // a second time: tiles with few rows take longer than whole ones. Not with a fused
    // epilogue, whose residual may be what it writes.
    template <class Globals>
    static __device__ __forceinline__ uint32_t first_row(const Globals& g, uint32_t m) {
        constexpr uint32_t height = C.block_m;
        return C.fused ? m * height : min(m * height, last_row(g.m, height, C.a_m_major));
    }
    static __device__ __forceinline__ Narrow is_narrow(const auto& tile) {
        if constexpr (C.varied)
            return C.block_n - tile.width;
        else if constexpr (two_widths)
            return tile.narrow();
        return false;
    }

    // Staging of a warp's output: rows of 128 bytes, whatever the type of the output. To TMA, which
    // only copies, every output is a matrix of 16-bit words.
    using out_tile = st<bf16, 16, 64>;

    struct Stage {
        a_tile a;
        b_tile b;
    };
    // As it is, a row for each stage that can be a tile's first, or as fp32 for each consumer.
    using Bias = std::conditional_t<has_finishers, sv<T, C.block_n>[C.stages],
                                    sv_fl<C.block_n>[C.consumers]>;
    struct Shared {
        Stage stages[C.stages];
        out_tile out[C.consumers * WARPGROUP_WARPS][2];
        Bias bias;
        semaphore full[C.stages + handed], empty[C.stages + handed];
    };
    static_assert(sizeof(Stage) == sizeof(a_tile) + sizeof(b_tile) && sizeof(Stage) % 1024 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == shared_bytes(C), "gemm.h knows another size");

    using b_layout = std::conditional_t<less == 0, gl<T, -1, 1, -1, -1, b_part>,
                                        gl<T, -1, 1, -1, -1, b_part, b_last>>;

    // What the first load needs comes first: parameters come from memory, in lines.
    struct Globals {
        int k_blocks;
        uint32_t blocks;  // of the grid
        bool a_batched, b_batched;
        bool b_once;         // see Schedule
        bool one_round;      // a tile per block, and the grid is that of the tiles
        bool plain;          // sums are rounded to the operands' type, and TMA stores them
        bool tma_store;      // rows of the output are multiples of 16 bytes
        bool pairs;          // rows of a 16-bit output are multiples of 4 bytes
        bool aligned_pairs;  // two neighbours of z can be written as one
        bool packed;         // values are activated as they are rounded, to bf16
        Pace<C> pace;
        std::conditional_t<C.varied, VariedOrder,
                           std::conditional_t<two_widths, UnevenOrder, TileOrder>>
            order;
        Epilogue epilogue;
        uint32_t m, n, out_n;
        DType out_dtype;
        void* out;
        int64_t out_stride, out_batch_stride;
        Marks marks;
        gl<T, -1, 1, -1, -1, a_part> a;
        b_layout b;
        gl<bf16, -1, 1, -1, -1, out_tile> out_map;
        Residual<C> residual;
        Kept<C> kept;
        Varied<C> varied;
    };

    static constexpr int threads = gemm::threads(C);
    // With two consumers, 65536 registers are 168 per thread at launch; the producer needs few.
    static constexpr bool producer_works = has_finishers || C.marked;
    static constexpr int producer_registers = producer_works ? 40 : 24;
    static constexpr int consumer_registers = producer_works ? 232 : 240;
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
