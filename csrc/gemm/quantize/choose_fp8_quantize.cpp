// Which kernels quantise which problem: pure functions of the problem and the device.
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/quantize/fp8_quantize.h"

namespace thunderkittens::fp8_quantize {

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16 && p.dtype != DType::fp32) {
        return concat("x must be bf16, fp16 or fp32, got ", name_of(p.dtype));
    }
    if (!is_fp8(p.out_dtype))
        return concat("the result must be e4m3 or e5m2, got ", name_of(p.out_dtype));
    const Config config = choose(p, device);
    const int64_t blocks = blocks_of(config.pass, p.m, p.k, device.sm_count);
    if (blocks > std::numeric_limits<int32_t>::max()) {
        return concat("x (", p.m, ", ", p.k, ") takes ", blocks,
                      " blocks; at most 2^31 - 1 are supported");
    }
    return "";
}

Config choose(const Problem& p, const DeviceProperties& device) {
    return {p.dtype, last_pass(p), !runs_native(device)};
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.dtype), '_', name_of(c.pass), c.portable ? "_portable" : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    const auto add = [&](const Config& c) {
        list.push_back({
            .name = kernel_name(c),
            .config = concat(THREADS, " threads, 64 elements each"),
            .symbol = concat("fp8_quantize_kernelI", symbol_of(c.dtype), "LNS0_4PassE", int(c.pass),
                             "ELb", int(c.portable), 'E'),
            .arch = c.portable ? PORTABLE : NATIVE,
            .threads = THREADS,
            .shared_bytes = 0,
        });
    };
    for (std::size_t i = 0; i < CONFIGS; ++i) add(config_at(i));
    for (const bool portable : {false, true}) {
        list.push_back(
            {.name = portable ? "transpose_portable" : "transpose",
             .config = "256 threads, 64 bytes each",
             .symbol = concat("LNS0_4PassE", int(Pass::transpose), "ELb", int(portable), 'E'),
             .arch = portable ? PORTABLE : NATIVE,
             .threads = THREADS,
             .shared_bytes = 0});
    }
    return list;
}

static const bool registered = register_op("fp8_quantize", "gemm", &kernels, &unsupported, &choose);

}  // namespace thunderkittens::fp8_quantize
