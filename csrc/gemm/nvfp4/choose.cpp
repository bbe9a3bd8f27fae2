// Which kernel multiplies activations with prepared weights: pure functions of the problem and the
// device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/fused_dequant/fused_dequant.h"
#include "csrc/gemm/nvfp4/cost.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"
#include "csrc/gemm/nvfp4/portable.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

// Of a piece of k; and what stream-K costs besides.
struct Costs {
    int tokens, row_groups, split_k;
    SwapAbCosts swap_ab;
    double fix_up;
};
constexpr Costs COSTS[] = {
    {32, 2, 1, {6113, 362, 595, 1600}, 7084},   {64, 2, 1, {4487, 520, 3257, 770}, 8386},
    {64, 4, 1, {7649, 833, 1663, 1271}, 11071}, {64, 4, 4, {7000, 641, 0, 2800}, 0},
    {128, 2, 1, {5724, 660, 3567, 959}, 11909}, {256, 2, 1, {5360, 1057, 8015, 408}, 21768},
};
const Costs& costs_of(const Config& c) {
    return *std::ranges::find_if(COSTS, [&](const Costs& x) {
        return x.tokens == c.tokens && x.row_groups == c.row_groups && x.split_k == c.split_k;
    });
}
// A multicast cluster has as many tiles as blocks, side by side.
SwapAbWork work_of(const Config& c, const Problem& p, int multicast) {
    const int64_t row_tiles = ceil_div(ceil_div(p.n, block_rows(c)), multicast);
    const int64_t token_tiles = ceil_div(p.m, c.tokens) + (p.grouped ? p.groups : 0);
    return {.tiles = std::max<int64_t>(1, row_tiles * token_tiles),
            .steps = std::max<int64_t>(1, pieces(p.k)),
            .weight = double(c.row_groups) * PIECE_BYTES,
            .rows = double(c.tokens) * PIECE * 2 / multicast,
            .readers = double(std::min<int64_t>(token_tiles, 4))};
}

struct Plan {
    Choice choice;
    double cycles = std::numeric_limits<double>::infinity();

    void consider(const Choice& other, double its) {
        if (its < cycles) choice = other, cycles = its;
    }
};

// The schedules of a swap-AB kernel: split-K over a cluster where all tiles have one at a time,
// multicast clusters, stream-K.
void consider_swap_ab(const Config& c, const Problem& p, int sm_count, Plan& plan) {
    const auto [tokens, row_groups, split_k, costs, fix_up] = costs_of(c);
    const auto consider = [&](const Schedule& schedule, double cycles) {
        plan.consider({.kernel = Kernel::swap_ab, .config = c, .schedule = schedule}, cycles);
    };
    for (int multicast = 1; multicast <= std::min(max_multicast(c), sm_count); ++multicast) {
        const SwapAbWork work = work_of(c, p, multicast);
        const int64_t stages = ceil_div(work.steps, c.pieces);
        for (int splits = 1; splits <= (multicast == 1 ? 8 : 1); ++splits) {
            const int in_cluster = splits * multicast;
            const int64_t clusters = gemm::clusters_at_a_time(in_cluster, sm_count);
            if (in_cluster > sm_count) break;
            if (splits > 1 && (work.tiles > clusters || stages < 2 * splits)) continue;
            const int64_t grid = p.grouped ? std::min(work.tiles, clusters)
                                           : ceil_div(work.tiles, ceil_div(work.tiles, clusters));
            consider({.blocks = static_cast<int>(grid * in_cluster),
                      .splits = splits,
                      .multicast = multicast},
                     work.cycles(costs, splits, in_cluster, clusters));
        }
        // In many waves the ranges of stream-K read what others read at other times.
        const int64_t clusters = gemm::clusters_at_a_time(multicast, sm_count);
        const int64_t steps = work.tiles * stages;
        if (p.grouped || work.tiles > 4 * clusters || steps < 8 * clusters ||
            steps >= std::numeric_limits<int32_t>::max())
            continue;
        const auto blocks = static_cast<int>(clusters * multicast);
        const double tiles = double(work.tiles) / double(clusters);  // of a cluster
        consider({.blocks = blocks, .splits = 1, .multicast = multicast, .stream_k = true},
                 costs.start + fix_up +
                     tiles * (double(work.steps) * work.step_cycles(costs, blocks) + costs.tile));
    }
}

// The GEMV kernel: strips per tile so that no SM has much more to do than others. The cost of a
// tile is what it reads, of the strips and of a, which comes from the L2 cache, and its beginning
// and end.
Schedule schedule_gemv(const Config& config, const Problem& p, int sm_count) {
    const int64_t all = std::max<int64_t>(1, ceil_div(p.n, STRIP_ROWS));
    // Only the device knows the rows of groups: each has at least one tile.
    const int64_t token_tiles =
        std::max({int64_t{1}, ceil_div(p.m, config.tokens), p.grouped ? p.groups : 0});
    Schedule best;
    double least = 0;
    for (int strips = 1; strips <= GEMV_STRIPS; ++strips) {
        const int64_t tiles = ceil_div(all, strips) * token_tiles;
        const double bytes = strips * STRIP_BYTES + config.tokens * PIECE;
        const double cost = double(ceil_div(tiles, sm_count)) *
                            (bytes * double(std::max<int64_t>(1, pieces(p.k))) + 50'000);
        if (strips > 1 && cost >= least) continue;
        least = cost;
        best = {.blocks = static_cast<int>(std::min<int64_t>(tiles, sm_count)),
                .splits = 1,
                .strips = strips};
    }
    return best;
}

// Split-K through the workspace, where all blocks, each with one tile, are there at a time.
void consider_split_k(const Config& c, const Problem& p, int sm_count, Plan& plan) {
    const SwapAbWork work = work_of(c, p, 1);
    const int64_t blocks = work.tiles * c.split_k;
    if (p.grouped || p.m > c.tokens || blocks > sm_count ||
        ceil_div(work.steps, c.pieces) < c.split_k * 4)
        return;
    const SwapAbCosts& costs = costs_of(c).swap_ab;
    const double steps =
        double(ceil_div(work.steps, c.split_k)) * work.step_cycles(costs, double(blocks));
    plan.consider(
        {.kernel = Kernel::split_k, .config = c, .schedule = {.blocks = static_cast<int>(blocks)}},
        costs.start + costs.reduction + steps);
}

// The least cycles of the tile shapes whose size is of the order of the rows.
Plan best(const Problem& p, int sm_count) {
    // Only the device knows the rows of groups: assume equal ones.
    const int64_t rows = p.grouped ? ceil_div(p.m, std::max<int64_t>(1, p.groups)) : p.m;
    Plan plan;
    for (const TileShape& shape : TILE_SHAPES) {
        const Config config = make_config(shape, p.dtype);
        const Kernel kernel = kernel_of(config);
        if (kernel == Kernel::gemv) {
            if (shape.tokens < rows) continue;
            plan.consider({kernel, config, schedule_gemv(config, p, sm_count)}, 0);
            return plan;
        }
        const int64_t least = std::min<int64_t>(rows, 256) / 4;
        if (shape.tokens < least || (shape.tokens > 32 && shape.tokens >= 2 * rows)) continue;
        if (kernel == Kernel::split_k)
            consider_split_k(config, p, sm_count, plan);
        else
            consider_swap_ab(config, p, sm_count, plan);
    }
    return plan;
}

// A dequantized weight of more elements, a gigabyte, is more workspace than a product should take.
constexpr int64_t DEQUANTIZED_ELEMENTS = int64_t{1} << 29;

// The weight is dequantized while products run, but not where the blocks begin and where they wait
// for it.
bool fused_dequant_pays(const Problem& p, double without, int sm_count) {
    if (p.grouped || p.m <= 128) return false;
    if (pieces(p.n) * pieces(p.k) > DEQUANTIZED_ELEMENTS / (PIECE * PIECE)) return false;
    const double tile = 1024 * double(pieces(p.k));
    const int64_t tiles = ceil_div(p.m, 128) * ceil_div(p.n, 256);
    const double product = double(ceil_div(tiles, sm_count)) * (tile + 600) * 1.03;
    const double dequantization = double(p.n) * double(p.k) / (1.85 * sm_count);
    return std::max(product, dequantization) + 0.15 * std::min(product, dequantization) + 15'000 <
           without;
}

// The tiles at work at a time form a square of elements, in raster groups of equal height.
Choice fused_dequant(Choice choice, const Problem& p, int sm_count) {
    const gemm::Config config = gemm::fused_dequant_config(p.dtype);
    const int64_t rows = ceil_div(p.m, config.block_m);
    const double height = std::sqrt(double(sm_count) * config.block_n / config.block_m);
    const int64_t raster_groups = std::max<int64_t>(1, std::llround(double(rows) / height));
    choice.kernel = Kernel::fused_dequant;
    choice.raster_group = static_cast<int>(ceil_div(rows, raster_groups));
    // Blocks without a tile dequantize.
    choice.schedule = {.blocks = sm_count};
    return choice;
}

std::string fused_dequant_name(DType dtype) {
    return concat("nvfp4_", name_of(dtype), "_fused_dequant");
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16) {
        return concat("activations must be bf16 or fp16, got ", name_of(p.dtype));
    }
    if (std::string reason = gemm::unsupported_sizes(p.m, p.n, p.k, "groups", p.groups);
        !reason.empty())
        return reason;
    if (p.k % 16 != 0) return concat("k must be a multiple of 16, got ", p.k);
    if (!runs_native(device)) return unsupported_portable(p, device);
    const Choice choice = choose(p, device);
    const int64_t tile_rows = choice.kernel == Kernel::gemv ? STRIP_ROWS * choice.schedule.strips
                                                            : block_rows(choice.config);
    const double tiles =
        double(ceil_div(p.m, choice.config.tokens) + p.groups) * double(ceil_div(p.n, tile_rows));
    return gemm::unsupported_resources(tiles, shared_bytes(choice.config), device);
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return choose_portable(p, device);
    const int sm_count = std::max(1, device.sm_count);
    const Plan plan = best(p, sm_count);
    const bool fits =
        gemm::shared_bytes(gemm::fused_dequant_config(p.dtype)) <= device.shared_bytes_per_block;
    return fits && fused_dequant_pays(p, plan.cycles, sm_count)
               ? fused_dequant(plan.choice, p, sm_count)
               : plan.choice;
}

void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced) {
    if (is_portable(before.kernel)) return follow_forced_portable(choice, kernel_is_forced);
    if (!kernel_is_forced) choice.kernel = kernel_of(choice.config);
    const int in_cluster = choice.schedule.splits * choice.schedule.multicast;
    choice.schedule.blocks = (choice.schedule.blocks + in_cluster - 1) / in_cluster * in_cluster;
}

std::string kernel_name(const Config& c) {
    if (is_gemv(c)) return concat("nvfp4_", name_of(c.dtype), "_gemv", c.tokens);
    return concat("nvfp4_", name_of(c.dtype), '_', block_rows(c), 'x', c.tokens,
                  c.split_k > 1 ? "_split_k" : "");
}

std::string kernel_name(const Choice& choice) {
    if (choice.kernel == Kernel::fused_dequant) return fused_dequant_name(choice.config.dtype);
    if (is_portable(choice.kernel)) return portable_name(choice);
    return kernel_name(choice.config);
}

std::string unsupported(const Nvfp4Weight& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.k % 16 != 0) return concat("k must be a multiple of 16, got ", p.k);
    const double count = double(pieces(p.n)) * double(pieces(p.k)) * double(p.groups);
    if (count > 2e9) return concat("the weight has ", count, " pieces; at most 2e9 are supported");
    return "";
}
Nvfp4Preparation choose(const Nvfp4Weight& p, const DeviceProperties& device) {
    return {p.restore ? Nvfp4Pass::restore : Nvfp4Pass::prepare, !runs_native(device)};
}
std::string kernel_name(const Nvfp4Preparation& c) {
    return concat(c.pass == Nvfp4Pass::restore ? "restore" : "prepare",
                  c.portable ? "_portable" : "");
}

namespace {

std::vector<KernelInfo> nvfp4_gemm_kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        const gemm::Config c = gemm::fused_dequant_config(dtype);
        list.push_back({.name = fused_dequant_name(dtype),
                        .config =
                            "tile 128x256x64, 4 stages, 1 producer warp, 3 warps that dequantize "
                            "and 2 consumer warpgroups",
                        .symbol = symbol_of("fused_dequant_kernel", "Config", c) + "*11Nvfp4Source",
                        .threads = gemm::threads(c),
                        .shared_bytes = gemm::shared_bytes(c)});
    }
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        const std::string config =
            is_gemv(c) ? concat("up to ", GEMV_STRIPS * STRIP_ROWS, 'x', c.tokens,
                                ", 1 producer warp and ", GEMV_WARPS, " consumer warps")
                       : concat("tile ", block_rows(c), 'x', c.tokens, 'x', c.pieces * PIECE, ", ",
                                c.stages, " stages, 1 producer warp and ", consumers(c),
                                " consumer warpgroups");
        list.push_back({
            .name = kernel_name(c),
            .config = config,
            .symbol = symbol_of(is_gemv(c)      ? "nvfp4_gemv_kernel"
                                : c.split_k > 1 ? "nvfp4_split_k_kernel"
                                                : "nvfp4_gemm_kernel",
                                "Config", c),
            .threads = threads(c),
            .shared_bytes = shared_bytes(c),
        });
    }
    for (KernelInfo& info : portable_kernels()) list.push_back(std::move(info));
    return list;
}
std::vector<KernelInfo> nvfp4_prepare_kernels() {
    std::vector<KernelInfo> list;
    for (const Nvfp4Pass pass : {Nvfp4Pass::prepare, Nvfp4Pass::restore}) {
        for (const bool portable : {false, true}) {
            list.push_back(
                {.name = kernel_name(Nvfp4Preparation{pass, portable}),
                 .config = "a piece of 64x64, 128 threads",
                 .symbol = concat("nvfp4_prepare_kernelILi", int(pass), "ELb", int(portable), 'E'),
                 .arch = portable ? PORTABLE : NATIVE,
                 .threads = 128});
        }
    }
    return list;
}

const bool registered = register_op<Problem, Choice>("nvfp4_gemm", "gemm", &nvfp4_gemm_kernels,
                                                     &unsupported, &choose) &&
                        register_op<Nvfp4Weight, Nvfp4Preparation>(
                            "nvfp4_prepare", "gemm", &nvfp4_prepare_kernels, &unsupported, &choose);

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm
