// The body of LoLCATS's gradient, on any back end: it checks what memory safety needs, allocates,
// chooses and launches. Host C++ without torch.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "csrc/common/accesses.h"
#include "csrc/linear_attention/lolcats/backward_dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {

// What the forward op has kept for the gradient.
template <class Tensor>
struct LolcatsKept {
    const Tensor &out, &maxima, &denominators;
};

template <class Tensor>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats_backward_body(
    const Backend<Tensor>& on, const Tensor& grad_out_in, const LolcatsTensors<Tensor>& given,
    const LolcatsKept<Tensor>& kept, const std::array<std::optional<Tensor>, 5>& initial_in,
    const std::vector<bool>& needs) {
    constexpr const char* OP = "tk.lolcats";
    enum { DQ, DK, DV, DQ_MAP, DK_MAP, DALPHA, DBETA };  // of the gradients
    LolcatsBackwardParams params;
    LolcatsParams& call = params.forward;
    LolcatsProblem& p = call.problem;
    p = checked_lolcats(OP, given);
    p.continued = initial_in[4].has_value();
    const LolcatsState<Tensor> initial(OP, p, initial_in, given.q);
    const std::vector<int64_t> shape = {p.batch, p.heads, p.length, p.head_dim};
    const std::vector<int64_t> rows = {p.batch, p.heads, p.length};
    check_tensor(OP, "grad_out", grad_out_in, shape, p.dtype, given.q);
    check_tensor(OP, "out", kept.out, shape, p.dtype, given.q);
    check_tensor(OP, "maxima", kept.maxima, rows, DType::fp32, given.q);
    check_tensor(OP, "denominators", kept.denominators, rows, DType::fp32, given.q);
    TK_CHECK(needs.size() == 7, OP, ": needs must have 7 elements, got ", needs.size());
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);

    // One kernel gives the gradients of k and v.
    const bool of_keys = needs[DK] || needs[DV];
    const std::array<const Tensor*, 7> operands = {
        &given.q, &given.k, &given.v, &given.q_map, &given.k_map, &given.alpha, &given.beta};
    const auto gradient = [&](int i, bool wanted) {
        const Tensor& like = *operands[std::size_t(i)];
        return wanted ? empty(like.sizes(), like.scalar_type(), like)
                      : empty({0}, like.scalar_type(), like);
    };
    std::array<Tensor, 7> grads = {gradient(DQ, needs[DQ]),         gradient(DK, of_keys),
                                   gradient(DV, of_keys),           gradient(DQ_MAP, needs[DQ_MAP]),
                                   gradient(DK_MAP, needs[DK_MAP]), gradient(DALPHA, needs[DALPHA]),
                                   gradient(DBETA, needs[DBETA])};
    const auto results = [&] {
        const Tensor dk = needs[DK] ? grads[DK] : gradient(DK, false);
        const Tensor dv = needs[DV] ? grads[DV] : gradient(DV, false);
        return std::tuple{grads[DQ],     dk,          dv, grads[DQ_MAP], grads[DK_MAP],
                          grads[DALPHA], grads[DBETA]};
    };
    if (kept.out.numel() == 0) {
        for (Tensor& x : grads) zero_(x);
        return results();
    }
    const LolcatsOperands<Tensor> in(given);
    const Tensor grad_out = for_tensor_map(grad_out_in), out = for_tensor_map(kept.out);
    const Tensor denominators = packed(kept.denominators);
    const LolcatsBackwardChoice choice =
        on.chosen("lolcats_backward", choose_lolcats_backward(p, device));
    const Tensor workspace =
        empty({lolcats_backward_workspace(p, choice.segments, choice.map_splits, choice.portable)},
              DType::fp32, in.q);
    call.portable = choice.portable;
    call.segments = choice.segments;
    in.fill(call);
    call.out = operand(out);
    call.initial = initial.pointers();
    params.map_splits = choice.map_splits;
    params.grad_out = operand(grad_out);
    params.denominators = data_as<const float>(denominators);
    if (needs[DQ]) params.dq = operand(grads[DQ]);
    if (of_keys) params.dk = operand(grads[DK]), params.dv = operand(grads[DV]);
    if (needs[DQ_MAP]) params.dq_map = grads[DQ_MAP].data_ptr();
    if (needs[DK_MAP]) params.dk_map = grads[DK_MAP].data_ptr();
    if (needs[DALPHA]) params.grad_alpha = data_as<float>(grads[DALPHA]);
    if (needs[DBETA]) params.grad_beta = data_as<float>(grads[DBETA]);
    params.workspace = data_as<float>(workspace);
    auto launch = on.launch("lolcats", choice, in.q);
    in.may_read(launch);
    reads(launch, "grad_out", grad_out, "out", out, "denominators", denominators);
    initial.may_read(launch);
    constexpr std::array<const char*, 7> names = {"dq",     "dk",         "dv",       "dq_map",
                                                  "dk_map", "grad_alpha", "grad_beta"};
    for (std::size_t i = 0; i < grads.size(); ++i) launch.may_write(names[i], grads[i]);
    launch.may_write("workspace", workspace);
    run_lolcats_backward(params, launch.stream);
    return results();
}

}  // namespace thunderkittens::linear_attention
