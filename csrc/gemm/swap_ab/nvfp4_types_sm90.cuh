// What nvfp4_sm90.cuh works on: types, the walk over tiles, and how results are stored.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/nvfp4/weights_sm90.cuh"
#include "csrc/gemm/swap_ab/skeleton_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
namespace sm90 {

// Named barriers.
constexpr int READY = gemm::sm90::READY, SUMS = 2;

// Stream-K: the steps of k of all tiles, one after the other, are cut into ranges of the same size,
// one per cluster.
struct StreamKRanges {
    int each = 0, extra_rows = 0;  // the first `extra_rows` have one more
    __device__ __forceinline__ bool on() const { return each > 0 || extra_rows > 0; }
    __device__ __forceinline__ int2 of(int cluster) const {
        const int begin = cluster * each + min(cluster, extra_rows);
        return {begin, begin + each + (cluster < extra_rows)};
    }
};

template <Config C>
struct KernelTraits {
    static constexpr Config config = C;
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    using W = Nvfp4Weights;
    using rows = st<T, C.tokens, PIECE>;
    // Multicast: the slice of a stage's rows of a that a block loads for all blocks of its cluster.
    static constexpr int slices = max_multicast(C);
    static constexpr int slice_rows = C.tokens / slices;
    using slice = st<T, slice_rows, PIECE>;
    static constexpr int piece = PIECE_BYTES;
    static constexpr int lines = 3;  // of a piece, in the eyes of its tensor map
    // The height of a raster group in tiles of rows of a: their rows, many more bytes than those of
    // the weight, stay in the L2 cache.
    static constexpr uint32_t raster_group = 4;
    static constexpr int stage_bytes = nvfp4_gemm::stage_bytes(C);
    // The stages of a step of the main loop, which takes an even number of pieces per warpgroup.
    static constexpr int step_stages = C.pieces == C.k_groups ? 2 : 1;
    static constexpr int block_rows = nvfp4_gemm::block_rows(C);
    static constexpr int pass = tokens_at_a_time(C);
    static constexpr int pitch = block_rows + 4;  // of the sums, in floats: no bank conflicts
    static constexpr int threads = nvfp4_gemm::threads(C);
    static constexpr int consumers = nvfp4_gemm::consumers(C);  // warpgroups
    static constexpr bool moves_registers = nvfp4_gemm::moves_registers(C);
    static constexpr bool splits_k = C.split_k > 1;
    // The registers of a block at launch are 168 per thread with two consumers, 96 with four; they
    // move from the producer to the consumers.
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
        gl<T, 1, 1, -1, -1, slice> a;
        CUtensorMap weight;
        const float* scale;
        const void* bias;
        const int32_t* offs;
        void* out;
        DType out_dtype;
        gemm::Activation activation;
        bool vec4_aligned;  // four neighbouring elements of out are aligned
        uint32_t m, n, groups;
        uint32_t row_pieces, row_tiles, clusters;  // row_tiles: of a cluster's rows of the weight
        int k_steps, splits, multicast;
        bool one_pass;  // one tile per block: its sums are reduced in one pass
        StreamKRanges stream_k;
        float4* partials;
        uint64_t* flags;
        uint64_t epoch;
    };
};

// A tile of `tokens` rows of a, of which those below `end` belong to it, and rows of a group's
// weight. Group number `groups` stands for the rows behind the last group, which are zero.
struct Tile {
    uint32_t group, row_tile, token, end;
};

// Calls work(tile, k) for each of this block's tiles and the range of k that falls to it: of each
// group in turn, in raster groups of a few tiles of rows of a, tiles of the same rows of the weight
// one after the other. With stream-K the last tile comes first, see epilogue_sm90.cuh.
template <class Traits, class Work>
__device__ __forceinline__ void for_each_tile(const typename Traits::Globals& g, Work work) {
    constexpr uint32_t tokens = Traits::config.tokens;
    uint32_t multicast = 1;
    if constexpr (requires { g.multicast; }) multicast = g.multicast;
    const uint32_t in_cluster = g.splits * multicast;
    const uint32_t multicast_rank = multicast > 1 ? blockIdx.x % in_cluster : 0;
    uint32_t index = blockIdx.x / in_cluster, first = 0, stride = g.clusters;
    int2 range = {}, limits = {};
    bool equal = false;
    constexpr bool STREAM_K = requires { g.stream_k; };
    if constexpr (STREAM_K) {
        range = swap_ab::range_of_k(g);
        equal = g.stream_k.on();
        if (equal) {
            limits = g.stream_k.of(index);
            // An empty range has no tile.
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
            if constexpr (STREAM_K) {
                const int zero = index * g.k_steps;
                if (equal) range = {max(limits.x - zero, 0), min(limits.y - zero, g.k_steps)};
            }
            const uint32_t per_raster_group = g.row_tiles * Traits::raster_group;
            const uint32_t raster_group = index / per_raster_group,
                           in_raster_group = index - raster_group * per_raster_group;
            const uint32_t wide =
                min(token_tiles - raster_group * Traits::raster_group, Traits::raster_group);
            const uint32_t row_tile = in_raster_group / wide;
            const uint32_t token_tile =
                raster_group * Traits::raster_group + (in_raster_group - row_tile * wide);
            const Tile tile{group, row_tile * multicast + multicast_rank,
                            begin + token_tile * tokens, end};
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

// The prologue, where a stage is released by the consumers of `readers` blocks; the tensor maps
// come in meanwhile.
template <class Traits, class Prefetch>
__device__ __forceinline__ void make_semaphores(typename Traits::Shared& shared, bool produces,
                                                int splits, int readers, Prefetch&& prefetch) {
    swap_ab::initialise<Traits>(produces, [&] {
        constexpr int WARPS = Traits::consumers * WARPGROUP_WARPS;
        prefetch();
        gemm::sm90::init_stages<Traits::config.stages>(shared, 1, WARPS * readers);
        init_semaphore(shared.summed, WARPS * splits);
        init_semaphore(shared.read, WARPS * splits);
        arch::mbarrier_init_fence();
    });
}

// Where a block's partial sums lie in the workspace: by block, 16 bytes of a thread's sums, thread.
template <class Traits>
__device__ __forceinline__ float4* partials_of(const typename Traits::Globals& g, uint32_t block) {
    constexpr int VEC4S = Traits::config.tokens / 8;
    return g.partials +
           (int64_t(block) * VEC4S * (Traits::consumers * WARPGROUP_THREADS) + threadIdx.x);
}

// The scale of a group's sums; that of rows without a group is zero.
template <class Globals>
__device__ __forceinline__ float scale_of(const Globals& g, uint32_t group) {
    if (group >= g.groups) return 0.f;
    return g.scale != nullptr ? arch::load_global(g.scale + group) : 1.f;
}

// Four neighbouring elements of row m of out from their sums.
template <class Traits>
__device__ __forceinline__ void store_results(const typename Traits::Globals& g, uint32_t group,
                                              float scale, uint32_t m, uint32_t n,
                                              const float4& sum) {
    using T = typename Traits::T;
    const auto* bias = static_cast<const T*>(group >= g.groups ? nullptr : g.bias);
    float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = x[j] * Traits::W::FACTOR * scale;
    const int count = int(g.n) - int(n);
    if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j < count) x[j] += convert<float>(arch::load_global(bias + n + j));
        }
    }
    swap_ab::finish_four(g, m, n, x, count);
}

}  // namespace sm90

// What the launchers give all kernels in the same way.
template <class Globals, class CallParams>
void set_results(Globals& to, const CallParams& p) {
    to.scale = p.scale, to.bias = p.bias, to.offs = p.offs, to.out = p.out;
    to.out_dtype = p.out_dtype;
    to.activation = static_cast<gemm::Activation>(p.activation);
    to.vec4_aligned = gemm::is_vec4_aligned(p.out, p.n, p.out_dtype);
    to.m = static_cast<uint32_t>(p.m), to.n = static_cast<uint32_t>(p.n);
    to.groups = static_cast<uint32_t>(p.groups);
}

}  // namespace thunderkittens::nvfp4_gemm
