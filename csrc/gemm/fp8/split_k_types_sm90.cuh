// What split_k_sm90.cuh works on: types, the position of a block, whom it releases stages to, and
// block-wise scales.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/fp8/products_sm90.cuh"
#include "csrc/gemm/fp8/split_k.h"

namespace thunderkittens::fp8_gemm {
namespace sm90 {

template <Sums sums_>
struct SplitKTraits {
    using TA = fp8e4m3;
    using TB = fp8e4m3;
    static constexpr bool fast = sums_ == Sums::fast;
    static constexpr Config config = split_k_config(SPLIT_K_WIDTHS[0], sums_);
    static constexpr int consumers = config.consumers, rows = config.block_m;
    static constexpr int own_rows = rows / consumers;
    // Promoted sums take more registers than all threads can have.
    static constexpr int threads = split_k_threads(sums_);
    static constexpr int producer_registers = 40, consumer_registers = 232;
    using a_tile = st<TA, rows, BLOCK_K>;

    struct Shared {
        st<TA, SPLIT_K_RING_ROWS, BLOCK_K> ring;  // of both operands
        sv_fl<rows> of_rows;
        sv_fl<SPLIT_K_WIDTHS[0]> of_columns, bias;
        semaphore full[SPLIT_K_STAGES], empty[SPLIT_K_STAGES];
        semaphore there[consumers];  // what other blocks have sent
        semaphore sent[consumers];   // what this one has
    };
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");
    static_assert(sizeof(Shared) == SPLIT_K_SHARED_BYTES, "split_k.h knows another size");

    struct Globals {
        int k_each, k_extra;  // steps of a block; the first `k_extra` of them have one more
        int width, stages, stage_bytes;
        uint32_t share_m, share_n;  // blocks that share b's and a's tiles: the cluster along m, n
        int a_slice, b_slice;       // rows that one of them loads for all
        // The last tiles begin where they are whole: rows that are not there are slow to load.
        uint32_t last_row, last_col;
        CUtensorMap a, b;
        Scales scale_a, scale_b;
        const void* bias;
        DType out_dtype, bias_dtype;
        bool vec4_aligned;  // four neighbouring elements of out are aligned
        bool blockwise;     // scales are of 128 of k, those of b of 128 columns
        bool per_column;    // each column has a scale
        void* out;
        uint32_t m, n;

        __device__ __forceinline__ bool multicasts() const { return share_m * share_n > 1; }
    };
};

// Named barrier of the consumers.
constexpr int DONE = READY + 1;

// The position of the block's tile.
template <class Traits>
__device__ __forceinline__ uint32_t tile_row(const typename Traits::Globals& g) {
    return min(blockIdx.x * Traits::rows, g.last_row);
}
template <class Traits>
__device__ __forceinline__ uint32_t tile_col(const typename Traits::Globals& g) {
    return min(blockIdx.y * g.width, g.last_col);
}
template <class Traits>
__device__ __forceinline__ int first_step(const typename Traits::Globals& g, int block) {
    return block * g.k_each + min(block, g.k_extra);
}

// The place of a block among those of its range of k, whose counts along m and n are powers of two,
// and the rank in the cluster of the first of these.
struct SharePlace {
    uint32_t in_m, in_n, first;

    template <class Globals>
    __device__ __forceinline__ explicit SharePlace(const Globals& g)
        : in_m(blockIdx.x & (g.share_m - 1)),
          in_n(blockIdx.y & (g.share_n - 1)),
          first(blockIdx.z * g.share_m * g.share_n) {}
};

// Releases a stage to the blocks that fill it: lane i of a consumer's first warp arrives at block i
// of those of its range of k. One arrival stands for the warpgroup, because wgmma reads shared
// memory for all of it.
struct ShareRelease {
    bool own, alone;
    uint32_t peer;

    template <class Globals>
    __device__ __forceinline__ explicit ShareRelease(const Globals& g) : alone(!g.multicasts()) {
        const SharePlace place(g);
        const uint32_t i = laneid(), in_row = g.share_m * place.in_n;
        const bool shares = i < g.share_m * g.share_n &&
                            ((i & (g.share_m - 1)) == place.in_m || i - in_row < g.share_m);
        own = warpgroup::warpid() == 0 && shares;
        peer = place.first + i;
    }
    __device__ __forceinline__ void operator()(semaphore& empty) const {
        if (!own) return;
        if (alone)
            arrive(empty);
        else
            arrive_remote_relaxed(empty, static_cast<int>(peer));
    }
};

// Block-wise scales of a consumer's products: a thread has two rows, and a product one block of
// b's. Those of the next step are on their way.
template <class Traits, int products>
struct StepScales {
    const float *of_rows[2], *of_blocks[products];
    int64_t rows_step, blocks_step;
    float now[2 + products], next[2 + products];

    __device__ __forceinline__ StepScales(const typename Traits::Globals& g, int own_row)
        : rows_step(g.scale_a.inner), blocks_step(g.scale_b.inner) {
        const int64_t step = first_step<Traits>(g, static_cast<int>(blockIdx.z));
        const uint32_t last = (g.n + 127) / 128 - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t row = min(tile_row<Traits>(g) + own_row + i * 8, g.m - 1);
            of_rows[i] = g.scale_a.data + int64_t(row) * g.scale_a.outer + step * rows_step;
        }
#pragma unroll
        for (int i = 0; i < products; ++i) {
            const uint32_t block = min(tile_col<Traits>(g) / 128 + i, last);
            of_blocks[i] = g.scale_b.data + int64_t(block) * g.scale_b.outer + step * blocks_step;
        }
        fetch(true);
        advance();
    }
    // Of the next step, if there is one.
    __device__ __forceinline__ void fetch(bool there) {
        if (!there) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            next[i] = arch::load_global(of_rows[i]);
            of_rows[i] += rows_step;
        }
#pragma unroll
        for (int i = 0; i < products; ++i) {
            next[2 + i] = arch::load_global(of_blocks[i]);
            of_blocks[i] += blocks_step;
        }
    }
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int i = 0; i < 2 + products; ++i) now[i] = next[i];
    }
    template <int cols>
    __device__ __forceinline__ void add(rt_fl<16, cols>& sum, const rt_fl<16, cols>& product,
                                        int which) const {
        const float factors[2] = {now[0] * now[2 + which], now[1] * now[2 + which]};
#pragma unroll
        for (int j = 0; j < sum.width; ++j) {
#pragma unroll
            for (int r = 0; r < sum.packed_per_base; ++r) {
                const float2 x = product.tiles[0][j].data[r];
                float2& s = sum.tiles[0][j].data[r];
                s = make_float2(fmaf(x.x, factors[r % 2], s.x), fmaf(x.y, factors[r % 2], s.y));
            }
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::fp8_gemm
