// lolcats_backward on the emulator, as lolcats_backward.cpp does it on CUDA tensors.
#include "csrc/linear_attention/lolcats/backward_dispatch.h"
#include "csrc/linear_attention/lolcats/emulated_operands.h"

namespace thunderkittens::linear_attention {
namespace {

void force(LolcatsBackwardChoice& choice, const emulated::Call& call) {
    emulated::force(static_cast<LolcatsChoice&>(choice), call);
}

emulated::Result run(const emulated::Call& call) {
    LolcatsBackwardParams params;
    LolcatsParams& forward = params.forward;
    LolcatsProblem& p = forward.problem;
    p = checked_lolcats_problem(call);
    const LolcatsState initial(call);
    Array dq = emulated::allocate(call.array("q").size, p.dtype);
    Array dk = emulated::allocate(call.array("k").size, p.dtype);
    Array dv = emulated::allocate(call.array("v").size, p.dtype);
    Array dq_map = emulated::allocate(call.array("q_map").size, p.dtype);
    Array dk_map = emulated::allocate(call.array("k_map").size, p.dtype);
    Array grad_alpha = emulated::allocate({p.heads}, DType::fp32);
    Array grad_beta = emulated::allocate({p.heads}, DType::fp32);
    emulated::Result result;
    result.arrays = {{"dq", dq},
                     {"dk", dk},
                     {"dv", dv},
                     {"dq_map", dq_map},
                     {"dk_map", dk_map},
                     {"grad_alpha", grad_alpha},
                     {"grad_beta", grad_beta}};
    const Array q = emulated::for_tensor_map(call.array("q"));
    const Array k = emulated::for_tensor_map(call.array("k"));
    const Array v = emulated::for_tensor_map(call.array("v"));
    const Array q_map = emulated::for_tensor_map(call.array("q_map"));
    const Array k_map = emulated::for_tensor_map(call.array("k_map"));
    const Array grad_out = emulated::for_tensor_map(call.array("grad_out"));
    const Array out = emulated::for_tensor_map(call.array("out"));
    const Array alpha = packed(call.array("alpha")), beta = packed(call.array("beta"));
    const Array rows = packed(call.array("denominators"));
    LolcatsBackwardChoice choice = choose_lolcats_backward(p, call.device);
    force(choice, call);
    forward.segments = choice.segments;
    forward.q = operand(q);
    forward.k = operand(k);
    forward.v = operand(v);
    forward.out = operand(out);
    forward.q_map = operand(q_map);
    forward.k_map = operand(k_map);
    forward.alpha = floats(alpha);
    forward.beta = floats(beta);
    forward.initial = initial.pointers();
    params.map_parts = choice.map_parts;
    params.grad_out = operand(grad_out);
    params.denominators = floats(rows);
    params.dq = operand(dq);
    params.dk = operand(dk);
    params.dv = operand(dv);
    params.dq_map = dq_map.data;
    params.dk_map = dk_map.data;
    params.grad_alpha = floats(grad_alpha);
    params.grad_beta = floats(grad_beta);
    const Array workspace = emulated::allocate(
        {lolcats_backward_workspace(p, choice.segments, choice.map_parts)}, DType::fp32);
    params.workspace = floats(workspace);

    emulated::Launch scope("lolcats " + kernel_name(choice));
    for (const auto& [name, x] :
         {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}, std::pair{"q_map", &q_map},
          std::pair{"k_map", &k_map}, std::pair{"grad_out", &grad_out}, std::pair{"out", &out},
          std::pair{"alpha", &alpha}, std::pair{"beta", &beta}, std::pair{"denominators", &rows}})
        scope.may_read(name, *x);
    initial.may_read(scope);
    for (const auto& [name, gradient] : result.arrays) scope.may_write(name.c_str(), gradient);
    scope.may_write("workspace", workspace);
    run_lolcats_backward(params, nullptr);
    result.choice = detail::fields_of(static_cast<const LolcatsChoice&>(choice));
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

const bool registered = emulated::register_run("lolcats_backward", &run);

}  // namespace
}  // namespace thunderkittens::linear_attention
