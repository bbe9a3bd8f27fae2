// Which kernel quantises to MXFP8 or NVFP4, or back: pure functions of the problem and the device.
#include <algorithm>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/quantize/block_scaled.h"

namespace thunderkittens::block_scaled {
namespace {

constexpr const char* PORTABLE_NAME = "_portable";

bool is_wide(DType dtype) { return std::ranges::find(WIDE, dtype) != std::end(WIDE); }

std::string unsupported_sizes(int64_t rows, int64_t columns, int64_t batch, DType dtype,
                              const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (!is_wide(dtype)) return concat("x must be bf16, fp16 or fp32, got ", name_of(dtype));
    // Tiles are counted in 31 bits, matrices in 16.
    const double count = (double(rows) / TILE + 1) * (double(columns) / TILE + 1) * double(batch);
    if (count > 2e9) return concat("x has some ", count, " tiles; at most 2e9 are supported");
    return "";
}

// A kernel of 256 threads, a template over the fields of a configuration.
template <class Config>
KernelInfo kernel(const std::string& name, const char* kernel, Config config) {
    std::string symbol = concat(kernel, 'I');
    visit_fields(config, [&](const char*, auto& field) {
        constexpr bool flag = std::is_same_v<decltype(field), bool&>;
        symbol += concat(flag ? "Lb" : "Li", int(field), 'E');
    });
    return {.name = name,
            .config = "tile 128x128, 256 threads",
            .symbol = symbol,
            .arch = config.portable ? PORTABLE : NATIVE,
            .threads = THREADS};
}
template <auto at, std::size_t count>
std::vector<KernelInfo> kernels(const char* name) {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < count; ++i) {
        list.push_back(kernel(kernel_name(at(i)), name, at(i)));
    }
    return list;
}

std::vector<KernelInfo> mxfp8_quantize_kernels() {
    return kernels<mxfp8_quantize_at, MXFP8_QUANTIZE>("mxfp8_quantize_kernel");
}
std::vector<KernelInfo> mxfp8_dequantize_kernels() {
    return kernels<mxfp8_dequantize_at, MXFP8_DEQUANTIZE>("mxfp8_dequantize_kernel");
}
std::vector<KernelInfo> nvfp4_quantize_kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < NVFP4_QUANTIZE; ++i) {
        const Nvfp4Quantize c = nvfp4_quantize_at(i);
        const bool ring = in_ring(c);
        list.push_back(kernel(kernel_name(c),
                              ring ? "nvfp4_quantize_ring_kernel" : "nvfp4_quantize_kernel", c));
        // `unaligned` tells kernels apart by what they are called; those of the ring have no
        // portable twins.
        std::string& symbol = list.back().symbol;
        constexpr std::size_t flag = std::string_view("Lb0E").size();
        symbol.erase(symbol.size() - 2 * flag, ring ? 2 * flag : flag);
        if (!ring) continue;
        list.back().config = "tile 128x128, 2 stages, 256 threads";
        list.back().shared_bytes = NVFP4_RING_BYTES;
    }
    for (std::size_t i = 0; i < NVFP4_DEQUANTIZE; ++i) {
        const Nvfp4Dequantize c = nvfp4_dequantize_at(i);
        list.push_back(kernel(concat("maxima_", kernel_name(c)), "nvfp4_maxima_kernel", c));
    }
    return list;
}
std::vector<KernelInfo> nvfp4_dequantize_kernels() {
    return kernels<nvfp4_dequantize_at, NVFP4_DEQUANTIZE>("nvfp4_dequantize_kernel");
}

}  // namespace

std::string unsupported(const Mxfp8Problem& p, const DeviceProperties& device) {
    if (!is_fp8(p.data_dtype)) {
        return concat("elements must be e4m3 or e5m2, got ", name_of(p.data_dtype));
    }
    return unsupported_sizes(p.rows, p.columns, p.batch, p.dtype, device);
}
std::string unsupported(const Nvfp4Problem& p, const DeviceProperties& device) {
    if (p.columns % 2 != 0) {
        return concat("the number of columns must be even, got ", p.columns);
    }
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    if (std::max(p.rows, p.columns) > limit) {
        return concat("at most ", limit, " rows and columns are supported, got ", p.rows, " and ",
                      p.columns);
    }
    return unsupported_sizes(p.rows, p.columns, p.batch, p.dtype, device);
}

Mxfp8Quantize choose_mxfp8_quantize(const Mxfp8Problem& p, const DeviceProperties& device) {
    return {p.dtype, p.data_dtype, p.transpose || !p.row_major, !runs_native(device)};
}
Mxfp8Dequantize choose_mxfp8_dequantize(const Mxfp8Problem& p, const DeviceProperties& device) {
    return {p.dtype, p.data_dtype, !runs_native(device)};
}
Nvfp4Quantize choose_nvfp4_quantize(const Nvfp4Problem& p, const DeviceProperties& device) {
    const bool portable = !runs_native(device);
    return {p.dtype, p.square, p.stochastic, !portable && p.unaligned && p.dtype != DType::fp32,
            portable};
}
Nvfp4Dequantize choose_nvfp4_dequantize(const Nvfp4Problem& p, const DeviceProperties& device) {
    return {p.dtype, !runs_native(device)};
}

int maxima_count(const Nvfp4Problem& p, const DeviceProperties& device) {
    // Enough blocks for a matrix to fill the SMs, which hold three each.
    const int64_t most = 3 * std::max(1, device.sm_count);
    return static_cast<int>(std::clamp<int64_t>(tiles(p.rows, p.columns, 1), 1, most));
}

int ring_blocks(const DeviceProperties& device) {
    return NVFP4_BLOCKS_PER_SM * std::max(1, device.sm_count);
}

std::string kernel_name(const Mxfp8Quantize& c) {
    return concat(name_of(c.dtype), '_', name_of(c.data_dtype), c.down ? "_down" : "",
                  c.portable ? PORTABLE_NAME : "");
}
std::string kernel_name(const Mxfp8Dequantize& c) {
    return concat(name_of(c.data_dtype), '_', name_of(c.dtype), c.portable ? PORTABLE_NAME : "");
}
std::string kernel_name(const Nvfp4Quantize& c) {
    return concat(name_of(c.dtype), c.square ? "_16x16" : "_1x16",
                  c.stochastic ? "_stochastic" : "", c.unaligned ? "_unaligned" : "",
                  c.portable ? PORTABLE_NAME : "");
}
std::string kernel_name(const Nvfp4Dequantize& c) {
    return concat(name_of(c.dtype), c.portable ? PORTABLE_NAME : "");
}

static const bool registered = register_op("mxfp8_quantize", "gemm", &mxfp8_quantize_kernels,
                                           &unsupported, &choose_mxfp8_quantize) &&
                               register_op("mxfp8_dequantize", "gemm", &mxfp8_dequantize_kernels,
                                           &unsupported, &choose_mxfp8_dequantize) &&
                               register_op("nvfp4_quantize", "gemm", &nvfp4_quantize_kernels,
                                           &unsupported, &choose_nvfp4_quantize) &&
                               register_op("nvfp4_dequantize", "gemm", &nvfp4_dequantize_kernels,
                                           &unsupported, &choose_nvfp4_dequantize);

}  // namespace thunderkittens::block_scaled
