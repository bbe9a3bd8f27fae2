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

// As few stages as have 36 KB on their way, which is what memory delivers meanwhile: a warp fills
// its ring, rows of a too, before its first product. As many as leave room for so many blocks, if
// that is fewer; 0 where there is none for two.
int few_rows_stages(Config config, int strips, int blocks, const DeviceProperties& device) {
    const int room = (device.shared_bytes_per_block + 1024) / blocks - 1024;
    const int bytes = blocks * config.k_groups * (config.tokens * PIECE * 2 + strips * STRIP_BYTES);
    int most = 0;
    for (config.stages = 2; config.stages <= FEW_ROWS_STAGES; ++config.stages) {
        if (few_rows_shared_bytes(config, strips) > room) break;
        most = config.stages;
        if ((most - 1) * bytes >= 36000) break;
    }
    return most;
}

// The strips of a tile and the warps that divide k: cycles of the multiprocessor with the most
// tiles, of which each round has a beginning and an end. The limit is the instructions (four
// schedulers of sixteen warps issue 2.4 in a cycle), the 30 bytes a cycle that come from the L2
// cache, or those on their way in the 1200 cycles that memory takes.
Choice choose_few_rows(const Problem& p, const DeviceProperties& device) {
    const int64_t sm_count = std::max(1, device.sm_count);
    const int64_t all = std::max<int64_t>(1, ceil_div(p.n, STRIP_ROWS));
    const int64_t groups = p.grouped ? std::max<int64_t>(1, p.groups) : 1;
    // Groups may differ, and a tile that is cut reads the weight twice.
    const int tokens = ceil_div(p.m, groups) <= (p.grouped ? 4 : 8) ? 8 : FEW_ROWS;
    const int64_t token_tiles =
        std::max({int64_t{1}, ceil_div(p.m, tokens), p.grouped ? groups : 0});
    const double rows = double(p.m) / double(token_tiles);
    Choice choice{.kernel = Kernel::portable_few_rows};
    double least = std::numeric_limits<double>::infinity();
    for (const int warps : {FEW_ROWS_MOST_WARPS, FEW_ROWS_WARPS}) {
        for (int strips = 1; strips <= FEW_ROWS_STRIPS; ++strips) {
            const int64_t tiles = ceil_div(all, strips) * token_tiles;
            const int64_t of_sm = ceil_div(tiles, sm_count);
            Config config{.tokens = tokens,
                          .row_groups = 0,
                          .k_groups = warps,
                          .pieces = 1,
                          .dtype = p.dtype};
            int blocks = of_sm > 1 ? FEW_ROWS_MOST_WARPS / warps : 1;
            config.stages = few_rows_stages(config, strips, blocks, device);
            if (config.stages == 0 && blocks > 1) {
                blocks = 1;
                config.stages = few_rows_stages(config, strips, blocks, device);
            }
            if (config.stages == 0) continue;
            const double steps = double(ceil_div(pieces(p.k), warps)) * warps * double(of_sm);
            const double weight = double(strips) * STRIP_BYTES;
            const double active = double(blocks * warps) / FEW_ROWS_MOST_WARPS;
            const double instructions = steps * (strips * (70 + tokens / 2) + 40) / (2.4 * active);
            const double cache = steps * (weight + rows * PIECE * 2) / 30;
            const double memory = steps * 1200 / (double(blocks * warps) * (config.stages - 1));
            const double cost =
                std::max({instructions, cache, memory}) + double(ceil_div(of_sm, blocks)) * 1500;
            if (cost >= least) continue;
            least = cost;
            choice.config = config;
            choice.schedule = {.blocks = int(std::min<int64_t>(tiles, INT32_MAX)),
                               .strips = strips};
        }
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
        return gemm::unsupported_resources(tiles_of(choice.config.tokens, strips * STRIP_ROWS, p),
                                           few_rows_shared_bytes(choice.config, strips), device);
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
        config = {.tokens = config.tokens <= 8 ? 8 : FEW_ROWS,
                  .row_groups = 0,
                  .k_groups = config.k_groups <= 8 ? FEW_ROWS_WARPS : FEW_ROWS_MOST_WARPS,
                  .pieces = 1,
                  .stages = std::clamp(config.stages, 2, FEW_ROWS_STAGES),
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
        return concat("nvfp4_", name_of(c.dtype), '_', c.tokens, "_few_rows_portable");
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
                        .symbol = symbol_of("nvfp4_portable_kernel", "PortableConfig", c),
                        .arch = PORTABLE,
                        .threads = c.threads(),
                        .shared_bytes = weight_shared_bytes(c)});
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int tokens : {8, FEW_ROWS}) {
            const Choice choice{.kernel = Kernel::portable_few_rows,
                                .config = {.tokens = tokens,
                                           .row_groups = 0,
                                           .k_groups = FEW_ROWS_WARPS,
                                           .stages = 2,
                                           .dtype = dtype}};
            list.push_back(
                {.name = portable_name(choice),
                 .config =
                     concat("up to ", FEW_ROWS_STRIPS * STRIP_ROWS, 'x', tokens, ", ",
                            FEW_ROWS_WARPS, " or ", FEW_ROWS_MOST_WARPS, " warps that divide k"),
                 .symbol = concat("nvfp4_few_rows_kernelILi", int(dtype), "ELi", tokens, 'E'),
                 .arch = PORTABLE,
                 .threads = FEW_ROWS_MOST_WARPS * 32,
                 .shared_bytes = few_rows_shared_bytes(choice.config, FEW_ROWS_STRIPS)});
        }
    }
    return list;
}

}  // namespace thunderkittens::nvfp4_gemm
