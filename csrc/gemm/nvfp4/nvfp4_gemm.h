// Products of 16-bit activations and NVFP4 weights (mixed input), which are prepared once for the
// kernels: what a call is (Problem), what is compiled (Config), how it is scheduled (Schedule), and
// the functions that choose. Host C++ only.
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
#include "csrc/common/fields.h"
#include "csrc/gemm/common/listed.h"

namespace thunderkittens::nvfp4_gemm {

constexpr int PIECE = 64;  // rows and columns
constexpr int STRIP_ROWS = 16;
constexpr int STRIPS = PIECE / STRIP_ROWS;                           // of a piece
constexpr int PIECE_BYTES = PIECE * PIECE / 2 + PIECE * PIECE / 16;  // codes and scales
constexpr int STRIP_BYTES = PIECE_BYTES / STRIPS;

struct Problem {
    int64_t m = 0, n = 0, k = 0, groups = 1;
    DType dtype = DType::bf16;
    DType out_dtype = DType::bf16;
    bool grouped = false;
};

// A block computes `row_groups` * 64 rows of w times `tokens` rows of a. It takes k in stages of
// `pieces` * 64. One warp loads; row_groups * k_groups warpgroups multiply: those of a row group
// alternate at the pieces of a stage, and their sums are added at the end. In the GEMV kernel
// (is_gemv()) single warps multiply, and how they share the work is known at run time.
struct Config {
    int tokens = 16;
    int row_groups = 2;
    int k_groups = 2;
    int pieces = 4;
    int stages = 6;
    // Split-K through the workspace: so many blocks share the k of the only tile that they have.
    int split_k = 1;
    DType dtype = DType::bf16;

    bool operator==(const Config&) const = default;
};

struct Schedule {
    int blocks = 0;  // of the grid, a multiple of `splits`
    int splits = 1;  // split-K over a cluster: the blocks that divide k
    // Multicast cluster: blocks with the same rows of a, of which each loads a slice for all.
    int multicast = 1;
    // The GEMV kernel: the strips of the weight that are a tile.
    int strips = 0;
    // Stream-K: blocks (or multicast clusters) take ranges of the same size of all tiles' steps of
    // k; partial sums of tiles that fall to several go through the workspace, see
    // swap_ab/epilogue_sm90.cuh. Not with groups.
    bool stream_k = false;
};

// The kernel that runs: of swap_ab/, nvfp4_sm90.cuh, nvfp4_split_k_sm90.cuh, nvfp4_gemv_sm90.cuh,
// or for many rows of fused_dequant/fused_dequant.h. Each computes every call of its problem.
// On other GPUs the kernels of portable.h.
enum class Kernel : int { swap_ab, split_k, gemv, fused_dequant, portable, portable_few_rows };
constexpr const char* strategy_name(Kernel kernel) {
    constexpr const char* names[] = {"swap_ab",  "split_k",           "gemv", "fused_dequant",
                                     "portable", "portable_few_rows", nullptr};
    return names[static_cast<int>(kernel)];
}

struct Choice {
    Kernel kernel = Kernel::swap_ab;
    Config config;
    Schedule schedule;
    int raster_group = 1;  // of fused_dequant, in tiles
};

// One call. a: base and stride, in elements, satisfy TMA. Rows of out are contiguous.
struct Params {
    const void* a = nullptr;
    const void* weight = nullptr;   // (groups, row pieces, column pieces, PIECE_BYTES)
    const float* scale = nullptr;   // (groups,) on the device
    const void* bias = nullptr;     // (n,) of the activations' dtype
    const int32_t* offs = nullptr;  // (groups,) ends of the groups' rows
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, groups = 1;
    int64_t a_stride = 0;
    DType out_dtype = DType::bf16;
    int activation = 0;  // common/epilogue.h
    // For split-K and stream-K: workspace_bytes() bytes, 16-byte aligned, with any contents;
    // gemm::new_epoch().
    void* workspace = nullptr;
    uint64_t epoch = 0;
    Schedule schedule;
};

TK_FIELDS(Problem, m, n, k, groups, dtype, out_dtype, grouped)
TK_FIELDS(Config, tokens, row_groups, k_groups, pieces, stages, split_k, dtype)
TK_FIELDS(Schedule, blocks, splits, multicast, strips, stream_k)
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("strategy", c.kernel);
    visit("raster_group", c.raster_group);
    visit_fields(c.config, visit);
    visit_fields(c.schedule, visit);
}

// The kernel of swap_ab/nvfp4_gemv_sm90.cuh: 16 warps multiply, one loads.
constexpr bool is_gemv(const Config& c) { return c.row_groups == 0; }
constexpr Kernel kernel_of(const Config& c) {
    return is_gemv(c) ? Kernel::gemv : c.split_k > 1 ? Kernel::split_k : Kernel::swap_ab;
}
constexpr int GEMV_WARPS = 16;
constexpr int GEMV_STRIPS = 16;  // of a tile at most, four per warp
constexpr int GEMV_STAGES = 16;  // at most
constexpr int GEMV_SHARED_BYTES = 232448;

// How the warps of the GEMV kernel share a tile of so many strips: `row_groups` of warps divide the
// strips (where half of them would have one more, two alternate at it), those of a row group the
// pieces of k, of which a stage has `pieces`. All are powers of two; the device divides by some of
// them, and by columns of the sums, as shifts.
struct GemvPlan {
    int row_groups, k_groups, pieces;
    int row_groups_bits, k_groups_bits, pieces_bits, fours_bits;
    int stage_bytes, pitch, sums_bytes, stages;
};
constexpr int log2_ceil(int least) {
    int bits = 0;
    while (1 << bits < least) ++bits;
    return bits;
}
constexpr GemvPlan gemv_plan(const Config& c, int strips) {
    GemvPlan plan{};
    plan.row_groups = strips <= 4 ? 1 : strips <= 8 ? 2 : 4;
    plan.k_groups = GEMV_WARPS / plan.row_groups;
    plan.pieces = strips <= 2 ? 8 : strips > 8 && c.tokens == 8 ? 2 : 4;
    plan.row_groups_bits = log2_ceil(plan.row_groups);
    plan.k_groups_bits = log2_ceil(plan.k_groups);
    plan.pieces_bits = log2_ceil(plan.pieces);
    plan.fours_bits = log2_ceil(strips * STRIP_ROWS / 4);
    const int bytes = plan.pieces * (c.tokens * PIECE * 2 + strips * STRIP_BYTES);
    plan.stage_bytes = (bytes + 1023) / 1024 * 1024;
    // The pitch of the sums, in floats, without bank conflicts. There is room for two sums of a
    // shared strip.
    const int places = (strips + plan.row_groups - 1) / plan.row_groups * plan.row_groups;
    plan.pitch = places * STRIP_ROWS + 4;
    plan.sums_bytes = plan.k_groups * c.tokens * plan.pitch * 4;
    const int stages = (GEMV_SHARED_BYTES - 1024 - plan.sums_bytes) / plan.stage_bytes;
    plan.stages = stages < GEMV_STAGES ? stages : GEMV_STAGES;
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
    if (is_gemv(c)) return (GEMV_WARPS + 1) * 32;
    return consumers(c) * 128 + (moves_registers(c) ? 128 : 32);
}
constexpr int block_rows(const Config& c) { return c.row_groups * PIECE; }
// The most blocks of a multicast cluster: two for large tiles, whose rows of a the L2 cache cannot
// deliver fast enough to each block.
constexpr int max_multicast(const Config& c) { return c.tokens >= 256 ? 2 : 1; }
// Rows of a whose sums pass through shared memory at a time.
constexpr int tokens_at_a_time(const Config& c) {
    const int own = c.tokens / c.split_k;
    return own < 64 ? own : 64;
}
constexpr int stage_bytes(const Config& c) {
    return c.pieces * (c.tokens * PIECE * 2 + c.row_groups * PIECE_BYTES);
}
// The ring, the sums as rows of fp32 that are 4 longer than the tile's, and semaphores.
constexpr int shared_bytes(const Config& c) {
    if (is_gemv(c)) return GEMV_SHARED_BYTES;
    const int sums = c.k_groups * tokens_at_a_time(c) * (block_rows(c) + 4) * 4;
    const int ring = (c.stages * stage_bytes(c) + 127) / 128 * 128;
    return (ring + (sums + 127) / 128 * 128 + (2 * c.stages + 2) * 8 + 127) / 128 * 128;
}

// The bytes of a partial sum of a block; and of all of the workspace, with the flags: of stream-K
// one for each warp, of split-K one for each of the tile's blocks.
constexpr int64_t partial_bytes(const Config& c) {
    return int64_t{4} * block_rows(c) * c.k_groups * c.tokens;
}
constexpr int64_t workspace_bytes(const Config& c, const Schedule& schedule) {
    if (!schedule.stream_k && c.split_k == 1) return 0;
    const int flags = c.split_k > 1 ? c.split_k : consumers(c) * 4;
    return schedule.blocks * (partial_bytes(c) + flags * int64_t{sizeof(uint64_t)});
}

constexpr int64_t pieces(int64_t size) { return (size + PIECE - 1) / PIECE; }

// Tile shapes that are compiled, each for both dtypes of activations.
struct TileShape {
    int tokens, row_groups = 0, k_groups = 0, pieces = 0, stages = 0, split_k = 1;
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
constexpr Config make_config(const TileShape& shape, DType dtype) {
    return {.tokens = shape.tokens,
            .row_groups = shape.row_groups,
            .k_groups = shape.k_groups,
            .pieces = shape.pieces,
            .stages = shape.stages,
            .split_k = shape.split_k,
            .dtype = dtype};
}
// Every kernel that is compiled, by number.
constexpr std::size_t CONFIGS = 2 * std::size(TILE_SHAPES);
constexpr Config config_at(std::size_t i) {
    return make_config(TILE_SHAPES[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);
}
// A configuration for NVFP4 weights as instances.txt names it: rows of the weight (0 where a tile
// is some strips) and of the activations.
struct Nvfp4Name {
    int rows = 0, tokens = 0, split_k = 1;
    DType dtype = DType::bf16;

    constexpr bool is_of(const Config& c) const {
        return rows == block_rows(c) && tokens == c.tokens && split_k == c.split_k &&
               dtype == c.dtype;
    }
};
consteval Config nvfp4_config(const Nvfp4Name& name) {
    return gemm::named<config_at, CONFIGS>(name);
}

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
// After fields of a choice have been forced: its kernel follows from the configuration, unless it
// is forced itself, and a grid is whole clusters.
void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced);

// Run the kernel of `config` on the stream: swap_ab or split_k, gemv.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_gemv(const Params& params, Stream stream);

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
template <Nvfp4Pass pass, bool portable>
void run(const PrepareParams& params, Stream stream);

// A preparation as the registry knows it.
struct Nvfp4Weight {
    int64_t n = 0, k = 0, groups = 1;
    bool restore = false;
};
struct Nvfp4Preparation {
    Nvfp4Pass pass = Nvfp4Pass::prepare;
    bool portable = false;
};
TK_FIELDS(Nvfp4Weight, n, k, groups, restore)
TK_FIELDS(Nvfp4Preparation, pass, portable)
std::string unsupported(const Nvfp4Weight& weight, const DeviceProperties& device);
Nvfp4Preparation choose(const Nvfp4Weight& weight, const DeviceProperties& device);
std::string kernel_name(const Nvfp4Preparation& config);

}  // namespace thunderkittens::nvfp4_gemm
