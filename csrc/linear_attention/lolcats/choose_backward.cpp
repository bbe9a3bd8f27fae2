// Which kernels run LoLCATS's gradient, and in how many segments. Pure functions.
#include <algorithm>
#include <limits>

#include "csrc/linear_attention/common/choose.h"
#include "csrc/linear_attention/lolcats/backward.h"

namespace thunderkittens::linear_attention {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// In cycles, of an H200: a chunk in both main kernels, and in the passes that sum segments; the
// launches of these; a segment in their scans.
constexpr double CHUNK_COST = 10000, SUMS_COST = 3000, LAUNCHES_COST = 16000, SEGMENT_COST = 300;

}  // namespace

LolcatsBackwardChoice choose_lolcats_backward(const LolcatsProblem& p,
                                              const DeviceProperties& device) {
    const int64_t chunks = chunks_of(p), lines = p.batch * p.heads;
    const int64_t sms = std::max(1, device.sm_count);
    LolcatsBackwardChoice choice{{p.dtype, int(p.head_dim), int(p.features), 1}, 1};
    double least = std::numeric_limits<double>::infinity();
    for (int64_t segments = 1; segments <= std::min<int64_t>(chunks, MAX_SEGMENTS); ++segments) {
        const auto steps = double(ceil_div(lines * segments, sms) * ceil_div(chunks, segments));
        double cost = steps * CHUNK_COST;
        if (segments > 1)
            cost += steps * SUMS_COST + LAUNCHES_COST + double(segments) * SEGMENT_COST;
        if (cost < least) choice.segments = int(segments), least = cost;
    }
    // Two blocks share a multiprocessor, and those of both maps run at once; two rounds of them.
    const int64_t parts = ceil_div(2 * sms, std::max<int64_t>(lines, 1));
    choice.map_parts = int(std::clamp<int64_t>(parts, 1, std::max<int64_t>(chunks, 1)));
    return choice;
}

std::string kernel_name(const LolcatsBackwardChoice& c) {
    return concat("key_gradient_", name_of(c.dtype), "_d", c.head_dim, "_f", c.features);
}

std::vector<KernelInfo> lolcats_backward_kernels() {
    std::vector<KernelInfo> list;
    struct Kind {
        const char *name, *text;
        bool source_per_dtype;
        int threads, bytes;
    };
    constexpr Kind kinds[] = {
        {"query_gradient", "dQ", true, 384, LOLCATS_QUERY_BYTES},
        {"key_gradient", "dK and dV", true, 512, LOLCATS_KEY_BYTES},
        {"gradient_sums", "sums over the queries of a segment", false, 128,
         LOLCATS_GRADIENT_SUMS_BYTES},
        {"maps", "parts of the maps' gradients", false, 128, LOLCATS_MAPS_BYTES},
    };
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Kind& kind : kinds) {
            for (const int dim : {64, 128}) {
                for (const int features : {32, 64}) {
                    KernelInfo info;
                    info.name = concat(kind.name, "_", name_of(dtype), "_d", dim, "_f", features);
                    info.config = concat(kind.text, ", head dimension ", dim, ", ", features,
                                         " features twice");
                    info.source = concat("lolcats_", kind.name,
                                         kind.source_per_dtype ? concat('_', name_of(dtype)) : "");
                    info.symbol =
                        concat("lolcats_", kind.name, "_kernelINS0_13LolcatsKernelILNS_5DTypeE",
                               int(dtype), "ELi", dim, "ELi", features, "E");
                    info.threads = kind.threads;
                    info.shared_bytes = kind.bytes;
                    list.push_back(info);
                }
            }
        }
        list.push_back({.name = concat("parts_", name_of(dtype)),
                        .config = "sums of parts",
                        .source = "lolcats_rows",
                        .symbol = concat("lolcats_parts_kernelI", symbol_of(dtype)),
                        .threads = 256});
    }
    list.push_back({.name = "scan",
                    .config = "sums of the segments behind each",
                    .source = "lolcats_gradient_sums",
                    .symbol = "based_scan_kernelI6float4E",
                    .threads = 128});
    return list;
}

static const bool registered = register_op<LolcatsProblem, LolcatsBackwardChoice>(
    "lolcats_backward", "linear_attention", &lolcats_backward_kernels,
    static_cast<std::string (*)(const LolcatsProblem&, const DeviceProperties&)>(&unsupported),
    &choose_lolcats_backward);

}  // namespace thunderkittens::linear_attention
