// Which kernels run a problem of Based, and in how many segments. Pure functions.
#include "csrc/linear_attention/common/choose.h"

#include <algorithm>
#include <limits>

#include "csrc/common/math.h"

namespace thunderkittens::linear_attention {
std::string unsupported_problem(DType dtype, int64_t batch, int64_t heads, int64_t length,
                                int64_t value_dim, const DeviceProperties& device) {
    if (std::string reason = no_native_code_for(device); !reason.empty()) return reason;
    if (dtype != DType::bf16 && dtype != DType::fp16) {
        return concat("operands must be bf16 or fp16, got ", name_of(dtype));
    }
    if (value_dim < 8 || value_dim > MAX_VALUE_DIM || value_dim % 8 != 0) {
        return concat("the value dimension must be a multiple of 8 from 8 to ", MAX_VALUE_DIM,
                      ", got ", value_dim);
    }
    constexpr int64_t limit = std::numeric_limits<int32_t>::max() - 2 * CHUNK;
    if (std::min({batch, heads, length}) < 0 || std::max({batch, heads, length}) > limit) {
        return concat("sizes must be in [0, ", limit, "], got batch ", batch, ", heads ", heads,
                      ", length ", length);
    }
    if (double(batch) * double(heads) * double(ceil_div(value_dim, VALUES)) > 2e9) {
        return concat("batch ", batch, " times ", heads, " heads are too many");
    }
    if (BACKWARD_BYTES > device.shared_bytes_per_block) {
        return concat("the kernels need ", BACKWARD_BYTES,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

int choose_segments(int64_t heads, int64_t chunks, const Costs& costs,
                    const DeviceProperties& device) {
    const int64_t sms = std::max(1, device.sm_count);
    int best = 1;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t segments = 1; segments <= std::min<int64_t>(chunks, MAX_SEGMENTS); ++segments) {
        const int64_t blocks = heads * segments, length = ceil_div(chunks, segments);
        // Where two blocks share a multiprocessor, one alone is faster than one of two.
        const int64_t waves = ceil_div(blocks, costs.blocks_per_sm * sms);
        const double per_chunk = blocks <= sms ? costs.alone : 1.0;
        double cost = double(waves * length) * per_chunk * costs.chunk;
        if (segments > 1) {
            cost += double(waves * length) * per_chunk * costs.sum + costs.launches +
                    double(segments) * costs.segment;
        }
        if (cost < least) best = int(segments), least = cost;
    }
    return best;
}

std::string unsupported(const BasedProblem& p, const DeviceProperties& device) {
    return unsupported_problem(p.dtype, p.batch, p.heads, p.length, p.value_dim, device);
}

// Cycles, of an H200.
BasedChoice choose(const BasedProblem& p, const DeviceProperties& device) {
    constexpr Costs costs{.chunk = 2000,
                          .sum = 1000,
                          .launches = 8000,
                          .segment = 100,
                          .alone = 0.65,
                          .blocks_per_sm = 2};
    return {p.dtype, p.denominator,
            choose_segments(p.batch * p.heads * slices_of(p), chunks_of(p), costs, device)};
}

std::string kernel_name(const BasedChoice& c) {
    return concat("forward_", name_of(c.dtype), c.denominator ? "_denominator" : "");
}

std::vector<KernelInfo> based_kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        const auto add = [&](const char* kind, const char* text, const char* suffix,
                             const char* symbol, int bytes) {
            KernelInfo info;
            info.name = concat(kind, "_", name_of(dtype), suffix);
            info.config = concat(text, ": chunks of ", CHUNK, " tokens, ", VALUES,
                                 " columns of values, 1 warpgroup");
            info.source = concat("based_", kind);
            info.symbol = concat("based_", kind, "_kernelI", symbol_of(dtype), symbol);
            info.threads = 128;
            info.shared_bytes = bytes;
            list.push_back(info);
        };
        add("forward", "output", "", "Lb0E", FORWARD_BYTES);
        add("forward", "output, and sum of its weights", "_denominator", "Lb1E", FORWARD_BYTES);
        add("segment_states", "state of a segment", "", "Lb0ELb0E", SEGMENT_STATES_BYTES);
        add("segment_states", "state of a segment, with the denominator's", "_denominator",
            "Lb1ELb0E", SEGMENT_STATES_BYTES);
        add("segment_states", "the same with weights of the tokens", "_weighted", "Lb1ELb1E",
            SEGMENT_STATES_BYTES);
    }
    for (const bool denominator : {false, true}) {
        KernelInfo info;
        info.name = denominator ? "scan_denominator" : "scan";
        info.config = "prefix sums of the segments' states";
        info.source = "based_scan";
        info.symbol = denominator ? "based_scan_kernelIf" : "based_scan_kernelI6float4";
        info.threads = 128;
        list.push_back(info);
    }
    return list;
}

static const bool registered =
    register_op("based", "linear_attention", &based_kernels, &unsupported, &choose);

}  // namespace thunderkittens::linear_attention
