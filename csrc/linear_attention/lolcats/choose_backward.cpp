// Which kernels run LoLCATS's gradient, and in how many segments. Pure functions.
#include <algorithm>

#include "csrc/common/math.h"
#include "csrc/linear_attention/common/choose.h"
#include "csrc/linear_attention/lolcats/portable.h"

namespace thunderkittens::linear_attention {
namespace {

// Cycles, of an H200; both main kernels together. Of portable kernels those of the linear part, as
// expected.
constexpr Costs COSTS{.chunk = 10000, .sum = 3000, .launches = 16000, .segment = 300};
constexpr Costs PORTABLE_COSTS{.chunk = 10000, .sum = 6000, .launches = 24000, .segment = 300};

}  // namespace

LolcatsBackwardChoice choose_lolcats_backward(const LolcatsProblem& p,
                                              const DeviceProperties& device) {
    const int64_t chunks = chunks_of(p), batch_heads = p.batch * p.heads;
    const int64_t sms = std::max(1, device.sm_count);
    const bool portable = !runs_native(device);
    const int segments =
        choose_segments(batch_heads, chunks, portable ? PORTABLE_COSTS : COSTS, device);
    LolcatsBackwardChoice choice{{p.dtype, int(p.head_dim), int(p.features), portable, segments},
                                 1};
    // Two blocks share a multiprocessor, and those of both maps run at once; two waves of them.
    const int64_t parts = ceil_div(2 * sms, std::max<int64_t>(batch_heads, 1));
    choice.map_splits = int(std::clamp<int64_t>(parts, 1, std::max<int64_t>(chunks, 1)));
    return choice;
}

std::string kernel_name(const LolcatsBackwardChoice& c) {
    return concat("key_gradient_", name_of(c.dtype), "_d", c.head_dim, "_f", c.features,
                  c.portable ? "_portable" : "");
}

// Those of portable kernels of a dtype.
static void add_portable(std::vector<KernelInfo>& list, DType dtype) {
    for (const int dim : {64, 128}) {
        for (const int features : {32, 64}) {
            const auto enter = [&](const char* kind, const char* text, const char* kernel,
                                   const char* suffix, int threads, int bytes) {
                KernelInfo info;
                info.name =
                    concat(kind, "_", name_of(dtype), "_d", dim, "_f", features, "_portable");
                info.config =
                    concat(text, ", head dimension ", dim, ", ", features, " features twice");
                info.symbol =
                    concat("lolcats_portable_", kernel, "_kernelINS0_13LolcatsKernelILNS_5DTypeE",
                           int(dtype), "ELi", dim, "ELi", features, "EEE", suffix);
                info.arch = PORTABLE;
                info.threads = threads;
                info.shared_bytes = bytes;
                list.push_back(info);
            };
            const int window = portable_window_gradient_bytes(dim),
                      linear = portable_linear_gradient_bytes(dim, features);
            enter("rows", "delta of the rows", "rows", "", 256, 0);
            enter("query_gradient", "dQ", "query_gradient", "", 128, window);
            enter("key_gradient", "dK and dV", "key_gradient", "", 128, window);
            enter("linear_queries", "through the queries' features", "linear_queries", "", 256,
                  linear);
            enter("linear_keys", "through the keys' features", "linear_keys", "", 256, linear);
            enter("segment_state_gradients", "sums over the queries of a segment", "segment_states",
                  "Lb1E", 128, PORTABLE_LOLCATS_SEGMENTS_BYTES);
            enter("feature_map_gradient", "partial gradients of the feature maps", "map_gradient",
                  "", 128, PORTABLE_FEATURE_MAP_GRADIENT_BYTES);
        }
    }
    list.push_back({.name = concat("reduce_partials_", name_of(dtype), "_portable"),
                    .config = "sums of the partial gradients",
                    .symbol = concat("lolcats_reduce_partials_kernelI", symbol_of(dtype)),
                    .arch = PORTABLE,
                    .threads = 256});
}

std::vector<KernelInfo> lolcats_backward_kernels() {
    std::vector<KernelInfo> list;
    struct Kind {
        const char *name, *text;
        int threads, bytes;
    };
    constexpr Kind kinds[] = {
        {"query_gradient", "dQ", 384, LOLCATS_QUERY_BYTES},
        {"key_gradient", "dK and dV", 512, LOLCATS_KEY_BYTES},
        {"segment_state_gradients", "sums over the queries of a segment", 128,
         LOLCATS_SEGMENT_STATE_GRADIENTS_BYTES},
        {"feature_map_gradient", "partial gradients of the feature maps", 128,
         LOLCATS_FEATURE_MAP_GRADIENT_BYTES},
    };
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Kind& kind : kinds) {
            for (const int dim : {64, 128}) {
                for (const int features : {32, 64}) {
                    KernelInfo info;
                    info.name = concat(kind.name, "_", name_of(dtype), "_d", dim, "_f", features);
                    info.config = concat(kind.text, ", head dimension ", dim, ", ", features,
                                         " features twice");
                    info.symbol =
                        concat("lolcats_", kind.name, "_kernelINS0_13LolcatsKernelILNS_5DTypeE",
                               int(dtype), "ELi", dim, "ELi", features, "E");
                    info.threads = kind.threads;
                    info.shared_bytes = kind.bytes;
                    list.push_back(info);
                }
            }
        }
        list.push_back({.name = concat("reduce_partials_", name_of(dtype)),
                        .config = "sums of the partial gradients",
                        .symbol = concat("lolcats_reduce_partials_kernelI", symbol_of(dtype)),
                        .threads = 256});
        add_portable(list, dtype);
    }
    list.push_back({.name = "scan",
                    .config = "sums of the segments behind each",
                    .symbol = "based_scan_kernelI6float4E",
                    .threads = 128});
    list.push_back({.name = "scan_portable",
                    .config = "sums of the segments before or behind each",
                    .symbol = "based_portable_scan_kernelI6float4E",
                    .arch = PORTABLE,
                    .threads = 128});
    return list;
}

static const bool registered = register_op<LolcatsProblem, LolcatsBackwardChoice>(
    "lolcats_backward", "linear_attention", &lolcats_backward_kernels,
    static_cast<std::string (*)(const LolcatsProblem&, const DeviceProperties&)>(&unsupported),
    &choose_lolcats_backward);

}  // namespace thunderkittens::linear_attention
