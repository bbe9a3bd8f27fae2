// Which kernels quantise normalised rows: pure functions of the problem and the device.
#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/norm/quantize/quantize.h"

namespace thunderkittens::norm {

std::string unsupported_quantize(const QuantizeProblem& p, const DeviceProperties& device) {
    if (p.output < 0 || p.output >= OUTPUTS) {
        return concat("output is ", p.output, "; it must be from 0 to ", OUTPUTS - 1);
    }
    if (static_cast<Output>(p.output) == Output::nvfp4 && p.width % 2 != 0) {
        return concat("rows of ", p.width,
                      " elements have no NVFP4, of which two share a byte; their number must be "
                      "even");
    }
    return unsupported({.rows = p.rows,
                        .width = p.width,
                        .dtype = p.dtype,
                        .sum_dtype = p.sum_dtype,
                        .layer = p.layer},
                       device);
}

QuantizeConfig choose_quantize(const QuantizeProblem& p, const DeviceProperties& device) {
    const int lanes = lanes_of(p.width);
    const bool held = p.aligned && lanes <= MAX_LANES &&
                      (!has_blocks(static_cast<Output>(p.output)) || lanes >= LANES_OF_GROUP);
    const bool divided =
        p.aligned && lanes > MAX_LANES && p.width <= MOST_IN_CLUSTER && runs_native(device);
    return {held ? Path::registers : divided ? Path::cluster : Path::memory, !runs_native(device)};
}

std::string kernel_name(const QuantizeConfig& c) {
    return concat(strategy_name(c.path), c.portable ? "_portable" : "");
}

std::vector<KernelInfo> quantize_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < QUANTIZE_CONFIGS; ++i) {
        const QuantizeConfig c = quantize_at(i);
        list.push_back({
            .name = kernel_name(c),
            .config = concat("a row ",
                             c.path == Path::registers ? "in the registers of"
                             : c.path == Path::cluster ? "in the registers of a cluster, blocks of"
                                                       : "from memory,",
                             " up to ", most_lanes(c), " threads"),
            .symbol = symbol_of("norm_quantize_kernel", "QuantizeConfig", c),
            .arch = c.portable ? PORTABLE : NATIVE,
            .threads = most_lanes(c),
            .shared_bytes = 0,
            .fields = detail::fields_of(c),
        });
    }
    return list;
}

static const bool registered = register_op("rms_norm_quantize", "norm", &quantize_kernels,
                                           &unsupported_quantize, &choose_quantize);

}  // namespace thunderkittens::norm
