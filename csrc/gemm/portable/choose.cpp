// Which tiles the portable kernel has for which problem: a pure function of the problem and the
// device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/dense/portable.h"

namespace thunderkittens::gemm {
namespace {

PortableConfig config_of(const PortableShape& s, const Problem& p) {
    return {.block_m = s.block_m,
            .block_n = s.block_n,
            .stages = s.stages,
            .warps_m = s.warps_m,
            .warps_n = s.warps_n,
            .dtype = p.dtype,
            .a_m_major = p.a_m_major,
            .b_n_major = p.b_n_major};
}

// Of the output, of which a gate takes two columns of b.
int64_t tiles_of(const PortableShape& s, const Problem& p) {
    return p.batch * ceil_div(p.m, s.block_m) * ceil_div(p.n, s.block_n);
}

// Blocks that a multiprocessor holds at a time, whose shared memory is 1 KB more than a block can
// have, and of which each block takes 1 KB for the system; two of four warps fill the registers.
int blocks_per_sm(const PortableConfig& c, const DeviceProperties& device) {
    const int most = c.warps() > 4 ? 1 : c.warp_m() * c.warp_n() > 2048 ? 2 : 4;
    const int fit = (device.shared_bytes_per_block + 1024) / (portable_shared_bytes(c) + 1024);
    return std::min(most, fit);
}

// What a problem takes, in units of what the first shape takes for 64 of k of a multiprocessor's
// share of the output.
double cost_of(const PortableShape& s, const Problem& p, const DeviceProperties& device) {
    // What a block does beside its products, in steps of k: to fill the ring, and to store.
    constexpr double apart = 6;
    const int sm_count = std::max(1, device.sm_count);
    const int at_a_time = blocks_per_sm(config_of(s, p), device);
    const double work =
        double(s.block_m * s.block_n) / (128 * 256) * (double(ceil_div(p.k, BLOCK_K)) + apart);
    // The rate grows with the blocks that a multiprocessor works at.
    const auto rate = [&](double blocks) {
        const double share = at_a_time == 1 ? 1 : (blocks - 1) / (at_a_time - 1);
        return s.alone + (s.full - s.alone) * std::clamp(share, 0.0, 1.0);
    };
    const int64_t tiles = tiles_of(s, p), wave = int64_t{sm_count} * at_a_time;
    const int64_t rest = tiles % wave;
    const auto last = double(ceil_div(rest, sm_count));
    return work * (double(tiles / wave) * at_a_time / rate(at_a_time) +
                   (rest == 0 ? 0 : last / rate(last)));
}

Choice choice_of(const PortableShape& s, const Problem& p, const DeviceProperties& device) {
    const PortableConfig c = config_of(s, p);
    Choice choice{.kernel = Kernel::portable, .config = choice_config(c)};
    const int64_t rows = ceil_div(p.m, s.block_m), tiles = tiles_of(s, p);
    choice.schedule.blocks =
        static_cast<int>(std::min<int64_t>(tiles, std::numeric_limits<int>::max()));
    choice.schedule.per_sm = blocks_per_sm(c, device);
    // The tiles at work at a time form a square of elements, in raster groups of equal height.
    const double wave = double(std::max(1, device.sm_count)) * choice.schedule.per_sm;
    const double height = std::sqrt(wave * s.block_n / double(s.block_m));
    const auto groups = std::max<int64_t>(1, std::llround(double(rows) / height));
    choice.schedule.raster_group = static_cast<int>(ceil_div(rows, groups));
    return choice;
}

bool fits(const PortableShape& s, const Problem& p, const DeviceProperties& device) {
    return portable_shared_bytes(config_of(s, p)) <= device.shared_bytes_per_block;
}

}  // namespace

Choice choose_portable(const Problem& p, const DeviceProperties& device) {
    const PortableShape* best = &PORTABLE_SHAPES[std::size(PORTABLE_SHAPES) - 1];
    double least = std::numeric_limits<double>::infinity();
    for (const PortableShape& shape : PORTABLE_SHAPES) {
        if (!fits(shape, p, device)) continue;
        const double cost = cost_of(shape, p, device);
        if (cost < least) best = &shape, least = cost;
    }
    return choice_of(*best, p, device);
}

std::string unsupported_portable(const Problem& p, const DeviceProperties& device) {
    const PortableConfig c = portable_config(choose_portable(p, device).config);
    const double tiles =
        double(p.batch) * double(ceil_div(p.m, c.block_m)) * double(ceil_div(p.n, c.block_n));
    return unsupported_resources(tiles, portable_shared_bytes(c), device);
}

std::vector<Choice> portable_candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list{choose_portable(p, device)};
    for (const PortableShape& shape : PORTABLE_SHAPES) {
        const Choice choice = choice_of(shape, p, device);
        if (fits(shape, p, device) && !(choice == list[0])) list.push_back(choice);
    }
    return list;
}

}  // namespace thunderkittens::gemm
