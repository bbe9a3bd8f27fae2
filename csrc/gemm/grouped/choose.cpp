// Which kernel multiplies which grouped problem: pure functions of the problem and the device. The
// sizes of the groups are not known here, only their mean.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/grouped/portable.h"

namespace thunderkittens::grouped_gemm {
namespace {

// The tiles of all groups; along the dimension that the groups divide, each group's last tile is
// half full.
double tiles_of(const gemm::TileShape& shape, const Problem& p) {
    const auto tiles = [&](int64_t size, int block, Grouped divides) {
        if (Grouped(p.grouped) != divides) return double(ceil_div(size, block));
        return double(ceil_div(size, block)) + 0.5 * double(std::min(p.groups, size) - 1);
    };
    return tiles(p.m, shape.block_m, Grouped::rows) * tiles(p.n, shape.block_n, Grouped::columns) *
           (Grouped(p.grouped) == Grouped::k ? double(p.groups) : 1.0);
}

// Whether balanced tiling is possible. To count rows of tiles, each block reads the ends of all
// groups before its first load. Where columns are divided, a warp has one group per lane, and one
// lane for what is behind them; b's rows along n would begin anywhere in a line. Short sums lose by
// more tiles.
bool can_count(const Problem& p) {
    constexpr int64_t few_groups = 64, lanes = 32, many_steps = 32;
    switch (Grouped(p.grouped)) {
        case Grouped::rows: return p.groups <= few_groups;
        case Grouped::columns: return p.groups < lanes && !p.b_n_major;
        default: return p.k >= p.groups * many_steps * gemm::BLOCK_K;
    }
}

// The cycles that the GPU needs with tiles of this shape, as in dense/choose.cpp.
double cycles(const gemm::TileShape& shape, const Problem& p, int sm_count) {
    const int size = shape.block_m * shape.block_n;
    const double per_product = size >= 128 * 256 ? 1.0 : size >= 128 * 128 ? 1.05 : 1.32;
    const double k = double(p.k) / (Grouped(p.grouped) == Grouped::k ? double(p.groups) : 1.0);
    const double steps = std::max(1.0, std::ceil(k / gemm::BLOCK_K));
    const double waves = std::max(1.0, tiles_of(shape, p) / sm_count);
    return waves * (steps * size / 32 * per_product + 600);
}

Choice choice_of(const gemm::TileShape& shape, const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    Choice choice{.config = gemm::make_config(shape, p.dtype, p.a_m_major, p.b_n_major)};
    // The tiles at work at a time form a square of elements.
    choice.raster_group =
        std::max(1, int(std::lround(std::sqrt(double(sm_count) * shape.block_n / shape.block_m))));
    choice.blocks = sm_count;
    const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n) *
                          (Grouped(p.grouped) == Grouped::k ? p.groups : 1);
    choice.two_widths = tiles > sm_count && can_count(p) && gemm::has_two_widths(choice.config);
    return choice;
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16) {
        return concat("operands must be bf16 or fp16, got ", name_of(p.dtype));
    }
    constexpr int64_t limit = std::numeric_limits<int32_t>::max() - 1024;
    if (std::string reason = gemm::unsupported_sizes(p.m, p.n, p.k, "groups", p.groups, limit);
        !reason.empty())
        return reason;
    if (p.grouped < 0 || p.grouped > int(Grouped::k)) {
        return concat("grouped must be 0 (rows), 1 (columns) or 2 (k), got ", p.grouped);
    }
    if (!runs_native(device)) return unsupported_portable(p, device);
    // The kernels count tiles in 31 bits, up to one wave of blocks past the last.
    const gemm::Config config = choose(p, device).config;
    const double groups = double(p.groups) + 1;
    const double rows = double(ceil_div(p.m, config.block_m));
    const double columns = double(ceil_div(p.n, config.block_n));
    const double tiles = Grouped(p.grouped) == Grouped::rows      ? (rows + groups) * columns
                         : Grouped(p.grouped) == Grouped::columns ? rows * (columns + groups)
                                                                  : rows * columns * groups;
    return gemm::unsupported_resources(tiles, grouped_gemm::shared_bytes(config), device);
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return choose_portable(p, device);
    const int sm_count = std::max(1, device.sm_count);
    const gemm::TileShape* best = nullptr;
    double least = 0;
    for (std::size_t i = 0; i < SHAPES; ++i) {
        const gemm::TileShape& shape = gemm::TILE_SHAPES[i];
        const double needed = cycles(shape, p, sm_count);
        if (best == nullptr || needed < least) best = &shape, least = needed;
    }
    return choice_of(*best, p, device);
}

std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return portable_candidates(p, device);
    std::vector<Choice> list{choose(p, device)};
    const auto add = [&](const Choice& choice) {
        if (std::find(list.begin(), list.end(), choice) == list.end()) list.push_back(choice);
    };
    for (std::size_t i = 0; i < SHAPES; ++i) {
        Choice choice = choice_of(gemm::TILE_SHAPES[i], p, device);
        add(choice);
        choice.two_widths = false;
        add(choice);
    }
    return list;
}

std::string kernel_name(const gemm::Config& c) {
    return concat(name_of(c.dtype), '_', c.a_m_major ? 't' : 'n', c.b_n_major ? 'n' : 't', '_',
                  c.block_m, 'x', c.block_n);
}

std::string kernel_name(const Choice& choice) {
    return concat(grouped_gemm::kernel_name(choice.config), choice.portable ? "_portable" : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const gemm::Config c = config_at(i);
        const std::string tile = concat(c.block_m, 'x', c.block_n);
        list.push_back({
            .name = grouped_gemm::kernel_name(c),
            .config = concat("tile ", tile, 'x', gemm::BLOCK_K, ", ", c.stages,
                             " stages, 1 loading thread, 1 scheduling warp and ", c.consumers,
                             " consumer warpgroups"),
            .symbol = symbol_of("grouped_gemm_kernel", "Config", c),
            .threads = gemm::threads(c),
            .shared_bytes = grouped_gemm::shared_bytes(c),
        });
    }
    for (KernelInfo& info : portable_kernels()) list.push_back(std::move(info));
    return list;
}

static const bool registered =
    register_op("grouped_gemm", "gemm", &kernels, &unsupported, &choose) &&
    register_candidates("grouped_gemm", &candidates);

}  // namespace thunderkittens::grouped_gemm
