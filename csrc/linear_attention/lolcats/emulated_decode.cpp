// lolcats_decode on the emulator, as lolcats_decode.cpp does it on CUDA tensors. The state is
// copied, and returned.
#include "csrc/linear_attention/lolcats/dispatch.h"
#include "csrc/linear_attention/lolcats/emulated_operands.h"

namespace thunderkittens::linear_attention {
namespace {

emulated::Result run(const emulated::Call& call) {
    const LolcatsProblem shape = checked_lolcats_problem(call);
    LolcatsDecodeParams params;
    LolcatsDecodeProblem& p = params.problem;
    p = {shape.dtype, shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.features};
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.lolcats_decode: ", reason);
    Array out = emulated::allocate({p.batch, p.heads, 1, p.head_dim}, p.dtype);
    const LolcatsState state(call);
    emulated::Result result;
    result.arrays["out"] = out;
    state.enter(result);
    if (p.batch * p.heads == 0) return result;
    const Array q = emulated::for_tensor_map(call.array("q"));
    const Array k = emulated::for_tensor_map(call.array("k"));
    const Array v = emulated::for_tensor_map(call.array("v"));
    const Array q_map = emulated::for_tensor_map(call.array("q_map"));
    const Array k_map = emulated::for_tensor_map(call.array("k_map"));
    const Array alpha = packed(call.array("alpha")), beta = packed(call.array("beta"));
    LolcatsDecodeChoice choice = choose_decode(p, call.device);
    emulated::force(choice, call);
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(out);
    params.q_map = operand(q_map);
    params.k_map = operand(k_map);
    params.alpha = floats(alpha);
    params.beta = floats(beta);
    params.state = state.pointers();
    params.sliding = call.scalar("sliding", false);

    emulated::Launch scope("lolcats_decode " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_read("q_map", q_map);
    scope.may_read("k_map", k_map);
    scope.may_read("alpha", alpha);
    scope.may_read("beta", beta);
    state.may_write(scope);
    scope.may_write("out", out);
    run_lolcats_decode(params, nullptr);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("lolcats_decode", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
