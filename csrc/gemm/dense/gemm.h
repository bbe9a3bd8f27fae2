// The dense GEMM: what a product is (Problem), what is compiled (Config), how it is scheduled
// (Schedule), and the functions that choose. Host C++ only. The op in gemm.cpp, the kernels in
// *_sm90.cuh and swap_ab/dense_sm90.cuh, and the registry in choose.cpp meet here.
//
// A product is z = alpha * a @ b + bias with a (batch, m, k), b (batch, k, n), and
// out = activation(z) + beta * residual with out (batch, m, n), or (batch, m, n / 2) when one half
// of z's columns gates the other. Either operand may have either of its two dimensions contiguous
// in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/gemm/common/epilogue.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/gemm/common/raster.h"
#include "csrc/gemm/common/tile_mask.h"

namespace thunderkittens::gemm {

struct Problem {
    int64_t m = 0, n = 0, k = 0, batch = 1;
    DType dtype = DType::bf16;
    DType out_dtype = DType::bf16;
    bool a_m_major = false;  // a's rows (m) are adjacent in memory, instead of its columns (k)
    bool b_n_major = true;   // b's columns (n) are adjacent in memory, instead of its rows (k)
    Gate gate = Gate::none;
    bool fused = false;  // the epilogue does more than to scale and to add a bias
    // Bytes that an operand's rows, as they lie in memory, begin at multiples of: 16 to 128.
    int64_t a_alignment = 128, b_alignment = 128;
    // Whether TMA cannot read an operand where it lies: all kernels but that for a short k then
    // read a copy, to whose rows the two fields before refer.
    bool a_needs_copy = false, b_needs_copy = false;

    bool operator==(const Problem&) const = default;
};

// What one kernel is compiled for. A block computes block_m x block_n tiles, 64 of k at a time,
// with one warpgroup that loads and `consumers` warpgroups that share the tile's rows. `swap_ab`:
// the kernel for skinny m, swap_ab/dense_sm90.cuh, which takes block_k of k at a time.
struct Config {
    int block_m = 128;
    int block_n = 256;
    int stages = 4;
    int consumers = 2;
    bool swap_ab = false;
    int block_k = 64;
    bool fused = false;
    DType dtype = DType::bf16;
    bool a_m_major = false;
    bool b_n_major = true;
    bool masked = false;        // only the tiles of a mask, see TileMask
    bool cluster_tile = false;  // a tile per block, over a cluster of run-time sizes

    bool operator==(const Config&) const = default;
};
constexpr int BLOCK_K = 64;

// How tiles are dealt out. Blocks walk them in raster groups of `raster_group` rows of tiles, so
// that those at work at a time form a compact rectangle, whose operands fit the L2 cache. A raster
// group runs along n (its tiles are next to each other in m), or along m where `raster_along_m`
// says so.
struct Schedule {
    int raster_group = 8;
    bool raster_along_m = false;
    int blocks = 0;  // of the grid, a multiple of splits
    int splits = 1;  // split-K and stream-K: the blocks that share the k of a tile
    // Cluster and run-time tiles: the blocks along m, and along n, that share loads by multicast.
    int share_m = 1, share_n = 1;
    int per_sm = 1;  // blocks that an SM holds at a time, which divide its shared memory
    // Load b with evict_first where it is read about once: otherwise each of its lines evicts
    // another one, which goes to memory first where it has been written.
    bool evict_first_b = false;
    // Epilogue warps (epilogue_warps_sm90.cuh): the steps of k between the subtiles of the last
    // tile that consumers hand to them. 0: the consumers apply the epilogue themselves.
    int store_interval = 0;
    // Balanced tiling (common/raster.h): `extra_rows` rows of tiles have one tile more than
    // `columns`. 0: all tiles are as wide as the configuration's.
    int columns = 0, extra_rows = 0;

    bool operator==(const Schedule&) const = default;
};

// The kernel that runs, each that of its file, swap_ab that of swap_ab/dense_sm90.cuh, short_k that
// of unaligned/short_k_sm90.cuh, and portable that of portable/multistage_sm80.cuh. What the
// single-wave, the split-K and the run-time tile kernels compute, dispatch.h says.
enum class Kernel : int {
    persistent,
    single_wave,
    single_wave_64x64,
    split_k,
    cluster_tile,
    swap_ab,
    short_k,
    portable,
    runtime_tile
};
constexpr int KERNELS = static_cast<int>(Kernel::runtime_tile) + 1;
constexpr const char* strategy_name(Kernel kernel) {
    constexpr const char* names[] = {"persistent",   "single_wave", "single_wave_64x64", "split_k",
                                     "cluster_tile", "swap_ab",     "short_k",           "portable",
                                     "runtime_tile", nullptr};
    return names[static_cast<int>(kernel)];
}

struct Choice {
    Kernel kernel = Kernel::persistent;
    Config config;
    Schedule schedule;

    bool operator==(const Choice&) const = default;
};

// One call. Strides count elements: a_stride and b_stride lie between neighbours in the dimension
// that is not contiguous. An operand that is the same for the whole batch has batch stride 0. The
// operands must satisfy TMA: base and strides multiples of 16 bytes; not for the kernel for a short
// k. Rows of out and residual are contiguous.
struct Params {
    const void* a = nullptr;
    const void* b = nullptr;
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, batch = 1;
    int64_t a_stride = 0, a_batch_stride = 0;
    int64_t b_stride = 0, b_batch_stride = 0;
    int64_t out_stride = 0, out_batch_stride = 0;
    DType out_dtype = DType::bf16;
    Epilogue epilogue;
    TileMask mask;
    Schedule schedule;
};

TK_FIELDS(Problem, m, n, k, batch, dtype, out_dtype, a_m_major, b_n_major, gate, fused, a_alignment,
          b_alignment, a_needs_copy, b_needs_copy)
TK_FIELDS(Config, block_m, block_n, stages, consumers, swap_ab, block_k, fused, dtype, a_m_major,
          b_n_major, masked, cluster_tile)
TK_FIELDS(Schedule, raster_group, raster_along_m, blocks, splits, share_m, share_n, per_sm,
          evict_first_b, store_interval, columns, extra_rows)
TK_CHOICE_FIELDS(Choice)

// Tile shapes that are compiled, each for both dtypes and the four layouts of the operands.
struct TileShape {
    int block_m, block_n, stages, consumers;
};
// The first FUSED_SHAPES of them have a persistent kernel with a fused epilogue, the first
// PERSISTENT_SHAPES also one without. The others without are of single-wave kernels, and of those
// for a short k.
constexpr TileShape TILE_SHAPES[] = {
    {128, 256, 4, 2},
    {128, 128, 6, 2},
    {64, 128, 8, 1},
    {64, 64, 10, 1},
};
constexpr std::size_t FUSED_SHAPES = 3, PERSISTENT_SHAPES = 2;
constexpr Config make_config(const TileShape& shape, DType dtype, bool a_m_major, bool b_n_major,
                             bool fused = false) {
    return {.block_m = shape.block_m,
            .block_n = shape.block_n,
            .stages = shape.stages,
            .consumers = shape.consumers,
            .fused = fused,
            .dtype = dtype,
            .a_m_major = a_m_major,
            .b_n_major = b_n_major};
}

// Cluster tiles: tiles of one block each (cluster_tile_sm90.cuh), for both dtypes and the four
// layouts.
constexpr TileShape CLUSTER_TILE_SHAPES[] = {
    {64, 64, 14, 1},  {64, 128, 9, 1},  {64, 192, 7, 1},
    {128, 128, 7, 2}, {128, 192, 5, 2}, {192, 192, 4, 3},
};
constexpr int MAX_CLUSTER_BLOCKS = 8;
constexpr Config cluster_tile_config(const TileShape& shape, DType dtype, bool a_m_major,
                                     bool b_n_major) {
    Config c = make_config(shape, dtype, a_m_major, b_n_major);
    c.cluster_tile = true;
    return c;
}

// The listed shape of a size.
consteval TileShape tile_shape(int block_m, int block_n) {
    const auto fits = [&](const TileShape& s) {
        return s.block_m == block_m && s.block_n == block_n;
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (fits(shape)) return shape;
    }
    throw "no shape of this size is listed";
}

// The swap-AB kernels for skinny m, each for both dtypes and both orders of b; a's rows are
// contiguous.
struct SwapAbShape {
    int block_m, block_n, block_k, stages;
    bool fused;
};
constexpr SwapAbShape SWAP_AB_SHAPES[] = {
    {16, 64, 256, 5, false},
    {32, 64, 256, 4, false},
    {64, 128, 128, 4, true},
};
constexpr Config make_config(const SwapAbShape& shape, DType dtype, bool b_n_major) {
    return {.block_m = shape.block_m,
            .block_n = shape.block_n,
            .stages = shape.stages,
            .consumers = 1,
            .swap_ab = true,
            .block_k = shape.block_k,
            .fused = shape.fused,
            .dtype = dtype,
            .b_n_major = b_n_major};
}

// The kernel with a tile mask, for the operands of MXFP8 products, as a pass over them leaves them.
constexpr Config masked_config() {
    Config c = make_config(tile_shape(128, 128), DType::bf16, false, false, true);
    c.masked = true;
    return c;
}

// Every kernel that is compiled, by number: what the launchers are enumerated by.
constexpr std::size_t TILED = (std::size(TILE_SHAPES) + FUSED_SHAPES) * 8;
constexpr std::size_t SWAP_AB = std::size(SWAP_AB_SHAPES) * 4;
constexpr std::size_t CLUSTER_TILES = std::size(CLUSTER_TILE_SHAPES) * 8;
constexpr std::size_t CONFIGS = TILED + SWAP_AB + CLUSTER_TILES + 1;
constexpr Config config_at(std::size_t i) {
    const auto dtype = [](std::size_t j) { return j % 2 == 0 ? DType::bf16 : DType::fp16; };
    if (i < TILED) {
        const bool fused = i / 8 >= std::size(TILE_SHAPES);
        return make_config(TILE_SHAPES[i / 8 % std::size(TILE_SHAPES)], dtype(i / 4),
                           i / 2 % 2 != 0, i % 2 != 0, fused);
    }
    i -= TILED;
    if (i < SWAP_AB) return make_config(SWAP_AB_SHAPES[i / 4], dtype(i / 2), i % 2 != 0);
    i -= SWAP_AB;
    if (i < CLUSTER_TILES) {
        return cluster_tile_config(CLUSTER_TILE_SHAPES[i / 8], dtype(i / 4), i / 2 % 2 != 0,
                                   i % 2 != 0);
    }
    return masked_config();
}

// A configuration as instances.txt names it, by what tells it from the others. The layout is that
// of a, then of b: n as the operand stands in a @ b, row by row in memory, t stored transposed.
enum class Layout { nn, nt, tn, tt };
struct ConfigName {
    int block_m, block_n;
    DType dtype = DType::bf16;
    Layout layout = Layout::nn;
    bool swap_ab = false, fused = false, masked = false, cluster_tile = false;

    constexpr bool is_of(const Config& c) const {
        return block_m == c.block_m && block_n == c.block_n && dtype == c.dtype &&
               c.a_m_major == (layout == Layout::tn || layout == Layout::tt) &&
               c.b_n_major == (layout == Layout::nn || layout == Layout::tn) &&
               swap_ab == c.swap_ab && fused == c.fused && masked == c.masked &&
               cluster_tile == c.cluster_tile;
    }
};
consteval Config config_of(const ConfigName& name) { return named<config_at, CONFIGS>(name); }

// The kernel of a configuration that is listed, for all calls: some have a single-wave kernel
// beside it.
constexpr Kernel kernel_of(const Config& c) {
    if (c.swap_ab) return Kernel::swap_ab;
    if (c.cluster_tile) return Kernel::cluster_tile;
    return c.consumers == 1 && !c.fused ? Kernel::short_k : Kernel::persistent;
}

// Whether the kernel has epilogue warps.
constexpr bool has_epilogue_warps(const Config& c) {
    return c.fused && !c.masked && !c.swap_ab && c.block_n == 256;
}

// Whether the kernel has balanced tiling with two fixed widths. Those of 128 x 176 are of
// fused_dequant/.
constexpr bool has_two_widths(const Config& c) {
    return !c.masked && !c.swap_ab && !c.cluster_tile && c.consumers == 2 &&
           (c.block_n == 256 || c.block_n == 176);
}

// How the tiles of a schedule are walked.
constexpr TileWalk tile_walk(const Config& c, const Schedule& s) {
    return {.block_m = c.block_m,
            .block_n = c.block_n,
            .raster_group = s.raster_group,
            .raster_along_m = s.raster_along_m,
            .columns = s.columns,
            .extra_rows = s.extra_rows};
}

// The kernel for a short k, unaligned/short_k_sm90.cuh. Its configurations' stages and consumers
// are those of other kernels: it has neither.
constexpr int SHORT_K_THREADS = 256;
constexpr bool has_short_k(const Config& c) { return kernel_of(c) == Kernel::short_k; }
// The k that is in shared memory at a time: as much as a thread's registers hold on the way.
constexpr int short_k_block_k(const Config& c) { return c.block_n == 64 ? 128 : 64; }
// The tiles of the operands, the output's rows, the bias.
constexpr int short_k_shared_bytes(const Config& c) {
    const int operands = (c.block_m + c.block_n) * short_k_block_k(c) * 2;
    return operands + c.block_m * (c.block_n * 4 + 16) + (c.block_n * 4 + 127) / 128 * 128;
}
// Whether it computes a problem. Its grid has the rows of tiles in the second dimension and the
// batch in the third, which end at 65535.
constexpr bool fits_short_k(const Problem& p) {
    constexpr int64_t most = 65535, limit = INT32_MAX - 1024;
    return p.gate == Gate::none && p.m <= most * 64 && p.batch <= most && p.n <= limit &&
           p.k <= limit;
}
// The elements from an operand's first to its last: the kernel counts their bytes in 31 bits, and
// those of 64 rows of the output in 32.
constexpr int64_t short_k_extent(int64_t batch, int64_t rows, int64_t columns, int64_t stride,
                                 int64_t batch_stride) {
    return (batch - 1) * batch_stride + (rows - 1) * stride + columns;
}
constexpr int64_t SHORT_K_EXTENT = int64_t{1} << 30, SHORT_K_OUT_STRIDE = int64_t{1} << 24;

// Dynamic shared memory of a block: the ring of stages, two staging buffers of 16 rows of 128 bytes
// per consumer warp, a row of bias per consumer, two semaphores per stage, and with epilogue warps
// two per staging buffer. With swap-AB: the ring, the sums as rows of fp32 that are 4 longer than
// the tile's, and two semaphores more. Of cluster tiles: the ring, which becomes the memory of the
// sums.
constexpr int shared_bytes(const Config& c) {
    if (c.swap_ab) {
        const int ring = c.stages * (c.block_m + c.block_n) * c.block_k * 2;
        const int sums = (c.block_m * (c.block_n + 4) * 4 + 127) / 128 * 128;
        return (ring + sums + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
    }
    if (c.cluster_tile) return 1024 + c.stages * (c.block_m + c.block_n) * BLOCK_K * 2;
    const int bias = (c.block_n * 4 + 127) / 128 * 128;
    const int bytes = c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 +
                      c.consumers * (4 * 2 * 16 * 128 + bias) + c.stages * 16 +
                      (has_epilogue_warps(c) ? (c.consumers * 4 * 2 + c.stages) * 16 : 0);
    return (bytes + 127) / 128 * 128;
}
constexpr int threads(const Config& c) {
    const bool producer_warp = c.swap_ab || c.cluster_tile;
    return c.consumers * 128 + (producer_warp ? 32 : 128);
}

// Cluster tiles: the stages of a block's ring where an SM of 228 KB of shared memory holds so many
// blocks, which need 1 KB each, and their semaphores as much; and the most of them, with rings of
// at least three stages.
constexpr int cluster_tile_stages(const Config& c, int per_sm) {
    const int stage = (c.block_m + c.block_n) * BLOCK_K * 2;
    return std::min(c.stages, (228 * 1024 / per_sm - 2048) / stage);
}
constexpr int most_cluster_tiles_per_sm(const Config& c) {
    return cluster_tile_stages(c, 2) >= 3 ? 2 : 1;
}

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
// The same among the kernels that compute operands of any strides and need no workspace.
Choice choose_simple(const Problem& problem, const DeviceProperties& device);
// The choice of a configuration, and its single-wave kernel where that computes the problem.
Choice tiled_choice(const Config& config, const Problem& problem, const DeviceProperties& device);
// The choice and what else could run, for measurements of the choice: every compiled kernel that
// computes the problem, with each way to split k.
std::vector<Choice> candidates(const Problem& problem, const DeviceProperties& device);
// The kernel with a tile mask, for a problem of its dtype and layout.
Choice choose_masked(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();
// After fields of a choice have been forced: its kernel follows from the configuration, unless it
// is forced itself, and a grid is whole clusters.
void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced);

// Run a kernel of `config` on the stream, each the one of its file.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_single_wave(const Params& params, Stream stream);
template <Config config>
void launch_single_wave_64x64(const Params& params, Stream stream);
template <Config config>
void launch_cluster_tile(const Params& params, Stream stream);
template <Config config>
void launch_short_k(const Params& params, Stream stream);
template <Config config>
void launch_swap_ab(const Params& params, Stream stream);

}  // namespace thunderkittens::gemm
