// Which kernels run Based's gradient, and in how many segments. Pure functions.
#include "csrc/linear_attention/common/choose.h"

namespace thunderkittens::linear_attention {

// Cycles, of an H200; both main kernels together. Of portable kernels as expected.
BasedBackwardChoice choose_backward(const BasedProblem& p, const DeviceProperties& device) {
    return {choose_by(p, device, {6000, 2000, 16000, 200, 0.65, 2},
                      {10000, 4000, 24000, 200, 0.65, 2})};
}

std::string kernel_name(const BasedBackwardChoice& c) {
    return concat("key_gradient_", c.denominator ? "denominator_" : "", name_of(c.dtype),
                  c.portable ? "_portable" : "");
}

std::vector<KernelInfo> based_backward_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            const auto add = [&](const std::string& name, const std::string& kernel,
                                 const std::string& arguments, const std::string& text, int threads,
                                 int bytes) {
                KernelInfo info;
                info.name = concat(name, "_", name_of(dtype), portable ? "_portable" : "");
                info.config = text;
                info.symbol = concat(kernel, "_kernelI", symbol_of(dtype), arguments);
                info.arch = portable ? PORTABLE : NATIVE;
                info.threads = threads;
                info.shared_bytes = bytes;
                list.push_back(info);
            };
            for (const char* part : {"query", "key"}) {
                for (const bool denominator : {false, true}) {
                    const std::string gradient = concat(part, "_gradient");
                    add(gradient + (denominator ? "_denominator" : ""),
                        concat(portable ? "based_portable_" : "based_", gradient),
                        concat("Lb", int(denominator), 'E'),
                        concat(part[0] == 'q' ? "dQ" : "dK and dV", ": chunks of ", CHUNK,
                               " tokens, ", VALUES, " columns of values, ",
                               portable ? "4 warps" : "1 warpgroup",
                               denominator ? ", with the denominator" : ""),
                        128, portable ? PORTABLE_BACKWARD_BYTES : BACKWARD_BYTES);
                }
            }
            const std::string which = concat("Lb", int(portable), 'E');
            add("preprocess", "based_preprocess", which,
                "weights of the tokens, from the denominators", 256, 0);
            add("reduce_partials", "based_reduce_partials", which,
                "sums of the partial dQ and dK of the value slices", 256, 0);
        }
    }
    return list;
}

static const bool registered = register_op("based_backward", "linear_attention",
                                           &based_backward_kernels, &unsupported, &choose_backward);

}  // namespace thunderkittens::linear_attention
