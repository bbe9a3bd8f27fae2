// Which kernel runs attention over a cache, and in how many parts. Pure functions.
#include <span>

#include "csrc/attention/decode/append.h"
#include "csrc/attention/forward/forward.h"

#include "csrc/common/check.h"
#include "csrc/common/registry.h"

namespace thunderkittens::attention::decode {
namespace {

constexpr int64_t MAX_LENGTH = int64_t{1} << 28;
// Queries of a sequence, on average, from which on tiles of more rows pay.
constexpr int64_t PREFILL_QUERIES = 128;
constexpr int MAX_CODES = 256;  // of a row, which a warp quantises

// Of either problem. A copy of 16 bytes has 32 codes.
template <class P>
std::string unsupported_nvfp4(const P& p) {
    if (!p.nvfp4 || (p.head_dim % 32 == 0 && p.value_dim % 32 == 0)) return "";
    return concat("head dimensions of NVFP4 must be multiples of 32, got ", p.head_dim, " and ",
                  p.value_dim);
}

const char* suffix(const Config& c) { return c.nvfp4 ? "_nvfp4" : has_codes(c) ? "_codes" : ""; }

int arch_of(bool portable) { return portable ? PORTABLE : NATIVE; }
// Of kernels of which the portable one has a name of its own.
std::string symbol_of_either(const std::string& kernel, bool portable) {
    const std::string name = portable ? "portable_" + kernel : kernel;
    return concat(name.size(), name, 'I');
}
const char* portable_name(bool portable) { return portable ? "portable_" : ""; }

KernelInfo kernel_info(const Config& c) {
    return {.name = kernel_name({.config = c}),
            .config = concat("head_dim ", c.head_dim, ", value_dim ", c.value_dim, ", ",
                             c.few_rows && !has_any_rows(c) ? c.few_rows : TILE_ROWS,
                             " query rows x ", BLOCK_N, " keys, ", c.slots, " slots, ",
                             c.portable ? "4 consumer warps" : "1 consumer warpgroup", " + ",
                             producer_warps(c), " producer warps"),
            .symbol = symbol_of(c.few_rows ? "few_rows_kernel" : "decode_kernel", "Config", c),
            .arch = arch_of(c.portable),
            .threads = 128 + 32 * producer_warps(c),
            .shared_bytes = shared_bytes(c)};
}

}  // namespace

ScheduleShape schedule_shape(const Problem& p, int parts) {
    ScheduleShape shape{.parts = parts, .batch = p.batch, .items = parts, .slots = 2 * parts};
    if (p.split_size > 0) {
        shape.items = p.batch * p.kv_heads * p.tiles();
        shape.slots = shape.items * ceil_div(p.k_length, p.split_size);
    }
    return shape;
}

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    attention::Problem same{.dtype = p.dtype,
                            .batch = p.batch,
                            .q_heads = p.q_heads,
                            .kv_heads = p.kv_heads,
                            .q_length = p.q_length,
                            .k_length = p.k_length,
                            .head_dim = p.head_dim,
                            .value_dim = p.value_dim};
    if (std::string reason = attention::unsupported(same, device); !reason.empty()) return reason;
    if (std::string reason = unsupported_nvfp4(p); !reason.empty()) return reason;
    if (p.split_size < 0 || p.split_size % BLOCK_N != 0) {
        return concat("split_size must be a multiple of ", BLOCK_N, ", or 0, got ", p.split_size);
    }
    if (p.q_length * p.group() > MAX_LENGTH) {
        return concat("query rows of a key head must be at most ", MAX_LENGTH, ", got ",
                      p.q_length * p.group());
    }
    const ScheduleShape shape = schedule_shape(p, MOST_PARTS);
    if (shape.ints() > INT32_MAX || shape.slots * p.tile_rows() > INT32_MAX) {
        return concat("split_size ", p.split_size, " cuts ", p.batch, " sequences of up to ",
                      p.k_length, " keys into too many splits");
    }
    return "";
}

// A multiprocessor has 1 KB more than one block can have, and takes 1 KB of every block.
static int portable_blocks_per_sm(const Config& c, const DeviceProperties& device) {
    const int fitting = (device.shared_bytes_per_block + 1024) / (shared_bytes(c) + 1024);
    return std::clamp(fitting, 1, c.blocks_per_sm);
}

// A split size promises bits that no batch changes, so such calls keep to one kernel.
bool can_prefill(const Problem& p) {
    return !p.codes && !p.mask && !p.rotary && !p.leftpad && p.attention_chunk == 0 &&
           p.split_size == 0 && p.page_size % attention::LEAST_PIECE == 0;
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    const bool native = runs_native(device);
    Choice choice{.prefill =
                      can_prefill(p) && p.tokens >= PREFILL_QUERIES * p.batch && p.batch > 0};
    const int64_t rows = p.q_length * p.group();
    const bool has_eight = native || std::max(p.head_dim, p.value_dim) <= 128;
    const int few_rows = p.codes && rows <= 8 && has_eight          ? 8
                         : !native || (p.codes && rows <= FEW_ROWS) ? FEW_ROWS
                                                                    : 0;
    const std::span<const Config> configs =
        native ? std::span<const Config>(CONFIGS) : std::span<const Config>(PORTABLE_CONFIGS);
    for (const Config& c : configs) {
        if (c.head_dim < p.head_dim || c.value_dim < p.value_dim) continue;
        if (has_codes(c) != p.codes || c.nvfp4 != p.nvfp4 || c.few_rows != few_rows) continue;
        choice.config = with_dtype(c, p.dtype);
        break;
    }
    const int blocks_per_sm =
        native ? choice.config.blocks_per_sm : portable_blocks_per_sm(choice.config, device);
    choice.parts = std::clamp(device.sm_count * blocks_per_sm, 1, int{MOST_PARTS});
    choice.schedule_ints = static_cast<int>(schedule_shape(p, choice.parts).ints());
    return choice;
}

std::string kernel_name(const Choice& choice) {
    const Config& c = choice.config;
    const std::string value = c.value_dim == c.head_dim ? "" : concat("v", c.value_dim);
    return concat("decode_", portable_name(c.portable), name_of(c.dtype), "_d", c.head_dim, value,
                  suffix(c),
                  c.few_rows && !has_any_rows(c) ? concat("_", c.few_rows, "_rows") : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        list.push_back({.name = portable ? "schedule_portable" : "schedule",
                        .config = "one block of 256 threads",
                        .symbol = symbol_of_either("schedule_kernel", portable),
                        .arch = arch_of(portable),
                        .threads = SCHEDULE_THREADS});
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            list.push_back(
                {.name = concat("combine_", portable_name(portable), name_of(dtype)),
                 .config = "1 to 8 warps for a row",
                 .symbol = concat("6decode", symbol_of_either("combine_kernel", portable),
                                  symbol_of(dtype)),
                 .arch = arch_of(portable),
                 .threads = 32 * COMBINE_WARPS,
                 .shared_bytes = COMBINE_SHARED_BYTES});
        }
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Config& c : CONFIGS) list.push_back(kernel_info(with_dtype(c, dtype)));
        for (const Config& c : PORTABLE_CONFIGS) list.push_back(kernel_info(with_dtype(c, dtype)));
    }
    return list;
}

std::string unsupported_append(const AppendProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    for (const auto& [name, dim] : {std::pair{"head", p.head_dim}, {"value", p.value_dim}}) {
        if (dim % 8 != 0) {
            return concat("the ", name, " dimension must be a multiple of 8, got ", dim);
        }
    }
    if (std::string reason = unsupported_nvfp4(p); !reason.empty()) return reason;
    if ((p.codes || p.nvfp4) && std::max(p.head_dim, p.value_dim) > MAX_CODES) {
        return concat("head dimensions of caches of 8 and 4 bits must be at most ", MAX_CODES,
                      ", got ", p.head_dim, " and ", p.value_dim);
    }
    if (p.tokens > INT32_MAX / 2 || p.kv_heads * (p.head_dim + p.value_dim) > INT32_MAX / 2) {
        return concat("too many tokens or elements of one: ", p.tokens, " of ", p.kv_heads,
                      " heads");
    }
    return "";
}
AppendChoice choose_append(const AppendProblem& p, const DeviceProperties& device) {
    return {p.codes && !p.nvfp4, p.nvfp4, p.dtype, !runs_native(device)};
}
std::string kernel_name(const AppendChoice& c) {
    return concat(c.nvfp4   ? "append_nvfp4_"
                  : c.codes ? "append_codes_"
                            : "append_",
                  portable_name(c.portable), name_of(c.dtype));
}
std::string unsupported_merge(const MergeProblem&, const DeviceProperties& device) {
    return no_code_for(device);
}
MergeChoice choose_merge(const MergeProblem& p, const DeviceProperties& device) {
    return {p.dtype, !runs_native(device)};
}
std::string kernel_name(const MergeChoice& c) {
    return concat("merge_", portable_name(c.portable), name_of(c.dtype));
}

namespace {

std::vector<KernelInfo> append_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            for (const char* const kernel :
                 {"append_kernel", "append_codes_kernel", "append_nvfp4_kernel"}) {
                const bool codes = kernel == std::string("append_codes_kernel");
                const bool nvfp4 = kernel == std::string("append_nvfp4_kernel");
                list.push_back(
                    {.name = kernel_name(AppendChoice{codes, nvfp4, dtype, portable}),
                     .config = codes || nvfp4 ? "a warp for a row" : "a thread for 16 bytes",
                     .symbol = concat(symbol_of_either(kernel, portable), symbol_of(dtype)),
                     .arch = arch_of(portable),
                     .threads = 256});
            }
        }
    }
    return list;
}
std::vector<KernelInfo> merge_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            list.push_back({.name = kernel_name(MergeChoice{dtype, portable}),
                            .config = "a warp for a row",
                            .symbol = concat("12merge_kernelI", symbol_of(dtype)),
                            .arch = arch_of(portable),
                            .threads = 128});
        }
    }
    return list;
}

}  // namespace

static const bool registered =
    register_op("attention_paged", "attention", &kernels, &unsupported, &choose) &&
    register_op("append_kv", "attention", &append_kernels, &unsupported_append, &choose_append) &&
    register_op("merge_attention", "attention", &merge_kernels, &unsupported_merge, &choose_merge);

}  // namespace thunderkittens::attention::decode
