// Which kernel computes the gradient through a gate: pure functions of the problem and the device.
#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/backward/gemm_backward.h"

#include <limits>

namespace thunderkittens::gemm_backward {

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16 && p.dtype != DType::fp32) {
        return concat("grad must be bf16, fp16 or fp32, got ", name_of(p.dtype));
    }
    if (p.activation != Activation::silu && p.activation != Activation::gelu) {
        return concat("activation must be 2 (gelu) or 4 (silu), got ", int(p.activation));
    }
    if (p.gate != Gate::blocked && p.gate != Gate::interleaved) {
        return concat("gate must be 1 (blocked) or 2 (interleaved), got ", int(p.gate));
    }
    if (const int64_t blocks = blocks_of(p.rows, p.columns);
        blocks > std::numeric_limits<int32_t>::max()) {
        return concat("grad (", p.rows, ", ", p.columns, ") takes ", blocks,
                      " blocks; at most 2^31 - 1 are supported");
    }
    return "";
}

Config choose(const Problem& p, const DeviceProperties& device) {
    return {p.dtype, p.gate, !runs_native(device)};
}

std::string kernel_name(const Config& c) {
    return concat(name_of(c.dtype), c.gate == Gate::blocked ? "_blocked" : "_interleaved",
                  c.portable ? "_portable" : "");
}

std::vector<KernelInfo> kernels() {
    std::vector<KernelInfo> list;
    for (std::size_t i = 0; i < KERNELS; ++i) {
        const Config c = config_at(i);
        list.push_back({
            .name = kernel_name(c),
            .config = concat(THREADS, " threads, ", CHUNK, " gates each"),
            .symbol = concat(c.portable ? "29portable_" : "20", "gate_gradient_kernelILi",
                             int(c.dtype), "ELi", int(c.gate), 'E'),
            .arch = c.portable ? PORTABLE : NATIVE,
            .threads = THREADS,
        });
    }
    return list;
}

Params params_of(const Problem& p, const void* grad, int64_t grad_stride, const void* z,
                 void* out) {
    const auto at = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
    const auto step = static_cast<uintptr_t>(grad_stride * size_in_bytes(p.dtype));
    const bool aligned = p.columns % CHUNK == 0 && ((at(grad) | at(z) | at(out) | step) % 16) == 0;
    return {.grad = grad,
            .z = z,
            .out = out,
            .rows = p.rows,
            .columns = p.columns,
            .grad_stride = grad_stride,
            .chunks = chunks_of(p.columns),
            .activation = p.activation,
            .aligned = aligned};
}

static const bool registered =
    register_op("gemm_backward", "gemm", &kernels, &unsupported, &choose);

}  // namespace thunderkittens::gemm_backward
