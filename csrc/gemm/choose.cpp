// Which kernel multiplies which problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/gemm.h"

namespace thunderkittens::gemm {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a tile costs in clock cycles of an SM: block_m * block_n / 32 for its products of 64 steps
// of k at the tensor cores' full rate, times `per_product`, plus `fixed`. Fitted to an H200: one
// consumer keeps the tensor cores less busy than two, and small tiles load more bytes per product.
struct TileCost {
    double per_product, fixed;
};
TileCost tile_cost(const TileShape& shape) {
    const int size = shape.block_m * shape.block_n;
    return {size >= 128 * 256   ? 1.0
            : size >= 128 * 128 ? 1.05
            : size >= 64 * 128  ? 1.32
                                : 2.16,
            600};
}

// Cycles that the GPU needs with tiles of this shape: rounds of one tile per SM.
double cycles(const TileShape& shape, const Problem& p, int sm_count) {
    const int64_t tiles = p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t rounds = ceil_div(tiles, sm_count);
    const TileCost cost = tile_cost(shape);
    const double steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    return rounds * (steps * shape.block_m * shape.block_n / 32 * cost.per_product + cost.fixed);
}

Schedule schedule_for(const Config& config, const Problem& p, int sm_count) {
    const int64_t rows = ceil_div(p.m, config.block_m), columns = ceil_div(p.n, config.block_n);
    Schedule schedule;
    // The tiles at work at a time form a square of elements, in bands of equal height.
    const int64_t across = rows / schedule.cluster_m;
    const double height = std::sqrt(double(sm_count) * config.block_n / config.block_m);
    const double bands = std::round(double(across) * schedule.cluster_m / height);
    schedule.band = static_cast<int>(ceil_div(across, std::max<int64_t>(1, int64_t(bands))));
    const int cluster = schedule.cluster_m * schedule.cluster_n;
    schedule.blocks = static_cast<int>(
        std::min<int64_t>(p.batch * across * columns, sm_count / cluster) * cluster);
    return schedule;
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype == DType::fp32) {
        return "operands must be bf16 or fp16, got fp32; convert them, or use torch.matmul";
    }
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    if (std::min({p.m, p.n, p.k, p.batch}) < 0 || std::max({p.m, p.n, p.k, p.batch}) > limit) {
        return concat("sizes must be in [0, ", limit, "], got m ", p.m, ", n ", p.n, ", k ", p.k,
                      ", batch ", p.batch);
    }
    // Tiles are counted in 31 bits, up to one round of blocks past the last.
    const Choice choice = choose(p, device);
    const double tiles = double(p.batch) * double(ceil_div(p.m, choice.config.block_m)) *
                         double(ceil_div(p.n, choice.config.block_n));
    if (tiles > 2e9) return concat("the output has ", tiles, " tiles; at most 2e9 are supported");
    const int bytes = shared_bytes(choice.config);
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernel needs ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const TileShape* best = nullptr;
    double least = 0;
    for (const TileShape& shape : TILE_SHAPES) {
        const double needed = cycles(shape, p, sm_count);
        if (best == nullptr || needed < least) best = &shape, least = needed;
    }
    Choice choice{.config = make_config(*best, p.dtype, p.a_m_major, p.b_n_major)};
    choice.schedule = schedule_for(choice.config, p, sm_count);
    return choice;
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.dtype), '_', c.a_m_major ? 't' : 'n', c.b_n_major ? 'n' : 't', '_',
                  c.block_m, 'x', c.block_n);
}

std::string kernel_name(const Choice& choice) { return kernel_name(choice.config); }

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const TileShape& shape : TILE_SHAPES) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            for (const bool a_m_major : {false, true}) {
                for (const bool b_n_major : {true, false}) {
                    const Config c = make_config(shape, dtype, a_m_major, b_n_major);
                    list.push_back({
                        .name = kernel_name(c),
                        .config =
                            concat("tile ", c.block_m, 'x', c.block_n, 'x', BLOCK_K, ", ", c.stages,
                                   " stages, 1 producer and ", c.consumers, " consumer warpgroups"),
                        .source = concat(name_of(dtype), '_', c.block_m, 'x', c.block_n),
                        .symbol = concat("ELi", c.block_m, "ELi", c.block_n, "ELi", c.stages, "ELi",
                                         c.consumers, "ELNS_5DTypeE", int(dtype), "ELb",
                                         int(a_m_major), "ELb", int(b_n_major), 'E'),
                        .threads = threads(c),
                        .shared_bytes = shared_bytes(c),
                    });
                }
            }
        }
    }
    return list;
}

static const bool registered = register_op("gemm", "gemm", &kernels, &unsupported, &choose);

}  // namespace thunderkittens::gemm
