// What nvfp4_sm90.cuh works on: types, the walk over tiles, and what becomes of a tile's sums.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"

namespace thunderkittens::mixed_gemm {
namespace sm90 {

// Named barriers.
constexpr int READY = 1, SUMS = 2;

// The products of all tiles with all stages of k, one after the other, in ranges of the same size,
// one per cluster.
struct EqualRanges {
    int each = 0, longer = 0;  // the first `longer` have one more
    __device__ __forceinline__ bool on() const { return each > 0 || longer > 0; }
    __device__ __forceinline__ int2 of(int cluster) const {
        const int begin = cluster * each + min(cluster, longer);
        return {begin, begin + each + (cluster < longer)};
    }
};

template <Format format>
struct weights_of;
template <>
struct weights_of<Format::nvfp4> {
    using type = Nvfp4Weights;
};

template <Config C>
struct Types {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    using W = typename weights_of<C.format>::type;
    using rows = st<T, C.tokens, PIECE>;
    // What a block loads of a stage's rows of a for the blocks that share them.
    static constexpr int parts = most_sharers(C);
    static constexpr int part_rows = C.tokens / parts;
    using part = st<T, part_rows, PIECE>;
    static constexpr int piece = piece_bytes(C.format);
    static constexpr int lines = 3;  // of a piece, in the eyes of its tensor map
    // Tiles of rows of a that are taken together: their rows, many more bytes than those of the
    // weight, stay in the L2 cache.
    static constexpr uint32_t band = 4;
    static constexpr int stage_bytes = mixed_gemm::stage_bytes(C);
    // Of a step of the main loop, which takes an even number of pieces per warpgroup.
    static constexpr int step_stages = C.pieces == C.k_groups ? 2 : 1;
    static constexpr int block_rows = mixed_gemm::block_rows(C);
    static constexpr int pass = tokens_at_a_time(C);
    static constexpr int pitch = block_rows + 4;  // of the sums, in floats: no bank conflicts
    static constexpr int threads = mixed_gemm::threads(C);
    static constexpr int consumers = mixed_gemm::consumers(C);  // warpgroups
    static constexpr bool moves_registers = mixed_gemm::moves_registers(C);
    static constexpr bool exchanges = C.exchange > 1;
    // Of the registers that a block has at launch: 168 per thread with two consumers, 96 with four.
    static constexpr int producer_registers = consumers == 2 ? 40 : 56;
    static constexpr int consumer_registers = consumers == 2 ? 232 : 104;
    static_assert(!moves_registers || consumers == 2 || consumers == 4);

    struct alignas(128) Codes {
        uint8_t bytes[C.pieces * piece];
        __device__ __forceinline__ uint32_t address() const { return arch::shared_address(this); }
    };
    struct Stage {
        rows a[C.pieces];
        Codes weight[C.row_groups];
    };
    struct Shared {
        Stage stages[C.stages];
        sv_fl<pass * pitch> sums[C.k_groups];
        semaphore full[C.stages], empty[C.stages];
        semaphore summed, read;  // the cluster's sums: all are there, all have been read
    };
    static_assert(sizeof(Stage) % 128 == 0);
    static_assert(sizeof(Shared) <= MAX_SHARED_MEMORY, "too many stages");

    struct Globals {
        gl<T, 1, 1, -1, -1, part> a;
        CUtensorMap weight;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool quads;  // four neighbouring elements of out are aligned
        uint32_t m, n, groups;
        uint32_t row_pieces, row_tiles, clusters;  // row_tiles: of a cluster's rows of the weight
        int k_steps, splits, sharers;
        bool at_once;  // every block has one tile, of which it gets all sums at once
        EqualRanges ranges;
        float4* parts;
        uint64_t* marks;
        uint64_t mark;
    };
};

// A tile of `tokens` rows of a, of which those below `end` belong to it, and rows of a group's
// weight. Group number `groups` stands for the rows behind the last group, which are zero.
struct Tile {
    uint32_t group, row_tile, token, end;
};

// The steps of k that fall to a block of the cluster.
template <class Globals>
__device__ __forceinline__ int2 range_of_k(const Globals& g) {
    const int rank = g.splits > 1 ? static_cast<int>(arch::cluster_rank()) : 0;
    return {g.k_steps * rank / g.splits, g.k_steps * (rank + 1) / g.splits};
}

// Calls work(tile, k) for each of this block's tiles and the stages of k that fall to it: of each
// group in turn, in bands of a few tiles of rows of a, tiles of the same rows of the weight one
// after the other. Of equal ranges the last tile comes first, see epilogue_sm90.cuh.
template <class K, class Work>
__device__ __forceinline__ void for_each_tile(const typename K::Globals& g, Work work) {
    constexpr uint32_t tokens = K::config.tokens;
    uint32_t sharers = 1;
    if constexpr (requires { g.sharers; }) sharers = g.sharers;
    const uint32_t in_cluster = g.splits * sharers;
    const uint32_t sharer = sharers > 1 ? blockIdx.x % in_cluster : 0;
    uint32_t index = blockIdx.x / in_cluster, first = 0, stride = g.clusters;
    int2 range = {}, limits = {};
    bool equal = false;
    constexpr bool RANGES = requires { g.ranges; };
    if constexpr (RANGES) {
        range = range_of_k(g);
        equal = g.ranges.on();
        if (equal) {
            limits = g.ranges.of(index);
            // Of an empty range no tile.
            first = limits.x / g.k_steps;
            index = limits.x < limits.y ? (limits.y - 1) / g.k_steps : first - 1;
            stride = ~0u;
        }
    }
    uint32_t begin = 0;
    // One loop for all, so that `work` is in the code once: behind the last group are rows that
    // have none.
    for (uint32_t group = 0; group <= g.groups; ++group) {
        uint32_t end = g.m;
        if (g.offs != nullptr && group < g.groups) {
            const int last = arch::load_global(g.offs + group);
            end = min(max(uint32_t(max(last, 0)), begin), g.m);
        }
        const uint32_t token_tiles = (end - begin + tokens - 1) / tokens;
        const uint32_t tiles = token_tiles * g.row_tiles;
        for (; index < tiles && index >= first; index += stride) {
            if constexpr (RANGES) {
                const int zero = index * g.k_steps;
                if (equal) range = {max(limits.x - zero, 0), min(limits.y - zero, g.k_steps)};
            }
            const uint32_t per_band = g.row_tiles * K::band;
            const uint32_t band = index / per_band, in_band = index - band * per_band;
            const uint32_t wide = min(token_tiles - band * K::band, K::band);
            const uint32_t row_tile = in_band / wide;
            const uint32_t token_tile = band * K::band + (in_band - row_tile * wide);
            const Tile tile{group, row_tile * sharers + sharer, begin + token_tile * tokens, end};
            if constexpr (std::invocable<Work, const Tile&, int2>)
                work(tile, range);
            else
                work(tile);
        }
        if (equal) return;
        index -= tiles;
        begin = end;
    }
}

// What every thread does first: one of the producer's makes the semaphores, a stage being handed
// back by the consumers of `readers` blocks, while the tensor maps come in.
template <class K, class Prefetch>
__device__ __forceinline__ void make_semaphores(typename K::Shared& shared, bool produces,
                                                int splits, int readers, Prefetch&& prefetch) {
    if (produces) {
        if (warpgroup::warpid() == 0 && arch::elect_one()) {
            prefetch();
            for (int i = 0; i < K::config.stages; ++i) {
                init_semaphore(shared.full[i], 1);
                init_semaphore(shared.empty[i], K::consumers * WARPGROUP_WARPS * readers);
            }
            init_semaphore(shared.summed, K::consumers * WARPGROUP_WARPS * splits);
            init_semaphore(shared.read, K::consumers * WARPGROUP_WARPS * splits);
            arch::mbarrier_init_fence();
        }
        arch::sync_warp();
        arch::named_barrier_arrive(READY, K::threads);
    } else {
        arch::named_barrier_sync(READY, K::threads);
    }
}

template <class O>
__device__ __forceinline__ void store_four(O* to, const float (&from)[4], bool aligned, int count) {
    if (aligned && count >= 4) {
        struct alignas(4 * sizeof(O)) Four {
            O v[4];
        } four;
#pragma unroll
        for (int i = 0; i < 4; ++i) four.v[i] = convert<O>(from[i]);
        arch::store_global(reinterpret_cast<Four*>(to), four);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) arch::store_global(to + i, convert<O>(from[i]));
        }
    }
}

// By what the sums of a group are multiplied. Those of rows without a group are zero.
template <class Globals>
__device__ __forceinline__ float scale_of(const Globals& g, uint32_t group) {
    if (group >= g.groups) return 0.f;
    return g.scale != nullptr ? arch::load_global(g.scale + group) : 1.f;
}

// Four neighbouring elements of row m of out from their sums.
template <class K>
__device__ __forceinline__ void store_results(const typename K::Globals& g, uint32_t group,
                                              float scale, uint32_t m, uint32_t n,
                                              const float4& sum) {
    using T = typename K::T;
    const auto* bias = static_cast<const T*>(group >= g.groups ? nullptr : g.bias);
    float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = x[j] * K::W::FACTOR * scale;
    const int count = int(g.n) - int(n);
    if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j < count) x[j] += convert<float>(arch::load_global(bias + n + j));
        }
    }
    gemm::sm90::activate(g.activation, x);
    const int64_t at = int64_t(m) * g.n + n;
    if (g.out_dtype == DType::bf16)
        store_four(static_cast<bf16*>(g.out) + at, x, g.quads, count);
    else if (g.out_dtype == DType::fp16)
        store_four(static_cast<half*>(g.out) + at, x, g.quads, count);
    else
        store_four(static_cast<float*>(g.out) + at, x, g.quads, count);
}

}  // namespace sm90
}  // namespace thunderkittens::mixed_gemm
