// Which kernel multiplies which problem: pure functions of the problem and the device.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/common/balanced_tiles.h"
#include "csrc/gemm/dense/balanced_order.h"
#include "csrc/gemm/dense/single_wave.h"
#include "csrc/gemm/dense/split_k.h"

namespace thunderkittens::gemm {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a tile costs in clock cycles of an SM: block_m * block_n / 32 for its products of 64 steps
// of k at the tensor cores' full rate, times `per_product`, plus `fixed`, and `once` before
// the first product and after the last. Fitted to an H200: one consumer keeps the tensor cores less
// busy than two, and small tiles load more bytes per product.
struct TileCost {
    double per_product, fixed, once;
};
TileCost tile_cost(const TileShape& shape) {
    const int size = shape.block_m * shape.block_n;
    return {size >= 128 * 256   ? 1.0
            : size >= 128 * 224 ? 1.03
            : size >= 128 * 128 ? 1.05
            : size >= 128 * 112 ? 1.1
            : size >= 64 * 128  ? 1.32
                                : 2.16,
            600, 2500 + 0.12 * size};
}

// Steps between the four parts of a tile that are handed over. Where k is short the consumers would
// wait for the warps that finish, for fp16, whose activations are longer, more so.
int spacing_for(const Problem& p) {
    const int64_t steps = ceil_div(p.k, BLOCK_K), least = p.dtype == DType::bf16 ? 48 : 64;
    return steps < least ? 0 : static_cast<int>(std::min<int64_t>(steps / 5, 32));
}

// Tiles of two widths, where the kernel has them.
Widths two_widths(const Config& config, const Problem& p, int sm_count) {
    if (!has_two_widths(config) || p.batch > 1 || p.out_dtype != p.dtype) return {};
    // With a gate, where warps beside the one that loads finish tiles.
    if (p.gate != Gate::none && spacing_for(p) == 0) return {};
    const bool halves = p.gate == Gate::blocked;
    const int width = halves ? config.block_n / 2 : config.block_n;
    const int64_t n = halves ? p.n / 2 : p.n;
    Widths widths = gemm::two_widths(config.block_m, width, p.m, n, sm_count);
    if (p.b_n_major && cover_too_much<int64_t>(widths.columns, n, width)) return {};
    // With many rows that costs most of what it brings where nearly all tiles are narrow.
    const int64_t rows = ceil_div(p.m, config.block_m), fewer = rows - widths.longer;
    const int64_t wide = fewer * wide_tiles(n, widths.columns, width) +
                         widths.longer * wide_tiles(n, widths.columns + 1, width);
    if (p.b_n_major && rows >= 16 && wide * 10 < rows * widths.columns) {
        widths.share *= 1.055;
        if (wide == 0 && widths.share > 0.985) return {};
    }
    return widths;
}

// Cycles that the GPU needs with tiles of this shape: rounds of one tile per SM.
double cycles(const TileShape& shape, const Config& config, const Problem& p, int sm_count) {
    const int64_t tiles = p.batch * ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t rounds = ceil_div(tiles, sm_count);
    const TileCost cost = tile_cost(shape);
    const double steps = static_cast<double>(std::max<int64_t>(1, ceil_div(p.k, BLOCK_K)));
    const double tile = steps * shape.block_m * shape.block_n / 32 * cost.per_product;
    return rounds * (tile * two_widths(config, p, sm_count).share + cost.fixed) + cost.once;
}

// Tiles whose widths are chosen for the problem: how many, and what they need.
struct VariedTiles {
    int columns = 0, longer = 0;
    double cycles = std::numeric_limits<double>::infinity();
};

// What a tile of a width costs, in columns of one of 256: rows of a are loaded for fewer.
double column_cost(int64_t width) { return std::max(double(width), 0.6 * double(width) + 91); }

// The columns that an SM computes at most.
double varied_load(const Config& config, int64_t rows, int64_t n, int64_t columns, int64_t longer,
                   int sm_count) {
    const int64_t unit = varied_unit(config), tiles = rows * columns + longer;
    const Shares fewer = share_columns(config, n, columns),
                 more = share_columns(config, n, columns + 1);
    const double narrow = column_cost(fewer.narrow),
                 wider = column_cost(fewer.narrow + unit) - narrow;
    const auto rounds = static_cast<double>(ceil_div(tiles, sm_count));
    if (longer == 0) {
        return rounds * narrow + double(ceil_div(rows * fewer.wide, sm_count)) * wider;
    }
    if (rounds == 1) return narrow + (fewer.wide > 0 ? wider : 0);
    const double of_more = double(columns + 1) * column_cost(more.narrow) +
                           more.wide * (column_cost(more.narrow + unit) - column_cost(more.narrow));
    const double all = double(rows - longer) * (double(columns) * narrow + fewer.wide * wider) +
                       double(longer) * of_more;
    return all / sm_count + wider / 2;
}

VariedTiles vary_tiles(const Config& config, const Problem& p, int sm_count) {
    VariedTiles best;
    const int64_t rows = ceil_div(p.m, config.block_m);
    const int64_t least = ceil_div(p.n, widest(config)), most = ceil_div(p.n, narrowest(config));
    const auto steps = static_cast<double>(ceil_div(p.k, BLOCK_K));
    const auto consider = [&](int64_t columns, int64_t longer) {
        if (columns < least || columns + (longer > 0) > most) return;
        const double tiles = std::ceil(double(rows * columns + longer) / sm_count);
        const double cycles = steps * config.block_m / 32 *
                                  varied_load(config, rows, p.n, columns, longer, sm_count) +
                              tiles * 900 + 2500 + 0.12 * config.block_m * config.block_n;
        if (cycles < best.cycles) {
            best = {static_cast<int>(columns), static_cast<int>(longer), cycles};
        }
    };
    const int64_t first = ceil_div(rows * least, sm_count);
    for (int64_t rounds = first; rounds < first + 3; ++rounds) {
        const int64_t columns = std::min(rounds * sm_count / rows, most);
        if (columns < least) continue;
        if (config.b_n_major) {
            for (int64_t less = 0; less < 3; ++less) consider(columns - less, 0);
        } else {
            const Shares shares = share_columns(config, p.n, columns);
            const int64_t widest_tile = shares.narrow + (shares.wide > 0 ? int{NARROWER} : 0);
            consider(ceil_div(p.n, widest_tile), 0);
            consider(columns, 0);
            if (columns < most) consider(columns, rounds * sm_count % rows);
        }
    }
    return best;
}

Schedule schedule_for(const Config& config, const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const int64_t rows = ceil_div(p.m, config.block_m), columns = ceil_div(p.n, config.block_n);
    Schedule schedule;
    // Few rows of tiles use b at about the same time. A much larger b is read at the same speed
    // either way.
    const double b_bytes = 2.0 * double(p.n) * double(p.k), l2_bytes = device.l2_bytes;
    schedule.b_once =
        p.m <= 512 && p.batch == 1 && b_bytes * 4 >= l2_bytes && b_bytes <= l2_bytes * 4;
    const int64_t tiles = rows * columns, all = p.batch * tiles;
    schedule.blocks = static_cast<int>(std::min<int64_t>(all, sm_count));
    // A block for each tile: one band, and the grid has the shape of the tiles.
    schedule.band = static_cast<int>(rows);
    if (all <= sm_count) return schedule;
    // Whole products of a batch at a time, where that takes no more rounds: their tiles read the
    // same rows and columns together.
    const int64_t whole = sm_count / tiles * tiles;
    if (p.batch > 1 && whole * 16 >= sm_count * 15 &&
        ceil_div(all, whole) == ceil_div(all, sm_count)) {
        schedule.blocks = static_cast<int>(whole);
    }
    // The tiles at work at a time form a square of elements, in bands of equal height.
    const double height = std::sqrt(double(sm_count) * config.block_n / config.block_m);
    const double bands = std::round(double(rows) / height);
    schedule.band = static_cast<int>(ceil_div(rows, std::max<int64_t>(1, int64_t(bands))));
    const Widths widths = two_widths(config, p, sm_count);
    schedule.columns = widths.columns, schedule.longer = widths.longer;
    return schedule;
}

// Few rows: what counts is how fast b is read. Its rows are then a's, or columns, and a block reads
// its part of them once.
bool streams(const Problem& p) { return p.m <= 64 && p.batch == 1 && !p.a_m_major; }
// More rows, but few tiles and a long k, which the clusters of the same kernel divide.
bool streams_divided(const Problem& p, int sm_count) {
    const int64_t tiles = ceil_div(p.m, 64) * ceil_div(p.n, 64);
    return p.m <= 256 && p.batch == 1 && !p.a_m_major && !p.fused && p.k >= 4096 &&
           tiles * 32 <= int64_t{sm_count} * 7;
}

Choice streamed_choice(const StreamShape& shape, int splits, const Problem& p,
                       const DeviceProperties& device) {
    Choice choice{.config = make_config(shape, p.dtype, p.b_n_major)};
    const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
    const int64_t clusters = std::max(1, device.sm_count / splits);
    const int64_t rounds = ceil_div(tiles, clusters);
    choice.schedule.splits = splits;
    choice.schedule.blocks = static_cast<int>(ceil_div(tiles, rounds) * splits);
    // What is many times the L2 cache is read faster where its lines need not take the places of
    // each other.
    choice.schedule.b_once = p.fused || 2.0 * double(p.n) * double(p.k) <= 6.0 * device.l2_bytes;
    return choice;
}

Choice choose_streamed(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    const StreamShape* shape = nullptr;
    for (const StreamShape& candidate : STREAM_SHAPES) {
        if (candidate.fused != p.fused) continue;
        shape = &candidate;
        if (candidate.block_m >= p.m) break;
    }
    const int64_t tiles = ceil_div(p.m, shape->block_m) * ceil_div(p.n, shape->block_n);
    const int64_t k_blocks = ceil_div(p.k, shape->block_k);
    // Half of the SMs read as fast as all do. Below that, blocks of a cluster divide k, as long as
    // each still has some steps. With several rows of tiles a block reads more than b.
    const double enough = p.m <= 64 ? 0.4 : 0.45;
    int splits = 1;
    while (splits < 8 && double(tiles * splits) < sm_count * enough && k_blocks >= splits * 2 * 2) {
        splits *= 2;
    }
    // Three, where two leave half of the SMs to add up many rows, or to read with fewer bytes on
    // their way, as the kernel with a fused epilogue does; that one also divides a long k sooner.
    const bool three = p.fused || p.m > (p.b_n_major ? 32 : 16);
    if (splits == 2 && three && tiles * 4 <= sm_count && k_blocks >= 3 * 2) splits = 3;
    if (splits == 1 && p.fused && tiles * 2 <= sm_count && k_blocks >= 128) splits = 2;
    return streamed_choice(*shape, splits, p, device);
}

// Whether sums are only rounded to rows of whole words of TMA, of one product and a long k: what
// kernels for tiles of several widths and for divided ones compute.
bool is_rounded(const Problem& p) {
    return !p.fused && !p.a_m_major && p.batch == 1 && p.k >= 1536 && p.m >= 1 && p.n >= 1 &&
           p.n % 8 == 0 && p.out_dtype == p.dtype;
}

TileShape shape_of(const Config& c) { return {c.block_m, c.block_n, c.stages, c.consumers}; }

// Tiles whose k is divided: by how many blocks, and the cycles that they need.
struct DividedTiles {
    const TileShape* shape = nullptr;
    int splits = 1;
    double cycles = std::numeric_limits<double>::infinity();
    int blocks = 0;
};

// What it takes to read the operands from memory.
double operand_cycles(const Problem& p) { return 2 * double(p.m + p.n) * double(p.k) / 1765; }

// Fitted to an H200: products, or reading the operands from memory; a start and an end that grow
// with the sums which are given; and what is taken, a unit of columns of each other block at a
// time. All blocks run at a time, so there are no more of them than SMs.
DividedTiles divide_tiles(const Problem& p, int sm_count) {
    constexpr int64_t most_splits = Segments::MOST_EVENLY;
    DividedTiles best;
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    const double read = operand_cycles(p);
    for (const TileShape& shape : DIVIDED_SHAPES) {
        const int64_t rows = ceil_div(p.m, shape.block_m), columns = ceil_div(p.n, shape.block_n);
        const int64_t units = shape.block_n / DIVIDED_UNIT;
        const int64_t most = std::min({sm_count / (rows * columns), steps / 4, most_splits});
        for (int64_t splits = 2; splits <= most; ++splits) {
            const double size = shape.block_m * shape.block_n;
            const double products = double(ceil_div(steps, splits)) * size / 32 * 1.04;
            const auto taken = static_cast<double>(ceil_div(units, splits) * (splits - 1));
            const double cycles = std::max(products, read) + 7500 + 0.55 * size + 160 * taken;
            if (cycles < best.cycles) {
                best = {&shape, static_cast<int>(splits), cycles,
                        static_cast<int>(rows * columns * splits)};
            }
        }
    }
    return best;
}

// The same of tiles of which some have owners, see common/stream_k.h, if they need less than
// `limit`. To take a part costs an owner most.
DividedTiles own_tiles(const Problem& p, int sm_count, double limit) {
    DividedTiles best{.cycles = limit};
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    const double read = operand_cycles(p);
    if (steps > UINT16_MAX) return best;
    for (const TileShape& shape : DIVIDED_SHAPES) {
        const int64_t all = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        const double size = shape.block_m * shape.block_n;
        // Narrow tiles are bound by loads where not all blocks read the same rows at a time.
        const bool wide = shape.block_n > 128;
        const double step = size / 32 * (wide ? 1.03 : 1.09);
        const double whole = double(steps) * size / 32 * (wide ? 1.03 : 1.24) + 3000;
        // Divided without a rest, and for nothing.
        if (double(all * steps) * step > limit * sm_count || all >= 2 * sm_count) continue;
        const int tiles = static_cast<int>(all);
        for (int splits = 2; splits <= Segments::MOST_BLOCKS; ++splits) {
            const int blocks = sm_count / splits * splits;
            const Group group = make_group(blocks, splits, tiles);
            if (blocks >= tiles * splits || group.whole > 1) continue;
            const int handed = group.handed(static_cast<int>(steps));
            if (handed == 0) continue;
            const double kept = double(steps - handed) * step;
            const int parts = (group.parts() + group.owned - 1) / group.owned;
            const double cycles =
                std::max(group.whole * whole + kept, read) + 4500 + (0.16 + 0.2 * parts) * size;
            if (cycles < best.cycles) best = {&shape, splits, cycles, blocks};
        }
    }
    return best;
}

const char* suffix_of(OneTile kernel) {
    return kernel == OneTile::once ? "_once" : kernel == OneTile::single ? "_single" : "";
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
    const int bytes =
        is_divided(choice.config) ? DIVIDED_SHARED_BYTES : shared_bytes(choice.config);
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernel needs ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

Choice choose_unvaried(const Problem& p, const DeviceProperties& device) {
    const int sm_count = std::max(1, device.sm_count);
    if (streams(p) || streams_divided(p, sm_count)) return choose_streamed(p, device);
    const TileShape* best = nullptr;
    double least = 0;
    const auto consider = [&](const TileShape& shape) {
        const Config config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused);
        const double needed = cycles(shape, config, p, sm_count);
        if (best == nullptr || needed < least) best = &shape, least = needed;
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) consider(shape);
    }
    // Where k is short, reading and writing count for more than full rounds.
    if (!p.fused && !p.a_m_major && p.k >= 1536) {
        if (p.b_n_major) {
            consider(BETWEEN_SHAPE_NN);
        } else {
            for (const TileShape& shape : BETWEEN_SHAPES) consider(shape);
        }
    }
    Choice choice{.config = make_config(*best, p.dtype, p.a_m_major, p.b_n_major, p.fused)};
    choice.schedule = schedule_for(choice.config, p, device);
    if (has_finishers(choice.config) && p.out_dtype == p.dtype) {
        choice.schedule.spacing = spacing_for(p);
    }
    return choice;
}

namespace {

Choice varied_choice(const Config& config, const VariedTiles& tiles, const Problem& p,
                     const DeviceProperties& device) {
    Choice choice{.config = config, .schedule = schedule_for(config, p, device)};
    choice.schedule.columns = tiles.columns, choice.schedule.longer = tiles.longer;
    const int64_t all = ceil_div(p.m, config.block_m) * tiles.columns + tiles.longer;
    choice.schedule.blocks = static_cast<int>(std::min<int64_t>(all, std::max(1, device.sm_count)));
    return choice;
}

Choice divided_choice(const TileShape& shape, int splits, int blocks, const Problem& p,
                      const DeviceProperties& device) {
    Choice choice{.config = make_config(shape, p.dtype, false, p.b_n_major)};
    choice.schedule = schedule_for(choice.config, p, device);
    choice.schedule.splits = splits, choice.schedule.blocks = blocks;
    return choice;
}

// Tiles of several widths where they pay, else of one.
Choice choose_whole(const Problem& p, const DeviceProperties& device) {
    const Choice choice = choose_unvaried(p, device);
    const Config config = varied_config(p.dtype, p.b_n_major);
    if (choice.config.streamed || !is_rounded(p)) return choice;
    const int sm_count = std::max(1, device.sm_count);
    const VariedTiles tiles = vary_tiles(config, p, sm_count);
    if (tiles.cycles > 0.985 * cycles(shape_of(choice.config), choice.config, p, sm_count)) {
        return choice;
    }
    return varied_choice(config, tiles, p, device);
}

}  // namespace

Choice choose(const Problem& p, const DeviceProperties& device) {
    const Choice choice = choose_whole(p, device);
    if (choice.config.streamed || !is_rounded(p) || p.m < 128) return choice;
    const int sm_count = std::max(1, device.sm_count);
    const double whole = choice.config.varied
                             ? vary_tiles(choice.config, p, sm_count).cycles
                             : cycles(shape_of(choice.config), choice.config, p, sm_count);
    const DividedTiles evenly = divide_tiles(p, sm_count);
    const DividedTiles owned = own_tiles(p, sm_count, 0.97 * std::min(whole, evenly.cycles));
    const DividedTiles& tiles = owned.shape != nullptr ? owned : evenly;
    if (tiles.shape == nullptr || tiles.cycles > 0.97 * whole) return choice;
    return divided_choice(*tiles.shape, tiles.splits, tiles.blocks, p, device);
}

namespace {

// The ways to divide k of tiles between blocks, evenly or with owners.
template <typename Add>
void add_divided(const Problem& p, const DeviceProperties& device, Add&& add) {
    const int64_t steps = ceil_div(p.k, BLOCK_K);
    for (const TileShape& shape : DIVIDED_SHAPES) {
        const int64_t tiles = ceil_div(p.m, shape.block_m) * ceil_div(p.n, shape.block_n);
        for (int splits = 2; p.m >= shape.block_m && splits <= Segments::MOST_BLOCKS; ++splits) {
            const bool evenly = tiles * splits <= device.sm_count;
            if (evenly ? steps < 4 * splits : tiles >= 2 * device.sm_count) continue;
            const auto blocks =
                static_cast<int>(evenly ? tiles * splits : device.sm_count / splits * splits);
            if (!evenly && make_group(blocks, splits, static_cast<int>(tiles)).whole > 1) continue;
            if (make_segments(blocks, splits, tiles, steps).groups == 0) continue;
            add(divided_choice(shape, splits, blocks, p, device));
        }
    }
}

}  // namespace

std::vector<Choice> candidates(const Problem& p, const DeviceProperties& device) {
    std::vector<Choice> list{choose(p, device)};
    const auto add = [&](const Choice& choice) {
        if (std::find(list.begin(), list.end(), choice) == list.end()) list.push_back(choice);
    };
    const auto add_tiles = [&](const TileShape& shape) {
        Choice choice{.config = make_config(shape, p.dtype, p.a_m_major, p.b_n_major, p.fused)};
        choice.schedule = schedule_for(choice.config, p, device);
        if (has_finishers(choice.config) && p.out_dtype == p.dtype) {
            choice.schedule.spacing = spacing_for(p);
        }
        add(choice);
        choice.schedule.columns = choice.schedule.longer = 0;
        add(choice);
    };
    for (const TileShape& shape : TILE_SHAPES) {
        if (!p.fused || shape.block_n >= 128) add_tiles(shape);
    }
    if (p.a_m_major) return list;
    if (!p.fused && p.b_n_major) add_tiles(BETWEEN_SHAPE_NN);
    if (!p.fused && !p.b_n_major) {
        for (const TileShape& shape : BETWEEN_SHAPES) add_tiles(shape);
    }
    if (p.batch > 1) return list;
    for (const StreamShape& shape : STREAM_SHAPES) {
        const bool holds = p.m <= shape.block_m || (shape.block_m == 64 && p.m <= 256);
        if (shape.fused != p.fused || !holds) continue;
        for (const int splits : {1, 2, 3, 4, 8}) {
            if (splits == 1 || ceil_div(p.k, shape.block_k) >= 2 * splits) {
                add(streamed_choice(shape, splits, p, device));
            }
        }
    }
    // What their kernels compute, see suits().
    if (p.fused || p.n % 8 != 0 || p.out_dtype != p.dtype) return list;
    const Config varied = varied_config(p.dtype, p.b_n_major);
    const VariedTiles tiles = vary_tiles(varied, p, std::max(1, device.sm_count));
    if (tiles.columns > 0 && ceil_div(p.k, BLOCK_K) >= (varied.block_n + 63) / 64) {
        add(varied_choice(varied, tiles, p, device));
    }
    add_divided(p, device, add);
    return list;
}

Choice choose_marked(const Problem& p, const DeviceProperties& device) {
    Choice choice{.config = marked_config()};
    choice.schedule = schedule_for(choice.config, p, device);
    return choice;
}

std::string kernel_name(const Config& c) {
    if (c.streamed) {
        return concat(name_of(c.dtype), "_n", c.b_n_major ? 'n' : 't', "_stream_", c.block_m, 'x',
                      c.block_n, c.fused ? "_fused" : "");
    }
    if (is_divided(c)) return concat(name_of(c.dtype), "_divided");
    return concat(name_of(c.dtype), '_', c.a_m_major ? 't' : 'n', c.b_n_major ? 'n' : 't', '_',
                  c.block_m, 'x', c.block_n, c.fused ? "_fused" : "", c.marked ? "_marked" : "",
                  c.varied ? "_varied" : "");
}

std::string kernel_name(const Choice& choice) { return kernel_name(choice.config); }

std::string kernel_name(const Config& c, const Params& p) {
    if (!suits(c, p)) return kernel_name(whole_config(c), in_whole_tiles(p));
    return kernel_name(c) + suffix_of(one_tile(c, p));
}

// The kernel of all configurations for divided tiles of a dtype.
static KernelInfo divided_info(DType dtype) {
    const TileShape &narrow = DIVIDED_SHAPES[0], &wide = DIVIDED_SHAPES[1];
    const Config c = make_config(narrow, dtype, false, false);
    return {.name = kernel_name(c),
            .config = concat("tiles ", narrow.block_m, 'x', narrow.block_n, " and ", wide.block_m,
                             'x', wide.block_n, ", ", narrow.stages, " and ", wide.stages,
                             " stages, 1 producer warp and ", c.consumers,
                             " consumer warpgroups, k divided"),
            .source = concat(name_of(c.dtype), "_divided"),
            .symbol = concat("DividedTypesILNS_5DTypeE", int(c.dtype), 'E'),
            .threads = one_tile_threads(c),
            .shared_bytes = DIVIDED_SHARED_BYTES};
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) list.push_back(divided_info(dtype));
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        const std::string tile = concat(c.block_m, 'x', c.block_n);
        const std::string roles =
            c.streamed ? "1 producer warp and 1 consumer warpgroup"
                       : concat("1 producer and ", c.consumers, " consumer warpgroups");
        KernelInfo kernel{
            .name = kernel_name(c),
            .config = concat("tile ", tile, 'x', c.block_k, ", ", c.stages, " stages, ", roles),
            .source = concat(name_of(c.dtype), c.streamed ? "_stream_" : "_", tile,
                             c.fused ? "_fused" : "", c.marked ? "_marked" : "",
                             c.varied ? "_varied" : ""),
            .symbol =
                concat("ELi", c.block_m, "ELi", c.block_n, "ELi", c.stages, "ELi", c.consumers,
                       "ELb", int(c.streamed), "ELi", c.block_k, "ELb", int(c.fused),
                       "ELNS_5DTypeE", int(c.dtype), "ELb", int(c.a_m_major), "ELb",
                       int(c.b_n_major), "ELb", int(c.marked), "ELb", int(c.varied), 'E'),
            .threads = threads(c),
            .shared_bytes = shared_bytes(c),
        };
        // Kernels for one tile per block, of the same source: single_wave_sm90.cuh and
        // single_wave_64x64_sm90.cuh.
        const std::string one_tile =
            concat("tile ", tile, 'x', c.block_k, ", ", c.stages, " stages, 1 producer warp and ",
                   c.consumers, " consumer warpgroup", c.consumers > 1 ? "s" : "", ", one tile");
        if (has_once(c)) {
            const std::string types = "_kernelINS1_5TypesIXtlNS0_6Config" + kernel.symbol;
            KernelInfo once = kernel;
            once.name += suffix_of(OneTile::once);
            once.config = one_tile;
            once.symbol = "once" + types;
            once.threads = one_tile_threads(c);
            list.push_back(once);
            kernel.symbol = "gemm" + types;
        }
        if (has_single(c)) {
            const std::string config = "TypesIXtlNS0_6Config" + kernel.symbol;
            KernelInfo single = kernel;
            single.name += suffix_of(OneTile::single);
            single.config = one_tile;
            single.symbol = "11Single" + config;
            single.threads = one_tile_threads(c);
            single.shared_bytes = single_shared_bytes(c);
            list.push_back(single);
            kernel.symbol = "5" + config;
        }
        list.push_back(kernel);
    }
    return list;
}

static const bool registered = register_op("gemm", "gemm", &kernels, &unsupported, &choose) &&
                               register_candidates("gemm", &candidates);

}  // namespace thunderkittens::gemm
