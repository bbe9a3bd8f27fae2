// Which kernels multiply MXFP8 matrices: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"
#include "csrc/gemm/nvfp4/cost.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

gemm::Problem dequantized(const Problem& p) {
    return {.m = p.m,
            .n = p.n,
            .k = p.k,
            .dtype = DType::bf16,
            .out_dtype = p.out_dtype,
            .b_n_major = false,
            .fused = p.fused};
}
fp8_gemm::Problem rescaled(const Problem& p) {
    return {.m = p.m, .n = p.n, .k = p.k, .out_dtype = p.out_dtype, .activated = p.fused};
}

grouped_gemm::Problem dequantized_groups(const Problem& p) {
    return {.m = p.m,
            .n = p.n,
            .k = p.k,
            .groups = p.groups,
            .grouped = static_cast<int>(grouped_gemm::Grouped::rows),
            .b_n_major = false};
}

constexpr const char* PORTABLE_NAME = "_portable";

std::string unsupported_dtype(const char* name, DType dtype) {
    return is_fp8(dtype) ? "" : concat(name, " must be e4m3 or e5m2, got ", name_of(dtype));
}

KernelInfo pass(const std::string& name, const std::string& what, bool portable) {
    return {.name = portable ? name + PORTABLE_NAME : name,
            .config = what,
            .symbol = concat("mxfp8_", name, "_pass_kernel"),
            .arch = portable ? PORTABLE : NATIVE,
            .threads = THREADS};
}
std::string dequant_name(const DequantConfig& f) {
    return concat(name_of(f.data), "_swap_ab_", f.tile.tokens);
}
std::string native_name(const NativeShape& s) { return concat("native_swap_ab_", s.tokens); }
std::string fused_dequant_name(const gemm::Config& c) {
    return c.block_n == 256 ? "fused_dequant" : concat("fused_dequant_", c.block_n);
}
std::vector<KernelInfo> gemm_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        list.push_back(pass("dequantize", "tile 128x128, 256 threads, two operands", portable));
    }
    for (const gemm::Config& c : {gemm::fused_dequant_config(DType::bf16),
                                  gemm::narrow_fused_dequant_config(DType::bf16)}) {
        list.push_back(
            {.name = fused_dequant_name(c),
             .config = concat("tile 128x", c.block_n, "x64, ", c.stages,
                              " stages, 1 producer warp, 3 warps that dequantize and 2 "
                              "consumer warpgroups"),
             .symbol = symbol_of("fused_dequant_kernel", "Config", c) + "*12Mxfp8Sources",
             .threads = gemm::threads(c),
             .shared_bytes = gemm::shared_bytes(c)});
    }
    for (std::size_t i = 0; i < DEQUANT_CONFIGS; ++i) {
        const DequantConfig f = dequant_config_at(i);
        const nvfp4_gemm::Config& c = f.tile;
        list.push_back({
            .name = dequant_name(f),
            .config = concat("tile ", c.tokens, 'x', nvfp4_gemm::block_rows(c), 'x',
                             CHUNK_K * c.k_groups, ", ", c.stages, " stages, 1 producer warp and ",
                             nvfp4_gemm::consumers(c), " consumer warpgroups"),
            // A DequantConfig is such a Config and a DType.
            .symbol = concat(symbol_of("mxfp8_dequant_kernel", "Config", c), "EL<enum>",
                             int(f.data), 'E'),
            .threads = nvfp4_gemm::threads(c),
            .shared_bytes = dequant_shared_bytes(f),
        });
    }
    for (const NativeShape& s : NATIVE_SHAPES) {
        list.push_back({
            .name = native_name(s),
            .config = concat("tile ", s.tokens, 'x', NATIVE_TILE, 'x', s.stage_k, ", ", s.stages,
                             " stages, 1 producer warp and ", s.k_groups, " consumer warpgroups"),
            .symbol = symbol_of("mxfp8_native_kernel", "NativeShape", s),
            .threads = native_threads(s),
            .shared_bytes = native_shared_bytes(s),
        });
    }
    return list;
}

// Split-K over a cluster where that fills more of the SMs, each block has some steps, and every
// tile has a cluster at once. `cycles(splits, clusters)` is what so many splits cost; returns the
// least.
template <class Cycles>
double schedule_swap_ab(int64_t tiles, int64_t stages, int sm_count, int most, Choice& choice,
                        Cycles cycles) {
    double least = 0;
    for (int splits = 1; splits <= std::min<int64_t>({most, sm_count, stages}); ++splits) {
        const int64_t clusters = gemm::clusters_at_a_time(splits, sm_count);
        if (splits > 1 && tiles > clusters) continue;
        const double cost = cycles(splits, clusters);
        if (splits > 1 && cost >= least) continue;
        least = cost;
        const int64_t waves = ceil_div(tiles, clusters);
        choice.swap_ab_schedule = {.blocks = static_cast<int>(ceil_div(tiles, waves) * splits),
                                   .splits = splits};
    }
    return least;
}

// Of a stage, by rows of a; a pass over a comes before.
nvfp4_gemm::SwapAbCosts dequant_costs(int tokens) {
    if (tokens <= 16) return {10769, 1642, 1072, 800};
    if (tokens <= 32) return {10769, 1642, 1072, 3726};
    if (tokens <= 64) return {8920, 1221, 2540, 5555};
    return {13861, 1328, 1484, 4253};
}
constexpr double PASS_CYCLES = 0.0016;  // of an element of a

// Skinny m, dequantized in registers: all SMs have to read and to convert. Returns its cycles.
double choose_dequant(const Problem& p, const DeviceProperties& device, Choice& choice) {
    // Only the device knows the rows of groups.
    const int64_t rows = ceil_div(p.m, std::max<int64_t>(p.groups, 1));
    const int sm_count = std::max(1, device.sm_count);
    const int most_tokens = std::end(DEQUANT_SHAPES)[-1].tokens;
    choice.kernel = Kernel::swap_ab_dequant;
    double least = 0;
    for (const DequantShape& shape : DEQUANT_SHAPES) {
        // The smallest that takes all rows, or one of half of them; of more rows the largest.
        if (shape.tokens * 2 < rows && shape.tokens < most_tokens) continue;
        Choice candidate = choice;
        candidate.dequant_config = make_dequant_config(shape, p.b_dtype);
        const nvfp4_gemm::Config& c = candidate.dequant_config.tile;
        const int64_t token_tiles = ceil_div(rows, c.tokens), stage_k = CHUNK_K * c.k_groups;
        const nvfp4_gemm::SwapAbWork work{
            .tiles = token_tiles * ceil_div(p.n, nvfp4_gemm::block_rows(c)),
            .steps = ceil_div(p.k, stage_k),
            .weight = double(stage_k) * nvfp4_gemm::block_rows(c),
            .rows = double(stage_k) * c.tokens * 2,
            .readers = double(std::min<int64_t>(token_tiles, 4))};
        const auto cycles = [&](int splits, int64_t clusters) {
            return work.cycles(dequant_costs(c.tokens), splits, splits, clusters) +
                   PASS_CYCLES * double(p.m) * double(p.k);
        };
        double cost = 0;
        if (p.grouped) {
            candidate.swap_ab_schedule = {.blocks = sm_count, .splits = 1};
            cost = cycles(1, sm_count);
        } else {
            cost = schedule_swap_ab(work.tiles, work.steps, sm_count, 8, candidate, cycles);
        }
        if (least > 0 && cost >= least) break;
        least = cost;
        choice = candidate;
        if (shape.tokens >= rows) break;
    }
    return least;
}

// The tiles that compete for the product of dequantized operands, with the least k of some. Those
// without a persistent kernel stand for what the dense GEMM has for such sizes.
struct Tile {
    int block_m, block_n;
    int64_t least_k = 0;
};
constexpr int NARROW = 176;  // of fused dequantization alone
constexpr Tile TILES[] = {{128, 256},       {128, 128},          {64, 128},       {64, 64},
                          {128, 112, 1536}, {128, NARROW, 1536}, {128, 224, 1536}};

// Waves of tiles of one per SM, block_m * block_n / 32 cycles for the products of 64 of k, times
// what smaller tiles lose, or 1.73 cycles for each row that is loaded.
double tile_cycles(const Tile& tile, const Problem& p, int sm_count) {
    const int size = tile.block_m * tile.block_n;
    const double per_product = size >= 128 * 256   ? 1.0
                               : size >= 128 * 224 ? 1.03
                               : size >= 128 * 128 ? 1.05
                               : size >= 128 * 112 ? 1.1
                               : size >= 64 * 128  ? 1.32
                                                   : 2.16;
    const bool two_widths = tile.block_n == 256 || tile.block_n == NARROW;
    const double share =
        two_widths && p.out_dtype == DType::bf16
            ? gemm::two_widths(tile.block_m, tile.block_n, p.m, p.n, sm_count).share
            : 1;
    const auto steps = double(std::max<int64_t>(1, ceil_div(p.k, gemm::BLOCK_K)));
    const double step = std::max(size / 32 * per_product, 1.73 * (tile.block_m + tile.block_n));
    const int64_t tiles = ceil_div(p.m, tile.block_m) * ceil_div(p.n, tile.block_n);
    return double(ceil_div(tiles, sm_count)) * (steps * step * share + 600) + 2500 + 0.12 * size;
}

Tile cheapest_tile(const Problem& p, int sm_count) {
    Tile best = TILES[0];
    double least = tile_cycles(best, p, sm_count);
    for (const Tile& tile : TILES) {
        if (p.k < tile.least_k || (p.fused && (tile.block_n < 128 || tile.least_k > 0))) continue;
        const double cycles = tile_cycles(tile, p, sm_count);
        if (cycles < least) best = tile, least = cycles;
    }
    return best;
}

// The product of dequantized operands: persistent with that tile, where there is such a kernel.
gemm::Choice choose_exact(const Problem& p, const Tile& tile, const DeviceProperties& device) {
    for (const gemm::TileShape& shape : gemm::TILE_SHAPES) {
        const gemm::Config config = gemm::make_config(shape, DType::bf16, false, false, p.fused);
        if (p.m > 64 && shape.block_m == tile.block_m && shape.block_n == tile.block_n &&
            gemm::kernel_of(config) == gemm::Kernel::persistent) {
            return gemm::tiled_choice(config, dequantized(p), device);
        }
    }
    return gemm::choose_simple(dequantized(p), device);
}

// Cycles of a pass that dequantizes both operands in memory, and of the product behind it, or over
// it.
double dequantize_cycles(const Problem& p, const Choice& choice, const Tile& c, int sm_count) {
    const double pass = double(p.m + p.n) * double(p.k) * 3 / (14.4 * sm_count);
    const double waves =
        double(ceil_div(p.m, c.block_m) * ceil_div(p.n, c.block_n)) / double(sm_count);
    if (choice.kernel == Kernel::fused_dequant) {
        const double product =
            std::ceil(waves) * (double(p.k) * c.block_m * c.block_n / 2048 * 1.05 + 1500);
        return std::max(pass, product) + 0.15 * std::min(pass, product) + 9000;
    }
    const double product = double(p.m) * double(p.n) * double(p.k) / (2048 * 0.8 * sm_count) *
                           std::max(1.0, std::ceil(waves) / waves);
    return pass + std::max(product, double(p.k) * 8) + 14000;
}
// The same on the native fp8 tensor cores.
void choose_native(const Problem& p, const DeviceProperties& device, Choice& choice) {
    const int sm_count = std::max(1, device.sm_count);
    const int64_t columns = ceil_div(p.n, NATIVE_TILE);
    const auto tiles = [&] { return ceil_div(p.m, choice.native_shape.tokens) * columns; };
    for (const NativeShape& candidate : NATIVE_SHAPES) {
        choice.native_shape = candidate;
        if (candidate.tokens >= p.m) break;
        // What limits with 64 rows is the scaling of products, which then has twice the SMs.
        if (candidate.tokens * 2 >= p.m && candidate.tokens >= 32 && tiles() <= sm_count) break;
    }
    choice.kernel = Kernel::swap_ab_native;
    const int64_t stages = ceil_div(p.k, choice.native_shape.stage_k);
    // A tile's stages, and what it costs to begin and to end one.
    schedule_swap_ab(tiles(), stages, sm_count, native_senders(choice.native_shape) + 1, choice,
                     [&](int splits, int64_t clusters) {
                         return double(ceil_div(tiles(), clusters)) *
                                (double(ceil_div(stages, splits)) + (splits > 1 ? 3 : 2));
                     });
}
std::vector<KernelInfo> prepare_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const int threads : {THREADS, MOST_RESCALE_THREADS}) {
            KernelInfo info =
                pass("rescale", concat("16 rows, ", threads, " threads, two operands"), portable);
            info.name = kernel_name(PrepareChoice{.threads = threads, .portable = portable});
            info.symbol = concat(info.symbol, "I*Li", threads / 32, "E");
            info.threads = threads;
            list.push_back(info);
        }
    }
    return list;
}

}  // namespace

std::string unsupported_operand(const PrepareProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (std::string reason = unsupported_dtype("data", p.data_dtype); !reason.empty()) {
        return reason;
    }
    const double blocks = double(mask_words(p.rows)) * double(p.batch) *
                          std::max<double>(MASK_BYTES, p.columns / 128);
    if (blocks > 2e9)
        return concat("data needs some ", blocks, " blocks; at most 2e9 are supported");
    return "";
}

PrepareChoice choose_prepare(const PrepareProblem& p, const DeviceProperties& device) {
    return {.threads = rescale_threads(mask_words(p.rows) * MASK_BYTES * p.batch),
            .portable = !runs_native(device)};
}

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    for (const auto& [name, dtype] : {std::pair{"a", p.a_dtype}, std::pair{"b", p.b_dtype}}) {
        if (std::string reason = unsupported_dtype(name, dtype); !reason.empty()) return reason;
    }
    for (const int64_t rows : {p.m, p.n}) {
        const PrepareProblem operand{.rows = rows, .columns = p.k};
        if (std::string reason = unsupported_operand(operand, device); !reason.empty()) {
            return reason;
        }
    }
    if (p.grouped && !p.skinny()) {
        return "groups need k > 0, rows of b that are multiples of 16 bytes, and its scales in the "
               "128x4 layout";
    }
    if (p.grouped && p.rescaled) return "groups are not multiplied by the rescaled path";
    if (p.grouped && !runs_native(device)) {
        return grouped_gemm::unsupported(dequantized_groups(p), device);
    }
    if (std::string reason = gemm::unsupported(dequantized(p), device); !reason.empty())
        return reason;
    return p.rescaled && runs_native(device) ? fp8_gemm::unsupported(rescaled(p), device) : "";
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    Choice choice;
    choice.dequant_config.data = p.b_dtype;
    if (!runs_native(device)) {
        // Exact on either path: without fp8 tensor cores rescaling has nothing to give.
        choice.exact = gemm::choose(dequantized(p), device);
        if (p.grouped) choice.groups = grouped_gemm::choose(dequantized_groups(p), device);
        return choice;
    }
    if (p.native()) {
        choose_native(p, device, choice);
        return choice;
    }
    if (!p.rescaled && p.skinny() && (p.grouped || p.m <= 64)) {
        choose_dequant(p, device, choice);
        return choice;
    }
    if (!p.rescaled) {
        const int sm_count = std::max(1, device.sm_count);
        const Tile tile = cheapest_tile(p, sm_count);
        const int64_t columns = ceil_div(p.n, tile.block_n);
        // From a full wave and 1024 rows on, the products are long enough to hide the
        // dequantization.
        const bool narrow = tile.block_n == NARROW;
        if (p.can_fuse_dequant() && std::min(p.m, p.n) >= 1024 && (tile.block_n == 256 || narrow) &&
            ceil_div(p.m, tile.block_m) * columns >= sm_count) {
            choice.kernel = Kernel::fused_dequant;
            choice.exact =
                gemm::tiled_choice(narrow ? gemm::narrow_fused_dequant_config(DType::bf16)
                                          : gemm::fused_dequant_config(DType::bf16),
                                   dequantized(p), device);
            // Whole rows of tiles in a wave: the next ones then need little that is new.
            const int blocks = choice.exact.schedule.blocks;
            if (narrow && columns <= blocks) {
                choice.exact.schedule.raster_group = blocks / static_cast<int>(columns);
            }
        } else {
            choice.exact = choose_exact(p, tile, device);
        }
        if (p.skinny()) {
            Choice swap_ab = choice;
            const double cycles = choose_dequant(p, device, swap_ab);
            if (cycles < dequantize_cycles(p, choice, tile, sm_count)) return swap_ab;
        }
        return choice;
    }
    choice.kernel = Kernel::rescale;
    choice.product = fp8_gemm::choose(rescaled(p), device);
    // The exact kernel for the tiles of the mask, which are few where rescaling is worth asking
    // for.
    choice.exact = gemm::choose_masked(dequantized(p), device);
    return choice;
}

void follow_forced(Choice& choice, const Choice&, bool) {
    if (choice.kernel == Kernel::swap_ab_dequant) {
        const nvfp4_gemm::Config& tile = choice.dequant_config.tile;
        for (const DequantShape& shape : DEQUANT_SHAPES) {
            if (shape.tokens != tile.tokens) continue;
            choice.dequant_config = make_dequant_config(shape, choice.dequant_config.data);
            break;
        }
    }
    if (choice.kernel != Kernel::fused_dequant) return;
    gemm::Config& config = choice.exact.config;
    config = config.block_n == 176 ? gemm::narrow_fused_dequant_config(DType::bf16)
                                   : gemm::fused_dequant_config(DType::bf16);
}

std::string kernel_name(const Choice& c) {
    switch (c.kernel) {
        case Kernel::fused_dequant: return fused_dequant_name(c.exact.config);
        case Kernel::swap_ab_dequant: return dequant_name(c.dequant_config);
        case Kernel::swap_ab_native: return native_name(c.native_shape);
        // The last pass.
        default:
            return concat("dequantize",
                          c.exact.kernel == gemm::Kernel::portable ? PORTABLE_NAME : "");
    }
}
std::string kernel_name(const PrepareChoice& c) {
    return concat(c.threads == THREADS ? "rescale" : "rescale_few_rows",
                  c.portable ? PORTABLE_NAME : "");
}

static const bool registered =
    register_op("mxfp8_gemm", "gemm", &gemm_kernels, &unsupported, &choose) &&
    register_op("mxfp8_prepare", "gemm", &prepare_kernels, &unsupported_operand, &choose_prepare);

}  // namespace thunderkittens::mxfp8_gemm
