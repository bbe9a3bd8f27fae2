// Which kernel runs a step of Based. Pure functions.
#include "csrc/linear_attention/based/based_decode.h"
#include "csrc/linear_attention/common/choose.h"

namespace thunderkittens::linear_attention {

std::string unsupported(const BasedDecodeProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    return unsupported_problem(p.dtype, p.batch, p.heads, 1, p.value_dim, BASED_DECODE_BYTES,
                               device);
}

// Where there are few heads, more threads shorten the way through one.
BasedDecodeChoice choose_decode(const BasedDecodeProblem& p, const DeviceProperties& device) {
    const bool few = p.batch * p.heads <= 2 * device.sm_count;
    return {p.dtype, !runs_native(device), few ? 512 : 256};
}

std::string kernel_name(const BasedDecodeChoice& c) {
    return concat("decode_", name_of(c.dtype), c.portable ? "_portable" : "");
}

std::vector<KernelInfo> based_decode_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            KernelInfo info;
            info.name = kernel_name(BasedDecodeChoice{dtype, portable});
            info.config = "one token: state and output of a head, 256 or 512 threads";
            info.symbol =
                concat(portable ? "based_portable_decode_kernelI" : "based_decode_kernelI",
                       symbol_of(dtype));
            info.arch = portable ? PORTABLE : NATIVE;
            info.threads = 512;
            info.shared_bytes = BASED_DECODE_BYTES;
            list.push_back(info);
        }
    }
    return list;
}

static const bool registered = register_op("based_decode", "linear_attention",
                                           &based_decode_kernels, &unsupported, &choose_decode);

}  // namespace thunderkittens::linear_attention
