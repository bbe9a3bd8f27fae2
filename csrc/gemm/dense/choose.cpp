// Which kernel multiplies which problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/common/latest_choices.h"
#include "csrc/gemm/common/limits.h"
#include "csrc/gemm/dense/dispatch.h"
#include "csrc/gemm/dense/learned_cost.h"
#include "csrc/gemm/dense/portable.h"

namespace thunderkittens::gemm {
namespace {

// Epilogue warps: the steps of k between the four subtiles that a consumer hands to them. With a
// short k the consumers would wait for the epilogue warps; for fp16, whose activation formulas are
// longer, sooner than for bf16.
int store_interval_for(const Problem& p) {
    const int64_t steps = ceil_div(p.k, BLOCK_K), least = p.dtype == DType::bf16 ? 48 : 64;
    return steps < least ? 0 : static_cast<int>(std::min<int64_t>(steps / 5, 32));
}

// Balanced tiling with two fixed widths, where the kernel has it and it pays.
Widths widths_of(const Config& config, const Problem& p, int sm_count) {
    if (!has_two_widths(config) || p.batch > 1 || p.out_dtype != p.dtype) return {};
    // A gate allows two widths only with epilogue warps.
    if (p.gate != Gate::none && store_interval_for(p) == 0) return {};
    const bool halves = p.gate == Gate::blocked;
    const int width = halves ? config.block_n / 2 : config.block_n;
    const int64_t n = halves ? p.n / 2 : p.n;
    const Widths widths = two_widths(config.block_m, width, p.m, n, sm_count);
    if (!p.b_n_major) return widths;
    if (cover_too_much<int64_t>(widths.columns, n, width)) return {};
    // With many rows of tiles the narrower loads cost most of what the balance brings, where nearly
    // all tiles are narrow.
    const int64_t rows = ceil_div(p.m, config.block_m);
    const bool all_narrow = wide_tiles(n, widths.columns, width) == 0;
    return rows >= 16 && all_narrow && widths.share * 1.055 > 0.985 ? Widths{} : widths;
}

Schedule schedule_for(const Config& config, const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const int64_t rows = ceil_div(p.m, config.block_m), columns = ceil_div(p.n, config.block_n);
    Schedule schedule;
    // With few rows of tiles all of them use b at about the same time, and it need not stay in L2.
    // A much larger b is read at the same speed either way.
    const double b_bytes = 2.0 * double(p.n) * double(p.k), l2_bytes = device.l2_bytes;
    schedule.evict_first_b =
        p.m <= 512 && p.batch == 1 && b_bytes * 4 >= l2_bytes && b_bytes <= l2_bytes * 4;
    const int64_t tiles = rows * columns, all = p.batch * tiles;
    schedule.blocks = static_cast<int>(std::min<int64_t>(all, sm_count));
    // A block for each tile: one raster group, and the grid has the shape of the tiles.
    schedule.raster_group = static_cast<int>(rows);
    if (all <= sm_count) return schedule;
    // Whole products of a batch at a time, where that takes no more waves: their tiles read the
    // same rows and columns together.
    const int64_t whole = sm_count / tiles * tiles;
    if (p.batch > 1 && whole * 16 >= sm_count * 15 &&
        ceil_div(all, whole) == ceil_div(all, sm_count)) {
        schedule.blocks = static_cast<int>(whole);
    }
    // The tiles at work at a time form a square of elements, in raster groups of equal height.
    const double height = std::sqrt(double(sm_count) * config.block_n / config.block_m);
    const double raster_groups = std::round(double(rows) / height);
    schedule.raster_group =
        static_cast<int>(ceil_div(rows, std::max<int64_t>(1, int64_t(raster_groups))));
    const Widths widths = widths_of(config, p, sm_count);
    schedule.columns = widths.columns, schedule.extra_rows = widths.extra_rows;
    return schedule;
}

}  // namespace

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

namespace {

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

// Every way to divide a problem into cluster tiles.
template <typename Add>
void add_cluster_tiles(const Problem& p, int sm_count, Add&& add) {
    constexpr int most = MAX_CLUSTER_BLOCKS, grid_limit = 65535;
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    if (p.gate != Gate::none || p.batch > grid_limit / most) return;
    for (const TileShape& shape : CLUSTER_TILE_SHAPES) {
        const int64_t rows = ceil_div(p.m, shape.block_m), columns = ceil_div(p.n, shape.block_n);
        const int64_t tiles = p.batch * rows * columns;
        if (tiles < 1 || columns > grid_limit - most) continue;
        Choice choice{.kernel = Kernel::cluster_tile,
                      .config = cluster_tile_config(shape, p.dtype, p.a_m_major, p.b_n_major)};
        Schedule& schedule = choice.schedule;
        const int pairs = most_cluster_tiles_per_sm(choice.config);
        for (const int splits : {1, 2, 3, 4, 6, 8}) {
            if (splits > steps || (splits > 1 && tiles * splits > sm_count * pairs)) break;
            for (int share_m = 1; share_m * splits <= most && share_m < 2 * rows; share_m *= 2) {
                for (int share_n = 1; share_m * share_n * splits <= most && share_n < 2 * columns;
                     share_n *= 2) {
                    const int64_t blocks =
                        p.batch * round_up(rows, share_m) * round_up(columns, share_n) * splits;
                    schedule.blocks = static_cast<int>(
                        std::min<int64_t>(blocks, std::numeric_limits<int>::max()));
                    schedule.share_m = share_m, schedule.share_n = share_n;
                    schedule.splits = splits;
                    schedule.per_sm = blocks > sm_count ? pairs : 1;
                    add(choice);
                }
            }
        }
    }
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
    const int bytes = choice.kernel == Kernel::split_k        ? SPLIT_K_SHARED_BYTES
                      : choice.kernel == Kernel::runtime_tile ? RUNTIME_TILE_SHARED_BYTES
                      : choice.kernel == Kernel::short_k      ? short_k_shared_bytes(choice.config)
                                                              : shared_bytes(choice.config);
    return unsupported_resources(tiles, bytes, device);
}

namespace {

Choice split_k_choice(const TileShape& shape, int splits, int blocks, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.kernel = Kernel::split_k,
                  .config = make_config(shape, p.dtype, false, p.b_n_major)};
    choice.schedule = schedule_for(choice.config, p, device);
    choice.schedule.splits = splits, choice.schedule.blocks = blocks;
    return choice;
}

// Every split-K and stream-K schedule of a problem.
template <typename Add>
void add_split_k(const Problem& p, const DeviceProperties& device, Add&& add) {
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    if (p.batch > 1 || p.a_m_major || p.fused || p.n % 8 != 0 || p.out_dtype != p.dtype) return;
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

// Where all rows begin at lines of the L2 cache they are no faster than what there is. Of short
// products the start of the kernel, with its many loops, takes more than balance brings.
constexpr double LEAST_RUNTIME_TILE_CYCLES = 20000;

// A run-time tile in every cluster.
template <typename Add>
void add_runtime_tile(const RuntimeTile& tile, bool swap_ab, const Problem& p, int sm_count,
                      Add&& add) {
    const int64_t rows = ceil_div(swap_ab ? p.n : p.m, tile.block_rows()),
                  columns = ceil_div(swap_ab ? p.m : p.n, tile.block_width());
    Choice choice{.kernel = Kernel::runtime_tile,
                  .config = runtime_tile_config(tile, swap_ab, p.dtype, p.a_m_major, p.b_n_major)};
    if (runtime_tile_of(choice.config) != tile) return;
    const double square = std::sqrt(double(sm_count) * tile.block_width() / tile.block_rows());
    for (int down = 1; down <= MOST_RUNTIME_SHARE && down <= rows; down *= 2) {
        for (int along = 1; along <= MOST_RUNTIME_SHARE && along <= columns; along *= 2) {
            const int cluster = down * along;
            if (cluster > MAX_CLUSTER_BLOCKS) continue;
            const int sms = static_cast<int>(sms_for(cluster, sm_count));
            const int64_t clusters_down = ceil_div(rows, down),
                          all = p.batch * clusters_down * ceil_div(columns, along),
                          at_a_time = std::max(1, sms / cluster), waves = ceil_div(all, at_a_time);
            const int64_t used = waves < 3 ? ceil_div(all, waves) : at_a_time;
            const auto groups = std::max<int64_t>(
                1, std::llround(double(clusters_down) / std::max(1.0, square / down)));
            Schedule& s = choice.schedule;
            s.blocks = static_cast<int>(used * cluster);
            s.raster_group =
                static_cast<int>(waves == 1 ? clusters_down : ceil_div(clusters_down, groups));
            s.share_m = swap_ab ? along : down, s.share_n = swap_ab ? down : along;
            add(choice);
        }
    }
}
// Every size of a run-time tile, as wide as so many of them in a row need it.
template <typename Add>
void add_runtime_tiles(const Problem& p, const DeviceProperties& device, Add&& add) {
    const bool off_lines = std::min(p.a_alignment, p.b_alignment) < 128;
    if (!off_lines || p.fused || p.batch > 1 || p.n % 8 != 0 || p.out_dtype != p.dtype) return;
    const int sm_count = std::max(1, device.sm_count);
    for (const bool swap_ab : {false, true}) {
        const int64_t along = swap_ab ? p.m : p.n;
        for (const int rows : RUNTIME_TILE_ROWS) {
            for (const bool side_by_side : {false, true}) {
                const int tiles = side_by_side ? 2 : 1;
                const int64_t most = most_runtime_width(rows, side_by_side) * tiles;
                int width = 0;
                for (int64_t n = ceil_div(along, most); width != LEAST_RUNTIME_WIDTH; ++n) {
                    const int64_t needed = round_up(ceil_div(along, n * tiles), RUNTIME_WIDTH_STEP);
                    const int next = std::max(LEAST_RUNTIME_WIDTH, static_cast<int>(needed));
                    if (next != width)
                        add_runtime_tile({rows, next, side_by_side}, swap_ab, p, sm_count, add);
                    width = next;
                }
            }
        }
    }
}
// Whether a product may take long enough for them, at the speed of the tensor cores and of memory.
bool suits_runtime_tiles(const Problem& p, const DeviceProperties& device) {
    const double products = double(p.batch) * double(p.m) * double(p.n) * double(p.k) / 2048;
    return 3 * std::max(products / std::max(1, device.sm_count), bytes_of(p) / 2500) >
           LEAST_RUNTIME_TILE_CYCLES;
}

// Visits every compiled kernel that computes the problem, with each way to divide it; a simple one
// is told so.
template <typename Add>
void for_each_candidate(const Problem& p, const DeviceProperties& device, Add&& add) {
    for (std::size_t i = 0; i < std::size(TILE_SHAPES); ++i) {
        if (i >= (p.fused ? FUSED_SHAPES : PERSISTENT_SHAPES)) break;
        const Config config =
            make_config(TILE_SHAPES[i], p.dtype, p.a_m_major, p.b_n_major, p.fused);
        Choice choice = tiled_choice(config, p, device);
        add(choice);
        if (choice.kernel != kernel_of(config)) add({kernel_of(config), config, choice.schedule});
        if (choice.schedule.columns == 0) continue;
        choice.schedule.columns = choice.schedule.extra_rows = 0;
        add(choice);
    }
    const Config smallest = make_config(tile_shape(64, 64), p.dtype, p.a_m_major, p.b_n_major);
    const Choice single_wave = tiled_choice(smallest, p, device);
    if (!p.fused && single_wave.kernel == Kernel::single_wave_64x64) add(single_wave);
    add_cluster_tiles(p, std::max(1, device.sm_count), add);
    for (const TileShape& shape : SHORT_K_SHAPES) {
        if (fits_short_k(p) && p.k <= MOST_SHORT_K) add(short_k_choice(shape, p));
    }
    for (const SwapAbShape& shape : SWAP_AB_SHAPES) {
        if (p.a_m_major || p.batch > 1 || shape.fused != p.fused || p.m > shape.block_m) continue;
        for (const int splits : {1, 2, 3, 4, 8}) {
            if (splits == 1 || ceil_div(p.k, shape.block_k) >= 2 * splits) {
                add(swap_ab_choice(shape, splits, p, device));
            }
        }
    }
    add_split_k(p, device, add);
    if (suits_runtime_tiles(p, device)) add_runtime_tiles(p, device, add);
}

// `simple`: without those for a short k, which cannot count all strides, and through a workspace.
// The model of cost.h leaves out most candidates, and what is learned decides among the rest.
Choice cheapest(const Problem& p, const DeviceProperties& device, bool simple = false) {
    if (!runs_native(device)) return choose_portable(p, device);
    constexpr double NEAR = 1.4, MORE = 1500;
    const int sm_count = std::max(1, device.sm_count);
    struct Candidate {
        Choice choice;
        double cycles;
    };
    std::vector<Candidate> found;
    double least[] = {std::numeric_limits<double>::infinity(),
                      std::numeric_limits<double>::infinity()};
    const auto of_kind = [&](const Choice& choice) -> double& {
        return least[choice.kernel == Kernel::runtime_tile];
    };
    for_each_candidate(p, device, [&](const Choice& choice) {
        if (simple && (choice.kernel == Kernel::short_k || choice.kernel == Kernel::split_k))
            return;
        const double cycles = cycles_of(choice, p, sm_count);
        if (cycles > NEAR * of_kind(choice) + MORE) return;
        of_kind(choice) = std::min(of_kind(choice), cycles);
        found.push_back({choice, cycles});
    });
    const Candidate* best = nullptr;
    double shortest = std::numeric_limits<double>::infinity();
    for (const Candidate& candidate : found) {
        if (candidate.cycles > NEAR * of_kind(candidate.choice) + MORE) continue;
        const double cycles = expected_cycles(candidate.choice, p, sm_count, candidate.cycles);
        if (cycles < shortest) best = &candidate, shortest = cycles;
    }
    return best == nullptr ? Choice{} : best->choice;
}

}  // namespace

Choice choose(const Problem& p, const DeviceProperties& device) {
    const int64_t hash = p.m * 31 + p.n * 1009 + p.k * 65537 + p.batch * 7 + p.a_m_major * 3 +
                         p.b_n_major * 5 + int(p.dtype);
    const auto is_same = [](const Problem& a, const Problem& b) { return a == b; };
    return latest_choice<Choice>(
        p, device, hash, is_same,
        [](const Problem& x, const DeviceProperties& y) { return cheapest(x, y); });
}

Choice choose_simple(const Problem& p, const DeviceProperties& device) {
    return cheapest(p, device, true);
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
    const bool same_tile = choice.kernel == Kernel::runtime_tile && is_runtime_tile(choice.config);
    const bool stays = same_split || same_tile || choice.kernel == Kernel::portable;
    if (!kernel_is_forced && !stays) choice.kernel = preferred_kernel(choice.config);
    const Kernel kernel = choice.kernel;
    const bool splits_k =
        kernel == Kernel::split_k || kernel == Kernel::cluster_tile || kernel == Kernel::swap_ab;
    int& splits = choice.schedule.splits;
    splits = splits_k ? std::max(1, splits) : 1;
    int &share_m = choice.schedule.share_m, &share_n = choice.schedule.share_n;
    const bool clusters = kernel == Kernel::cluster_tile || kernel == Kernel::runtime_tile;
    if (!clusters || share_m * share_n * splits > MAX_CLUSTER_BLOCKS) {
        share_m = share_n = 1;
    }
    const int whole = kernel == Kernel::runtime_tile ? share_m * share_n : splits;
    choice.schedule.blocks = static_cast<int>(round_up(choice.schedule.blocks, whole));
}

}  // namespace thunderkittens::gemm
