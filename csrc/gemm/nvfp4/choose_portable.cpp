// Which portable kernel multiplies activations with prepared NVFP4 weights: pure functions of the
// problem and the device.
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/nvfp4/portable.h"

namespace thunderkittens::nvfp4_gemm {
namespace {

// As many stages as leave room for the blocks that a multiprocessor is to hold, or for one.
int few_rows_stages(int strips, const DeviceProperties& device) {
    for (const int blocks : {FEW_ROWS_PER_SM, 1}) {
        const int room = (device.shared_bytes_per_block + 1024) / blocks - 1024;
        for (int stages = FEW_ROWS_STAGES; stages >= 2; --stages) {
            if (few_rows_shared_bytes(strips, stages) <= room) return stages;
        }
    }
    return 2;
}

// The strips of a tile: what the multiprocessor with the most tiles reads, by 30 bytes a cycle from
// the L2 cache, and the beginning and end of its tiles.
Choice choose_few_rows(const Problem& p, const DeviceProperties& device) {
    const int64_t sm_count = std::max(1, device.sm_count);
    const int64_t all = std::max<int64_t>(1, ceil_div(p.n, STRIP_ROWS));
    const int64_t token_tiles =
        std::max({int64_t{1}, ceil_div(p.m, FEW_ROWS), p.grouped ? p.groups : 0});
    const double rows = double(p.m) / double(token_tiles);
    Choice choice{.kernel = Kernel::portable_few_rows};
    double least = std::numeric_limits<double>::infinity();
    for (int strips = 1; strips <= FEW_ROWS_STRIPS; ++strips) {
        const int64_t tiles = ceil_div(all, strips) * token_tiles;
        const double bytes = (strips * STRIP_BYTES + rows * PIECE * 2) * double(pieces(p.k));
        const double cost = double(ceil_div(tiles, sm_count)) * bytes / 30 +
                            double(ceil_div(tiles, FEW_ROWS_PER_SM * sm_count)) * 1500;
        if (cost >= least) continue;
        least = cost;
        choice.config = {.tokens = FEW_ROWS,
                         .row_groups = 0,
                         .k_groups = FEW_ROWS_WARPS,
                         .pieces = 1,
                         .stages = few_rows_stages(strips, device),
                         .dtype = p.dtype};
        choice.schedule = {.blocks = int(std::min<int64_t>(tiles, INT32_MAX)), .strips = strips};
    }
    return choice;
}

double tiles_of(int tokens, int columns, const Problem& p) {
    const double more = p.grouped ? double(p.groups) : 0;  // groups end within tiles
    return (double(ceil_div(p.m, tokens)) + more) * double(ceil_div(p.n, columns));
}

}  // namespace

Choice choose_portable(const Problem& p, const DeviceProperties& device) {
    // Only the device knows the rows of groups: assume equal ones.
    const int64_t rows = p.grouped ? ceil_div(p.m, std::max<int64_t>(1, p.groups)) : p.m;
    if (rows <= FEW_ROWS) return choose_few_rows(p, device);
    Choice choice{.kernel = Kernel::portable};
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const gemm::PortableConfig c = portable_config_at(i);
        if (c.dtype != p.dtype) continue;
        const int bytes = weight_shared_bytes(c);
        if (bytes > device.shared_bytes_per_block) continue;
        // What the multiprocessor with the most tiles has to do; and of each tile, beside its
        // products, to fill the ring and to store, in steps of k.
        const double most =
            std::ceil(tiles_of(c.block_m, c.block_n, p) / std::max(1, device.sm_count));
        const double cost =
            most * c.block_m * c.block_n * (double(pieces(p.k)) + 6) / PORTABLE_SHAPES[i / 2].rate;
        if (cost >= least) continue;
        least = cost;
        choice.config = weight_config(c);
    }
    choice.schedule = {
        .blocks = int(std::min(tiles_of(choice.config.tokens, block_rows(choice.config), p), 2e9))};
    return choice;
}

std::string unsupported_portable(const Problem& p, const DeviceProperties& device) {
    const Choice choice = choose_portable(p, device);
    if (choice.kernel == Kernel::portable_few_rows) {
        const int strips = choice.schedule.strips;
        return gemm::unsupported_resources(tiles_of(FEW_ROWS, strips * STRIP_ROWS, p),
                                           few_rows_shared_bytes(strips, choice.config.stages),
                                           device);
    }
    const gemm::PortableConfig c = portable_config(choice.config);
    return gemm::unsupported_resources(tiles_of(c.block_m, c.block_n, p), weight_shared_bytes(c),
                                       device);
}

// What a forced tile leaves open follows from the list.
void follow_forced_portable(Choice& choice, bool kernel_is_forced) {
    Config& config = choice.config;
    if (!kernel_is_forced) {
        choice.kernel = config.row_groups == 0 ? Kernel::portable_few_rows : Kernel::portable;
    }
    if (choice.kernel == Kernel::portable_few_rows) {
        config = {.tokens = FEW_ROWS,
                  .row_groups = 0,
                  .k_groups = FEW_ROWS_WARPS,
                  .pieces = 1,
                  .stages = config.stages,
                  .dtype = config.dtype};
        choice.schedule.strips = std::clamp(choice.schedule.strips, 1, FEW_ROWS_STRIPS);
        return;
    }
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const Config listed = weight_config(portable_config_at(i));
        if (listed.tokens == config.tokens && listed.row_groups == config.row_groups &&
            listed.dtype == config.dtype)
            config = listed;
    }
}

std::string portable_name(const Choice& choice) {
    const Config& c = choice.config;
    if (choice.kernel == Kernel::portable_few_rows) {
        return concat("nvfp4_", name_of(c.dtype), "_few_rows_portable");
    }
    return concat("nvfp4_", name_of(c.dtype), '_', block_rows(c), 'x', c.tokens, "_portable");
}

std::vector<KernelInfo> portable_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const gemm::PortableConfig c = portable_config_at(i);
        const Choice choice{.kernel = Kernel::portable, .config = weight_config(c)};
        list.push_back({.name = portable_name(choice),
                        .config = concat("tile ", c.block_n, 'x', c.block_m, 'x', PIECE, ", ",
                                         c.stages, " stages, ", c.warps(), " warps, no roles"),
                        .source = concat("nvfp4_portable_", name_of(c.dtype), "_sm80"),
                        .symbol = symbol_of("nvfp4_portable_kernel", "PortableConfig", c),
                        .arch = PORTABLE,
                        .threads = c.threads(),
                        .shared_bytes = weight_shared_bytes(c)});
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        const Choice choice{.kernel = Kernel::portable_few_rows, .config = {.dtype = dtype}};
        list.push_back({.name = portable_name(choice),
                        .config = concat("up to ", FEW_ROWS_STRIPS * STRIP_ROWS, 'x', FEW_ROWS,
                                         ", ", FEW_ROWS_WARPS, " warps that divide k"),
                        .source = "nvfp4_few_rows_sm80",
                        .symbol = concat("nvfp4_few_rows_kernelILi", int(dtype), 'E'),
                        .arch = PORTABLE,
                        .threads = FEW_ROWS_WARPS * 32,
                        .shared_bytes = few_rows_shared_bytes(FEW_ROWS_STRIPS, 2)});
    }
    return list;
}

}  // namespace thunderkittens::nvfp4_gemm
