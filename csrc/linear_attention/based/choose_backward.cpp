// Which kernels run Based's gradient, and in how many segments. Pure functions.
#include "csrc/linear_attention/common/choose.h"

namespace thunderkittens::linear_attention {

// Cycles, of an H200; both main kernels together.
BasedBackwardChoice choose_backward(const BasedProblem& p, const DeviceProperties& device) {
    constexpr Costs costs{.chunk = 6000,
                          .sum = 2000,
                          .launches = 16000,
                          .segment = 200,
                          .alone = 0.65,
                          .blocks_per_sm = 2};
    return {{p.dtype, p.denominator,
             choose_segments(p.batch * p.heads * slices_of(p), chunks_of(p), costs, device)}};
}

std::string kernel_name(const BasedBackwardChoice& c) {
    return concat("key_gradient_", c.denominator ? "denominator_" : "", name_of(c.dtype));
}

std::vector<KernelInfo> based_backward_kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        const auto add = [&](const std::string& source, const std::string& name,
                             const std::string& symbol, const std::string& text, int threads,
                             int bytes) {
            KernelInfo info;
            info.name = concat(name, "_", name_of(dtype));
            info.config = text;
            info.source = concat("based_", source);
            info.symbol = symbol;
            info.threads = threads;
            info.shared_bytes = bytes;
            list.push_back(info);
        };
        for (const char* part : {"query", "key"}) {
            for (const bool denominator : {false, true}) {
                const std::string source = concat(part, "_gradient");
                add(source, source + (denominator ? "_denominator" : ""),
                    concat("based_", source, "_kernelI", symbol_of(dtype), "Lb", int(denominator),
                           'E'),
                    concat(part[0] == 'q' ? "dQ" : "dK and dV", ": chunks of ", CHUNK, " tokens, ",
                           VALUES, " columns of values, 1 warpgroup",
                           denominator ? ", with the denominator" : ""),
                    128, BACKWARD_BYTES);
            }
        }
        add("backward_prepost", "preprocess", concat("based_preprocess_kernelI", symbol_of(dtype)),
            "weights of the tokens, from the denominators", 256, 0);
        add("backward_prepost", "reduce_partials",
            concat("based_reduce_partials_kernelI", symbol_of(dtype)),
            "sums of the partial dQ and dK of the value slices", 256, 0);
    }
    return list;
}

static const bool registered = register_op("based_backward", "linear_attention",
                                           &based_backward_kernels, &unsupported, &choose_backward);

}  // namespace thunderkittens::linear_attention
