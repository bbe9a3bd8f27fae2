// Which kernels normalise rows: pure functions of the problem and the device.
#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/norm/norm.h"

namespace thunderkittens::norm {

namespace {

std::string unsupported_types(const Problem& p) {
    for (const Types& t : TYPES) {
        if (t.dtype == p.dtype && t.sum_dtype == p.sum_dtype && t.gated == p.gated) return "";
    }
    return concat("x in ", name_of(p.dtype), " with ", p.gated ? "a gate and " : "",
                  "a residual in ", name_of(p.sum_dtype),
                  " is not supported; x is bf16, fp16 or fp32, and the residual of its dtype or "
                  "fp32");
}

Config config_of(const Problem& p, const DeviceProperties& device) {
    return {.dtype = p.dtype,
            .sum_dtype = p.sum_dtype,
            .gated = p.gated,
            .path = Path::memory,
            .portable = !runs_native(device)};
}

}  // namespace

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (std::string reason = unsupported_types(p); !reason.empty()) return reason;
    if (p.rows >= int64_t{1} << 31 || p.width >= int64_t{1} << 31) {
        return concat("x has ", p.rows, " rows of ", p.width,
                      " elements; of both, at most 2^31 - 1 are supported");
    }
    return "";
}
std::string unsupported_backward(const Problem& p, const DeviceProperties& device) {
    if (p.layer && p.gated) return "layer_norm has no gate";
    return unsupported(p, device);
}

Config choose(const Problem& p, const DeviceProperties& device) {
    Config config = config_of(p, device);
    if (!p.aligned) return config;
    // What is gated is held in fp32, by half as many lanes.
    const int lanes = p.gated && !config.portable ? SLICE_LANES : MAX_LANES;
    if (lanes_of(p.width) <= lanes) {
        config.path = Path::registers;
    } else if (!config.portable && p.width <= MOST_IN_CLUSTER) {
        config.path = Path::cluster;
    } else if (config.portable && !p.gated && p.width <= most_in_block(config)) {
        config.path = Path::wide;
    }
    return config;
}
Config choose_backward(const Problem& p, const DeviceProperties& device) {
    Config config = config_of(p, device);
    config.layer = p.layer;
    if (!p.aligned) return config;
    if (config.portable || config.gated) {
        if (lanes_of(p.width, units_of(config)) <= most_lanes_of_gradient(config)) {
            config.path = Path::registers;
        }
        return config;
    }
    // The fewest units a lane that let a team stream its rows.
    for (int units = 1; units <= (p.sum_dtype == DType::fp32 ? 2 : 4); units *= 2) {
        if (lanes_of(p.width, units) > MAX_LANES) continue;
        Config streamed = config;
        streamed.path = Path::registers, streamed.units = units;
        const int bytes = streamed_bytes(streamed, threads_of(lanes_of(streamed, p.width)));
        return bytes <= device.shared_bytes_per_block ? streamed : config;
    }
    if (p.width > MOST_IN_CLUSTER) return config;
    Config divided = config;
    divided.path = Path::cluster, divided.units = 2;
    const int bytes = streamed_bytes(divided, lanes_of(divided, p.width));
    return bytes <= device.shared_bytes_per_block ? divided : config;
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.dtype), c.sum_dtype != c.dtype ? "_sum_fp32" : "",
                  c.layer ? "_layer" : "", c.gated ? "_gated" : "", "_", strategy_name(c.path),
                  c.units > 0 ? concat("_", c.units, "units") : "", c.portable ? "_portable" : "");
}

namespace {

KernelInfo info_of(const char* kernel, const Config& c, int threads) {
    return {
        .name = kernel_name(c),
        .config = c.path == Path::registers
                      ? concat("a row in the registers of up to ", threads, " threads")
                  : c.path == Path::cluster
                      ? concat("a row in the registers of a cluster, ", threads, " threads a block")
                  : c.path == Path::wide ? concat("a row in the registers of ", threads, " threads")
                                         : concat("a row from memory, up to ", threads, " threads"),
        .symbol = symbol_of(kernel, "Config", c),
        .arch = c.portable ? PORTABLE : NATIVE,
        .threads = threads,
        .shared_bytes = streamed_bytes(c, threads),
        .fields = detail::fields_of(c),
    };
}

}  // namespace

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < FORWARD_CONFIGS; ++i) {
        const Config c = forward_at(i);
        list.push_back(info_of("norm_forward_kernel", c, most_lanes_of_forward(c)));
    }
    return list;
}

std::vector<KernelInfo> backward_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < BACKWARD_CONFIGS; ++i) {
        const Config c = backward_at(i);
        list.push_back(info_of("norm_backward_kernel", c,
                               c.path == Path::memory ? MAX_LANES : most_lanes_of_gradient(c)));
    }
    for (const bool portable : {false, true}) {
        list.push_back({.name = portable ? "reduce_portable" : "reduce",
                        .config = concat(REDUCE_THREADS, " threads, ", REDUCE_COLUMNS, " columns"),
                        .symbol = concat("norm_reduce_kernelILb", int(portable), 'E'),
                        .arch = portable ? PORTABLE : NATIVE,
                        .threads = REDUCE_THREADS,
                        .shared_bytes = 0});
    }
    return list;
}

static const bool registered = register_op("rms_norm", "norm", &kernels, &unsupported, &choose) &&
                               register_op("rms_norm_backward", "norm", &backward_kernels,
                                           &unsupported_backward, &choose_backward);

}  // namespace thunderkittens::norm
