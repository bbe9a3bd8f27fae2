// Which kernel rotates: pure functions of the problem and the device.
#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/rotary/rotary.h"

namespace thunderkittens::rotary {

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16 && p.dtype != DType::fp32) {
        return concat("x must be bf16, fp16 or fp32, got ", name_of(p.dtype));
    }
    if (p.heads >= int64_t{1} << 31 || p.dim >= int64_t{1} << 31) {
        return concat("x has ", p.heads, " heads of ", p.dim,
                      " elements; of both, at most 2^31 - 1 are supported");
    }
    return "";
}

Config choose(const Problem& p, const DeviceProperties& device) {
    return {p.dtype, !runs_native(device)};
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.dtype), c.portable ? "_portable" : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < CONFIGS; ++i) {
        const Config c = config_at(i);
        list.push_back({.name = kernel_name(c),
                        .config = concat(THREADS, " threads, ", PAIRS, " pairs of ",
                                         heads_of_thread(c.dtype), " heads each"),
                        .symbol = symbol_of("rotary_kernel", "Config", c),
                        .arch = c.portable ? PORTABLE : NATIVE,
                        .threads = THREADS,
                        .shared_bytes = 0,
                        .fields = detail::fields_of(c)});
    }
    return list;
}

static const bool registered = register_op("rotary", "rotary", &kernels, &unsupported, &choose);

}  // namespace thunderkittens::rotary
