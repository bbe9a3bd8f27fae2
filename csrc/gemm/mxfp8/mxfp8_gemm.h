// Products of MXFP8 matrices: what a call is (Problem), which kernels serve it (Choice), and the
// passes over operands that come before them. Host C++ only; the ops in mxfp8_gemm.cpp, the
// kernels in passes_sm90.cuh and the registry in choose.cpp meet here.
//
// Hopper's tensor cores have no block-wise scales. Exact: the operands are dequantized to bf16,
// which holds them exactly but for extreme scales, by a pass before the kernels of gemm, or by the
// kernel that multiplies (fused_dequant/fused_dequant_sm90.cuh). Rescaled ("rebased" in the op's
// arguments): a pass multiplies each block's codes by a power of two, so that all of a row are
// relative to one scale, and the kernels of fp8_gemm multiply; the scales of rows and columns are
// applied to the sums. Codes that become small lose bits. Where an element would move by more than
// 2^-9 of the largest magnitude of its block, the pass puts the rows into a tile mask, and a kernel
// computes the tiles with such rows anew, from operands that are dequantized then. Native: for
// skinny m the fp8 tensor cores take the codes as they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "csrc/common/fields.h"
#include "csrc/common/math.h"
#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/fp8/fp8_gemm.h"
#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/grouped/grouped_gemm.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::mxfp8_gemm {

constexpr int BLOCK = 32;  // elements that share a scale
// A byte of a tile mask stands for 16 rows, those of one block of the pass: four neighbours and the
// same at a distance of 32, 64 and 96, whose scales are neighbours in the 128x4 layout. A word
// stands for 128 rows.
constexpr int ROWS = 16;
constexpr int MASK_BYTES = gemm::MASK_ROWS / ROWS;  // of a word
constexpr int THREADS = 256;
// Exponents of the scales of rows stay within this range, so that their products with sums stay in
// the range of fp32; rows beyond it are put into the mask.
constexpr int MAX_EXPONENT = 96;
// The most rows of the swap-AB kernel that dequantizes; how much of k it takes at a time.
constexpr int64_t SKINNY_ROWS = 768;
constexpr int CHUNK_K = 128;
// The most rows of the native swap-AB kernel.
constexpr int64_t NATIVE_ROWS = 64;

struct Problem {
    int64_t m = 0, n = 0, k = 0;
    DType a_dtype = DType::e4m3, b_dtype = DType::e4m3;
    DType out_dtype = DType::bf16;
    bool fused = false;  // with an activation
    bool rescaled = false;
    // TMA can read the operand, and its scales are in the 128x4 layout.
    bool readable_a = true, readable = true;
    bool short_rows = true;  // strides of both operands are numbers of 31 bits
    bool kept_b = false;     // b is rescaled already
    int64_t groups = 1;
    bool grouped = false;

    bool skinny() const { return (m <= SKINNY_ROWS || grouped) && k > 0 && readable; }
    // Whether the kernel that multiplies can dequantize.
    bool can_fuse_dequant() const {
        return !rescaled && !fused && !grouped && readable_a && readable && short_rows &&
               std::min(m, n) >= gemm::ITEM_ROWS && k > 0 && k % 16 == 0;
    }
    // Rescaled, where nothing has to be: the native kernel, from the codes as they are. With more
    // than 32 rows its scaling of sums limits; beside a large weight that is kept, a pass over a
    // costs less.
    bool native() const {
        const bool pass_pays = kept_b && m > 32 && double(n) * double(k) >= 120e6;
        return rescaled && !pass_pays && m <= NATIVE_ROWS && k > 0 && !grouped && readable_a &&
               readable && a_dtype == DType::e4m3 && b_dtype == DType::e4m3;
    }
};

// The swap-AB kernel that dequantizes in registers, swap_ab/mxfp8_dequant_sm90.cuh.
struct DequantConfig {
    nvfp4_gemm::Config tile;
    DType data = DType::e4m3;

    bool operator==(const DequantConfig&) const = default;
};
struct DequantShape {
    int tokens, row_groups, k_groups, stages;
};
constexpr DequantShape DEQUANT_SHAPES[] = {
    {16, 1, 4, 4}, {32, 1, 4, 3}, {64, 2, 1, 6}, {128, 2, 1, 4}};
constexpr DequantConfig make_dequant_config(const DequantShape& s, DType data) {
    return {{.tokens = s.tokens,
             .row_groups = s.row_groups,
             .k_groups = s.k_groups,
             .pieces = s.k_groups * CHUNK_K / nvfp4_gemm::PIECE,
             .stages = s.stages},
            data};
}
// Every such kernel, by number.
constexpr std::size_t DEQUANT_CONFIGS = 2 * std::size(DEQUANT_SHAPES);
constexpr DequantConfig dequant_config_at(std::size_t i) {
    return make_dequant_config(DEQUANT_SHAPES[i / 2], i % 2 == 0 ? DType::e4m3 : DType::e5m2);
}
// As instances.txt names it.
struct DequantName {
    int tokens;
    DType data;

    constexpr bool is_of(const DequantConfig& c) const {
        return tokens == c.tile.tokens && data == c.data;
    }
};
consteval DequantConfig dequant_config_of(const DequantName& name) {
    return gemm::named<dequant_config_at, DEQUANT_CONFIGS>(name);
}
// Rows of a whose sums pass through shared memory at a time, as many as the ring leaves room for.
constexpr int dequant_pass(const nvfp4_gemm::Config& c) { return std::max(16, c.tokens / 4); }
// The ring and its scales, the sums as rows of fp32 that are 4 longer than the tile's, semaphores.
constexpr int dequant_shared_bytes(const DequantConfig& f) {
    const nvfp4_gemm::Config& c = f.tile;
    const int rows = nvfp4_gemm::block_rows(c);
    const int chunk = CHUNK_K * (rows + c.tokens * 2) + 512;
    const int sums = c.k_groups * ((dequant_pass(c) * (rows + 4) * 4 + 127) / 128 * 128);
    const int bytes = c.stages * c.k_groups * chunk + sums + (2 * c.stages + 2) * 8;
    return (bytes + 127) / 128 * 128;
}
// The native swap-AB kernels, for e4m3, swap_ab/mxfp8_native_sm90.cuh: rows of a, the warpgroups
// that divide a stage's k, how much that is, and stages.
struct NativeShape {
    int tokens, k_groups, stage_k, stages;

    bool operator==(const NativeShape&) const = default;
};
constexpr NativeShape NATIVE_SHAPES[] = {{16, 1, 512, 4}, {32, 4, 512, 3}, {64, 2, 512, 3}};
constexpr NativeShape native_shape_at(std::size_t i) { return NATIVE_SHAPES[i]; }
// As instances.txt names it.
struct NativeName {
    int tokens;

    constexpr bool is_of(const NativeShape& s) const { return tokens == s.tokens; }
};
consteval NativeShape native_shape(const NativeName& name) {
    return gemm::named<native_shape_at, std::size(NATIVE_SHAPES)>(name);
}
constexpr int NATIVE_TILE = 64;  // rows of the weight
// Blocks of a cluster that may send a tile's sums to the first one.
constexpr int native_senders(const NativeShape& s) { return s.tokens > 32 ? 0 : 7; }
// Products of 32 of k of a warpgroup in a stage.
constexpr int native_products(const NativeShape& s) { return s.stage_k / BLOCK / s.k_groups; }
constexpr int native_factors(const NativeShape& s) { return NATIVE_TILE + s.tokens + 16; }
// Where registers move between warpgroups, all of these are whole.
constexpr int native_threads(const NativeShape& s) {
    return s.k_groups * 128 + (s.k_groups > 1 ? 128 : 32);
}
constexpr int native_shared_bytes(const NativeShape& s) {
    const int rows = NATIVE_TILE + s.tokens;
    const int stage = s.stage_k * rows + 2 * (s.stage_k / CHUNK_K * 512);
    const int factors = s.k_groups * 2 * native_products(s) * native_factors(s) * 4;
    const int sent = std::max(native_senders(s) * NATIVE_TILE * s.tokens * 4, 128);
    return (s.stages * stage + factors + sent + (2 * s.stages + 1) * 8 + 127) / 128 * 128;
}
// What multiplies: `dequantize`, a kernel of gemm, behind a pass that dequantizes the operands;
// `fused_dequant`, one that dequantizes them itself; `rescale`, a kernel of fp8_gemm behind a pass
// that rescales them, and for the tiles of the mask as `dequantize`; `swap_ab_dequant` and
// `swap_ab_native`, the kernels of swap_ab/, of which the first dequantizes in registers.
enum class Kernel : int { dequantize, fused_dequant, rescale, swap_ab_dequant, swap_ab_native };
constexpr const char* strategy_name(Kernel kernel) {
    constexpr const char* names[] = {"dequantize",      "fused_dequant",  "rescale",
                                     "swap_ab_dequant", "swap_ab_native", nullptr};
    return names[static_cast<int>(kernel)];
}
struct Choice {
    Kernel kernel = Kernel::dequantize;
    DequantConfig dequant_config;
    NativeShape native_shape{};
    nvfp4_gemm::Schedule swap_ab_schedule;
    gemm::Choice exact;           // of dequantized operands
    grouped_gemm::Choice groups;  // the same of groups, if `portable` is set
    fp8_gemm::Choice product;     // of rescaled ones
};

struct PrepareProblem {
    int64_t rows = 0, columns = 0, batch = 1;
    DType data_dtype = DType::e4m3;
};
struct PrepareChoice {
    int rows = ROWS;
    int threads = THREADS;
    bool portable = false;
};

// A call of the swap-AB kernels. Strides are multiples of 16; scales lie in the 128x4 layout.
struct SwapAbParams {
    // (m, k); of the kernel that dequantizes bf16 (m, k rounded up to CHUNK_K), in the order of
    // position_of.
    const void* a = nullptr;
    const void* weight = nullptr;  // (groups, n, k)
    const void *scales_a = nullptr, *scales_weight = nullptr;
    const float* scale = nullptr;  // (groups,) ones
    const void* bias = nullptr;
    const int32_t* offs = nullptr;  // (groups,) ends of the groups' rows
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, groups = 1;
    int64_t a_stride = 0, weight_stride = 0, group_stride = 0;
    DType out_dtype = DType::bf16;
    int activation = 0;
    nvfp4_gemm::Schedule schedule;
};

// An operand to be rescaled. `mask`: a byte per ROWS rows.
struct Rescale {
    block_scaled::Matrix data;
    const void* scale = nullptr;
    bool swizzle = true;
    bool e5m2 = false;
    void* codes = nullptr;  // e4m3 (batch, rows, pitch), zero behind the columns
    int64_t pitch = 0;      // a multiple of 16
    float* factor = nullptr;
    uint8_t* mask = nullptr;
    int blocks = 0;  // of the grid
};
// An operand to be dequantized to bf16 rows of `pitch` elements, a multiple of 8; for the swap-AB
// kernel of CHUNK_K, in its order.
struct DequantizePass {
    block_scaled::DequantizeParams source;
    bool e5m2 = false;
    bool swap_ab_order = false;
    int64_t pitch = 0;
    int tiles = 0;
};

// Passes over one operand or two; the second may have no blocks or tiles.
struct RescaleParams {
    Rescale operands[2];
};
struct DequantizePassParams {
    DequantizePass operands[2];
    gemm::TileMask mask;  // nothing is done where it has no tile; none: always
    int64_t m = 0, n = 0;
    float* ones = nullptr;  // where these are to be written
    int64_t ones_count = 0;
    int blocks = 0;  // of the grid
};

TK_FIELDS(Problem, m, n, k, a_dtype, b_dtype, out_dtype, fused, rescaled, readable_a, readable,
          short_rows, kept_b, groups, grouped)
TK_FIELDS(PrepareProblem, rows, columns, batch, data_dtype)
TK_FIELDS(NativeShape, tokens, k_groups, stage_k, stages)
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("strategy", c.kernel);
    const bool native = c.kernel == Kernel::swap_ab_native, rescales = c.kernel == Kernel::rescale;
    const bool grouped = c.groups.portable;
    visit("tokens", native ? c.native_shape.tokens : c.dequant_config.tile.tokens);
    visit("splits", c.swap_ab_schedule.splits);
    visit("swap_ab_blocks", c.swap_ab_schedule.blocks);
    gemm::Config& exact = grouped ? c.groups.config : c.exact.config;
    visit("block_m", rescales ? c.product.config.block_m : exact.block_m);
    visit("block_n", rescales ? c.product.config.block_n : exact.block_n);
    visit("raster_group", rescales  ? c.product.schedule.raster_group
                          : grouped ? c.groups.raster_group
                                    : c.exact.schedule.raster_group);
    visit("blocks", rescales  ? c.product.schedule.blocks
                    : grouped ? c.groups.blocks
                              : c.exact.schedule.blocks);
}
TK_FIELDS(PrepareChoice, rows, threads, portable)

constexpr int64_t mask_words(int64_t rows) { return ceil_div(rows, gemm::MASK_ROWS); }
inline int rescale_blocks(const block_scaled::Matrix& m) {
    return static_cast<int>(mask_words(m.rows) * MASK_BYTES * m.batch);
}
// Of a block that rescales. Few blocks do not fill the SMs of a GPU: there, two warps share a row.
constexpr int FEW_RESCALE_BLOCKS = 128, MOST_RESCALE_THREADS = 1024;
constexpr int rescale_threads(int64_t blocks) {
    return blocks <= FEW_RESCALE_BLOCKS ? MOST_RESCALE_THREADS : THREADS;
}

// Copies of scales in bulk are of 16 bytes.
inline bool aligned_scales(const void* scale) {
    return reinterpret_cast<uintptr_t>(scale) % 16 == 0;
}
// Empty when there are kernels for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
std::string unsupported_operand(const PrepareProblem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
PrepareChoice choose_prepare(const PrepareProblem& problem, const DeviceProperties& device);
std::string kernel_name(const Choice& choice);
std::string kernel_name(const PrepareChoice& choice);
// After fields of a choice have been forced: the configuration of the kernel that dequantizes
// itself is the one of so many columns.
void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced);

template <NativeShape shape>
void launch_native(const SwapAbParams& params, Stream stream);
template <DequantConfig config>
void launch_dequant(const SwapAbParams& params, Stream stream);

// Blocks of the dequantizing pass: where it may have nothing to do, as many as are there at a time.
inline int dequantize_blocks(const DequantizePassParams& p, const DeviceProperties& device) {
    const int tiles = p.operands[0].tiles + p.operands[1].tiles;
    return p.mask.rows == nullptr ? tiles : std::min(tiles, 3 * std::max(1, device.sm_count));
}

// Run a pass on the stream; templates, so that they are instantiated in one place.
template <class Params, bool portable>
void run_pass(const Params& params, Stream stream);
template <class Params>
void run_pass(const Params& params, const DeviceProperties& device, Stream stream) {
    if (runs_native(device)) return run_pass<Params, false>(params, stream);
    if constexpr (BUILDS_PORTABLE) run_pass<Params, true>(params, stream);
}

}  // namespace thunderkittens::mxfp8_gemm
