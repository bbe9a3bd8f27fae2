// Products of MXFP8 matrices: what a call is (Problem), which kernels serve it (Choice), and the
// passes over operands that come before them. Host C++ only; the ops in mxfp8_gemm.cpp, the
// kernels in passes_sm90.cuh and the registry in choose.cpp meet here.
//
// Hopper's tensor cores have no scales of blocks. Exact: the operands are expanded to bf16, which
// holds them exactly but for extreme scales, by a pass before the kernels of gemm, or by the kernel
// that multiplies (fused_dequant/fused_dequant_sm90.cuh). Re-based: a pass
// multiplies each block's codes by a power of two, so that all of a row are relative to one scale,
// and those of fp8_gemm multiply; the scales of rows and columns are applied to the sums. Codes
// that become small lose bits. Where an element would move by more than 2^-9 of the largest
// magnitude of its block, the pass marks the rows, and a kernel computes the tiles with such rows
// anew, from operands that are expanded then.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "csrc/gemm/dense/gemm.h"
#include "csrc/gemm/fp8/fp8_gemm.h"
#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::mxfp8_gemm {

constexpr int BLOCK = 32;  // elements that share a scale
// A byte of marks stands for 16 rows, those of one block of the pass: four neighbours and the same
// at a distance of 32, 64 and 96, whose scales are neighbours in the 128x4 layout. A word stands
// for 128 rows.
constexpr int ROWS = 16;
constexpr int MARKS = gemm::MARKED_ROWS / ROWS;  // of a word
constexpr int THREADS = 256;
// Exponents of the scales of rows within this range, so that their products with sums stay in the
// range of fp32; rows beyond it are marked.
constexpr int MAX_EXPONENT = 96;
// The kernel for few rows, and how much of k it takes at a time.
constexpr int64_t FEW_ROWS = 64;
constexpr int FEW_K = 128;
// The kernel from codes: up to so many rows.
constexpr int64_t CODES_ROWS = 64;

struct Problem {
    int64_t m = 0, n = 0, k = 0;
    DType a_dtype = DType::e4m3, b_dtype = DType::e4m3;
    DType out_dtype = DType::bf16;
    bool fused = false;  // with an activation
    bool rebased = false;
    // TMA can read the operand, and its scales are in the 128x4 layout.
    bool readable_a = true, readable = true;
    bool short_rows = true;  // strides of both operands are numbers of 31 bits
    int64_t groups = 1;
    bool grouped = false;

    bool few() const { return (m <= FEW_ROWS || grouped) && k > 0 && readable; }
    // Expanded by the kernel that multiplies.
    bool expandable() const {
        return !rebased && !fused && !grouped && readable_a && readable && short_rows &&
               std::min(m, n) >= gemm::ITEM_ROWS && k > 0 && k % 16 == 0;
    }
    // Re-based, where nothing has to be: from the codes as they are.
    bool direct() const {
        return rebased && m <= CODES_ROWS && k > 0 && !grouped && readable_a && readable &&
               a_dtype == DType::e4m3 && b_dtype == DType::e4m3;
    }
};

// The kernel for few rows, see swap_ab/mxfp8_dequant_sm90.cuh.
struct FewConfig {
    mixed_gemm::Config tile;
    DType data = DType::e4m3;

    bool operator==(const FewConfig&) const = default;
};
struct FewShape {
    int tokens, row_groups, k_groups, stages;
};
constexpr FewShape FEW_SHAPES[] = {{16, 1, 4, 4}, {32, 1, 4, 3}, {64, 2, 1, 6}};
constexpr FewConfig make_few(const FewShape& s, DType data) {
    return {{.tokens = s.tokens,
             .row_groups = s.row_groups,
             .k_groups = s.k_groups,
             .pieces = s.k_groups * FEW_K / mixed_gemm::PIECE,
             .stages = s.stages},
            data};
}
// Every such kernel, by number.
constexpr std::size_t FEW_CONFIGS = 2 * std::size(FEW_SHAPES);
constexpr FewConfig few_at(std::size_t i) {
    return make_few(FEW_SHAPES[i / 2], i % 2 == 0 ? DType::e4m3 : DType::e5m2);
}
// As instances.txt names it. One that is not compiled is an error of the compiler.
struct FewName {
    int tokens;
    DType data;
};
consteval FewConfig few_config(const FewName& name) {
    for (const FewShape& shape : FEW_SHAPES) {
        if (shape.tokens == name.tokens) return make_few(shape, name.data);
    }
    throw "no such configuration is listed";
}
// Rows of a whose sums pass through shared memory at a time: few, which leaves more for the ring.
constexpr int few_pass(const mixed_gemm::Config&) { return 16; }
// The ring and its scales, the sums as rows of fp32 that are 4 longer than the tile's, semaphores.
constexpr int few_shared_bytes(const FewConfig& f) {
    const mixed_gemm::Config& c = f.tile;
    const int rows = mixed_gemm::block_rows(c);
    const int chunk = FEW_K * (rows + c.tokens * 2) + 512;
    const int sums = c.k_groups * ((few_pass(c) * (rows + 4) * 4 + 127) / 128 * 128);
    const int bytes = c.stages * c.k_groups * chunk + sums + (2 * c.stages + 2) * 8;
    return (bytes + 127) / 128 * 128;
}
// The kernels for few rows from their codes, for e4m3, see swap_ab/mxfp8_native_sm90.cuh: rows of
// a, the warpgroups that divide a stage's k, how much that is, and stages.
struct CodesShape {
    int tokens, k_groups, stage_k, stages;

    bool operator==(const CodesShape&) const = default;
};
constexpr CodesShape CODES_SHAPES[] = {{16, 1, 512, 4}, {32, 4, 512, 3}, {64, 2, 512, 3}};
// As instances.txt names it. One that is not compiled is an error of the compiler.
struct CodesName {
    int tokens;
};
consteval CodesShape codes_shape(const CodesName& name) {
    for (const CodesShape& shape : CODES_SHAPES) {
        if (shape.tokens == name.tokens) return shape;
    }
    throw "no such shape is listed";
}
constexpr int CODES_TILE = 64;  // rows of the weight
// Blocks of a cluster that may send a tile's sums to the first one.
constexpr int codes_senders(const CodesShape& s) { return s.tokens > 32 ? 0 : 7; }
// Of 32 of k, in a stage, of a warpgroup.
constexpr int codes_products(const CodesShape& s) { return s.stage_k / BLOCK / s.k_groups; }
constexpr int codes_factors(const CodesShape& s) { return CODES_TILE + s.tokens + 16; }
// Where registers are moved between them, all warpgroups are whole.
constexpr int codes_threads(const CodesShape& s) {
    return s.k_groups * 128 + (s.k_groups > 1 ? 128 : 32);
}
constexpr int codes_shared_bytes(const CodesShape& s) {
    const int rows = CODES_TILE + s.tokens;
    const int stage = s.stage_k * rows + 2 * (s.stage_k / FEW_K * 512);
    const int factors = s.k_groups * 2 * codes_products(s) * codes_factors(s) * 4;
    const int sent = std::max(codes_senders(s) * CODES_TILE * s.tokens * 4, 128);
    return (s.stages * stage + factors + sent + (2 * s.stages + 1) * 8 + 127) / 128 * 128;
}
// The kernels that multiply: of few rows, of expanded operands, and of re-based ones.
struct Choice {
    bool rebased = false, few = false, direct = false, expanding = false;
    FewConfig few_config;
    CodesShape codes;  // where `direct`
    mixed_gemm::Schedule few_schedule;
    gemm::Choice exact;
    fp8_gemm::Choice product;
};

struct PrepareProblem {
    int64_t rows = 0, columns = 0, batch = 1;
    DType data_dtype = DType::e4m3;
};
struct PrepareChoice {
    int rows = ROWS;
    int threads = THREADS;
};

struct FewParams {
    const void* a = nullptr;       // bf16 (m, k rounded up to FEW_K), in the order of position_of
    const void* weight = nullptr;  // (groups, n, k); strides are multiples of 16
    const void* scales = nullptr;  // in the 128x4 layout
    const float* scale = nullptr;  // (groups,) ones
    const void* bias = nullptr;
    const int32_t* offs = nullptr;  // (groups,) ends of the groups' rows
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, groups = 1;
    int64_t weight_stride = 0, group_stride = 0;
    DType out_dtype = DType::bf16;
    int activation = 0;
    mixed_gemm::Schedule schedule;
};

struct CodesParams {
    const void* a = nullptr;  // (m, k) and (n, k); strides are multiples of 16
    const void* weight = nullptr;
    const void* scales_a = nullptr;  // in the 128x4 layout
    const void* scales_weight = nullptr;
    const void* bias = nullptr;
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0;
    int64_t a_stride = 0, weight_stride = 0;
    DType out_dtype = DType::bf16;
    int activation = 0;
    mixed_gemm::Schedule schedule;
};

// An operand to be re-based. `marks`: a byte per ROWS rows.
struct Rebase {
    block_scaled::Matrix data;
    const void* scale = nullptr;
    bool swizzle = true;
    bool e5m2 = false;
    void* codes = nullptr;  // e4m3 (batch, rows, pitch), zero behind the columns
    int64_t pitch = 0;      // a multiple of 16
    float* factor = nullptr;
    uint8_t* marks = nullptr;
    int blocks = 0;  // of the grid
};
// An operand to be expanded to bf16 rows of `pitch` elements, a multiple of 8; for the kernel for
// few rows of FEW_K, in its order.
struct Expand {
    block_scaled::DequantizeParams source;
    bool e5m2 = false;
    bool for_few = false;
    int64_t pitch = 0;
    int tiles = 0;
};

// Passes over one operand or two; the second may have no blocks or tiles.
struct RebaseParams {
    Rebase operands[2];
};
struct ExpandParams {
    Expand operands[2];
    gemm::Marks marks;  // nothing is done where nothing is marked; none: always
    int64_t m = 0, n = 0;
    float* ones = nullptr;  // where these are to be written
    int64_t ones_count = 0;
    int blocks = 0;  // of the grid
};

template <typename Visitor>
void visit_fields(Problem& p, Visitor&& visit) {
    visit("m", p.m);
    visit("n", p.n);
    visit("k", p.k);
    visit("a_dtype", p.a_dtype);
    visit("b_dtype", p.b_dtype);
    visit("out_dtype", p.out_dtype);
    visit("fused", p.fused);
    visit("rebased", p.rebased);
    visit("readable_a", p.readable_a);
    visit("readable", p.readable);
    visit("short_rows", p.short_rows);
    visit("groups", p.groups);
    visit("grouped", p.grouped);
}
template <typename Visitor>
void visit_fields(PrepareProblem& p, Visitor&& visit) {
    visit("rows", p.rows);
    visit("columns", p.columns);
    visit("batch", p.batch);
    visit("data_dtype", p.data_dtype);
}
template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("rebased", c.rebased);
    visit("few", c.few);
    visit("direct", c.direct);
    visit("expanding", c.expanding);
    visit("tokens", c.direct ? c.codes.tokens : c.few_config.tile.tokens);
    visit("splits", c.few_schedule.splits);
    visit("few_blocks", c.few_schedule.blocks);
    visit("block_m", c.rebased ? c.product.config.block_m : c.exact.config.block_m);
    visit("block_n", c.rebased ? c.product.config.block_n : c.exact.config.block_n);
}
template <typename Visitor>
void visit_fields(PrepareChoice& c, Visitor&& visit) {
    visit("rows", c.rows);
    visit("threads", c.threads);
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t words_of_marks(int64_t rows) {
    return (rows + gemm::MARKED_ROWS - 1) / gemm::MARKED_ROWS;
}
inline int rebase_blocks(const block_scaled::Matrix& m) {
    return static_cast<int>(words_of_marks(m.rows) * MARKS * m.batch);
}

// Copies of scales in bulk are of 16 bytes.
inline bool aligned_scales(const void* scale) {
    return reinterpret_cast<uintptr_t>(scale) % 16 == 0;
}
// Empty when there are kernels for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
std::string unsupported_operand(const PrepareProblem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Choice& choice);
std::string kernel_name(const PrepareChoice& choice);

template <CodesShape shape>
void launch_codes(const CodesParams& params, Stream stream);
template <FewConfig config>
void launch_few(const FewParams& params, Stream stream);
// The same for a configuration that is known at run time; false when there is no such kernel.
template <std::size_t i = 0>
bool launch_any_few(const FewConfig& config, const FewParams& params, Stream stream) {
    if constexpr (i < FEW_CONFIGS) {
        if (!(config == few_at(i))) return launch_any_few<i + 1>(config, params, stream);
        launch_few<few_at(i)>(params, stream);
        return true;
    } else {
        return false;
    }
}

template <std::size_t i = 0>
bool launch_any_codes(const CodesShape& shape, const CodesParams& params, Stream stream) {
    if constexpr (i < std::size(CODES_SHAPES)) {
        if (!(shape == CODES_SHAPES[i])) return launch_any_codes<i + 1>(shape, params, stream);
        launch_codes<CODES_SHAPES[i]>(params, stream);
        return true;
    } else {
        return false;
    }
}

inline bool launch_any_expanding(const gemm::Config& config,
                                 const gemm::ExpandingParams<gemm::Mxfp8Sources>& params,
                                 Stream stream) {
    constexpr gemm::Config wide = gemm::expanding_config(DType::bf16);
    constexpr gemm::Config narrow = gemm::narrow_expanding_config(DType::bf16);
    if (config == wide) gemm::launch_expanding<wide>(params, stream);
    if (config == narrow) gemm::launch_expanding<narrow>(params, stream);
    return config == wide || config == narrow;
}

// Blocks of the pass that expands: where it may have nothing to do, as many as are there at a time.
inline int expand_blocks(const ExpandParams& p, const DeviceProperties& device) {
    const int tiles = p.operands[0].tiles + p.operands[1].tiles;
    return p.marks.rows == nullptr ? tiles : std::min(tiles, 3 * std::max(1, device.sm_count));
}

// Run a pass on the stream; templates, so that they are instantiated in one place.
template <class Params>
void run_pass(const Params& params, Stream stream);

}  // namespace thunderkittens::mxfp8_gemm
