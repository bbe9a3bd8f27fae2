// The kernels of the dense GEMM for the registry: their names, resources and symbols.
#include "csrc/common/check.h"
#include "csrc/common/cost_inputs.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/align_rows.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/dense/learned_cost.h"

namespace thunderkittens::gemm {

std::string kernel_name(const Config& c) {
    const std::string layout = concat(c.a_m_major ? 't' : 'n', c.b_n_major ? 'n' : 't');
    return concat(name_of(c.dtype), '_', layout, c.swap_ab ? "_swap_ab_" : "_", c.block_m, 'x',
                  c.block_n, c.fused ? "_fused" : "", c.masked ? "_masked" : "",
                  c.cluster_tile ? "_cluster" : "");
}

std::string kernel_name(const Choice& choice) {
    switch (choice.kernel) {
        case Kernel::split_k: return concat(name_of(choice.config.dtype), "_split_k");
        case Kernel::single_wave:
        case Kernel::single_wave_64x64: return kernel_name(choice.config) + "_single_wave";
        case Kernel::short_k: return kernel_name(choice.config) + "_short_k";
        case Kernel::runtime_tile:
            return concat(name_of(choice.config.dtype), "_runtime_tile_",
                          runtime_tile_of(choice.config).rows);
        case Kernel::portable: return kernel_name(choice.config) + "_portable";
        default: return kernel_name(choice.config);
    }
}

// The split-K kernel of a dtype, which has both widths of tiles and both orders of b.
static KernelInfo split_k_info(DType dtype) {
    const TileShape &narrow = SPLIT_K_SHAPES[0], &wide = SPLIT_K_SHAPES[1];
    const Config c = make_config(narrow, dtype, false, false);
    return {.name = kernel_name(Choice{.kernel = Kernel::split_k, .config = c}),
            .config = concat("tiles ", narrow.block_m, 'x', narrow.block_n, " and ", wide.block_m,
                             'x', wide.block_n, ", ", narrow.stages, " and ", wide.stages,
                             " stages, 1 producer warp and ", c.consumers,
                             " consumer warpgroups, split-K and stream-K"),
            .symbol = symbol_of("split_k_kernel", c.dtype),
            .threads = single_wave_threads(c),
            .shared_bytes = SPLIT_K_SHARED_BYTES};
}

// The run-time tile kernel of a dtype and of so many rows of a consumer.
static KernelInfo runtime_tile_info(DType dtype, int rows) {
    const Config c = runtime_tile_config({.rows = rows}, false, dtype, false, false);
    return {.name = kernel_name(Choice{.kernel = Kernel::runtime_tile, .config = c}),
            .config = concat("tiles ", 2 * rows, 'x', LEAST_RUNTIME_WIDTH, " to ",
                             most_runtime_width(rows), " and ", rows, 'x', 2 * LEAST_RUNTIME_WIDTH,
                             " to ", 2 * most_runtime_width(rows, true),
                             ", 4 producer warps and 2 consumer warpgroups, clusters of up to ",
                             MAX_CLUSTER_BLOCKS, " blocks"),
            .symbol = concat(symbol_of("runtime_tile_kernel", dtype), "Li", rows, 'E'),
            .threads = RUNTIME_TILE_THREADS,
            .shared_bytes = RUNTIME_TILE_SHARED_BYTES};
}

static KernelInfo portable_info(const PortableConfig& c) {
    const Choice choice{.kernel = Kernel::portable, .config = choice_config(c)};
    KernelInfo info{.name = kernel_name(choice),
                    .config = concat("tile ", c.block_m, 'x', c.block_n, 'x', BLOCK_K, ", ",
                                     c.stages, " stages, ", c.warps(), " warps, no roles"),
                    .symbol = symbol_of("portable_kernel", "PortableConfig", c),
                    .arch = PORTABLE,
                    .threads = c.threads(),
                    .shared_bytes = portable_shared_bytes(c),
                    .fields = detail::fields_of(choice.config)};
    info.fields["strategy"] = std::string(strategy_name(Kernel::portable));
    return info;
}

static KernelInfo align_rows_info(int arch) {
    const bool native = arch == NATIVE;
    return {.name = native ? "align_rows" : "align_rows_portable",
            .config = "copies of operands whose rows begin at no multiples of 16 bytes",
            .symbol = concat(native ? "17align_rows_kernelILi" : "26portable_align_rows_kernelILi",
                             MAX_ALIGNED, 'E'),
            .arch = arch,
            .threads = ALIGN_THREADS};
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) list.push_back(split_k_info(dtype));
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const int rows : RUNTIME_TILE_ROWS) list.push_back(runtime_tile_info(dtype, rows));
    }
    for (const int arch : {NATIVE, PORTABLE}) list.push_back(align_rows_info(arch));
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        list.push_back(portable_info(portable_config_at(i)));
    }
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        const auto add = [&](Kernel kernel, const std::string& config, const char* symbol,
                             int threads, int shared_bytes) {
            list.push_back({.name = kernel_name(Choice{.kernel = kernel, .config = c}),
                            .config = config,
                            .symbol = symbol_of(symbol, "Config", c),
                            .threads = threads,
                            .shared_bytes = shared_bytes,
                            .fields = detail::fields_of(c)});
            list.back().fields["strategy"] = std::string(strategy_name(kernel));
        };
        const std::string tile = concat("tile ", c.block_m, 'x', c.block_n, 'x');
        const std::string stages = concat(tile, c.block_k, ", ", c.stages, " stages");
        const std::string warps = concat(stages, ", 1 producer warp and ", c.consumers,
                                         " consumer warpgroup", c.consumers > 1 ? "s" : "");
        const Kernel kernel = kernel_of(c);
        if (kernel == Kernel::swap_ab) {
            add(kernel, warps, "swap_ab_kernel", threads(c), shared_bytes(c));
        } else if (kernel == Kernel::cluster_tile) {
            add(kernel, concat(warps, ", clusters of up to ", MAX_CLUSTER_BLOCKS, " blocks"),
                "cluster_tile_kernel", threads(c), shared_bytes(c));
        } else if (kernel == Kernel::persistent) {
            add(kernel, concat(stages, ", 1 producer and ", c.consumers, " consumer warpgroups"),
                "persistent_gemm_kernel", threads(c), shared_bytes(c));
        }
        if (has_short_k(c)) {
            add(Kernel::short_k,
                concat(tile, short_k_block_k(c), ", no roles, operands of any alignment"),
                "short_k_kernel", SHORT_K_THREADS, short_k_shared_bytes(c));
        }
        const std::string single = warps + ", single-wave";
        if (has_single_wave(c)) {
            add(Kernel::single_wave, single, "single_wave_kernel", single_wave_threads(c),
                shared_bytes(c));
        } else if (has_single_wave_64x64(c)) {
            add(Kernel::single_wave_64x64, single, "single_wave_64x64_kernel",
                single_wave_threads(c), single_wave_64x64_shared_bytes(c));
        }
    }
    return list;
}

static std::vector<double> cost_inputs(const Problem& p, const Choice& choice,
                                       const DeviceProperties& device) {
    const LearnedInputs x =
        learned_inputs(choice, p, device.sm_count, cycles_of(choice, p, device.sm_count));
    return {x.begin(), x.end()};
}

static const bool registered = register_op("gemm", "gemm", &kernels, &unsupported, &choose) &&
                               register_candidates("gemm", &candidates) &&
                               register_cost_inputs("gemm", &cost_inputs);

}  // namespace thunderkittens::gemm
