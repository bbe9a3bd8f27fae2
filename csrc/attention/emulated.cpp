// Attention on the emulator, as attention.cpp does it on CUDA tensors.
#include "csrc/attention/dispatch.h"
#include "csrc/attention/emulated_operands.h"

namespace thunderkittens::attention {
namespace {

emulated::Result run(const emulated::Call& call) {
    const Array &q_in = call.array("q"), &k_in = call.array("k"), &v_in = call.array("v");
    ForwardParams params;
    Problem& p = params.problem;
    p = checked_problem(call);
    std::vector<int64_t> out_size = q_in.size;
    out_size.back() = p.value_dim;
    Array out = emulated::allocate(out_size, q_in.dtype);
    Array lse = p.varlen ? emulated::allocate({p.q_heads, q_in.size[0]}, DType::fp32)
                         : emulated::allocate({p.batch, p.q_heads, p.q_length}, DType::fp32);
    emulated::Result result;
    result.arrays["out"] = out;
    result.arrays["lse"] = lse;
    if (out.elements() == 0) return result;
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.attention: ", reason);
    params.scores = scores_of(p, call);
    params.sequences = sequences_of(call);
    const Array q = signed_query(q_in, p.varlen, params.scores);
    // Without keys no key is read, but tensor maps need an address.
    const bool keys = k_in.elements() > 0;
    const Array k = keys ? for_kernel(k_in, p.varlen) : q;
    const Array v = keys ? for_kernel(v_in, p.varlen) : q;
    const auto describe = [&](const Array& x) { return p.varlen ? packed_operand(x) : operand(x); };
    params.q = describe(q);
    params.k = describe(k);
    params.v = describe(v);
    params.out = describe(out);
    params.lse = call.scalar("lse", true) ? reinterpret_cast<float*>(lse.data) : nullptr;
    params.sm_count = call.device.sm_count;
    Choice choice = choose(p, call.device);
    emulated::force(choice, call);
    params.section_heads = choice.section_heads;
    emulated::Launch scope("attention " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    may_read_options(scope, call);
    scope.may_write("out", out);
    scope.may_write("lse", lse);
    params.splits = choice.splits;
    Array partial_out, partial_lse;
    if (combines(p, choice.splits)) {
        const int64_t rows = choice.splits * partial_rows(p, params.sequences);
        partial_out = emulated::allocate({rows, p.value_dim}, DType::fp32);
        partial_lse = emulated::allocate({rows}, DType::fp32);
        params.partial_out = reinterpret_cast<float*>(partial_out.data);
        params.partial_lse = reinterpret_cast<float*>(partial_lse.data);
        scope.may_write("partial_out", partial_out);
        scope.may_write("partial_lse", partial_lse);
    }
    launch_choice("tk.attention", choice, params, nullptr);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("attention", &run);

}  // namespace
}  // namespace thunderkittens::attention
