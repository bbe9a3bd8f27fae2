// The gradient of LoLCATS for CUDA: checks what memory safety needs, allocates, chooses, launches.
#include <array>
#include <tuple>
#include <vector>

#include "csrc/linear_attention/lolcats/backward_dispatch.h"
#include "csrc/linear_attention/lolcats/operands.h"

namespace thunderkittens::linear_attention {
namespace {

constexpr const char* OP = "tk.lolcats";

enum Gradient { DQ, DK, DV, DQ_MAP, DK_MAP, DALPHA, DBETA };
using Gradients = std::array<Tensor, 7>;

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats_backward(
    const Tensor& grad_out_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& q_map_in, const Tensor& k_map_in, const Tensor& alpha_in, const Tensor& beta_in,
    const Tensor& out_in, const Tensor& maxima, const Tensor& denominators_in,
    std::optional<Tensor> numerator, std::optional<Tensor> denominator, std::optional<Tensor> keys,
    std::optional<Tensor> values, std::optional<Tensor> lengths, std::vector<bool> needs) {
    LolcatsBackwardParams params;
    LolcatsParams& call = params.forward;
    LolcatsProblem& p = call.problem;
    p = checked_lolcats(OP, q_in, k_in, v_in, q_map_in, k_map_in, alpha_in, beta_in);
    p.continued = lengths.has_value();
    const LolcatsStateTensors initial(OP, p, {numerator, denominator, keys, values, lengths}, q_in);
    const std::vector<int64_t> shape = {p.batch, p.heads, p.length, p.head_dim};
    const std::vector<int64_t> rows = {p.batch, p.heads, p.length};
    check_lolcats_tensor(OP, "grad_out", grad_out_in, shape, q_in.scalar_type(), q_in);
    check_lolcats_tensor(OP, "out", out_in, shape, q_in.scalar_type(), q_in);
    check_lolcats_tensor(OP, "maxima", maxima, rows, ScalarType::Float, q_in);
    check_lolcats_tensor(OP, "denominators", denominators_in, rows, ScalarType::Float, q_in);
    TK_CHECK(needs.size() == 7, OP, ": needs must have 7 elements, got ", needs.size());
    const DeviceGuard guard(q_in.get_device_index());
    const DeviceProperties& device = device_properties(q_in.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);

    // One kernel gives the gradients of k and v.
    const bool of_keys = needs[DK] || needs[DV];
    const std::array<const Tensor*, 7> operands = {&q_in,     &k_in,     &v_in,   &q_map_in,
                                                   &k_map_in, &alpha_in, &beta_in};
    const auto gradient = [&](int i, bool wanted) {
        const Tensor& like = *operands[std::size_t(i)];
        return wanted ? empty(like.sizes(), like.scalar_type(), like)
                      : empty({0}, like.scalar_type(), like);
    };
    Gradients grads = {gradient(DQ, needs[DQ]),         gradient(DK, of_keys),
                       gradient(DV, of_keys),           gradient(DQ_MAP, needs[DQ_MAP]),
                       gradient(DK_MAP, needs[DK_MAP]), gradient(DALPHA, needs[DALPHA]),
                       gradient(DBETA, needs[DBETA])};
    const auto results = [&] {
        const Tensor dk = needs[DK] ? grads[DK] : gradient(DK, false);
        const Tensor dv = needs[DV] ? grads[DV] : gradient(DV, false);
        return std::tuple{grads[DQ],     dk,          dv, grads[DQ_MAP], grads[DK_MAP],
                          grads[DALPHA], grads[DBETA]};
    };
    if (out_in.numel() == 0) {
        for (Tensor& x : grads) torch::stable::zero_(x);
        return results();
    }
    const Tensor q = for_tensor_map(q_in), k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const Tensor q_map = for_tensor_map(q_map_in), k_map = for_tensor_map(k_map_in);
    const Tensor grad_out = for_tensor_map(grad_out_in), out = for_tensor_map(out_in);
    const Tensor alpha = packed(alpha_in);
    const Tensor beta = packed(beta_in);
    const Tensor denominators = packed(denominators_in);
    const LolcatsBackwardChoice choice = choose_lolcats_backward(p, device);
    Tensor workspace = empty({lolcats_backward_workspace(p, choice.segments, choice.map_parts)},
                             ScalarType::Float, q);
    call.segments = choice.segments;
    call.q = operand_of(q);
    call.k = operand_of(k);
    call.v = operand_of(v);
    call.out = operand_of(out);
    call.q_map = operand_of(q_map);
    call.k_map = operand_of(k_map);
    call.alpha = static_cast<const float*>(alpha.data_ptr());
    call.beta = static_cast<const float*>(beta.data_ptr());
    call.initial = initial.pointers();
    params.map_parts = choice.map_parts;
    params.grad_out = operand_of(grad_out);
    params.denominators = static_cast<const float*>(denominators.data_ptr());
    if (needs[DQ]) params.dq = operand_of(grads[DQ]);
    if (of_keys) params.dk = operand_of(grads[DK]), params.dv = operand_of(grads[DV]);
    if (needs[DQ_MAP]) params.dq_map = grads[DQ_MAP].data_ptr();
    if (needs[DK_MAP]) params.dk_map = grads[DK_MAP].data_ptr();
    if (needs[DALPHA]) params.grad_alpha = static_cast<float*>(grads[DALPHA].data_ptr());
    if (needs[DBETA]) params.grad_beta = static_cast<float*>(grads[DBETA].data_ptr());
    params.workspace = static_cast<float*>(workspace.data_ptr());
    run_lolcats_backward(params, current_stream(q));
    return results();
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_backward", TORCH_BOX(&lolcats_backward));
}

}  // namespace thunderkittens::linear_attention
