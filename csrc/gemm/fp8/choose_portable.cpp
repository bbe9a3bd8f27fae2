// Which tiles the portable kernel has for which fp8 problem: a pure function of the problem and the
// device.
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/fp8/portable.h"

namespace thunderkittens::fp8_gemm {
namespace {

double tiles_of(const Config& c, const Problem& p) {
    const double more = p.grouped ? double(p.groups) : 0;  // groups end within tiles
    return (double(ceil_div(p.m, c.block_m)) + more) * double(ceil_div(p.n, c.block_n));
}

}  // namespace

std::string portable_name(const Config& c) {
    const char* const kind = c.sums == Sums::promoted ? "_blockwise" : "";
    return concat(name_of(c.a_dtype), '_', name_of(c.b_dtype), kind, '_', c.block_m, 'x', c.block_n,
                  "_portable");
}

Choice choose_portable(const Problem& p, const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::portable};
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const Config c = portable_config_at(i);
        if (c.a_dtype != p.a_dtype || c.b_dtype != p.b_dtype) continue;
        if ((c.sums == Sums::promoted) != p.blockwise) continue;
        // What the multiprocessor with the most tiles has to do; and of each tile, beside its
        // products, to fill the ring and to store, in steps of k.
        const double most = std::ceil(tiles_of(c, p) / std::max(1, device.sm_count));
        const double cost = most * c.block_m * c.block_n * (double(ceil_div(p.k, BLOCK_K)) + 4) /
                            PORTABLE_SHAPES[i / 3].rate;
        if (cost >= least) continue;
        least = cost;
        choice.config = c;
    }
    choice.schedule = {.raster_group = 1, .blocks = int(std::min(tiles_of(choice.config, p), 2e9))};
    return choice;
}

std::string unsupported_portable(const Problem& p, const DeviceProperties& device) {
    const Config c = choose_portable(p, device).config;
    return gemm::unsupported_resources(tiles_of(c, p), portable_bytes(c), device);
}

std::vector<KernelInfo> portable_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const Config c = portable_config_at(i);
        list.push_back(
            {.name = portable_name(c),
             .config = concat("tile ", c.block_m, 'x', c.block_n, 'x', BLOCK_K, ", ", c.stages,
                              " stages, ", loop_config(c).warps(), " warps, no roles"),
             .symbol = symbol_of("fp8_portable_kernel", "Config", c),
             .arch = PORTABLE,
             .threads = loop_config(c).threads(),
             .shared_bytes = portable_bytes(c)});
    }
    return list;
}

}  // namespace thunderkittens::fp8_gemm
