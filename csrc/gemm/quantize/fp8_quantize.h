// Quantisation to fp8: what a call is (Problem), what is compiled (Config), and the functions that
// choose. Host C++ only.
//
// x is (m, k). Elements that share a scale are a group: all of x, a row, 128 neighbours of a row,
// or 128 x 128 elements. With `transposed`, x^T is quantised at the same time.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"

namespace thunderkittens::fp8_quantize {

// As the op's code of a granularity: its place in ("tensor", "row", "1x128", "128x128").
enum class Granularity : int { tensor, row, row_block, block };

// One pass over x. The first two find the largest magnitudes: of all of x, and of its rows and
// columns. The next three quantise along rows, with one scale that is given, of a row, of 128
// neighbours. The last three quantise tiles of 128 x 128, and can write the transpose too: with
// given scales of rows and columns, of 128 neighbours either way, of the tile. `transpose` writes
// the transpose of a matrix of bytes, an operand of fp8_gemm in the order that wgmma does not take.
enum class Pass : int {
    amax,
    amax_lines,
    given,
    row,
    row_block,
    tile_given,
    tile_row_block,
    tile_block,
    transpose
};
constexpr Pass PASSES[] = {
    Pass::amax,      Pass::amax_lines, Pass::given,          Pass::row,
    Pass::row_block, Pass::tile_given, Pass::tile_row_block, Pass::tile_block};
constexpr const char* name_of(Pass pass) {
    constexpr const char* names[] = {"amax",      "amax_lines", "given",          "row",
                                     "row_block", "tile_given", "tile_row_block", "tile_block",
                                     "transpose"};
    return names[static_cast<int>(pass)];
}

struct Problem {
    int64_t m = 0, k = 0;
    DType dtype = DType::bf16;
    DType out_dtype = DType::e4m3;
    int granularity = 1;
    bool given_scale = false;
    bool transposed = false;
};

struct Config {
    DType dtype = DType::bf16;
    Pass pass = Pass::row;
    bool portable = false;
    bool operator==(const Config&) const = default;
};

constexpr int THREADS = 256;
constexpr int GROUP = 128;

struct Params {
    const void* x = nullptr;  // (m, k), rows `stride` elements apart
    int64_t m = 0, k = 0, stride = 0;
    void* out = nullptr;            // (m, k), contiguous
    void* out_t = nullptr;          // (k, m), contiguous, or nullptr
    float* scales = nullptr;        // see scale_stride
    float* scales_t = nullptr;      // of x^T
    int64_t scale_stride = 0;       // between blocks of k: of 1 x 128, of 128 x 128 between rows
    int64_t scale_stride_t = 0;     // the same of x^T
    uint32_t* amax = nullptr;       // bits of the largest magnitudes: of x, or of its m rows
    uint32_t* amax_cols = nullptr;  // of its k columns
    const float* given = nullptr;   // the scale that is given, if it is
    DType out_dtype = DType::e4m3;
    bool aligned = false;      // 16-byte loads of x, 8-byte stores of out
    int64_t pitch_t = 0;       // between rows of out_t
    int64_t batch_stride = 0;  // of x, for the transpose alone
    int batches = 1;
    int blocks = 0;  // of the grid, per matrix
};

TK_FIELDS(Problem, m, k, dtype, out_dtype, granularity, given_scale, transposed)
TK_FIELDS(Config, dtype, portable)

// Every pass that is compiled, by number, but for the transpose: for Hopper, and portable.
constexpr DType DTYPES[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr std::size_t PASSES_OF_ALL = std::size(DTYPES) * std::size(PASSES);
constexpr std::size_t CONFIGS = 2 * PASSES_OF_ALL;
constexpr Config config_at(std::size_t i) {
    return {DTYPES[i / std::size(PASSES) % std::size(DTYPES)], PASSES[i % std::size(PASSES)],
            i >= PASSES_OF_ALL};
}
constexpr Config TRANSPOSE{DType::e4m3, Pass::transpose};
constexpr Config PORTABLE_TRANSPOSE{DType::e4m3, Pass::transpose, true};

// Blocks of the grid of a pass.
constexpr int64_t blocks_of(Pass pass, int64_t m, int64_t k, int sm_count) {
    if (pass == Pass::amax) return 4 * int64_t{sm_count};
    if (pass == Pass::given || pass == Pass::row || pass == Pass::row_block) {
        int64_t team = 1;  // warps that share a row
        while (team < THREADS / 32 && k > team * 32 * 64) team *= 2;
        const int64_t rows = THREADS / 32 / team;
        return m > rows ? (m + rows - 1) / rows : 1;
    }
    const int64_t down = (m + GROUP - 1) / GROUP, across = (k + GROUP - 1) / GROUP;
    if (pass != Pass::amax_lines) return down * across;
    // Strips of columns, each in as many parts as make one round of blocks.
    const int64_t parts = 4 * int64_t{sm_count} / across;
    return across * (parts < 1 ? 1 : parts < down ? parts : down);
}

// The pass that writes the result; what comes before it, if anything, finds the scales.
constexpr Pass last_pass(const Problem& p) {
    const auto granularity = static_cast<Granularity>(p.granularity);
    if (granularity == Granularity::block) return Pass::tile_block;
    if (granularity == Granularity::row_block)
        return p.transposed ? Pass::tile_row_block : Pass::row_block;
    if (p.transposed) return Pass::tile_given;
    return granularity == Granularity::row ? Pass::row : Pass::given;
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Config choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::vector<KernelInfo> kernels();

// Words of memory, set to zero, that the passes find the largest magnitudes in.
constexpr int64_t amax_words(const Problem& p) {
    const auto granularity = static_cast<Granularity>(p.granularity);
    if (granularity == Granularity::tensor && !p.given_scale) return 1;
    return granularity == Granularity::row && p.transposed ? p.m + p.k : 0;
}

// With one scale for all of x, rows mean nothing. Where they follow each other without gaps, and
// are not aligned or do not fill a warp's registers, x is taken as rows of FLAT_ROW elements, which
// do; what is left at the end is a row of its own, at the cost of more launches.
constexpr int64_t FLAT_ROW = 2048, LEAST_WITH_REST = 1 << 19;
inline bool is_flat(const Problem& p, const Params& params) {
    const int64_t elements = p.m * p.k;
    return static_cast<Granularity>(p.granularity) == Granularity::tensor && !p.transposed &&
           params.stride == p.k && (!params.aligned || p.k < FLAT_ROW) && elements >= FLAT_ROW &&
           (elements % FLAT_ROW == 0 || elements >= LEAST_WITH_REST) &&
           reinterpret_cast<uintptr_t>(params.x) % 16 == 0 &&
           reinterpret_cast<uintptr_t>(params.out) % 16 == 0;
}

// Calls launch(config, params) for the passes of a problem; `params.amax` holds amax_words().
template <class Launch>
void run_passes(const Problem& p, Params params, int sm_count, bool portable, Launch launch) {
    const auto run_on = [&](Pass pass, Params part) {
        part.blocks = static_cast<int>(blocks_of(pass, part.m, part.k, sm_count));
        launch(Config{p.dtype, pass, portable}, part);
    };
    const auto run = [&](Pass pass) {
        if (!is_flat(p, params)) return run_on(pass, params);
        const int64_t elements = p.m * p.k, rest = elements % FLAT_ROW, whole = elements - rest;
        Params part = params;
        part.m = whole / FLAT_ROW, part.k = part.stride = FLAT_ROW, part.aligned = true;
        run_on(pass, part);
        if (rest == 0) return;
        part.x = static_cast<const uint8_t*>(params.x) + whole * size_in_bytes(p.dtype);
        part.out = static_cast<uint8_t*>(params.out) + whole;
        part.m = 1, part.k = part.stride = rest, part.aligned = rest % 8 == 0;
        run_on(pass, part);
    };
    const auto granularity = static_cast<Granularity>(p.granularity);
    if (p.m == 0 || p.k == 0) {
        // Groups without elements have a scale too.
        params.k = 0;
        if (granularity == Granularity::tensor) run(Pass::given);
        if (granularity != Granularity::row) return;
        if (params.m > 0) run(Pass::row);
        params.m = p.k, params.scales = params.scales_t;
        if (p.transposed && params.m > 0) run(Pass::row);
        return;
    }
    if (granularity == Granularity::tensor && !p.given_scale) run(Pass::amax);
    if (granularity == Granularity::row && p.transposed) {
        params.amax_cols = params.amax + p.m;
        run(Pass::amax_lines);
    }
    run(last_pass(p));
}

// The shape of the scales of x (m, k), and whether neighbouring rows are adjacent in memory, each
// block of k padded to a multiple of four rows: so a product can load them by TMA.
struct ScaleShape {
    int64_t rows, cols;
    bool rows_adjacent = false;
};
constexpr ScaleShape scale_shape(int granularity, int64_t m, int64_t k) {
    const int64_t row_blocks = (m + GROUP - 1) / GROUP, blocks = (k + GROUP - 1) / GROUP;
    switch (static_cast<Granularity>(granularity)) {
        case Granularity::tensor: return {1, 1};
        case Granularity::row: return {m, 1};
        case Granularity::row_block: return {m, blocks, true};
        case Granularity::block: return {row_blocks, blocks};
    }
    return {1, 1};
}
constexpr int64_t scale_pitch(const ScaleShape& shape) {
    return shape.rows_adjacent ? (shape.rows + 3) / 4 * 4 : shape.cols;
}

// Runs the kernel of `config` on the stream.
template <Config config>
void launch(const Params& params, Stream stream);

}  // namespace thunderkittens::fp8_quantize
