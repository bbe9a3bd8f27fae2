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

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::fp8_gemm {

// How the partial sums of 128 of k come together. The tensor cores keep fewer bits of a sum of fp8
// products than fp32 has: `fast` leaves all sums to them, with scales for whole rows and columns.
// `promoted` adds the sums of 128 of k in fp32, each with the scale of its 128 elements of a row of
// a and its 128 x 128 block of b where there are such. `fine` is the same with scales of 128
// elements of a row of b.
enum class Sums : int { fast, promoted, fine };

constexpr const char* name_of(Sums sums) {
    return sums == Sums::fast ? "fast" : sums == Sums::promoted ? "promoted" : "fine";
}

struct Problem {
    int64_t m = 0, n = 0, k = 0, groups = 1;
    DType a_dtype = DType::e4m3, b_dtype = DType::e4m3;
    DType out_dtype = DType::bf16;
    bool accurate = true;
    bool blocks = false;       // scales of 1 x 128 elements of a, with those of b as follows
    bool fine_blocks = false;  // 1 x 128 elements of b, instead of 128 x 128
    bool grouped = false;
    bool activated = false;  // an activation follows
};

// A block computes block_m x block_n tiles, block_k of k at a time, with a warpgroup that loads and
// `consumers` that multiply; streamed, with two warps and one warpgroup.
struct Config {
    int block_m = 128;
    int block_n = 256;
    int stages = 4;
    int consumers = 2;
    int buffers = 2;  // for a warp's output, of 16 rows of 128 bytes
    bool streamed = false;
    int block_k = 128;
    Sums sums = Sums::fast;
    DType a = DType::e4m3, b = DType::e4m3;
    // Scales of blocks alone, and outputs of 16 bits per value, stored by TMA, without activation.
    bool plain = false;

    bool operator==(const Config&) const = default;
};
constexpr int BLOCK_K = 128;

// As in dense/gemm.h: clusters, the height of bands of tiles, blocks, and for few rows the blocks
// of a cluster that divide k.
struct Schedule {
    int cluster_m = 1;
    int cluster_n = 1;
    int band = 8;
    int blocks = 0;
    int splits = 1;
    // Tiles of two widths, see common/raster.h: `longer` rows of tiles, or of clusters of them,
    // have one more than `columns`.
    // 0: all tiles are as wide as the configuration's.
    int columns = 0, longer = 0;
};

struct Choice {
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
    bool blocks = false;  // scales are of 128 of k
    bool fine = false;    // those of b are of single columns then
    DType out_dtype = DType::bf16, bias_dtype = DType::bf16;
    int activation = 0;  // common/epilogue.h
    Schedule schedule;
};

template <typename Visitor>
void visit_fields(Problem& p, Visitor&& visit) {
    visit("m", p.m);
    visit("n", p.n);
    visit("k", p.k);
    visit("groups", p.groups);
    visit("a_dtype", p.a_dtype);
    visit("b_dtype", p.b_dtype);
    visit("out_dtype", p.out_dtype);
    visit("accurate", p.accurate);
    visit("blocks", p.blocks);
    visit("fine_blocks", p.fine_blocks);
    visit("grouped", p.grouped);
    visit("activated", p.activated);
}

template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("block_m", c.config.block_m);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("consumers", c.config.consumers);
    visit("buffers", c.config.buffers);
    visit("streamed", c.config.streamed);
    visit("block_k", c.config.block_k);
    visit("a_dtype", c.config.a);
    visit("b_dtype", c.config.b);
    visit("plain", c.config.plain);
    visit("cluster_m", c.schedule.cluster_m);
    visit("cluster_n", c.schedule.cluster_n);
    visit("band", c.schedule.band);
    visit("blocks", c.schedule.blocks);
    visit("splits", c.schedule.splits);
    visit("columns", c.schedule.columns);
    visit("longer", c.schedule.longer);
}

// Tile shapes that are compiled, each for the three pairs of dtypes.
struct TileShape {
    int block_m, block_n, stages, consumers, buffers;
    Sums sums;
};
constexpr TileShape TILE_SHAPES[] = {
    {128, 256, 4, 2, 2, Sums::fast},     {128, 192, 4, 2, 2, Sums::fast},
    {128, 176, 5, 2, 2, Sums::fast},     {128, 128, 6, 2, 2, Sums::fast},
    {128, 256, 4, 2, 2, Sums::promoted}, {128, 192, 4, 2, 3, Sums::promoted},
    {128, 176, 4, 2, 3, Sums::promoted}, {128, 128, 5, 2, 2, Sums::promoted},
    {128, 128, 5, 2, 2, Sums::fine},
};
struct DTypes {
    DType a, b;
};
constexpr DTypes DTYPES[] = {
    {DType::e4m3, DType::e4m3}, {DType::e4m3, DType::e5m2}, {DType::e5m2, DType::e4m3}};
// Those of plain configurations, for the first pair.
constexpr TileShape PLAIN_SHAPES[] = {{128, 256, 4, 2, 2, Sums::promoted},
                                      {128, 192, 4, 2, 3, Sums::promoted}};
// Kernels for few rows, each for the three pairs of dtypes, and all kinds of sums and scales.
struct StreamShape {
    int block_m, block_n, block_k, stages;
};
constexpr StreamShape STREAM_SHAPES[] = {{16, 64, 512, 5}, {32, 64, 512, 4}, {64, 64, 512, 3}};
constexpr Config make_config(const StreamShape& shape, const DTypes& dtypes) {
    return {.block_m = shape.block_m,
            .block_n = shape.block_n,
            .stages = shape.stages,
            .consumers = 1,
            .streamed = true,
            .block_k = shape.block_k,
            .sums = Sums::promoted,
            .a = dtypes.a,
            .b = dtypes.b};
}
constexpr Config make_config(const TileShape& shape, const DTypes& dtypes, bool plain = false) {
    return {shape.block_m, shape.block_n, shape.stages, shape.consumers, shape.buffers, false,
            BLOCK_K,       shape.sums,    dtypes.a,     dtypes.b,        plain};
}

// Wider tiles leave no registers for the walk over groups.
constexpr bool takes_groups(const Config& c) { return c.sums != Sums::fast && c.block_n <= 128; }
// The blocks of a cluster load b's tile together: each half of it, in whole groups of 16 rows.
constexpr bool shares_b(const Config& c) { return c.block_n % 32 == 0; }
constexpr int threads(const Config& c) {
    return c.streamed ? 4 * 32 + 2 * 32 : (c.consumers + 1) * 128;
}
// Where a consumer's registers have room for a whole tile, the consumers have tiles of their own.
// Narrower tiles are for products of few tiles, which both consumers end sooner.
constexpr bool takes_turns(const Config& c) {
    return c.sums == Sums::fast && !c.streamed && c.block_n > 128 && c.block_n < 192;
}
// Whether a kernel computes tiles of two widths; and whether of a configuration only that of calls
// without anything special does.
constexpr bool is_first_pair(const Config& c) { return c.a == DType::e4m3 && c.b == DType::e4m3; }
constexpr bool narrows_whole_only(const Config& c) {
    return !c.streamed && !c.plain && c.sums == Sums::promoted && c.block_n == 176 &&
           is_first_pair(c);
}
constexpr bool has_two_widths(const Config& c) {
    const bool wide = !c.streamed && !c.plain && c.sums != Sums::fine && c.block_n == 256;
    return wide || takes_turns(c) || narrows_whole_only(c);
}
// Whether calls without anything special have a kernel of their own, promoted_rowwise_sm90.cuh or
// pingpong_rowwise_sm90.cuh: for the commonest pair of types.
constexpr bool has_whole_kernel(const Config& c) {
    const bool promoted = c.sums == Sums::promoted && has_two_widths(c);
    return (promoted || takes_turns(c)) && is_first_pair(c);
}
// Whether TMA can store rows of the output: they are multiples of 16 bytes.
inline bool tma_stores(const Params& p) {
    const int64_t bytes = p.n * size_in_bytes(p.out_dtype);
    return bytes % 16 == 0 && bytes / 2 <= INT32_MAX;
}
// The calls that run that kernel: those with scales of whole rows or matrices and nothing else.
inline bool takes_whole_kernel(const Config& c, const Params& p) {
    return has_whole_kernel(c) && p.k > 0 && !p.blocks && p.offs == nullptr && p.bias == nullptr &&
           p.activation == 0 && p.out_dtype != DType::fp32 && tma_stores(p) &&
           p.schedule.cluster_m * p.schedule.cluster_n == 1;
}
// Whether it, or the kernel of plain calls, sends halves of tiles, store_warps_sm90.cuh.
constexpr bool sends_halves(const Config& c) {
    return c.block_n == 256 && (c.plain || has_whole_kernel(c));
}
// Blocks of a cluster that may send a streamed tile's sums to the first one.
constexpr int senders(const Config& c) { return c.block_m > 32 ? 1 : 2; }
// Scales that a stage holds: those of its rows of a, and of its blocks or columns of b.
constexpr int scales_of_stage(const Config& c) {
    if (c.sums == Sums::fast) return 0;
    return c.block_m + (c.sums == Sums::fine ? (c.block_n + 31) / 32 * 32 : 32);
}
// Of the largest tile of promoted sums, values of columns pass through the staging buffers.
constexpr bool columns_in_staging(const Config& c) {
    return c.sums != Sums::fast && c.block_n > 192;
}
constexpr int shared_bytes(const Config& c) {
    if (c.streamed) {
        const int parts = c.block_k / BLOCK_K;
        const int ring = c.stages * (c.block_m + c.block_n) * c.block_k;
        const int columns = std::max(c.block_n + 4, senders(c) * c.block_n);
        const int sums = (c.block_m * columns * 4 + 127) / 128 * 128;
        const int scales = c.stages * parts * (c.block_m + c.block_n) * 4;
        return (ring + sums + scales + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
    }
    const int stage = (c.block_m + c.block_n) * BLOCK_K + scales_of_stage(c) * 4;
    const int columns = columns_in_staging(c) ? 0 : (c.block_n + 31) / 32 * 32;
    const int rows = takes_turns(c) ? c.block_m : 0;
    const int bytes = c.stages * stage + c.consumers * (4 * c.buffers * 16 * 128 + columns * 4) +
                      c.consumers * rows * 4 + c.stages * 24;
    return (bytes + 127) / 128 * 128;
}

// The shapes of scales: (rows, columns) of scale_a, of one matrix of scale_b.
struct ScaleShapes {
    int64_t a_rows, a_cols, b_rows, b_cols;
};
struct ScaleKind {
    bool valid, blocks, fine;
};
// Scales per tensor or row, (1 or m, 1) and (1, 1 or n); or of 128 of k, (m, blocks of k) and
// (blocks of k, blocks of n) or, fine, (blocks of k, n).
constexpr ScaleKind scale_kind(const ScaleShapes& s, int64_t m, int64_t n, int64_t k) {
    const int64_t k_blocks = (k + 127) / 128, n_blocks = (n + 127) / 128;
    if ((s.a_rows == 1 || s.a_rows == m) && s.a_cols == 1 && s.b_rows == 1 &&
        (s.b_cols == 1 || s.b_cols == n) && (k_blocks <= 1 || k == 0)) {
        return {true, k == 0, false};
    }
    if (s.a_rows == m && s.a_cols == k_blocks && s.b_rows == k_blocks &&
        (s.b_cols == n_blocks || s.b_cols == n)) {
        return {true, true, s.b_cols != n_blocks};
    }
    const bool valid = (s.a_rows == 1 || s.a_rows == m) && s.a_cols == 1 && s.b_rows == 1 &&
                       (s.b_cols == 1 || s.b_cols == n);
    return {valid, k == 0, false};
}

// Every kernel that is compiled, by number: what the launchers are enumerated by.
constexpr std::size_t TILED = std::size(TILE_SHAPES) * std::size(DTYPES);
constexpr std::size_t STREAMED = std::size(STREAM_SHAPES) * std::size(DTYPES);
constexpr std::size_t CONFIGS = TILED + STREAMED + std::size(PLAIN_SHAPES);
constexpr Config config_at(std::size_t i) {
    if (i < TILED) return make_config(TILE_SHAPES[i / 3], DTYPES[i % 3]);
    if (i < TILED + STREAMED) return make_config(STREAM_SHAPES[(i - TILED) / 3], DTYPES[i % 3]);
    return make_config(PLAIN_SHAPES[i - TILED - STREAMED], DTYPES[0], true);
}

// A configuration as instances.txt names it, by what tells it from the others.
struct ConfigName {
    int block_m, block_n;
    Sums sums = Sums::promoted;
    DType a = DType::e4m3, b = DType::e4m3;
    bool streamed = false, plain = false;
};
// The one that has the name. One that is not compiled is an error of the compiler.
consteval Config config_of(const ConfigName& name) {
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        if (name.block_m == c.block_m && name.block_n == c.block_n && name.sums == c.sums &&
            name.a == c.a && name.b == c.b && name.streamed == c.streamed &&
            name.plain == c.plain) {
            return c;
        }
    }
    throw "no such configuration is listed";
}

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
// Of the kernel that a call runs, where a configuration has several.
std::string kernel_name(const Config& config, const Params& params);
std::vector<KernelInfo> kernels();

// Runs the kernel of `config` on the stream.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_streamed(const Params& params, Stream stream);

// The same for a configuration that is known at run time; false when there is no such kernel.
template <std::size_t i = 0>
bool launch_any(const Config& config, const Params& params, Stream stream) {
    if constexpr (i < CONFIGS) {
        if (config != config_at(i)) return launch_any<i + 1>(config, params, stream);
        if constexpr (config_at(i).streamed)
            launch_streamed<config_at(i)>(params, stream);
        else
            launch<config_at(i)>(params, stream);
        return true;
    } else {
        return false;
    }
}

}  // namespace thunderkittens::fp8_gemm
