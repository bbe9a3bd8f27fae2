// Which kernels run a problem of Based, and in how many segments. Pure functions.
#include "csrc/linear_attention/common/choose.h"

#include <algorithm>
#include <limits>

#include "csrc/common/math.h"

namespace thunderkittens::linear_attention {
std::string unsupported_problem(DType dtype, int64_t batch, int64_t heads, int64_t length,
                                int64_t value_dim, int shared_bytes,
                                const DeviceProperties& device) {
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
    if (shared_bytes > device.shared_bytes_per_block) {
        return concat("the kernels need ", shared_bytes,
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

BasedChoice choose_by(const BasedProblem& p, const DeviceProperties& device, const Costs& native,
                      const Costs& portable) {
    const bool is_native = runs_native(device);
    return {p.dtype, p.denominator, !is_native,
            choose_segments(p.batch * p.heads * slices_of(p), chunks_of(p),
                            is_native ? native : portable, device)};
}

std::string unsupported(const BasedProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    const int bytes = runs_native(device) ? BACKWARD_BYTES : PORTABLE_BACKWARD_BYTES;
    return unsupported_problem(p.dtype, p.batch, p.heads, p.length, p.value_dim, bytes, device);
}

// Cycles, of an H200; of portable kernels as expected from their products and loads.
BasedChoice choose(const BasedProblem& p, const DeviceProperties& device) {
    return choose_by(p, device, {2000, 1000, 8000, 100, 0.65, 2},
                     {3400, 2000, 12000, 100, 0.65, 2});
}

std::string kernel_name(const BasedChoice& c) {
    return concat("forward_", name_of(c.dtype), c.denominator ? "_denominator" : "",
                  c.portable ? "_portable" : "");
}

std::vector<KernelInfo> based_kernels() {
    std::vector<KernelInfo> list;
    const auto enter = [&](const std::string& name, const std::string& text,
                           const std::string& kind, const std::string& arguments, bool portable,
                           int bytes) {
        KernelInfo info;
        info.name = concat(name, portable ? "_portable" : "");
        info.config = text;
        info.symbol = concat(portable ? "based_portable_" : "based_", kind, "_kernelI", arguments);
        info.arch = portable ? PORTABLE : NATIVE;
        info.threads = 128;
        info.shared_bytes = bytes;
        list.push_back(info);
    };
    for (const bool portable : {false, true}) {
        const int forward = portable ? PORTABLE_FORWARD_BYTES : FORWARD_BYTES;
        const int states = portable ? PORTABLE_SEGMENT_STATES_BYTES : SEGMENT_STATES_BYTES;
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            const auto add = [&](const char* kind, const char* text, const char* suffix,
                                 const char* symbol, int bytes) {
                enter(concat(kind, "_", name_of(dtype), suffix),
                      concat(text, ": chunks of ", CHUNK, " tokens, ", VALUES,
                             " columns of values, ", portable ? "4 warps" : "1 warpgroup"),
                      kind, concat(symbol_of(dtype), symbol), portable, bytes);
            };
            add("forward", "output", "", "Lb0E", forward);
            add("forward", "output, and sum of its weights", "_denominator", "Lb1E", forward);
            add("segment_states", "state of a segment", "", "Lb0ELb0E", states);
            add("segment_states", "state of a segment, with the denominator's", "_denominator",
                "Lb1ELb0E", states);
            add("segment_states", "the same with weights of the tokens", "_weighted", "Lb1ELb1E",
                states);
        }
        enter("scan", "prefix sums of the segments' states", "scan", "6float4", portable, 0);
        enter("scan_denominator", "prefix sums of the segments' states", "scan", "f", portable, 0);
    }
    return list;
}

static const bool registered =
    register_op("based", "linear_attention", &based_kernels, &unsupported, &choose);

}  // namespace thunderkittens::linear_attention
