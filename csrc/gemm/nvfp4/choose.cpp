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
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

// Blocks that fit the GPU at a time in clusters of `splits`: measured, an H200 of 132 SMs holds 66
// clusters of two, 30 of four and 15 of eight.
int clusters_of(int splits, int sm_count) {
    return std::max(1, splits <= 2 ? sm_count / splits : sm_count * 10 / 11 / splits);
}

Schedule schedule_for(const Config& config, const Problem& p, int sm_count) {
    const int64_t row_tiles = ceil_div(p.n, block_rows(config));
    const int64_t token_tiles =
        p.grouped ? ceil_div(p.m, config.tokens) + p.groups : ceil_div(p.m, config.tokens);
    const int64_t tiles = std::max<int64_t>(1, row_tiles * token_tiles);
    const int64_t k_stages = ceil_div(pieces(p.k), config.pieces);
    // Split-K over a cluster where tiles are fewer than SMs, as long as each block still has some
    // steps.
    int splits = 1;
    while (splits < 8 && tiles * splits * 4 < sm_count * 3 && k_stages >= splits * 2 * 2 &&
           sm_count >= splits * 4) {
        splits *= 2;
    }
    // Multicast cluster: where there are enough tiles, two neighbours share rows of a, as long as
    // few tiles are left alone.
    const bool share = splits == 1 && max_multicast(config) == 2 && sm_count >= 2 &&
                       (row_tiles % 2 == 0 || row_tiles >= 16);
    const int multicast = share ? 2 : 1, in_cluster = splits * multicast;
    const int64_t work = std::max<int64_t>(1, ceil_div(row_tiles, multicast) * token_tiles);
    const int64_t clusters = clusters_of(in_cluster, sm_count);
    const int64_t waves = ceil_div(work, clusters);
    // Stream-K where waves leave many SMs idle: the fix-up costs as much as some 16 pieces of k,
    // and in many waves the ranges read what others read at other times.
    const int64_t idle = (waves * clusters - work) * pieces(p.k);
    const int64_t steps = work * k_stages;
    if (!p.grouped && splits == 1 && waves <= 4 && idle >= 16 * clusters && steps >= 8 * clusters &&
        steps < std::numeric_limits<int32_t>::max()) {
        return {.blocks = static_cast<int>(clusters * in_cluster),
                .splits = splits,
                .multicast = multicast,
                .stream_k = true};
    }
    return {.blocks = static_cast<int>(
                (p.grouped ? std::min(work, clusters) : ceil_div(work, waves)) * in_cluster),
            .splits = splits,
            .multicast = multicast};
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

// Split-K through the workspace: whether its blocks fill the GPU, each with one tile, all of them
// at a time.
bool split_k_pays(const Config& config, const Problem& p, int64_t tiles, int sm_count) {
    const int64_t blocks = tiles * config.split_k;
    return !p.grouped && p.m <= config.tokens && blocks <= sm_count && blocks * 4 >= sm_count * 3 &&
           ceil_div(pieces(p.k), config.pieces) >= config.split_k * 4;
}

// The smallest tile that takes all rows at once, of those the largest that still gives most SMs
// work: it reads the rows of a less often.
Choice best(const Problem& p, int sm_count) {
    // Only the device knows the rows of groups: assume equal ones.
    const int64_t rows = p.grouped ? ceil_div(p.m, std::max<int64_t>(1, p.groups)) : p.m;
    int tokens = TILE_SHAPES[std::size(TILE_SHAPES) - 1].tokens;
    for (const TileShape& shape : TILE_SHAPES) {
        if (shape.tokens >= rows) tokens = std::min(tokens, shape.tokens);
    }
    // Tiles of 128 rows where those of 256 are too few even for two splits of k.
    if (tokens == 256 && 4 * ceil_div(p.n, 128) * ceil_div(rows, 256) <= sm_count) tokens = 128;
    Choice choice;
    for (const TileShape& shape : TILE_SHAPES) {
        if (shape.tokens != tokens) continue;
        const Config config = make_config(shape, p.dtype);
        const Kernel kernel = kernel_of(config);
        if (kernel == Kernel::gemv) return {kernel, config, schedule_gemv(config, p, sm_count)};
        const int64_t tiles = ceil_div(p.n, block_rows(config)) * ceil_div(rows, config.tokens);
        if (kernel == Kernel::split_k) {
            if (split_k_pays(config, p, tiles, sm_count)) {
                choice = {kernel, config, {.blocks = static_cast<int>(tiles * config.split_k)}};
            }
            continue;
        }
        const bool first = choice.schedule.blocks == 0;
        if (first || tiles * 4 >= sm_count * 3) {
            choice = {kernel, config, schedule_for(config, p, sm_count)};
        }
    }
    return choice;
}

// A dequantized weight of more elements, a gigabyte, is more workspace than a product should take.
constexpr int64_t DEQUANTIZED_ELEMENTS = int64_t{1} << 29;

// Cycles of an SM, fitted to an H200. The weight is dequantized while products run, but not where
// the blocks begin and where they wait for it.
bool fused_dequant_pays(const Problem& p, const Choice& swap_ab, int sm_count) {
    const Config& c = swap_ab.config;
    const Schedule& s = swap_ab.schedule;
    if (p.grouped || c.tokens < 256) return false;
    if (pieces(p.n) * pieces(p.k) > DEQUANTIZED_ELEMENTS / (PIECE * PIECE)) return false;
    const int in_cluster = s.splits * s.multicast;
    const int64_t work =
        ceil_div(ceil_div(p.n, block_rows(c)), s.multicast) * ceil_div(p.m, c.tokens);
    const double tile = 1024 * double(pieces(p.k));
    const int64_t clusters = std::max(1, s.blocks / in_cluster);
    // Stream-K has no waves, but a fix-up.
    const double waves =
        s.stream_k ? double(work) / double(clusters) : double(ceil_div(work, clusters));
    const double without = waves * (tile / s.splits + 10'000) + (s.stream_k ? 26'000 : 0);
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
    const Choice choice = choose(p, device);
    const int64_t tile_rows = choice.kernel == Kernel::gemv ? STRIP_ROWS * choice.schedule.strips
                                                            : block_rows(choice.config);
    const double tiles =
        double(ceil_div(p.m, choice.config.tokens) + p.groups) * double(ceil_div(p.n, tile_rows));
    return gemm::unsupported_resources(tiles, shared_bytes(choice.config), device);
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const Choice choice = best(p, sm_count);
    const bool fits =
        gemm::shared_bytes(gemm::fused_dequant_config(p.dtype)) <= device.shared_bytes_per_block;
    return fits && fused_dequant_pays(p, choice, sm_count) ? fused_dequant(choice, p, sm_count)
                                                           : choice;
}

void follow_forced(Choice& choice, const Choice&, bool kernel_is_forced) {
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
    return kernel_name(choice.config);
}

std::string unsupported(const Nvfp4Weight& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.k % 16 != 0) return concat("k must be a multiple of 16, got ", p.k);
    const double count = double(pieces(p.n)) * double(pieces(p.k)) * double(p.groups);
    if (count > 2e9) return concat("the weight has ", count, " pieces; at most 2e9 are supported");
    return "";
}
Nvfp4Preparation choose(const Nvfp4Weight& p, const DeviceProperties&) {
    return {p.restore ? Nvfp4Pass::restore : Nvfp4Pass::prepare};
}
std::string kernel_name(const Nvfp4Preparation& c) {
    return c.pass == Nvfp4Pass::restore ? "restore" : "prepare";
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
                        .source = "nvfp4_fused_dequant",
                        .symbol = symbol_of("fused_dequant_kernel", "Config", c),
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
            .source = is_gemv(c) ? "nvfp4_gemv" : concat("nvfp4_gemm_", name_of(c.dtype)),
            .symbol = symbol_of(is_gemv(c)      ? "nvfp4_gemv_kernel"
                                : c.split_k > 1 ? "nvfp4_split_k_kernel"
                                                : "nvfp4_gemm_kernel",
                                "Config", c),
            .threads = threads(c),
            .shared_bytes = shared_bytes(c),
        });
    }
    return list;
}
std::vector<KernelInfo> nvfp4_prepare_kernels() {
    std::vector<KernelInfo> list;
    for (const Nvfp4Pass pass : {Nvfp4Pass::prepare, Nvfp4Pass::restore}) {
        list.push_back({.name = kernel_name(Nvfp4Preparation{pass}),
                        .config = "a piece of 64x64, 128 threads",
                        .source = "nvfp4_prepare",
                        .symbol = concat("nvfp4_prepare_kernelILi", int(pass), 'E'),
                        .threads = 128});
    }
    return list;
}

const bool registered = register_op<Problem, Choice>("nvfp4_gemm", "gemm", &nvfp4_gemm_kernels,
                                                     &unsupported, &choose) &&
                        register_op<Nvfp4Weight, Nvfp4Preparation>(
                            "nvfp4_prepare", "gemm", &nvfp4_prepare_kernels, &unsupported, &choose);

}  // namespace
}  // namespace thunderkittens::nvfp4_gemm
