// based_backward on the emulator, as based.cpp does it on CUDA tensors.
#include "csrc/linear_attention/based/dispatch.h"
#include "csrc/linear_attention/based/emulated_operands.h"

namespace thunderkittens::linear_attention {
namespace {

emulated::Result run(const emulated::Call& call) {
    BasedBackwardParams params;
    BasedParams& forward = params.forward;
    BasedProblem& p = forward.problem;
    p = checked_problem(call);
    const State initial(call, ""), grad_final(call, "grad_");
    const bool states = initial.numerator.data != nullptr;
    p.denominator = p.normalize || grad_final.denominator.data != nullptr;
    Array dq = emulated::allocate(call.array("q").size, p.dtype);
    Array dk = emulated::allocate(call.array("q").size, p.dtype);
    Array dv = emulated::allocate(call.array("v").size, p.dtype);
    const State grad_initial = states ? State(p, p.denominator) : State();
    emulated::Result result;
    result.arrays["dq"] = dq;
    result.arrays["dk"] = dk;
    result.arrays["dv"] = dv;
    if (states) result.arrays["numerator"] = grad_initial.numerator;
    if (states && p.denominator) result.arrays["denominator"] = grad_initial.denominator;
    const Array q = emulated::for_tensor_map(call.array("q"));
    const Array k = emulated::for_tensor_map(call.array("k"));
    const Array v = emulated::for_tensor_map(call.array("v"));
    const Array grad_out = emulated::for_tensor_map(call.array("grad_out"));
    const Array out = emulated::for_tensor_map(call.array("out"));
    const Array rows = packed(call.array("denominators"));
    BasedBackwardChoice choice = choose_backward(p, call.device);
    emulated::force(static_cast<BasedChoice&>(choice), call);
    forward.segments = choice.segments;
    forward.q = operand(q);
    forward.k = operand(k);
    forward.v = operand(v);
    forward.out = operand(out);
    forward.initial = initial.pointers();
    forward.final = grad_final.pointers();
    params.grad_out = operand(grad_out);
    params.row_denominators = p.normalize ? floats(rows) : nullptr;
    params.grad_initial = grad_initial.pointers();
    params.dq = operand(dq);
    params.dk = operand(dk);
    params.dv = operand(dv);
    const Array workspace =
        emulated::allocate({backward_workspace(p, choice.segments)}, DType::fp32);
    forward.workspace = floats(workspace);

    emulated::Launch scope("based " + kernel_name(choice));
    scope.may_read("q", q);
    scope.may_read("k", k);
    scope.may_read("v", v);
    scope.may_read("grad_out", grad_out);
    scope.may_read("out", out);
    scope.may_read("denominators", rows);
    initial.may_read(scope);
    grad_final.may_read(scope);
    for (const auto& [name, grad] : result.arrays) scope.may_write(name.c_str(), grad);
    scope.may_write("workspace", workspace);
    run_backward(params, nullptr);
    result.choice = detail::fields_of(static_cast<const BasedChoice&>(choice));
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("based_backward", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
