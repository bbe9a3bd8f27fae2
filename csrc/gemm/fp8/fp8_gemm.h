// Products of fp8 operands: what a call is (Problem), what is compiled (Config), how it is
// scheduled (Schedule), and the functions that choose. Host C++ only.
//
// out = activation(scale * (a @ b^T) + bias) with a (m, k), b (n, k) and out (m, n): both operands
// K-major, which is the only order that wgmma takes of 8-bit operands. Grouped, b is (groups, n, k)
// and the rows of a belong to the groups one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/gemm/common/listed.h"

namespace thunderkittens::fp8_gemm {

// How the sums of 128 of k are accumulated. The tensor cores keep fewer bits of a sum of fp8
// products than fp32 has. `fast` accumulation leaves all sums to them, with row-wise or tensor-wise
// scales. `promoted` accumulation adds the sums of 128 of k in fp32, with block-wise 1D2D scales
// where there are such: one for 128 elements of a row of a, one for a 128 x 128 block of b.
// `promoted_1d1d` is the same with one scale for 128 elements of a row of b.
enum class Sums : int { fast, promoted, promoted_1d1d };

constexpr const char* name_of(Sums sums) {
    return sums == Sums::fast ? "fast" : sums == Sums::promoted ? "promoted" : "1d1d";
}

struct Problem {
    int64_t m = 0, n = 0, k = 0, groups = 1;
    DType a_dtype = DType::e4m3, b_dtype = DType::e4m3;
    DType out_dtype = DType::bf16;
    bool accurate = true;
    bool blockwise = false;       // scales of 1 x 128 elements of a, with those of b as follows
    bool blockwise_1d1d = false;  // 1 x 128 elements of b, instead of 128 x 128
    bool grouped = false;
    bool activated = false;  // an activation follows
};

// A block computes block_m x block_n tiles, block_k of k at a time, with a warpgroup that loads and
// `consumers` that multiply; with swap-AB, with two warps that load and one warpgroup.
struct Config {
    int block_m = 128;
    int block_n = 256;
    int stages = 4;
    int consumers = 2;
    int buffers = 2;  // for a warp's output, of 16 rows of 128 bytes
    bool swap_ab = false;
    int block_k = 128;
    Sums sums = Sums::fast;
    DType a_dtype = DType::e4m3, b_dtype = DType::e4m3;
    // A kernel for block-wise 1D2D scales alone, and outputs of a 16-bit type, stored by TMA,
    // without activation.
    bool blockwise_only = false;

    bool operator==(const Config&) const = default;
};
constexpr int BLOCK_K = 128;

// As in dense/gemm.h: multicast clusters, the height of raster groups, the blocks of the grid, and
// for split-K the blocks of a cluster that share the k of a tile.
struct Schedule {
    int cluster_m = 1;
    int cluster_n = 1;
    int raster_group = 8;
    int blocks = 0;
    int splits = 1;
    // Balanced tiling (common/raster.h): `extra_rows` rows of tiles, or of clusters of them, have
    // one tile more than `columns`. 0: all tiles are as wide as the configuration's.
    int columns = 0, extra_rows = 0;
};

// The kernel that runs: of persistent_sm90.cuh, for all calls or for row-wise scales alone
// (promoted_rowwise_sm90.cuh, pingpong_rowwise_sm90.cuh), of split_k_sm90.cuh, of
// swap_ab/fp8_sm90.cuh.
// On other GPUs that of portable.h.
enum class Kernel : int { persistent, rowwise, split_k, swap_ab, portable };
constexpr const char* strategy_name(Kernel kernel) {
    constexpr const char* names[] = {"persistent", "rowwise",  "split_k",
                                     "swap_ab",    "portable", nullptr};
    return names[static_cast<int>(kernel)];
}

struct Choice {
    Kernel kernel = Kernel::persistent;
    Config config;
    Schedule schedule;
};

// A vector of scales, or none: the scale of (row or column i, block of k j, group g).
struct Scales {
    const float* data = nullptr;
    int64_t outer = 0, inner = 0, group = 0;  // strides; 0 where one scale is for all
};

struct Params {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;     // (n,)
    const int32_t* offs = nullptr;  // (groups,) ends of the groups' rows
    void* out = nullptr;            // (m, n), contiguous
    int64_t m = 0, n = 0, k = 0, groups = 1;
    int64_t a_stride = 0, b_stride = 0, b_group_stride = 0;
    Scales scale_a, scale_b;
    bool blockwise = false;  // scales are of 128 of k
    bool is_1d1d = false;    // those of b are of single columns then
    DType out_dtype = DType::bf16, bias_dtype = DType::bf16;
    int activation = 0;  // common/epilogue.h
    Schedule schedule;
};

TK_FIELDS(Problem, m, n, k, groups, a_dtype, b_dtype, out_dtype, accurate, blockwise,
          blockwise_1d1d, grouped, activated)
TK_FIELDS(Config, block_m, block_n, stages, consumers, buffers, swap_ab, block_k, sums, a_dtype,
          b_dtype, blockwise_only)
TK_FIELDS(Schedule, cluster_m, cluster_n, raster_group, blocks, splits, columns, extra_rows)
TK_CHOICE_FIELDS(Choice)

// Tile shapes that are compiled, each for the three pairs of dtypes.
struct TileShape {
    int block_m, block_n, stages, consumers, buffers;
    Sums sums;
};
constexpr TileShape TILE_SHAPES[] = {
    {128, 256, 4, 2, 2, Sums::fast},          {128, 192, 4, 2, 2, Sums::fast},
    {128, 176, 5, 2, 2, Sums::fast},          {128, 128, 6, 2, 2, Sums::fast},
    {128, 256, 4, 2, 2, Sums::promoted},      {128, 192, 4, 2, 3, Sums::promoted},
    {128, 176, 4, 2, 3, Sums::promoted},      {128, 128, 5, 2, 2, Sums::promoted},
    {128, 128, 5, 2, 2, Sums::promoted_1d1d},
};
struct DTypes {
    DType a, b;
};
constexpr DTypes DTYPES[] = {
    {DType::e4m3, DType::e4m3}, {DType::e4m3, DType::e5m2}, {DType::e5m2, DType::e4m3}};
// Shapes of the kernels for block-wise scales alone, for the first pair.
constexpr TileShape BLOCKWISE_SHAPES[] = {{128, 256, 4, 2, 2, Sums::promoted},
                                          {128, 192, 4, 2, 3, Sums::promoted}};
// The swap-AB kernels for skinny m, each for the three pairs of dtypes, and all kinds of sums and
// scales.
struct SwapAbShape {
    int block_m, block_n, block_k, stages;
};
constexpr SwapAbShape SWAP_AB_SHAPES[] = {{16, 64, 512, 5}, {32, 64, 512, 4}, {64, 64, 512, 3}};
constexpr Config make_config(const SwapAbShape& shape, const DTypes& dtypes) {
    return {.block_m = shape.block_m,
            .block_n = shape.block_n,
            .stages = shape.stages,
            .consumers = 1,
            .swap_ab = true,
            .block_k = shape.block_k,
            .sums = Sums::promoted,
            .a_dtype = dtypes.a,
            .b_dtype = dtypes.b};
}
constexpr Config make_config(const TileShape& shape, const DTypes& dtypes,
                             bool blockwise_only = false) {
    return {shape.block_m, shape.block_n, shape.stages, shape.consumers, shape.buffers, false,
            BLOCK_K,       shape.sums,    dtypes.a,     dtypes.b,        blockwise_only};
}

// Wider tiles leave no registers for the walk over groups.
constexpr bool takes_groups(const Config& c) { return c.sums != Sums::fast && c.block_n <= 128; }
// The blocks of a cluster load b's tile together: each half of it, in whole groups of 16 rows.
constexpr bool shares_b(const Config& c) { return c.block_n % 32 == 0; }
constexpr int threads(const Config& c) {
    return c.swap_ab ? 4 * 32 + 2 * 32 : (c.consumers + 1) * 128;
}
// Ping-pong: where a consumer's registers have room for a whole tile, each consumer has tiles of
// its own. Narrower tiles are for problems with few tiles, which both consumers together end
// sooner.
constexpr bool is_pingpong(const Config& c) {
    return c.sums == Sums::fast && !c.swap_ab && c.block_n > 128 && c.block_n < 192;
}
// Whether a kernel has balanced tiling with two widths; and whether of a configuration only the
// kernel for row-wise scales has it.
constexpr bool is_first_pair(const Config& c) {
    return c.a_dtype == DType::e4m3 && c.b_dtype == DType::e4m3;
}
constexpr bool narrows_rowwise_only(const Config& c) {
    return !c.swap_ab && !c.blockwise_only && c.sums == Sums::promoted && c.block_n == 176 &&
           is_first_pair(c);
}
constexpr bool has_two_widths(const Config& c) {
    const bool wide =
        !c.swap_ab && !c.blockwise_only && c.sums != Sums::promoted_1d1d && c.block_n == 256;
    return wide || is_pingpong(c) || narrows_rowwise_only(c);
}
// Whether row-wise scales alone, of the commonest pair of types, have a kernel of their own:
// promoted_rowwise_sm90.cuh or pingpong_rowwise_sm90.cuh.
constexpr bool has_rowwise_kernel(const Config& c) {
    const bool promoted = c.sums == Sums::promoted && has_two_widths(c);
    return (promoted || is_pingpong(c)) && is_first_pair(c);
}
// Whether TMA can store rows of the output: they are multiples of 16 bytes.
inline bool tma_stores(const Params& p) {
    const int64_t bytes = p.n * size_in_bytes(p.out_dtype);
    return bytes % 16 == 0 && bytes / 2 <= INT32_MAX;
}
// The kernel of a configuration that is listed, for all calls, and the one that is preferred where
// it computes a call.
constexpr Kernel kernel_of(const Config& c) {
    return c.swap_ab ? Kernel::swap_ab : Kernel::persistent;
}
constexpr Kernel preferred_kernel(const Config& c) {
    return has_rowwise_kernel(c) ? Kernel::rowwise : kernel_of(c);
}
// The calls of that kernel: those with row-wise or tensor-wise scales and nothing else.
inline bool runs_rowwise(const Config& c, const Params& p) {
    return has_rowwise_kernel(c) && p.k > 0 && !p.blockwise && p.offs == nullptr &&
           p.bias == nullptr && p.activation == 0 && p.out_dtype != DType::fp32 && tma_stores(p) &&
           p.schedule.cluster_m * p.schedule.cluster_n == 1;
}
// Whether the kernels for row-wise or block-wise scales have store warps (store_warps_sm90.cuh).
constexpr bool has_store_warps(const Config& c) {
    return c.block_n == 256 && (c.blockwise_only || has_rowwise_kernel(c));
}
// Swap-AB: the blocks of a cluster that may send a tile's sums to the first one.
constexpr int senders(const Config& c) { return c.block_m > 32 ? 1 : 2; }
// The scales that a stage holds: those of its rows of a, and of its blocks or columns of b.
constexpr int scales_of_stage(const Config& c) {
    if (c.sums == Sums::fast) return 0;
    return c.block_m + (c.sums == Sums::promoted_1d1d ? (c.block_n + 31) / 32 * 32 : 32);
}
// In the largest tile of promoted sums, values of columns pass through the staging buffers.
constexpr bool columns_in_staging(const Config& c) {
    return c.sums != Sums::fast && c.block_n > 192;
}
constexpr int shared_bytes(const Config& c) {
    if (c.swap_ab) {
        const int parts = c.block_k / BLOCK_K;
        const int ring = c.stages * (c.block_m + c.block_n) * c.block_k;
        const int columns = std::max(c.block_n + 4, senders(c) * c.block_n);
        const int sums = (c.block_m * columns * 4 + 127) / 128 * 128;
        const int scales = c.stages * parts * (c.block_m + c.block_n) * 4;
        return (ring + sums + scales + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
    }
    const int stage = (c.block_m + c.block_n) * BLOCK_K + scales_of_stage(c) * 4;
    const int columns = columns_in_staging(c) ? 0 : (c.block_n + 31) / 32 * 32;
    const int rows = is_pingpong(c) ? c.block_m : 0;
    const int bytes = c.stages * stage + c.consumers * (4 * c.buffers * 16 * 128 + columns * 4) +
                      c.consumers * rows * 4 + c.stages * 24;
    return (bytes + 127) / 128 * 128;
}

// The shapes of scales: (rows, columns) of scale_a, of one matrix of scale_b.
struct ScaleShapes {
    int64_t a_rows, a_cols, b_rows, b_cols;
};
struct ScaleKind {
    bool valid, blockwise, is_1d1d;
};
// Tensor-wise or row-wise scales, (1 or m, 1) and (1, 1 or n); or block-wise ones of 128 of k, (m,
// blocks of k) and (blocks of k, blocks of n) for 1D2D or (blocks of k, n) for 1D1D.
constexpr ScaleKind scale_kind(const ScaleShapes& s, int64_t m, int64_t n, int64_t k) {
    const int64_t k_blocks = (k + 127) / 128, n_blocks = (n + 127) / 128;
    const bool outer = (s.a_rows == 1 || s.a_rows == m) && s.a_cols == 1 && s.b_rows == 1 &&
                       (s.b_cols == 1 || s.b_cols == n);
    if (outer && k_blocks <= 1) return {true, k == 0, false};
    if (s.a_rows == m && s.a_cols == k_blocks && s.b_rows == k_blocks &&
        (s.b_cols == n_blocks || s.b_cols == n)) {
        return {true, true, s.b_cols != n_blocks};
    }
    return {outer, k == 0, false};
}

// Every kernel that is compiled, by number: what the launchers are enumerated by.
constexpr std::size_t TILED = std::size(TILE_SHAPES) * std::size(DTYPES);
constexpr std::size_t SWAP_AB = std::size(SWAP_AB_SHAPES) * std::size(DTYPES);
constexpr std::size_t CONFIGS = TILED + SWAP_AB + std::size(BLOCKWISE_SHAPES);
constexpr Config config_at(std::size_t i) {
    if (i < TILED) return make_config(TILE_SHAPES[i / 3], DTYPES[i % 3]);
    if (i < TILED + SWAP_AB) return make_config(SWAP_AB_SHAPES[(i - TILED) / 3], DTYPES[i % 3]);
    return make_config(BLOCKWISE_SHAPES[i - TILED - SWAP_AB], DTYPES[0], true);
}

// A configuration as instances.txt names it, by what tells it from the others.
struct ConfigName {
    int block_m, block_n;
    Sums sums = Sums::promoted;
    DType a = DType::e4m3, b = DType::e4m3;
    bool swap_ab = false, blockwise_only = false;

    constexpr bool is_of(const Config& c) const {
        return block_m == c.block_m && block_n == c.block_n && sums == c.sums && a == c.a_dtype &&
               b == c.b_dtype && swap_ab == c.swap_ab && blockwise_only == c.blockwise_only;
    }
};
consteval Config config_of(const ConfigName& name) { return gemm::named<config_at, CONFIGS>(name); }

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();
// After fields of a choice have been forced: its kernel follows from the configuration, unless it
// is forced itself.
void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced);

// Run a kernel of `config` on the stream: the one for all calls, for row-wise scales, swap-AB.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_rowwise(const Params& params, Stream stream);
template <Config config>
void launch_swap_ab(const Params& params, Stream stream);

}  // namespace thunderkittens::fp8_gemm
