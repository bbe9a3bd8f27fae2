// lolcats on the emulator, as lolcats.cpp does it on CUDA tensors.
#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/emulated_operands.h"

namespace thunderkittens::linear_attention {
namespace {

emulated::Result run(const emulated::Call& call) {
    LolcatsParams params;
    LolcatsProblem& p = params.problem;
    p = checked_lolcats_problem(call);
    const bool return_state = call.scalar("return_state", false);
    Array out = emulated::allocate({p.batch, p.heads, p.length, p.head_dim}, p.dtype);
    Array maxima = emulated::allocate({p.batch, p.heads, p.length}, DType::fp32);
    Array denominators = emulated::allocate({p.batch, p.heads, p.length}, DType::fp32);
    const LolcatsState initial(call);
    const LolcatsState final = return_state ? LolcatsState(p) : LolcatsState();
    emulated::Result result;
    result.arrays["out"] = out;
    result.arrays["maxima"] = maxima;
    result.arrays["denominators"] = denominators;
    final.enter(result);
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.lolcats: ", reason);
    if (p.batch * p.heads * p.length == 0) return result;
    const Array q = emulated::for_tensor_map(call.array("q"));
    const Array k = emulated::for_tensor_map(call.array("k"));
    const Array v = emulated::for_tensor_map(call.array("v"));
    const Array q_map = emulated::for_tensor_map(call.array("q_map"));
    const Array k_map = emulated::for_tensor_map(call.array("k_map"));
    const Array alpha = packed(call.array("alpha")), beta = packed(call.array("beta"));
    LolcatsChoice choice = choose(p, call.device);
    emulated::force(choice, call);
    params.segments = choice.segments;
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(out);
    params.q_map = operand(q_map);
    params.k_map = operand(k_map);
    params.alpha = floats(alpha);
    params.beta = floats(beta);
    params.initial = initial.pointers();
    params.final = final.pointers();
    params.maxima = floats(maxima);
    params.denominators = floats(denominators);
    const Array workspace =
        emulated::allocate({lolcats_workspace(p, choice.segments)}, DType::fp32);
    params.workspace = floats(workspace);

    emulated::Launch scope("lolcats " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_read("q_map", q_map);
    scope.may_read("k_map", k_map);
    scope.may_read("alpha", alpha);
    scope.may_read("beta", beta);
    initial.may_read(scope);
    final.may_write(scope);
    scope.may_write("out", out);
    scope.may_write("maxima", maxima);
    scope.may_write("denominators", denominators);
    scope.may_write("workspace", workspace);
    run_lolcats(params, nullptr);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("lolcats", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
