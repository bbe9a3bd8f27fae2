// The gradient of attention on the emulator, as backward.cpp does it on CUDA tensors.
#include "csrc/attention/backward_order.h"
#include "csrc/attention/emulated_operands.h"

namespace thunderkittens::attention {
namespace {

constexpr std::size_t KERNELS = 2 * std::size(BACKWARD_CONFIGS);
constexpr BackwardConfig config_at(std::size_t i) {
    return with_dtype(BACKWARD_CONFIGS[i / 2], i % 2 == 0 ? DType::bf16 : DType::fp16);
}
template <std::size_t... indices>
void launch_any(const BackwardChoice& choice, const BackwardParams& params,
                std::index_sequence<indices...>) {
    const bool found = ((choice.config == config_at(indices)
                             ? (launch_any_backward<config_at(indices)>(params, nullptr), true)
                             : false) ||
                        ...);
    TK_CHECK(found, "tk.attention: no kernel ", kernel_name(choice));
}

float* floats(const Array& x) { return reinterpret_cast<float*>(x.data); }

emulated::Result run(const emulated::Call& call) {
    const Array &q_in = call.array("q"), &k_in = call.array("k"), &v_in = call.array("v");
    BackwardParams params;
    Problem& p = params.problem;
    p = checked_problem(call);
    emulated::Result result;
    const auto gradient = [&](const char* name, const char* needed, const Array& x) {
        Array grad = call.scalar(needed, true) ? emulated::allocate(x.size, x.dtype) : Array{};
        if (grad.data) result.arrays[name] = grad;
        return grad;
    };
    const Array dq = gradient("dq", "needs_q", q_in), dk = gradient("dk", "needs_k", k_in),
                dv = gradient("dv", "needs_v", v_in);
    Array dsink;
    if (p.sink) dsink = gradient("dsink", "needs_sink", call.array("sink"));
    if (q_in.elements() == 0 || p.batch == 0) {
        for (auto& [name, grad] : result.arrays) {
            std::memset(grad.data, 0, static_cast<std::size_t>(grad.extent()));
        }
        return result;
    }
    const std::string reason = unsupported_backward(p, call.device);
    TK_CHECK(reason.empty(), "tk.attention: ", reason);
    params.scores = scores_of(p, call);
    params.query_scale = params.scores.scale;
    params.sequences = sequences_of(call);
    const Array q = signed_query(q_in, p.varlen, params.scores);
    const bool keys = k_in.elements() > 0;
    const Array k = keys ? for_kernel(k_in, p.varlen) : q;
    const Array v = keys ? for_kernel(v_in, p.varlen) : q;
    const Array out = for_kernel(call.array("out"), p.varlen);
    const Array grad_out = for_kernel(call.array("grad_out"), p.varlen);
    const auto packed = [](const Array& x) {
        Array copy = emulated::allocate(x.size, x.dtype);
        emulated::copy_elements(copy, x);
        return copy;
    };
    const Array lse = packed(call.array("lse"));
    const Array* grad_lse_in = call.optional("grad_lse");
    const Array grad_lse = grad_lse_in ? packed(*grad_lse_in) : Array{};

    BackwardChoice choice = choose_backward(p, call.device);
    emulated::force(choice, call);
    params.deterministic = call.scalar("deterministic", false);
    params.parts = params.deterministic ? ordered_parts(p, choice.config, choice.parts, call.device)
                                        : choice.parts;
    params.section_heads =
        params.deterministic ? choice.ordered_section_heads : choice.section_heads;
    const Array workspace = emulated::allocate(
        {workspace_floats(p, params.sequences, choice.config, params.parts)}, DType::fp32);
    const auto describe = [&](const Array& x) {
        if (x.data == nullptr || x.elements() == 0) return Operand{};
        return p.varlen ? packed_operand(x) : operand(x);
    };
    params.q = describe(q);
    params.k = describe(k);
    params.v = describe(v);
    params.out = describe(out);
    params.grad_out = describe(grad_out);
    params.lse = floats(lse);
    params.grad_lse = floats(grad_lse);
    params.dq = describe(dq);
    params.dk = describe(dk);
    params.dv = describe(dv);
    params.dsink = floats(dsink);
    params.workspace = floats(workspace);
    params.sm_count = call.device.sm_count;

    emulated::Launch scope("attention " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_read("out", out);
    scope.may_read("grad_out", grad_out);
    scope.may_read("lse", lse);
    if (grad_lse.data) scope.may_read("grad_lse", grad_lse);
    may_read_options(scope, call);
    for (const auto& [name, grad] : result.arrays) scope.may_write(name.c_str(), grad);
    scope.may_write("workspace", workspace);
    launch_any(choice, params, std::make_index_sequence<KERNELS>());
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("attention_backward", &run);

}  // namespace
}  // namespace thunderkittens::attention
