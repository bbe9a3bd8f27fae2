// The bodies of the ops of Based, on any back end: they check what memory safety needs, allocate,
// choose and launch. Host C++ without torch.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "csrc/common/accesses.h"
#include "csrc/linear_attention/based/dispatch.h"
#include "csrc/linear_attention/common/operands.h"

namespace thunderkittens::linear_attention {

template <class Tensor>
BasedProblem checked_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                             bool normalize) {
    check_cuda(op, "q", q);
    check_same_device(op, "k", k, "q", q);
    check_same_device(op, "v", v, "q", q);
    BasedProblem p;
    p.dtype = check_dtype(op, "q", q, {DType::bf16, DType::fp16});
    check_same_dtype(op, "k", k, "q", q);
    check_same_dtype(op, "v", v, "q", q);
    check_dims(op, "q", q, {4});
    check_dims(op, "k", k, {4});
    check_dims(op, "v", v, {4});
    TK_CHECK(q.size(3) == ELEMENTS, op, ": q must have ", ELEMENTS, " elements per token, got ",
             shape_text(q));
    for (int64_t i = 0; i < 4; ++i) {
        TK_CHECK(k.size(i) == q.size(i), op, ": k must have q's shape ", shape_text(q), ", got ",
                 shape_text(k));
        TK_CHECK(i == 3 || v.size(i) == q.size(i), op, ": v must match q's shape ", shape_text(q),
                 ", got ", shape_text(v));
    }
    p.batch = q.size(0);
    p.heads = q.size(1);
    p.length = q.size(2);
    p.value_dim = v.size(3);
    p.normalize = normalize;
    return p;
}

// The operands, and the parts of a state, as they are given.
template <class Tensor>
struct BasedTensors {
    const Tensor &q, &k, &v;
};
template <class Tensor>
struct BasedStateTensors {
    const std::optional<Tensor>&numerator, &denominator;
};

// Both parts of a state, packed, or none.
template <class Tensor>
struct BasedState {
    std::optional<Tensor> numerator, denominator;

    BasedState(const char* op, const BasedProblem& p, const BasedStateTensors<Tensor>& given,
               const Tensor& q) {
        if (given.numerator) {
            check_tensor(op, "the state's numerator", *given.numerator,
                         {p.batch, p.heads, FEATURES, p.value_dim}, DType::fp32, q);
            numerator = aligned_and_contiguous(*given.numerator);
        }
        if (given.denominator) {
            check_tensor(op, "the state's denominator", *given.denominator,
                         {p.batch, p.heads, FEATURES}, DType::fp32, q);
            denominator = aligned_and_contiguous(*given.denominator);
        }
    }
    StatePointers pointers() const {
        return {data_as<float>(numerator), data_as<float>(denominator)};
    }
    template <class Launch>
    void may_read(Launch& launch) const {
        reads(launch, "state's numerator", numerator, "state's denominator", denominator);
    }
};

template <class Tensor>
struct BasedResults {
    Tensor out, denominators, numerator, denominator;
};

template <class Tensor>
BasedResults<Tensor> based_body(const Backend<Tensor>& on, const BasedTensors<Tensor>& given,
                                bool normalize, double eps, const BasedStateTensors<Tensor>& state,
                                bool return_state, bool keep_rows) {
    constexpr const char* OP = "tk.based";
    BasedParams params;
    BasedProblem& p = params.problem;
    p = checked_problem(OP, given.q, given.k, given.v, normalize);
    TK_CHECK(state.numerator.has_value() == state.denominator.has_value(), OP,
             ": a state has both a numerator and a denominator");
    p.denominator = normalize || return_state;
    const BasedState<Tensor> initial(OP, p, state, given.q);
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    keep_rows = keep_rows && normalize;
    BasedResults<Tensor> r{
        .out = empty({p.batch, p.heads, p.length, p.value_dim}, given.q.scalar_type(), given.q),
        .denominators = empty({keep_rows ? p.batch : 0, p.heads, p.length}, DType::fp32, given.q),
        .numerator = empty({return_state ? p.batch : 0, p.heads, FEATURES, p.value_dim},
                           DType::fp32, given.q),
        .denominator =
            empty({return_state ? p.batch : 0, p.heads, FEATURES}, DType::fp32, given.q)};
    if (r.out.numel() == 0) {
        for (auto [to, from] : {std::pair{&r.numerator, &initial.numerator},
                                std::pair{&r.denominator, &initial.denominator}}) {
            if (!return_state) continue;
            if (*from)
                copy_(*to, **from);
            else
                zero_(*to);
        }
        return r;
    }
    const Tensor q = for_tensor_map(given.q), k = for_tensor_map(given.k),
                 v = for_tensor_map(given.v);
    const BasedChoice choice = on.chosen("based", choose(p, device));
    const Tensor workspace = empty({forward_workspace(p, choice.segments)}, DType::fp32, q);
    params.portable = choice.portable;
    params.segments = choice.segments;
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(r.out);
    params.initial = initial.pointers();
    if (return_state) params.final = {data_as<float>(r.numerator), data_as<float>(r.denominator)};
    if (keep_rows) params.row_denominators = data_as<float>(r.denominators);
    params.eps = static_cast<float>(eps);
    params.workspace = data_as<float>(workspace);
    auto launch = on.launch("based", choice, q);
    reads(launch, "q", q, "k", k, "v", v);
    initial.may_read(launch);
    writes(launch, "out", r.out, "denominators", r.denominators, "state's numerator", r.numerator,
           "state's denominator", r.denominator, "workspace", workspace);
    run_forward(params, launch.stream);
    return r;
}

// What the forward op has kept for the gradient.
template <class Tensor>
struct BasedKept {
    const Tensor &out, &denominators;
};

template <class Tensor>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> based_backward_body(
    const Backend<Tensor>& on, const Tensor& grad_out_in,
    const BasedStateTensors<Tensor>& grad_state, const BasedTensors<Tensor>& given,
    const BasedKept<Tensor>& kept, bool normalize, const BasedStateTensors<Tensor>& state,
    const std::vector<bool>& needs) {
    constexpr const char* OP = "tk.based";
    BasedBackwardParams params;
    BasedParams& call = params.forward;
    BasedProblem& p = call.problem;
    p = checked_problem(OP, given.q, given.k, given.v, normalize);
    const std::vector<int64_t> shape = {p.batch, p.heads, p.length, p.value_dim};
    check_tensor(OP, "grad_out", grad_out_in, shape, p.dtype, given.q);
    check_tensor(OP, "out", kept.out, shape, p.dtype, given.q);
    if (normalize)
        check_tensor(OP, "denominators", kept.denominators, {p.batch, p.heads, p.length},
                     DType::fp32, given.q);
    TK_CHECK(needs.size() == 4, OP, ": needs must have 4 elements, got ", needs.size());
    TK_CHECK(state.numerator.has_value() == state.denominator.has_value(), OP,
             ": a state has both a numerator and a denominator");
    p.denominator = normalize || grad_state.denominator.has_value();
    const BasedState<Tensor> initial(OP, p, state, given.q);
    const BasedState<Tensor> grad_final(OP, p, grad_state, given.q);
    const auto guard = on.guard(given.q);
    const DeviceProperties& device = on.device(given.q);
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);

    // One kernel gives the gradients of k, v and the state.
    const bool states = needs[3] && state.numerator.has_value();
    const bool queries = needs[0], keys = needs[1] || needs[2] || states;
    const auto gradient = [&](const Tensor& like, bool wanted) {
        return wanted ? empty(like.sizes(), like.scalar_type(), like)
                      : empty({0}, like.scalar_type(), like);
    };
    Tensor dq = gradient(given.q, queries), dk = gradient(given.k, keys),
           dv = gradient(given.v, keys);
    Tensor grad_initial =
        empty({states ? p.batch : 0, p.heads, FEATURES, p.value_dim}, DType::fp32, given.q);
    Tensor grad_initial_denominator =
        empty({states ? p.batch : 0, p.heads, FEATURES}, DType::fp32, given.q);
    const auto results = [&] {
        const auto wanted = [&](const Tensor& x, bool need) {
            return need ? x : empty({0}, x.scalar_type(), x);
        };
        return std::tuple{dq, wanted(dk, needs[1]), wanted(dv, needs[2]), grad_initial,
                          grad_initial_denominator};
    };
    if (states && !p.denominator) zero_(grad_initial_denominator);
    if (kept.out.numel() == 0) {
        for (Tensor* x : {&dq, &dk, &dv, &grad_initial, &grad_initial_denominator}) zero_(*x);
        if (states && grad_state.numerator) copy_(grad_initial, *grad_state.numerator);
        if (states && grad_state.denominator)
            copy_(grad_initial_denominator, *grad_state.denominator);
        return results();
    }
    const Tensor q = for_tensor_map(given.q), k = for_tensor_map(given.k),
                 v = for_tensor_map(given.v);
    const Tensor grad_out = for_tensor_map(grad_out_in), out = for_tensor_map(kept.out);
    const Tensor denominators = packed(kept.denominators);
    const BasedBackwardChoice choice = on.chosen("based_backward", choose_backward(p, device));
    const Tensor workspace = empty({backward_workspace(p, choice.segments)}, DType::fp32, q);
    call.portable = choice.portable;
    call.segments = choice.segments;
    call.q = operand(q);
    call.k = operand(k);
    call.v = operand(v);
    call.out = operand(out);
    call.initial = initial.pointers();
    call.final = grad_final.pointers();
    call.workspace = data_as<float>(workspace);
    params.grad_out = operand(grad_out);
    if (normalize) params.row_denominators = data_as<const float>(denominators);
    if (states) {
        params.grad_initial = {data_as<float>(grad_initial),
                               p.denominator ? data_as<float>(grad_initial_denominator) : nullptr};
    }
    if (queries) params.dq = operand(dq);
    if (keys) params.dk = operand(dk), params.dv = operand(dv);
    auto launch = on.launch("based", choice, q);
    reads(launch, "q", q, "k", k, "v", v, "grad_out", grad_out, "out", out, "denominators",
          denominators);
    initial.may_read(launch);
    grad_final.may_read(launch);
    writes(launch, "dq", dq, "dk", dk, "dv", dv, "numerator", grad_initial, "denominator",
           grad_initial_denominator, "workspace", workspace);
    run_backward(params, launch.stream);
    return results();
}

}  // namespace thunderkittens::linear_attention
