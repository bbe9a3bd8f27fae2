// The ops of Based for CUDA: checks what memory safety needs, allocates, chooses and launches.
#include <tuple>
#include <vector>

#include "csrc/common/tensor.h"
#include "csrc/linear_attention/based/dispatch.h"

namespace thunderkittens::linear_attention {
namespace {

constexpr const char* OP = "tk.based";

BasedProblem checked_problem(const Tensor& q, const Tensor& k, const Tensor& v, bool normalize) {
    check_cuda(OP, "q", q);
    check_same_device(OP, "k", k, "q", q);
    check_same_device(OP, "v", v, "q", q);
    BasedProblem p;
    p.dtype = check_dtype(OP, "q", q, {DType::bf16, DType::fp16});
    check_same_dtype(OP, "k", k, "q", q);
    check_same_dtype(OP, "v", v, "q", q);
    check_dims(OP, "q", q, {4});
    check_dims(OP, "k", k, {4});
    check_dims(OP, "v", v, {4});
    TK_CHECK(q.size(3) == ELEMENTS, OP, ": q must have ", ELEMENTS, " elements per token, got ",
             shape_text(q));
    for (int64_t i = 0; i < 4; ++i) {
        TK_CHECK(k.size(i) == q.size(i), OP, ": k must have q's shape ", shape_text(q), ", got ",
                 shape_text(k));
        TK_CHECK(i == 3 || v.size(i) == q.size(i), OP, ": v must match q's shape ", shape_text(q),
                 ", got ", shape_text(v));
    }
    p.batch = q.size(0);
    p.heads = q.size(1);
    p.length = q.size(2);
    p.value_dim = v.size(3);
    p.normalize = normalize;
    return p;
}

void check_shape(const char* name, const Tensor& x, const std::vector<int64_t>& shape,
                 ScalarType dtype, const Tensor& q) {
    check_same_device(OP, name, x, "q", q);
    const auto sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), OP, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
    TK_CHECK(x.scalar_type() == dtype, OP, ": ", name, " must be ", dtype_text(dtype), ", got ",
             dtype_text(x.scalar_type()));
}

// Both parts of a state, packed, or none.
struct State {
    std::optional<Tensor> numerator, denominator;

    State(const BasedProblem& p, const std::optional<Tensor>& _numerator,
          const std::optional<Tensor>& _denominator, const Tensor& q) {
        if (_numerator) {
            check_shape("the state's numerator", *_numerator,
                        {p.batch, p.heads, FEATURES, p.value_dim}, ScalarType::Float, q);
            numerator = aligned_and_contiguous(*_numerator);
        }
        if (_denominator) {
            check_shape("the state's denominator", *_denominator, {p.batch, p.heads, FEATURES},
                        ScalarType::Float, q);
            denominator = aligned_and_contiguous(*_denominator);
        }
    }
    StatePointers pointers() const {
        return {numerator ? static_cast<float*>(numerator->data_ptr()) : nullptr,
                denominator ? static_cast<float*>(denominator->data_ptr()) : nullptr};
    }
};

Operand operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
float* floats(Tensor& x) { return static_cast<float*>(x.data_ptr()); }

struct Results {
    Tensor out, denominators, numerator, denominator;
};

Results forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, bool normalize,
                double eps, const std::optional<Tensor>& numerator,
                const std::optional<Tensor>& denominator, bool return_state, bool keep_rows) {
    BasedParams params;
    BasedProblem& p = params.problem;
    p = checked_problem(q_in, k_in, v_in, normalize);
    TK_CHECK(numerator.has_value() == denominator.has_value(), OP,
             ": a state has both a numerator and a denominator");
    p.denominator = normalize || return_state;
    const State initial(p, numerator, denominator, q_in);
    const DeviceGuard guard(q_in.get_device_index());
    const DeviceProperties& device = device_properties(q_in.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);
    keep_rows = keep_rows && normalize;
    Results r{.out = empty({p.batch, p.heads, p.length, p.value_dim}, q_in.scalar_type(), q_in),
              .denominators =
                  empty({keep_rows ? p.batch : 0, p.heads, p.length}, ScalarType::Float, q_in),
              .numerator = empty({return_state ? p.batch : 0, p.heads, FEATURES, p.value_dim},
                                 ScalarType::Float, q_in),
              .denominator =
                  empty({return_state ? p.batch : 0, p.heads, FEATURES}, ScalarType::Float, q_in)};
    if (r.out.numel() == 0) {
        for (auto [to, from] : {std::pair{&r.numerator, &initial.numerator},
                                std::pair{&r.denominator, &initial.denominator}}) {
            if (!return_state) continue;
            if (*from)
                torch::stable::copy_(*to, **from);
            else
                torch::stable::zero_(*to);
        }
        return r;
    }
    const Tensor q = for_tensor_map(q_in), k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const BasedChoice choice = choose(p, device);
    Tensor workspace = empty({forward_workspace(p, choice.segments)}, ScalarType::Float, q);
    params.segments = choice.segments;
    params.q = operand(q);
    params.k = operand(k);
    params.v = operand(v);
    params.out = operand(r.out);
    params.initial = initial.pointers();
    if (return_state) params.final = {floats(r.numerator), floats(r.denominator)};
    if (keep_rows) params.row_denominators = floats(r.denominators);
    params.eps = static_cast<float>(eps);
    params.workspace = floats(workspace);
    run_forward(params, current_stream(q));
    return r;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> based_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 bool normalize, double eps,
                                                 std::optional<Tensor> numerator,
                                                 std::optional<Tensor> denominator,
                                                 bool return_state) {
    Results r = forward(q, k, v, normalize, eps, numerator, denominator, return_state, false);
    return {r.out, r.numerator, r.denominator};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> based(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 bool normalize, double eps,
                                                 std::optional<Tensor> numerator,
                                                 std::optional<Tensor> denominator,
                                                 bool return_state) {
    Results r = forward(q, k, v, normalize, eps, numerator, denominator, return_state, true);
    return {r.out, r.numerator, r.denominator, r.denominators};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> based_backward(
    const Tensor& grad_out_in, std::optional<Tensor> grad_numerator,
    std::optional<Tensor> grad_denominator, const Tensor& q_in, const Tensor& k_in,
    const Tensor& v_in, const Tensor& out_in, const Tensor& denominators_in, bool normalize,
    std::optional<Tensor> numerator, std::optional<Tensor> denominator, std::vector<bool> needs) {
    BasedBackwardParams params;
    BasedParams& call = params.forward;
    BasedProblem& p = call.problem;
    p = checked_problem(q_in, k_in, v_in, normalize);
    const std::vector<int64_t> shape = {p.batch, p.heads, p.length, p.value_dim};
    check_shape("grad_out", grad_out_in, shape, q_in.scalar_type(), q_in);
    check_shape("out", out_in, shape, q_in.scalar_type(), q_in);
    if (normalize)
        check_shape("denominators", denominators_in, {p.batch, p.heads, p.length},
                    ScalarType::Float, q_in);
    TK_CHECK(needs.size() == 4, OP, ": needs must have 4 elements, got ", needs.size());
    TK_CHECK(numerator.has_value() == denominator.has_value(), OP,
             ": a state has both a numerator and a denominator");
    p.denominator = normalize || grad_denominator.has_value();
    const State initial(p, numerator, denominator, q_in);
    const State grad_final(p, grad_numerator, grad_denominator, q_in);
    const DeviceGuard guard(q_in.get_device_index());
    const DeviceProperties& device = device_properties(q_in.get_device_index());
    const std::string reason = unsupported(p, device);
    TK_CHECK(reason.empty(), OP, ": ", reason);

    // One kernel gives the gradients of k, v and the state.
    const bool states = needs[3] && numerator.has_value();
    const bool queries = needs[0], keys = needs[1] || needs[2] || states;
    const auto gradient = [&](const Tensor& like, bool wanted) {
        return wanted ? empty(like.sizes(), like.scalar_type(), like)
                      : empty({0}, like.scalar_type(), like);
    };
    Tensor dq = gradient(q_in, queries), dk = gradient(k_in, keys), dv = gradient(v_in, keys);
    Tensor grad_initial =
        empty({states ? p.batch : 0, p.heads, FEATURES, p.value_dim}, ScalarType::Float, q_in);
    Tensor grad_initial_denominator =
        empty({states ? p.batch : 0, p.heads, FEATURES}, ScalarType::Float, q_in);
    const auto results = [&] {
        const auto wanted = [&](const Tensor& x, bool need) {
            return need ? x : empty({0}, x.scalar_type(), x);
        };
        return std::tuple{dq, wanted(dk, needs[1]), wanted(dv, needs[2]), grad_initial,
                          grad_initial_denominator};
    };
    if (states && !p.denominator) torch::stable::zero_(grad_initial_denominator);
    if (out_in.numel() == 0) {
        for (Tensor* x : {&dq, &dk, &dv, &grad_initial, &grad_initial_denominator})
            torch::stable::zero_(*x);
        if (states && grad_numerator) torch::stable::copy_(grad_initial, *grad_numerator);
        if (states && grad_denominator)
            torch::stable::copy_(grad_initial_denominator, *grad_denominator);
        return results();
    }
    const Tensor q = for_tensor_map(q_in), k = for_tensor_map(k_in), v = for_tensor_map(v_in);
    const Tensor grad_out = for_tensor_map(grad_out_in), out = for_tensor_map(out_in);
    const Tensor denominators = packed(denominators_in);
    const BasedBackwardChoice choice = choose_backward(p, device);
    Tensor workspace = empty({backward_workspace(p, choice.segments)}, ScalarType::Float, q);
    call.segments = choice.segments;
    call.q = operand(q);
    call.k = operand(k);
    call.v = operand(v);
    call.out = operand(out);
    call.initial = initial.pointers();
    call.final = grad_final.pointers();
    call.workspace = floats(workspace);
    params.grad_out = operand(grad_out);
    if (normalize) params.row_denominators = static_cast<const float*>(denominators.data_ptr());
    if (states) {
        params.grad_initial = {floats(grad_initial),
                               p.denominator ? floats(grad_initial_denominator) : nullptr};
    }
    if (queries) params.dq = operand(dq);
    if (keys) params.dk = operand(dk), params.dv = operand(dv);
    run_backward(params, current_stream(q));
    return results();
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("based_forward", TORCH_BOX(&based_forward));
    m.impl("based", TORCH_BOX(&based));
    m.impl("based_backward", TORCH_BOX(&based_backward));
}

}  // namespace thunderkittens::linear_attention
