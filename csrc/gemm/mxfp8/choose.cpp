// Which kernels multiply MXFP8 matrices: pure functions of the problem and the device.
#include <algorithm>
#include <initializer_list>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/mxfp8/mxfp8_gemm.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

gemm::Problem expanded(const Problem& p) {
    return {.m = p.m,
            .n = p.n,
            .k = p.k,
            .dtype = DType::bf16,
            .out_dtype = p.out_dtype,
            .b_n_major = false,
            .fused = p.fused};
}
fp8_gemm::Problem rebased(const Problem& p) {
    return {.m = p.m, .n = p.n, .k = p.k, .out_dtype = p.out_dtype, .activated = p.fused};
}

std::string unsupported_dtype(const char* name, DType dtype) {
    return is_fp8(dtype) ? "" : concat(name, " must be e4m3 or e5m2, got ", name_of(dtype));
}

KernelInfo pass(const std::string& name, const std::string& what) {
    return {.name = name,
            .config = what,
            .source = "mxfp8_passes",
            .symbol = concat("mxfp8_", name, "_kernel"),
            .threads = THREADS};
}
std::string few_name(const FewConfig& f) { return concat(name_of(f.data), "_few_", f.tile.tokens); }
std::string codes_name(const CodesShape& s) { return concat("codes_", s.tokens); }
std::string expanding_name(const gemm::Config& c) {
    return c.block_n == 256 ? "expanding" : concat("expanding_", c.block_n);
}
std::vector<KernelInfo> gemm_kernels() {
    std::vector<KernelInfo> list{pass("expand", "tile 128x128, 256 threads, two operands")};
    for (const gemm::Config& c :
         {gemm::expanding_config(DType::bf16), gemm::narrow_expanding_config(DType::bf16)}) {
        list.push_back({.name = expanding_name(c),
                        .config = concat("tile 128x", c.block_n, "x64, ", c.stages,
                                         " stages, 1 producer warp, 3 warps that expand and 2 "
                                         "consumer warpgroups"),
                        .source = "mxfp8_expanding",
                        .symbol = concat("expanding_gemm_kernelINS1_5TypesIXtlNS0_6ConfigELi128ELi",
                                         c.block_n, 'E'),
                        .threads = gemm::threads(c),
                        .shared_bytes = gemm::shared_bytes(c)});
    }
    for (std::size_t i = 0; i < FEW_CONFIGS; ++i) {
        const FewConfig f = few_at(i);
        const mixed_gemm::Config& c = f.tile;
        list.push_back({
            .name = few_name(f),
            .config = concat("tile ", c.tokens, 'x', mixed_gemm::block_rows(c), 'x',
                             FEW_K * c.k_groups, ", ", c.stages, " stages, 1 producer warp and ",
                             mixed_gemm::consumers(c), " consumer warpgroups"),
            .source = concat("mxfp8_few_", c.tokens),
            .symbol = concat("ELS8_", int(f.data), "EEEEEEEvNT_"),
            .threads = mixed_gemm::threads(c),
            .shared_bytes = few_shared_bytes(f),
        });
    }
    for (const CodesShape& s : CODES_SHAPES) {
        list.push_back({
            .name = codes_name(s),
            .config = concat("tile ", s.tokens, 'x', CODES_TILE, 'x', s.stage_k, ", ", s.stages,
                             " stages, 1 producer warp and ", s.k_groups, " consumer warpgroups"),
            .source = concat("mxfp8_codes_", s.tokens),
            .symbol = concat("CodesShapeELi", s.tokens, "ELi"),
            .threads = codes_threads(s),
            .shared_bytes = codes_shared_bytes(s),
        });
    }
    return list;
}

// Blocks of a cluster divide k where that fills more of the SMs, each has some steps, and every
// tile has a cluster at once.
void schedule_few(int64_t tiles, int64_t stages, int64_t sm_count, Choice& choice,
                  std::initializer_list<int> divisions = {1, 2, 4, 8}, int most = 8) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    double least = 0;
    for (const int splits : divisions) {
        if (splits > most || splits > sm_count || splits > stages) break;
        // Clusters of more than two blocks do not come out even with the SMs that they can share.
        const int64_t clusters =
            std::max<int64_t>(sm_count / splits * (splits > 2 ? 10 : 11) / 11, 1);
        const int64_t rounds = ceil_div(tiles, clusters);
        // A tile's steps, and what it costs to begin and to end one.
        const double cost =
            double(rounds) * (double(ceil_div(stages, splits)) + (splits > 1 ? 3 : 2));
        if (splits > 1 && (rounds > 1 || cost >= least)) continue;
        least = cost;
        choice.few_schedule = {.blocks = static_cast<int>(ceil_div(tiles, rounds) * splits),
                               .splits = splits};
    }
}

// Few rows: all SMs have to read and to convert.
void choose_few(const Problem& p, const DeviceProperties& device, Choice& choice) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    // Of groups only the device knows the rows.
    const int64_t rows = ceil_div(p.m, std::max<int64_t>(p.groups, 1));
    const FewShape* shape = nullptr;
    for (const FewShape& candidate : FEW_SHAPES) {
        shape = &candidate;
        if (candidate.tokens >= rows) break;
    }
    choice.few = true;
    choice.few_config = make_few(*shape, p.b_dtype);
    const mixed_gemm::Config& c = choice.few_config.tile;
    const int64_t sm_count = std::max(1, device.sm_count);
    const int64_t tiles = ceil_div(p.m, c.tokens) * ceil_div(p.n, mixed_gemm::block_rows(c));
    const int64_t stages = ceil_div(p.k, FEW_K * c.k_groups);
    if (p.grouped) {
        choice.few_schedule = {.blocks = static_cast<int>(sm_count), .splits = 1};
        return;
    }
    schedule_few(tiles, stages, sm_count, choice);
}
// The same from codes.
void choose_codes(const Problem& p, const DeviceProperties& device, Choice& choice) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t sm_count = std::max(1, device.sm_count), columns = ceil_div(p.n, CODES_TILE);
    const auto tiles = [&] { return ceil_div(p.m, choice.codes.tokens) * columns; };
    for (const CodesShape& candidate : CODES_SHAPES) {
        choice.codes = candidate;
        if (candidate.tokens >= p.m) break;
        // What limits with 64 rows is the scaling of products, which then has twice the SMs.
        if (candidate.tokens * 2 >= p.m && candidate.tokens >= 32 && tiles() <= sm_count) break;
    }
    choice.direct = true;
    schedule_few(tiles(), ceil_div(p.k, choice.codes.stage_k), sm_count, choice,
                 {1, 2, 3, 4, 5, 6, 7, 8}, codes_senders(choice.codes) + 1);
}
std::vector<KernelInfo> prepare_kernels() {
    return {pass("rebase", "16 rows, 256 threads, two operands")};
}
PrepareChoice choose_prepare(const PrepareProblem&, const DeviceProperties&) { return {}; }

}  // namespace

std::string unsupported_operand(const PrepareProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (std::string reason = unsupported_dtype("data", p.data_dtype); !reason.empty()) {
        return reason;
    }
    const double blocks =
        double(words_of_marks(p.rows)) * double(p.batch) * std::max<double>(MARKS, p.columns / 128);
    if (blocks > 2e9)
        return concat("data needs some ", blocks, " blocks; at most 2e9 are supported");
    return "";
}

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    for (const auto& [name, dtype] : {std::pair{"a", p.a_dtype}, std::pair{"b", p.b_dtype}}) {
        if (std::string reason = unsupported_dtype(name, dtype); !reason.empty()) return reason;
    }
    for (const int64_t rows : {p.m, p.n}) {
        const PrepareProblem operand{.rows = rows, .columns = p.k};
        if (std::string reason = unsupported_operand(operand, device); !reason.empty()) {
            return reason;
        }
    }
    if (p.grouped && !p.few()) {
        return "groups need k > 0, rows of b that are multiples of 16 bytes, and its scales in the "
               "128x4 layout";
    }
    if (p.grouped && p.rebased) return "groups are not multiplied by the re-based path";
    if (std::string reason = gemm::unsupported(expanded(p), device); !reason.empty()) return reason;
    return p.rebased ? fp8_gemm::unsupported(rebased(p), device) : "";
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    Choice choice{.rebased = p.rebased};
    if (p.direct()) {
        choose_codes(p, device, choice);
        return choice;
    }
    if (!p.rebased && p.few()) {
        choose_few(p, device, choice);
        return choice;
    }
    if (!p.rebased) {
        choice.exact = gemm::choose_unvaried(expanded(p), device);
        const gemm::Config& config = choice.exact.config;
        const bool narrow = config == gemm::narrow_expanding_config(DType::bf16);
        // From a full round and 1024 rows on the products are long enough to hide it.
        choice.expanding = p.expandable() && std::min(p.m, p.n) >= 1024 &&
                           (config == gemm::expanding_config(DType::bf16) || narrow) &&
                           choice.exact.schedule.blocks >= device.sm_count;
        // Whole rows of tiles in a round: the next ones then need little that is new.
        const auto columns = static_cast<int>((p.n + config.block_n - 1) / config.block_n);
        if (choice.expanding && narrow && columns <= choice.exact.schedule.blocks) {
            choice.exact.schedule.band = choice.exact.schedule.blocks / columns;
        }
        return choice;
    }
    choice.product = fp8_gemm::choose(rebased(p), device);
    // Of the tiles that are marked, which are few where re-basing is worth asking for.
    choice.exact = gemm::choose_marked(expanded(p), device);
    return choice;
}

std::string kernel_name(const Choice& c) {
    if (c.direct) return codes_name(c.codes);
    return c.few ? few_name(c.few_config) : c.expanding ? expanding_name(c.exact.config) : "expand";
}
std::string kernel_name(const PrepareChoice&) { return "rebase"; }

static const bool registered =
    register_op("mxfp8_gemm", "gemm", &gemm_kernels, &unsupported, &choose) &&
    register_op("mxfp8_prepare", "gemm", &prepare_kernels, &unsupported_operand, &choose_prepare);

}  // namespace thunderkittens::mxfp8_gemm
