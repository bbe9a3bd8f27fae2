// Which kernel multiplies which problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/dense/cost.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/dense/portable.h"

namespace thunderkittens::gemm {
namespace {

Schedule schedule_for(const Config& config, const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count), clusters = clusters_of(config, sm_count);
    const int64_t rows = ceil_div(p.m, height_of(config)), columns = ceil_div(p.n, config.block_n);
    Schedule schedule;
    // With few rows of tiles all of them use b at about the same time, and it need not stay in L2.
    // A much larger b is read at the same speed either way.
    const double b_bytes = 2.0 * double(p.n) * double(p.k), l2_bytes = device.l2_bytes;
    schedule.evict_first_b =
        p.m <= 512 && p.batch == 1 && b_bytes * 4 >= l2_bytes && b_bytes <= l2_bytes * 4;
    const int64_t tiles = rows * columns, all = p.batch * tiles;
    schedule.blocks = static_cast<int>(std::min<int64_t>(all, clusters)) * config.cluster_m;
    // A block for each tile: one raster group, and the grid has the shape of the tiles.
    schedule.raster_group = static_cast<int>(rows);
    if (all <= clusters) return schedule;
    // Whole products of a batch at a time, where that takes no more waves: their tiles read the
    // same rows and columns together.
    const int64_t whole = clusters / tiles * tiles;
    if (p.batch > 1 && whole * 16 >= clusters * 15 &&
        ceil_div(all, whole) == ceil_div(all, clusters)) {
        schedule.blocks = static_cast<int>(whole) * config.cluster_m;
    }
    // The tiles at work at a time form a square of elements, in raster groups of equal height.
    const double height = std::sqrt(double(clusters) * config.block_n / double(height_of(config)));
    const double raster_groups = std::round(double(rows) / height);
    schedule.raster_group =
        static_cast<int>(ceil_div(rows, std::max<int64_t>(1, int64_t(raster_groups))));
    const Widths widths = two_widths(config, p, sm_count);
    schedule.columns = widths.columns, schedule.extra_rows = widths.extra_rows;
    return schedule;
}

// The choice of a configuration, without balanced tiling at run-time widths, split-K and stream-K.
Choice tiled_choice(const Config& config, const Problem& p, const DeviceProperties& device) {
    Choice choice{.config = config, .schedule = schedule_for(config, p, device)};
    if (has_epilogue_warps(config) && p.out_dtype == p.dtype) {
        choice.schedule.store_interval = store_interval_for(p);
    }
    // As far as the problem tells.
    choice.kernel = preferred_kernel(config);
    const Params params{.m = p.m,
                        .n = p.n,
                        .k = p.k,
                        .batch = p.batch,
                        .out_stride = p.n,
                        .out_dtype = p.out_dtype,
                        .schedule = choice.schedule};
    if (!allows(choice, params)) choice.kernel = kernel_of(config);
    return choice;
}

// Skinny m: what counts is how fast b is read. With swap-AB a block reads its columns of b once.
bool is_skinny(const Problem& p) { return p.m <= 64 && p.batch == 1 && !p.a_m_major; }
// More rows, but few tiles and a long k: the same swap-AB kernel, with split-K over clusters.
bool is_skinny_with_long_k(const Problem& p, int sm_count) {
    const int64_t tiles = ceil_div(p.m, 64) * ceil_div(p.n, 64);
    return p.m <= 256 && p.batch == 1 && !p.a_m_major && !p.fused && p.k >= 4096 &&
           tiles * 32 <= int64_t{sm_count} * 7;
}

Choice swap_ab_choice(const SwapAbShape& shape, int splits, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::swap_ab, .config = make_config(shape, p.dtype, p.b_n_major)};
    const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t clusters = std::max(1, device.sm_count / splits);
    const int64_t waves = ceil_div(tiles, clusters);
    choice.schedule.splits = splits;
    choice.schedule.blocks = static_cast<int>(ceil_div(tiles, waves) * splits);
    // A weight of many times the L2 cache is read faster without the evict-first hint.
    choice.schedule.evict_first_b =
        p.fused || 2.0 * double(p.n) * double(p.k) <= 6.0 * device.l2_bytes;
    return choice;
}

Choice choose_swap_ab(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const SwapAbShape* shape = nullptr;
    for (const SwapAbShape& candidate : SWAP_AB_SHAPES) {
        if (candidate.fused != p.fused) continue;
        shape = &candidate;
        if (candidate.block_m >= p.m) break;
    }
    const int64_t tiles = ceil_div(p.m, shape->block_m) * ceil_div(p.n, shape->block_n);
    const int64_t k_blocks = ceil_div(p.k, shape->block_k);
    // Half of the SMs read as fast as all do. Below that, split-K over a cluster, as long as each
    // block still has some steps. With several rows of tiles a block reads more than b.
    const double enough = p.m <= 64 ? 0.4 : 0.45;
    int splits = 1;
    while (splits < 8 && double(tiles * splits) < sm_count * enough && k_blocks >= splits * 2 * 2) {
        splits *= 2;
    }
    // Three blocks, where two would leave half of the SMs idle: with many rows the reduction
    // profits, and with a fused epilogue, which has fewer bytes in flight, reading does. The fused
    // kernel also splits a long k sooner.
    const bool three = p.fused || p.m > (p.b_n_major ? 32 : 16);
    if (splits == 2 && three && tiles * 4 <= sm_count && k_blocks >= 3 * 2) splits = 3;
    if (splits == 1 && p.fused && tiles * 2 <= sm_count && k_blocks >= 128) splits = 2;
    return swap_ab_choice(*shape, splits, p, device);
}

Choice cluster_tile_choice(const ClusterTile& tile, const Problem& p) {
    Choice choice{.kernel = Kernel::cluster_tile,
                  .config = cluster_tile_config(*tile.shape, p.dtype, p.a_m_major, p.b_n_major)};
    Schedule& schedule = choice.schedule;
    schedule.splits = tile.splits, schedule.per_sm = tile.per_sm;
    schedule.share_m = tile.share_m, schedule.share_n = tile.share_n;
    schedule.blocks =
        static_cast<int>(std::min<int64_t>(tile.blocks(p), std::numeric_limits<int>::max()));
    return choice;
}

// A short k is one that the kernel reads in few steps.
constexpr int64_t MOST_SHORT_K = 512;
constexpr TileShape SHORT_K_SHAPES[] = {tile_shape(64, 64), tile_shape(64, 128)};
Choice short_k_choice(const TileShape& shape, const Problem& p) {
    Choice choice{.kernel = Kernel::short_k,
                  .config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major)};
    choice.schedule.blocks =
        static_cast<int>(p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n));
    return choice;
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype == DType::fp32) {
        return "operands must be bf16 or fp16, got fp32; convert them, or use torch.matmul";
    }
    if (std::string reason = unsupported_sizes(p.m, p.n, p.k, "batch", p.batch); !reason.empty())
        return reason;
    if (!runs_native(device)) return unsupported_portable(p, device);
    const Choice choice = choose(p, device);
    const double tiles = double(p.batch) * double(ceil_div(p.m, choice.config.block_m)) *
                         double(ceil_div(p.n, choice.config.block_n));
    const int bytes = choice.kernel == Kernel::split_k   ? SPLIT_K_SHARED_BYTES
                      : choice.kernel == Kernel::short_k ? short_k_shared_bytes(choice.config)
                                                         : shared_bytes(choice.config);
    return unsupported_resources(tiles, bytes, device);
}

Choice choose_fixed_width(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    if (is_skinny(p) || is_skinny_with_long_k(p, sm_count)) return choose_swap_ab(p, device);
    Config best;
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&](const TileShape& shape) {
        const Config config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused);
        const double needed = fixed_width_cycles(config, p, sm_count);
        if (needed < least) best = config, least = needed;
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) consider(shape);
    }
    // With a short k, reading and writing count for more than full waves.
    if (!p.fused && !p.a_m_major && p.k >= 1536) {
        if (p.b_n_major) {
            consider(NN_SHAPE);
        } else {
            for (const TileShape& shape : NT_SHAPES) consider(shape);
        }
    }
    return tiled_choice(best, p, device);
}

namespace {

Choice balanced_choice(const Config& config, const BalancedTiles& tiles, const Problem& p,
                       const DeviceProperties& device) {
    Choice choice{
        .kernel = Kernel::balanced, .config = config, .schedule = schedule_for(config, p, device)};
    choice.schedule.columns = tiles.columns, choice.schedule.extra_rows = tiles.extra_rows;
    const int64_t all = ceil_div(p.m, height_of(config)) * tiles.columns + tiles.extra_rows;
    const int clusters = clusters_of(config, std::max(1, device.sm_count));
    choice.schedule.blocks = static_cast<int>(std::min<int64_t>(all, clusters)) * config.cluster_m;
    return choice;
}

Choice split_k_choice(const TileShape& shape, int splits, int blocks, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::split_k,
                  .config = make_config(shape, p.dtype, false, p.b_n_major)};
    choice.schedule = schedule_for(choice.config, p, device);
    choice.schedule.splits = splits, choice.schedule.blocks = blocks;
    return choice;
}

// Balanced tiling with run-time widths where it pays, else the best fixed width; and the cycles.
std::pair<Choice, double> choose_unsplit(const Problem& p, const DeviceProperties& device) {
    const Choice choice = choose_fixed_width(p, device);
    const int sm_count = std::max(1, device.sm_count);
    const double fixed = fixed_width_cycles(choice.config, p, sm_count);
    if (choice.kernel == Kernel::swap_ab || !is_rounded(p)) return {choice, fixed};
    const Config config = balanced_config(p.dtype, p.b_n_major);
    const BalancedTiles tiles = balance_tiles(config, p, sm_count);
    if (tiles.cycles > 0.985 * fixed) return {choice, fixed};
    return {balanced_choice(config, tiles, p, device), tiles.cycles};
}

// Whether 64 rows are one wave of whole tiles of 64 x 64, with a long k: that wave reads b as fast
// as swap-AB's blocks do, if these do not divide k, and stores sooner.
bool fills_single_wave(const Problem& p, int sm_count) {
    return !p.fused && p.m == 64 && p.n % 64 == 0 && p.n / 64 <= sm_count && p.k >= 2048 &&
           p.out_dtype == p.dtype;
}

// Two rows of tiles of 64 x 128 in one wave, with a long k: the blocks of both rows share the tiles
// of b by multicast, and two beside each other those of a, where clusters of four leave as many SMs
// as there are tiles.
ClusterTile two_rows(const Choice& unsplit, const Problem& p, int sm_count) {
    const TileShape& shape = CLUSTER_TILE_SHAPES[1];
    const int64_t tiles = 2 * ceil_div(p.n, shape.block_n);
    const bool is_pair = unsplit.kernel == Kernel::one_consumer &&
                         unsplit.config.block_n == shape.block_n && p.batch == 1 && p.m > 64 &&
                         p.m <= 128 && p.k >= 2048 && tiles <= sm_count;
    if (!is_pair) return {};
    const bool four = round_up(tiles, 4) <= sm_count - std::lround(FIT.lost_by_4);
    return {.shape = &shape, .share_m = 2, .share_n = four ? 2 : 1};
}

// Where all rows begin at lines, and sums are only rounded, or m is skinny.
Choice cheapest_in_lines(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const auto [unsplit, whole] = choose_unsplit(p, device);
    SplitKTiles tiles;
    if (unsplit.kernel != Kernel::swap_ab && is_rounded(p) && p.m >= 128) {
        const SplitKTiles split_k = split_k_tiles(p, sm_count);
        const SplitKTiles stream_k =
            stream_k_tiles(p, sm_count, 0.97 * std::min(whole, split_k.cycles));
        tiles = stream_k.shape != nullptr ? stream_k : split_k;
    }
    const ClusterTile cluster = best_cluster_in_lines(p, sm_count);
    if (unsplit.kernel == Kernel::swap_ab) {
        // So few tiles that a cluster for each reads as fast as swap-AB, and ends sooner.
        const int64_t few = ceil_div(p.m, 64) * ceil_div(p.n, 64) * MAX_CLUSTER_BLOCKS;
        const bool small =
            cluster.splits > 1 && few <= sm_count && p.k >= 512 && p.gate == Gate::none;
        if (small) return cluster_tile_choice(cluster, p);
        const bool single = unsplit.schedule.splits == 1 && fills_single_wave(p, sm_count);
        if (!single) return unsplit;
        return tiled_choice(make_config(tile_shape(64, 64), p.dtype, false, p.b_n_major), p,
                            device);
    }
    if (const ClusterTile pair = two_rows(unsplit, p, sm_count); pair.shape != nullptr) {
        return cluster_tile_choice(pair, p);
    }
    // By which another kernel has to be cheaper.
    constexpr double margin = 0.97;
    if (cluster.cycles < margin * std::min(whole, tiles.cycles)) {
        return cluster_tile_choice(cluster, p);
    }
    if (tiles.shape == nullptr || tiles.cycles > margin * whole) return unsplit;
    return split_k_choice(*tiles.shape, tiles.splits, tiles.blocks, p, device);
}

// Every split-K and stream-K schedule of a problem.
template <typename Add>
void add_split_k(const Problem& p, const DeviceProperties& device, Add&& add) {
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    for (const TileShape& shape : SPLIT_K_SHAPES) {
        const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        for (int splits = 2; p.m >= shape.block_m && splits <= StreamKSegments::MAX_PEERS;
             ++splits) {
            const bool split_k = tiles * splits <= device.sm_count;
            if (split_k ? steps < 4 * splits : tiles >= 2 * device.sm_count) continue;
            const auto blocks =
                static_cast<int>(split_k ? tiles * splits : device.sm_count / splits * splits);
            if (!split_k &&
                make_peer_group(blocks, splits, static_cast<int>(tiles)).whole_tiles > 1)
                continue;
            if (make_stream_k_segments(blocks, splits, tiles, steps).groups == 0) continue;
            add(split_k_choice(shape, splits, blocks, p, device));
        }
    }
}

// Visits every compiled kernel that computes the problem, with each way to divide it.
template <typename Add>
void for_each_candidate(const Problem& p, const DeviceProperties& device, Add&& add) {
    const auto add_tiles = [&](const TileShape& shape, int cluster_m = 1) {
        Config config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused);
        config.cluster_m = cluster_m;
        Choice choice = tiled_choice(config, p, device);
        add(choice);
        choice.schedule.columns = choice.schedule.extra_rows = 0;
        add(choice);
        add({kernel_of(config), config, choice.schedule});
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) add_tiles(shape);
    }
    for (std::size_t i = 0; !p.fused && i < CLUSTER_SHAPES; ++i) add_tiles(TILE_SHAPES[i], 2);
    for_each_cluster_tile(p, device.sm_count,
                          [&](const ClusterTile& tile) { add(cluster_tile_choice(tile, p)); });
    for (const TileShape& shape : SHORT_K_SHAPES) {
        if (fits_short_k(p) && p.k <= MOST_SHORT_K) add(short_k_choice(shape, p));
    }
    if (p.a_m_major) return;
    if (!p.fused && p.b_n_major) add_tiles(NN_SHAPE);
    if (!p.fused && !p.b_n_major) {
        for (const TileShape& shape : NT_SHAPES) add_tiles(shape);
    }
    if (p.batch > 1) return;
    for (const SwapAbShape& shape : SWAP_AB_SHAPES) {
        const bool holds = p.m <= shape.block_m || (shape.block_m == 64 && p.m <= 256);
        if (shape.fused != p.fused || !holds) continue;
        for (const int splits : {1, 2, 3, 4, 8}) {
            if (splits == 1 || ceil_div(p.k, shape.block_k) >= 2 * splits) {
                add(swap_ab_choice(shape, splits, p, device));
            }
        }
    }
    // What their kernels compute, see allows().
    if (p.fused || p.n % 8 != 0 || p.out_dtype != p.dtype) return;
    for (const int cluster_m : {1, 2}) {
        Config balanced = balanced_config(p.dtype, p.b_n_major);
        balanced.cluster_m = cluster_m;
        const BalancedTiles found = balance_tiles(balanced, p, std::max(1, device.sm_count));
        const int64_t steps = ceil_div(p.k, BLOCK_K);
        if (found.columns > 0 && steps >= (balanced.block_n + 63) / 64) {
            add(balanced_choice(balanced, found, p, device));
        }
    }
    add_split_k(p, device, add);
}

Choice cheapest(const Problem& p, const DeviceProperties& device, bool counts_short_k = true) {
    if (!runs_native(device)) return choose_portable(p, device);
    const bool is_tuned = in_lines(p) || (begins_at_lines(p) && is_skinny(p));
    if (is_tuned) return cheapest_in_lines(p, device);
    const Config usual =
        make_config(tile_shape(128, 128), p.dtype, p.a_m_major, p.b_n_major, p.fused);
    Choice best = tiled_choice(usual, p, device);
    double least = std::numeric_limits<double>::infinity();
    for_each_candidate(p, device, [&](const Choice& choice) {
        if (choice.kernel == Kernel::short_k && !counts_short_k) return;
        const double cycles = fitted_cycles(choice, p, std::max(1, device.sm_count));
        if (cycles < least) best = choice, least = cycles;
    });
    return best;
}

}  // namespace

// A model calls the same products again and again, and a comparison of all kernels takes longer
// than a launch: each thread keeps the choices of its latest problems.
Choice choose(const Problem& p, const DeviceProperties& device) {
    struct Known {
        Problem problem{.m = -1};
        DeviceProperties device;
        Choice choice;
    };
    constexpr uint64_t entries = 64, mixer = 0x9e3779b97f4a7c15;
    thread_local Known known[entries];
    const auto sizes = static_cast<uint64_t>(p.m * 31 + p.n * 1009 + p.k * 65537 + p.batch * 7 +
                                             p.a_m_major * 3 + p.b_n_major * 5 + int(p.dtype));
    Known& entry = known[sizes * mixer >> 58];
    if (!(entry.problem == p && entry.device == device)) entry = {p, device, cheapest(p, device)};
    return entry.choice;
}

Choice choose_without_short_k(const Problem& p, const DeviceProperties& device) {
    return cheapest(p, device, false);
}

std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    if (!runs_native(device)) return portable_candidates(p, device);
    std::vector<Choice> list{choose(p, device)};
    for_each_candidate(p, device, [&](const Choice& choice) {
        if (std::find(list.begin(), list.end(), choice) == list.end()) list.push_back(choice);
    });
    return list;
}

Choice choose_masked(const Problem& p, const DeviceProperties& device) {
    return {.config = masked_config(), .schedule = schedule_for(masked_config(), p, device)};
}

void follow_forced(Choice& choice, const Choice& before, bool kernel_is_forced) {
    // A tile that is forced is that of a kernel that has it.
    Config& config = choice.config;
    const auto listed = [&] {
        for (std::size_t i = 0; i < CONFIGS; ++i) {
            if (config_at(i) == config) return true;
        }
        return false;
    };
    if (config != before.config && config.cluster_tile && !listed()) config.cluster_tile = false;
    const bool same_split = choice.kernel == Kernel::split_k && choice.config == before.config;
    const bool stays = same_split || choice.kernel == Kernel::portable;
    if (!kernel_is_forced && !stays) choice.kernel = preferred_kernel(choice.config);
    const Kernel kernel = choice.kernel;
    const bool splits_k =
        kernel == Kernel::split_k || kernel == Kernel::cluster_tile || kernel == Kernel::swap_ab;
    int& splits = choice.schedule.splits;
    splits = splits_k ? std::max(1, splits) : 1;
    int &share_m = choice.schedule.share_m, &share_n = choice.schedule.share_n;
    if (kernel != Kernel::cluster_tile || share_m * share_n * splits > MAX_CLUSTER_BLOCKS) {
        share_m = share_n = 1;
    }
    const int cluster = splits * choice.config.cluster_m;
    choice.schedule.blocks = (choice.schedule.blocks + cluster - 1) / cluster * cluster;
}

}  // namespace thunderkittens::gemm
