// The GEMM family: what a product is (Problem), what is compiled (Config), how it is scheduled
// (Schedule), and the functions that choose. Host C++ only; the op in gemm.cpp, the kernels of an
// architecture in persistent_sm90.cuh and the registry in choose.cpp meet here.
//
// A product is z = alpha * a @ b + bias with a (batch, m, k), b (batch, k, n), and
// out = activation(z) + beta * residual with out (batch, m, n), or (batch, m, n / 2) when one half
// of z's columns gates the other. Either operand may have either of its two dimensions contiguous
// in memory.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/gemm/common/epilogue.h"
#include "csrc/gemm/common/tile_mask.h"

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::gemm {

struct Problem {
    int64_t m = 0, n = 0, k = 0, batch = 1;
    DType dtype = DType::bf16;
    DType out_dtype = DType::bf16;
    bool a_m_major = false;  // a's rows (m) are adjacent in memory, instead of its columns (k)
    bool b_n_major = true;   // b's columns (n) are adjacent in memory, instead of its rows (k)
    Gate gate = Gate::none;
    bool fused = false;  // the epilogue does more than to scale and to add a bias
};

// What one kernel is compiled for. A block computes block_m x block_n tiles, 64 of k at a time,
// with one warpgroup that loads and `consumers` warpgroups that share the tile's rows. `streamed`:
// for few rows, the kernel of swap_ab/dense_sm90.cuh, which takes block_k of k at a time.
struct Config {
    int block_m = 128;
    int block_n = 256;
    int stages = 4;
    int consumers = 2;
    bool streamed = false;
    int block_k = 64;
    bool fused = false;
    DType dtype = DType::bf16;
    bool a_m_major = false;
    bool b_n_major = true;
    bool marked = false;  // only the tiles that are marked, see Marks
    bool varied = false;  // tiles of two widths that are chosen for a problem, see balanced_order.h

    bool operator==(const Config&) const = default;
};
constexpr int BLOCK_K = 64;

// How tiles are dealt out. Blocks walk them in bands of `band` tiles, so that those at work at a
// time form a compact rectangle, whose operands fit the L2 cache. A band lies along n (its tiles
// are next to each other in m), or along m when `bands_along_m`.
struct Schedule {
    int band = 8;
    bool bands_along_m = false;
    int blocks = 0;  // of the grid, a multiple of splits
    int splits = 1;  // streamed: blocks of a cluster that divide k between them
    // b is read about once: its lines are the first to leave the L2 cache. Else each takes the
    // place of another one, which goes to memory first where it has been written.
    bool b_once = false;
    // Warps beside the one that loads finish tiles where the epilogue is long, see
    // epilogue_warps_sm90.cuh; they are handed a part of the last tile every so many steps of k. 0:
    // the consumers finish.
    int spacing = 0;
    // Tiles of two widths, see common/raster.h: `longer` rows of tiles have one more than
    // `columns`. 0: all tiles are as wide as the configuration's.
    int columns = 0, longer = 0;

    bool operator==(const Schedule&) const = default;
};

struct Choice {
    Config config;
    Schedule schedule;

    bool operator==(const Choice&) const = default;
};

// One call. Strides count elements: a_stride and b_stride lie between neighbours in the dimension
// that is not contiguous. An operand that is the same for the whole batch has batch stride 0. The
// operands must satisfy TMA: base and strides multiples of 16 bytes. Rows of out and residual are
// contiguous.
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
    Marks marks;
    Schedule schedule;
};

template <typename Visitor>
void visit_fields(Problem& p, Visitor&& visit) {
    visit("m", p.m);
    visit("n", p.n);
    visit("k", p.k);
    visit("batch", p.batch);
    visit("dtype", p.dtype);
    visit("out_dtype", p.out_dtype);
    visit("a_m_major", p.a_m_major);
    visit("b_n_major", p.b_n_major);
    visit("gate", p.gate);
    visit("fused", p.fused);
}

template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("block_m", c.config.block_m);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("consumers", c.config.consumers);
    visit("streamed", c.config.streamed);
    visit("block_k", c.config.block_k);
    visit("fused", c.config.fused);
    visit("dtype", c.config.dtype);
    visit("a_m_major", c.config.a_m_major);
    visit("b_n_major", c.config.b_n_major);
    visit("varied", c.config.varied);
    visit("band", c.schedule.band);
    visit("bands_along_m", c.schedule.bands_along_m);
    visit("blocks", c.schedule.blocks);
    visit("splits", c.schedule.splits);
    visit("b_once", c.schedule.b_once);
    visit("spacing", c.schedule.spacing);
    visit("columns", c.schedule.columns);
    visit("longer", c.schedule.longer);
}

// Tile shapes that are compiled, each for both dtypes and the four layouts of the operands.
struct TileShape {
    int block_m, block_n, stages, consumers;
};
// The first FUSED_SHAPES of them also with a fused epilogue.
constexpr TileShape TILE_SHAPES[] = {
    {128, 256, 4, 2},
    {128, 128, 6, 2},
    {64, 128, 8, 1},
    {64, 64, 10, 1},
};
constexpr std::size_t FUSED_SHAPES = 3;
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

// Widths between those, which divide the columns of some weights into fewer rounds of the SMs: 7168
// are 64 tiles of 112, 2112 are 12 of 176, 28672 are 128 of 224. For both dtypes, and the layout of
// a linear layer alone: both operands have k adjacent.
constexpr TileShape BETWEEN_SHAPES[] = {
    {128, 112, 6, 2},
    {128, 176, 5, 2},
    {128, 224, 4, 2},
};

// The same for rows of b along n, which come in stripes of 64 columns: 2112 are 11 of 192. Both
// dtypes, a's rows along k.
constexpr TileShape BETWEEN_SHAPE_NN = {128, 192, 4, 2};

// Tiles of 128 x 256 at most, whose two widths are chosen for a problem: both dtypes, both orders
// of b, a's rows along k.
constexpr Config varied_config(DType dtype, bool b_n_major) {
    Config c = make_config(TILE_SHAPES[0], dtype, false, b_n_major);
    c.varied = true;
    return c;
}

// What computes the calls that kernels of varied and of divided tiles do not: tiles of 128 x 256.
constexpr Config whole_config(const Config& c) {
    return make_config(TILE_SHAPES[0], c.dtype, false, c.b_n_major);
}
inline Params in_whole_tiles(Params p) {
    p.schedule.columns = 0, p.schedule.splits = 1;
    return p;
}

// Kernels for few rows, each for both dtypes and both orders of b; a's rows are contiguous.
struct StreamShape {
    int block_m, block_n, block_k, stages;
    bool fused;
};
constexpr StreamShape STREAM_SHAPES[] = {
    {16, 64, 256, 5, false},
    {32, 64, 256, 4, false},
    {64, 64, 128, 6, false},
    {64, 128, 128, 4, true},
};
constexpr Config make_config(const StreamShape& shape, DType dtype, bool b_n_major) {
    return {.block_m = shape.block_m,
            .block_n = shape.block_n,
            .stages = shape.stages,
            .consumers = 1,
            .streamed = true,
            .block_k = shape.block_k,
            .fused = shape.fused,
            .dtype = dtype,
            .b_n_major = b_n_major};
}

// The kernel of marked tiles: the operands of MXFP8 products, as they come out of a pass over them.
constexpr Config marked_config() {
    Config c = make_config(TILE_SHAPES[1], DType::bf16, false, false, true);
    c.marked = true;
    return c;
}

// Every kernel that is compiled, by number: what the launchers are enumerated by.
constexpr std::size_t TILED = (std::size(TILE_SHAPES) + FUSED_SHAPES) * 8;
constexpr std::size_t STREAMED = std::size(STREAM_SHAPES) * 4;
constexpr std::size_t BETWEEN = std::size(BETWEEN_SHAPES) * 2;
constexpr std::size_t VARIED = 4;
constexpr std::size_t CONFIGS = TILED + STREAMED + BETWEEN + 2 + VARIED + 1;
constexpr Config config_at(std::size_t i) {
    const auto dtype = [](std::size_t j) { return j % 2 == 0 ? DType::bf16 : DType::fp16; };
    if (i < TILED) {
        const bool fused = i / 8 >= std::size(TILE_SHAPES);
        return make_config(TILE_SHAPES[i / 8 % std::size(TILE_SHAPES)], dtype(i / 4),
                           i / 2 % 2 != 0, i % 2 != 0, fused);
    }
    i -= TILED;
    if (i < STREAMED) return make_config(STREAM_SHAPES[i / 4], dtype(i / 2), i % 2 != 0);
    i -= STREAMED;
    if (i < BETWEEN) return make_config(BETWEEN_SHAPES[i / 2], dtype(i), false, false);
    i -= BETWEEN;
    if (i < 2) return make_config(BETWEEN_SHAPE_NN, dtype(i), false, true);
    i -= 2;
    if (i < VARIED) return varied_config(dtype(i / 2), i % 2 != 0);
    return marked_config();
}

// Whether warps beside the one that loads can finish tiles.
constexpr bool has_finishers(const Config& c) {
    return c.fused && !c.marked && !c.streamed && c.block_n == 256;
}

// Whether the kernel computes tiles of two widths.
constexpr bool has_two_widths(const Config& c) {
    return !c.marked && !c.streamed && c.consumers == 2 && (c.block_n == 256 || c.block_n == 176);
}

// Dynamic shared memory of a block: the ring of stages, two staging buffers of 16 rows of 128 bytes
// per consumer warp, a row of bias per consumer, two semaphores per stage, and two per staging
// buffer where other warps finish tiles.
// Streamed: the ring, the sums as rows of fp32 that are 4 longer than the tile's, and two
// semaphores more.
constexpr int shared_bytes(const Config& c) {
    if (c.streamed) {
        const int ring = c.stages * (c.block_m + c.block_n) * c.block_k * 2;
        const int sums = (c.block_m * (c.block_n + 4) * 4 + 127) / 128 * 128;
        return (ring + sums + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
    }
    const int bias = (c.block_n * 4 + 127) / 128 * 128;
    const int bytes = c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 +
                      c.consumers * (4 * 2 * 16 * 128 + bias) + c.stages * 16 +
                      (has_finishers(c) ? c.consumers * 4 * 2 * 16 : 0);
    return (bytes + 127) / 128 * 128;
}
constexpr int threads(const Config& c) {
    return c.streamed ? 4 * 32 + 32 : (c.consumers + 1) * 128;
}

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
// As choose(), of kernels whose tiles have the configuration's width, or all but 16 columns of it.
Choice choose_unvaried(const Problem& problem, const DeviceProperties& device);
// The choice and what else could run, for measurements of the choice: every compiled kernel that
// computes the problem, with each way to divide k.
std::vector<Choice> candidates(const Problem& problem, const DeviceProperties& device);
// The kernel of marked tiles, for a problem of its dtype and layout.
Choice choose_marked(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
// Of the kernel that runs a call: a configuration may have one more, see single_wave.h.
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

}  // namespace thunderkittens::gemm
