// Which tiles the portable kernel has for which grouped problem: a pure function of the problem and
// the device.
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

// Groups end within tiles: each has one more than its size says.
double tiles_of(const gemm::PortableConfig& c, const Problem& p) {
    const double m = double(ceil_div(p.m, c.block_m)), n = double(ceil_div(p.n, c.block_n));
    switch (Grouped(p.grouped)) {
        case Grouped::rows: return (m + double(p.groups)) * n;
        case Grouped::columns: return m * (n + double(p.groups));
        case Grouped::k: return m * n * double(p.groups);
    }
    return 0;
}

Choice choice_of(const gemm::PortableConfig& c, const Problem& p) {
    return {.config = gemm::choice_config(c),
            .blocks = int(std::min(tiles_of(c, p), 2e9)),
            .portable = true};
}

// In units of products of 64 of k.
double cost_of(const gemm::PortableConfig& c, const Problem& p, const DeviceProperties& device) {
    const double rate = c.block_m == 128 ? 1 : 0.55;
    const double parts = Grouped(p.grouped) == Grouped::k ? double(p.groups) : 1;
    const double steps = std::ceil(double(p.k) / parts / gemm::BLOCK_K) + 6;
    // What the multiprocessor with the most tiles has to do.
    const double most = std::ceil(tiles_of(c, p) / std::max(1, device.sm_count));
    return most * c.block_m * c.block_n * steps / rate;
}

bool is_for(const gemm::PortableConfig& c, const Problem& p, const DeviceProperties& device) {
    const Order order = portable_order(Grouped(p.grouped), p.b_n_major);
    return c.dtype == p.dtype && c.a_m_major == order.a_m_major && c.b_n_major == order.b_n_major &&
           gemm::portable_shared_bytes(c) <= device.shared_bytes_per_block;
}

}  // namespace

std::vector<Choice> portable_candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const gemm::PortableConfig c = portable_config_at(i);
        if (!is_for(c, p, device)) continue;
        const double cost = cost_of(c, p, device);
        list.insert(cost < least ? list.begin() : list.end(), choice_of(c, p));
        least = std::min(least, cost);
    }
    return list;
}

Choice choose_portable(const Problem& p, const DeviceProperties& device) {
    const std::vector<Choice> list = portable_candidates(p, device);
    return list.empty() ? Choice{.portable = true} : list[0];
}

std::string unsupported_portable(const Problem& p, const DeviceProperties& device) {
    const gemm::PortableConfig c = gemm::portable_config(choose_portable(p, device).config);
    const gemm::PortableConfig smallest = portable_config_at(PORTABLE_CONFIGS - 1);
    return gemm::unsupported_resources(c.block_m == 0 ? 0 : tiles_of(c, p),
                                       gemm::portable_shared_bytes(c.block_m == 0 ? smallest : c),
                                       device);
}

std::vector<KernelInfo> portable_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        const gemm::PortableConfig c = portable_config_at(i);
        const Choice choice{.config = gemm::choice_config(c), .portable = true};
        list.push_back(
            {.name = kernel_name(choice),
             .config = concat("tile ", c.block_m, 'x', c.block_n, 'x', gemm::BLOCK_K, ", ",
                              c.stages, " stages, ", c.warps(), " warps, no roles"),
             .symbol = symbol_of("grouped_portable_kernel", "PortableConfig", c),
             .arch = PORTABLE,
             .threads = c.threads(),
             .shared_bytes = gemm::portable_shared_bytes(c)});
    }
    return list;
}

}  // namespace thunderkittens::grouped_gemm
