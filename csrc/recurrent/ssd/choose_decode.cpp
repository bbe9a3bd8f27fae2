// Which kernel runs a few tokens of tk.ssd or tk.linear_attention. Pure functions.
#include <algorithm>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/common/decode.h"

namespace thunderkittens::recurrent {

std::string unsupported(const DecodeProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16) {
        return concat("operands must be bf16 or fp16, got ", name_of(p.dtype));
    }
    if (p.state_dtype != DType::fp32 && p.state_dtype != p.dtype) {
        return concat("a state must be fp32 or of the operands' dtype, got ",
                      name_of(p.state_dtype));
    }
    const auto fits = [](int64_t dim, int64_t most) {
        return dim >= 8 && dim <= most && dim % 8 == 0;
    };
    if (!fits(p.key_dim, MAX_KEY_DIM) || !fits(p.value_dim, MAX_VALUE_DIM)) {
        return concat("the key and the value dimension must be multiples of 8, from 8 to ",
                      MAX_KEY_DIM, " and to ", MAX_VALUE_DIM, ", got ", p.key_dim, " and ",
                      p.value_dim);
    }
    if (p.tokens < 1 || p.tokens > MAX_DECODE_TOKENS) {
        return concat("a sequence has from 1 to ", MAX_DECODE_TOKENS, " tokens, got ", p.tokens);
    }
    if ((p.groups == 0) != (p.heads == 0) || (p.groups > 0 && p.heads % p.groups != 0)) {
        return concat("the heads of the values must be a multiple of those of the keys, got ",
                      p.heads, " and ", p.groups);
    }
    if (std::min({p.batch, p.heads}) < 0 ||
        double(p.batch) * double(p.heads) * double(ceil_div(p.value_dim, VALUES)) >
            double(std::numeric_limits<int32_t>::max())) {
        return concat("batch ", p.batch, " times ", p.heads, " heads are too many");
    }
    return "";
}

DecodeConfig choose_decode(const DecodeProblem& p, const DeviceProperties& device) {
    return {p.dtype, p.state_dtype == DType::fp32, p.keys_first,
            p.keys_first || p.key_dim <= 64 ? 64 : 128, !runs_native(device)};
}

std::string kernel_name(const DecodeConfig& c) {
    return concat("decode_", name_of(c.dtype), c.wide_state ? "_state32" : "_state16",
                  c.keys_first ? "_keys_first" : concat("_keys", c.columns),
                  c.portable ? "_portable" : "");
}

std::vector<KernelInfo> decode_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            for (const bool wide : {true, false}) {
                for (const auto& [keys_first, columns] :
                     {std::pair{false, 64}, {false, 128}, {true, 64}}) {
                    KernelInfo info;
                    info.name =
                        kernel_name(DecodeConfig{dtype, wide, keys_first, columns, portable});
                    const int keys = keys_first ? 128 : columns;
                    info.config = concat("a few tokens: 64 columns of the values of a head, ",
                                         decode_threads(keys), " threads, states of ",
                                         wide ? "fp32" : name_of(dtype));
                    // The operands' type, named again, is a substitution.
                    info.symbol =
                        concat("recurrent_decode_kernelI", symbol_of(dtype), wide ? "f" : "S2_",
                               "Lb", int(keys_first), "ELi", keys, "ELb", int(portable), "E");
                    info.arch = portable ? PORTABLE : NATIVE;
                    info.threads = decode_threads(keys);
                    info.shared_bytes = decode_bytes(keys_first, keys);
                    list.push_back(info);
                }
            }
        }
    }
    return list;
}

static const bool registered =
    register_op("ssd_decode", "recurrent", &decode_kernels, &unsupported, &choose_decode);

}  // namespace thunderkittens::recurrent
