// based on the emulator, as based.cpp does it on CUDA tensors.
#include "csrc/linear_attention/based/dispatch.h"
#include "csrc/linear_attention/based/emulated_operands.h"

namespace thunderkittens::linear_attention {
namespace {

emulated::Result run(const emulated::Call& call) {
    BasedParams params;
    BasedProblem& p = params.problem;
    p = checked_problem(call);
    const bool return_state = call.scalar("return_state", false);
    p.denominator = p.normalize || return_state;
    Array out = emulated::allocate({p.batch, p.heads, p.length, p.value_dim}, p.dtype);
    Array rows = emulated::allocate({p.batch, p.heads, p.length}, DType::fp32);
    const State initial(call, ""), final = return_state ? State(p, true) : State();
    emulated::Result result;
    result.arrays["out"] = out;
    result.arrays["denominators"] = rows;
    if (return_state) {
        result.arrays["numerator"] = final.numerator;
        result.arrays["denominator"] = final.denominator;
    }
    const std::string reason = unsupported(p, call.device);
    TK_CHECK(reason.empty(), "tk.based: ", reason);
    if (p.batch * p.heads * p.length == 0) return result;
    const Array q = emulated::for_tensor_map(call.array("q"));
    const Array k = emulated::for_tensor_map(call.array("k"));
    const Array v = emulated::for_tensor_map(call.array("v"));
    BasedChoice choice = choose(p, call.device);
    emulated::force(choice, call);
    params.segments = choice.segments;
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(out);
    params.initial = initial.pointers();
    params.final = final.pointers();
    params.row_denominators = p.normalize ? floats(rows) : nullptr;
    params.eps = static_cast<float>(call.scalar("eps", 1e-12));
    const Array workspace =
        emulated::allocate({forward_workspace(p, choice.segments)}, DType::fp32);
    params.workspace = floats(workspace);

    emulated::Launch scope("based " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    initial.may_read(scope);
    final.may_write(scope);
    scope.may_write("out", out);
    scope.may_write("denominators", rows);
    scope.may_write("workspace", workspace);
    run_forward(params, nullptr);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("based", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
