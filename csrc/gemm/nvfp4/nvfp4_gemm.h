// Products of 16-bit activations and weights of fewer bits, which are prepared once for the kernel:
// what a call is (Problem), what is compiled (Config), how it is scheduled (Schedule), and the
// functions that choose. Host C++ only.
//
// out = activation(scale * (a @ w^T) + bias) with a (m, k), w (n, k) and out (m, n). Grouped, w is
// (groups, n, k) and the rows of a belong to the groups one after the other.
//
// Prepared, a weight is a sequence of pieces of 64 rows by 64 columns, those of 64 rows side by
// side; a piece is four strips of 16 rows, each the codes of its elements and then their scales, in
// the order in which the threads of a warp need them. What lies past the end of a weight is zero.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::mixed_gemm {

// The formats of weights. A kernel knows one by a trait, see weights_sm90.cuh.
enum class Format : int { nvfp4 };

constexpr const char* name_of(Format) { return "nvfp4"; }

constexpr int PIECE = 64;  // rows and columns
constexpr int STRIP_ROWS = 16;
constexpr int STRIPS = PIECE / STRIP_ROWS;  // of a piece
constexpr int piece_bytes(Format) { return PIECE * PIECE / 2 + PIECE * PIECE / 16; }
constexpr int strip_bytes(Format format) { return piece_bytes(format) / STRIPS; }

struct Problem {
    int64_t m = 0, n = 0, k = 0, groups = 1;
    DType dtype = DType::bf16;
    DType out_dtype = DType::bf16;
    bool grouped = false;
};

// A block computes `row_groups` * 64 rows of w times `tokens` rows of a. It takes k in stages of
// `pieces` * 64. One warp loads; row_groups * k_groups warpgroups multiply: those of a row group
// take turns at the pieces of a stage, and their sums are added at the end. Of few rows of a (see
// few()) warps work on their own, and how they share the work is known at run time.
struct Config {
    Format format = Format::nvfp4;
    int tokens = 16;
    int row_groups = 2;
    int k_groups = 2;
    int pieces = 4;
    int stages = 6;
    // So many blocks divide the k of the only tile that they have and exchange sums through memory.
    int exchange = 1;
    DType dtype = DType::bf16;

    bool operator==(const Config&) const = default;
};

struct Schedule {
    int blocks = 0;  // of the grid, a multiple of `splits`
    int splits = 1;  // blocks of a cluster that divide k between them
    // Or blocks of a cluster with the same rows of a, of which each loads a part for all.
    int sharers = 1;
    // Of few rows of a: the strips of the weight that are a tile.
    int strips = 0;
    // Blocks (or clusters of `sharers`) take equal ranges of all tiles' steps of k: tiles that fall
    // to several are summed through memory, see swap_ab/epilogue_sm90.cuh. Not of groups.
    bool ranges = false;
};

struct Choice {
    Config config;
    Schedule schedule;
    // Many rows: the kernel of fused_dequant/fused_dequant.h instead, in bands of so many tiles.
    bool expanding = false;
    int band = 1;
};

// One call. a: base and stride, in elements, satisfy TMA. Rows of out are contiguous.
struct Params {
    const void* a = nullptr;
    const void* weight = nullptr;   // (groups, row pieces, column pieces, piece_bytes)
    const float* scale = nullptr;   // (groups,) on the device
    const void* bias = nullptr;     // (n,) of the activations' dtype
    const int32_t* offs = nullptr;  // (groups,) ends of the groups' rows
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, groups = 1;
    int64_t a_stride = 0;
    DType out_dtype = DType::bf16;
    int activation = 0;  // common/epilogue.h
    // Of equal ranges: scratch_of() bytes, 16-byte aligned, with any contents; gemm::new_mark().
    void* scratch = nullptr;
    uint64_t mark = 0;
    Schedule schedule;
};

template <typename Visitor>
void visit_fields(Problem& p, Visitor&& visit) {
    visit("m", p.m);
    visit("n", p.n);
    visit("k", p.k);
    visit("groups", p.groups);
    visit("dtype", p.dtype);
    visit("out_dtype", p.out_dtype);
    visit("grouped", p.grouped);
}
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("expanding", c.expanding);
    visit("band", c.band);
    visit("tokens", c.config.tokens);
    visit("row_groups", c.config.row_groups);
    visit("k_groups", c.config.k_groups);
    visit("pieces", c.config.pieces);
    visit("stages", c.config.stages);
    visit("exchange", c.config.exchange);
    visit("dtype", c.config.dtype);
    visit("blocks", c.schedule.blocks);
    visit("splits", c.schedule.splits);
    visit("sharers", c.schedule.sharers);
    visit("strips", c.schedule.strips);
    visit("ranges", c.schedule.ranges);
}

// The kernel of swap_ab/nvfp4_gemv_sm90.cuh: 16 warps multiply, one loads.
constexpr bool few(const Config& c) { return c.row_groups == 0; }
constexpr int FEW_WARPS = 16;
constexpr int FEW_STRIPS = 16;  // of a tile at most, four per warp
constexpr int FEW_STAGES = 16;  // at most
constexpr int FEW_SHARED_BYTES = 232448;

// How a tile of so many strips is shared: `row_groups` of warps divide the strips (where half of
// them would have one more, two take turns at it), those of a row group the pieces of k, of which a
// stage has `pieces`. All are powers of two; the device divides by some of them, and by columns of
// the sums, as shifts.
struct FewPlan {
    int row_groups, k_groups, pieces;
    int row_groups_bits, k_groups_bits, pieces_bits, fours_bits;
    int stage_bytes, pitch, sums_bytes, stages;
};
constexpr int few_bits(int least) {
    int bits = 0;
    while (1 << bits < least) ++bits;
    return bits;
}
constexpr FewPlan few_plan(const Config& c, int strips) {
    FewPlan plan{};
    plan.row_groups = strips <= 4 ? 1 : strips <= 8 ? 2 : 4;
    plan.k_groups = FEW_WARPS / plan.row_groups;
    plan.pieces = strips <= 2 ? 8 : strips > 8 && c.tokens == 8 ? 2 : 4;
    plan.row_groups_bits = few_bits(plan.row_groups);
    plan.k_groups_bits = few_bits(plan.k_groups);
    plan.pieces_bits = few_bits(plan.pieces);
    plan.fours_bits = few_bits(strips * STRIP_ROWS / 4);
    const int bytes = plan.pieces * (c.tokens * PIECE * 2 + strips * strip_bytes(c.format));
    plan.stage_bytes = (bytes + 1023) / 1024 * 1024;
    // Of the sums, in floats: no bank conflicts. There is room for two sums of a shared strip.
    const int places = (strips + plan.row_groups - 1) / plan.row_groups * plan.row_groups;
    plan.pitch = places * STRIP_ROWS + 4;
    plan.sums_bytes = plan.k_groups * c.tokens * plan.pitch * 4;
    const int stages = (FEW_SHARED_BYTES - 1024 - plan.sums_bytes) / plan.stage_bytes;
    plan.stages = stages < FEW_STAGES ? stages : FEW_STAGES;
    // A warp has every `sets`-th stage. It comes back to the same places of the ring, so that it
    // sees each of their phases: a parity alone would not tell it from the one before the last.
    const int sets = plan.k_groups / plan.pieces;
    plan.stages -= plan.stages % sets;
    return plan;
}

constexpr int consumers(const Config& c) { return c.row_groups * c.k_groups; }
// Where the sums take many registers, the warp that loads is one of four that give theirs away.
constexpr bool moves_registers(const Config& c) { return c.tokens >= 64; }
constexpr int threads(const Config& c) {
    if (few(c)) return (FEW_WARPS + 1) * 32;
    return consumers(c) * 128 + (moves_registers(c) ? 128 : 32);
}
constexpr int block_rows(const Config& c) { return c.row_groups * PIECE; }
// How many blocks of a cluster may share rows of a: those of large tiles, which come from the L2
// cache faster than it gives them.
constexpr int most_sharers(const Config& c) { return c.tokens >= 256 ? 2 : 1; }
// Rows of a whose sums pass through shared memory at a time.
constexpr int tokens_at_a_time(const Config& c) {
    const int own = c.tokens / c.exchange;
    return own < 64 ? own : 64;
}
constexpr int stage_bytes(const Config& c) {
    return c.pieces * (c.tokens * PIECE * 2 + c.row_groups * piece_bytes(c.format));
}
// The ring, the sums as rows of fp32 that are 4 longer than the tile's, and semaphores.
constexpr int shared_bytes(const Config& c) {
    if (few(c)) return FEW_SHARED_BYTES;
    const int sums = c.k_groups * tokens_at_a_time(c) * (block_rows(c) + 4) * 4;
    const int ring = (c.stages * stage_bytes(c) + 127) / 128 * 128;
    return (ring + (sums + 127) / 128 * 128 + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
}

// Of equal ranges: the sums that a block hands on, in bytes, and a mark of each warp. Of an
// exchange: a mark for each of the tile's blocks.
constexpr int64_t part_bytes(const Config& c) {
    return int64_t{4} * block_rows(c) * c.k_groups * c.tokens;
}
constexpr int64_t scratch_of(const Config& c, const Schedule& schedule) {
    if (!schedule.ranges && c.exchange == 1) return 0;
    const int marks = c.exchange > 1 ? c.exchange : consumers(c) * 4;
    return schedule.blocks * (part_bytes(c) + marks * int64_t{sizeof(uint64_t)});
}

constexpr int64_t pieces(int64_t size) { return (size + PIECE - 1) / PIECE; }

// Tile shapes that are compiled, each for both dtypes of activations.
struct TileShape {
    int tokens, row_groups = 0, k_groups = 0, pieces = 0, stages = 0, exchange = 1;
};
constexpr TileShape TILE_SHAPES[] = {
    {8},
    {16},
    {32, 2, 2, 4, 5},
    {64, 2, 1, 2, 6},
    {64, 4, 1, 2, 4},
    {64, 4, 1, 2, 5, 4},
    {128, 2, 1, 1, 8},
    {256, 2, 1, 1, 5},
};
constexpr Config make_config(Format format, const TileShape& shape, DType dtype) {
    return {.format = format,
            .tokens = shape.tokens,
            .row_groups = shape.row_groups,
            .k_groups = shape.k_groups,
            .pieces = shape.pieces,
            .stages = shape.stages,
            .exchange = shape.exchange,
            .dtype = dtype};
}
// Every kernel of a format that is compiled, by number.
constexpr std::size_t CONFIGS = 2 * std::size(TILE_SHAPES);
constexpr Config config_at(Format format, std::size_t i) {
    return make_config(format, TILE_SHAPES[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);
}
// A configuration for NVFP4 weights as instances.txt names it, by what tells it from the others:
// rows of the weight (0 where a tile is some strips) and of the activations. One that is not
// compiled is an error of the compiler.
struct Nvfp4Name {
    int rows = 0, tokens = 0, exchange = 1;
    DType dtype = DType::bf16;
};
consteval Config nvfp4_config(const Nvfp4Name& name) {
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(Format::nvfp4, i);
        if (name.rows == block_rows(c) && name.tokens == c.tokens && name.exchange == c.exchange &&
            name.dtype == c.dtype) {
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

// Runs the kernel of `config` on the stream: the second where few() says so.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_few(const Params& params, Stream stream);

// The same for a configuration that is known at run time; false when there is no such kernel.
template <Format format, std::size_t i = 0>
bool launch_any(const Config& config, const Params& params, Stream stream) {
    if constexpr (i < CONFIGS) {
        if (config != config_at(format, i)) {
            return launch_any<format, i + 1>(config, params, stream);
        }
        constexpr Config c = config_at(format, i);
        if constexpr (few(c))
            launch_few<c>(params, stream);
        else
            launch<c>(params, stream);
        return true;
    } else {
        return false;
    }
}

// NVFP4 weights (groups, n, k) into pieces, and back as values times the global scale.
struct PrepareParams {
    const void* codes = nullptr;   // (groups, n, k / 2) bytes, rows contiguous
    const void* scales = nullptr;  // e4m3, contiguous; in the 128x4 layout or plain
    void* prepared = nullptr;
    void* values = nullptr;  // (groups, n, k), contiguous
    const float* global_scale = nullptr;
    int64_t n = 0, k = 0, groups = 1;
    int64_t codes_stride = 0, codes_group_stride = 0;  // bytes
    DType values_dtype = DType::bf16;
    bool swizzle = true;
};
// The first makes `prepared`; the second reads it and makes `values`.
enum class Nvfp4Pass : int { prepare, restore };
template <Nvfp4Pass pass>
void run(const PrepareParams& params, Stream stream);

// A preparation as the registry knows it.
struct Nvfp4Weight {
    int64_t n = 0, k = 0, groups = 1;
    bool restore = false;
};
struct Nvfp4Preparation {
    Nvfp4Pass pass = Nvfp4Pass::prepare;
};
template <typename Visitor>
void visit_fields(Nvfp4Weight& p, Visitor&& visit) {
    visit("n", p.n);
    visit("k", p.k);
    visit("groups", p.groups);
    visit("restore", p.restore);
}
template <typename Visitor>
void visit_fields(Nvfp4Preparation& c, Visitor&& visit) {
    visit("pass", c.pass);
}
std::string unsupported(const Nvfp4Weight& weight, const DeviceProperties& device);
Nvfp4Preparation choose(const Nvfp4Weight& weight, const DeviceProperties& device);
std::string kernel_name(const Nvfp4Preparation& config);

}  // namespace thunderkittens::mixed_gemm
