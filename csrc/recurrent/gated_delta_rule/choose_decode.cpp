// Which kernel runs a step of the gated delta rule. Pure functions.
#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/gated_delta_rule/gated_delta_rule_decode.h"

namespace thunderkittens::recurrent {

std::string unsupported(const DeltaRuleDecodeProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16)
        return concat("operands must be bf16 or fp16, got ", name_of(p.dtype));
    if (p.key_dim < 8 || p.key_dim > DELTA_MAX_KEY_DIM || p.key_dim % 8 != 0) {
        return concat("the key dimension must be a multiple of 8 from 8 to ", DELTA_MAX_KEY_DIM,
                      ", got ", p.key_dim);
    }
    if (p.value_dim < 8 || p.value_dim > DELTA_MAX_VALUE_DIM || p.value_dim % 8 != 0) {
        return concat("the value dimension must be a multiple of 8 from 8 to ", DELTA_MAX_VALUE_DIM,
                      ", got ", p.value_dim);
    }
    if (p.heads < 0 || p.value_heads < 0 ||
        (p.heads == 0 ? p.value_heads != 0 : p.value_heads % p.heads != 0)) {
        return concat("the value heads must be a multiple of the heads, got ", p.value_heads,
                      " and ", p.heads);
    }
    if (p.length < 1 || p.length > DELTA_MAX_TOKENS)
        return concat("a step has 1 to ", DELTA_MAX_TOKENS, " tokens, got ", p.length);
    if (double(p.batch) * double(p.value_heads) * double(ceil_div(p.value_dim, 8)) > 2e9)
        return concat("batch ", p.batch, " times ", p.value_heads, " value heads are too many");
    return "";
}

DeltaRuleDecodeConfig choose_decode(const DeltaRuleDecodeProblem& p,
                                    const DeviceProperties& device) {
    return {p.dtype, !runs_native(device), p.wide_state, p.keys_inner};
}

std::string kernel_name(const DeltaRuleDecodeConfig& c) {
    return concat("decode_", name_of(c.dtype), c.wide_state ? "_fp32" : "_bf16",
                  c.keys_inner ? "_keys_inner" : "_values_inner", c.portable ? "_portable" : "");
}

std::vector<KernelInfo> gated_delta_rule_decode_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            for (const bool wide : {false, true}) {
                for (const bool keys_inner : {false, true}) {
                    KernelInfo info;
                    info.name =
                        kernel_name(DeltaRuleDecodeConfig{dtype, portable, wide, keys_inner});
                    info.config = "1 to 8 tokens: a part of a head's state in registers";
                    info.symbol =
                        concat(portable ? "delta_portable_decode_kernelI" : "delta_decode_kernelI",
                               symbol_of(dtype), "Lb", int(wide), "ELb", int(keys_inner), 'E');
                    info.arch = portable ? PORTABLE : NATIVE;
                    info.threads = DELTA_DECODE_THREADS;
                    list.push_back(info);
                }
            }
        }
    }
    return list;
}

static const bool registered =
    register_op("gated_delta_rule_decode", "recurrent", &gated_delta_rule_decode_kernels,
                &unsupported, &choose_decode);

}  // namespace thunderkittens::recurrent
