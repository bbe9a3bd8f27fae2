// tk.fp8_linear and the node of its gradient.
#include "csrc/autograd/fp8_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <utility>

namespace thunderkittens::autograd {

namespace {

// Codes and scales of x, and of its transpose, which are empty where they are not wanted.
struct Quantized {
    Tensor codes, scale, codes_t, scale_t;
};

Quantized quantize(const Tensor& x, int64_t granularity, at::ScalarType dtype, bool transposed) {
    static const c10::OperatorHandle op = find_op("fp8_quantize");
    torch::jit::Stack stack{x, granularity, dtype, c10::IValue(), transposed};
    call_below(op, stack);
    return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor()};
}

// The product with the transpose of b.
Tensor product(const Tensor& a, const Tensor& scale_a, const Tensor& b, const Tensor& scale_b,
               const c10::IValue& bias, at::ScalarType dtype, bool accurate) {
    static const c10::OperatorHandle op = find_op("fp8_gemm");
    return call_below(op,
                      {a, b.t(), scale_a, scale_b.t(), bias, 0, dtype, accurate, c10::IValue()});
}

enum { WEIGHT, CODES_X, SCALE_X, CODES_WEIGHT, SCALE_WEIGHT };      // saved, of transposes
enum { DTYPE_X, DTYPE_BIAS, GRANULARITY_X, GRAD_DTYPE, ACCURATE };  // arguments

variable_list fp8_linear_gradient(OpNode& node, const variable_list& gradients) {
    variable_list result(3);
    const Tensor& grad = gradients[0];
    if (!grad.defined()) return result;
    const auto dtype_of = [&](int i) { return node.arguments[i].toScalarType(); };
    const Tensor weight = node.saved_input(WEIGHT);
    const Tensor codes_x = node.saved_input(CODES_X), scale_x = node.saved_input(SCALE_X);
    const Tensor codes_weight = node.saved_input(CODES_WEIGHT),
                 scale_weight = node.saved_input(SCALE_WEIGHT);
    if (node.wanted(0) || node.wanted(1)) {
        const at::NoGradGuard no_grad;
        const bool accurate = node.arguments[ACCURATE].toBool();
        const Quantized q = quantize(grad, node.arguments[GRANULARITY_X].toInt(),
                                     dtype_of(GRAD_DTYPE), node.wanted(1));
        if (node.wanted(0)) {
            result[0] = product(q.codes, q.scale, codes_weight, scale_weight, c10::IValue(),
                                dtype_of(DTYPE_X), accurate);
        }
        if (node.wanted(1)) {
            result[1] = product(q.codes_t, q.scale_t, codes_x, scale_x, c10::IValue(),
                                weight.scalar_type(), accurate);
        }
    }
    refuse_double_backward("fp8_linear", result, {grad, weight}, false);
    if (node.wanted(2)) result[2] = grad.sum({0}, false, at::kFloat).to(dtype_of(DTYPE_BIAS));
    return result;
}

const Formula& formula() {
    static const Formula formula{.op = "fp8_linear",
                                 .name = "thunderkittens_fp8_linearBackward",
                                 .edges = {0, 1, 2},
                                 .edge_count = 3,
                                 .saved_inputs = {0, 1, 2, 3, 4},
                                 .gradient = fp8_linear_gradient};
    return formula;
}

}  // namespace

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  std::optional<at::ScalarType> cast, int64_t granularity_x,
                  int64_t granularity_weight, at::ScalarType grad_dtype, bool accurate) {
    const c10::IValue operands[] = {x, weight, bias};
    const bool recorded = recording(operands, 3);
    const bool needs_x = recorded && x.requires_grad();
    const bool needs_weight = recorded && weight.requires_grad();
    Quantized qx, qw;
    Tensor out;
    {
        const at::NoGradGuard no_grad;
        const auto converted = [&](const Tensor& t) { return cast ? t.to(*cast) : t; };
        const Tensor rows = converted(x);
        const c10::IValue row = bias ? c10::IValue(converted(*bias)) : c10::IValue();
        qx = quantize(rows, granularity_x, at::kFloat8_e4m3fn, needs_weight);
        qw = quantize(converted(weight), granularity_weight, at::kFloat8_e4m3fn, needs_x);
        out = product(qx.codes, qx.scale, qw.codes, qw.scale, row, rows.scalar_type(), accurate);
    }
    if (!recorded) return out;
    const auto node = make_node<OpNode>(formula());
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    const at::ScalarType dtype_bias = bias ? bias->scalar_type() : x.scalar_type();
    node->arguments = {x.scalar_type(), dtype_bias, granularity_x, grad_dtype, accurate};
    node->saved.reserve(5);
    for (const Tensor& t : {weight, qx.codes_t, qx.scale_t, qw.codes_t, qw.scale_t}) {
        node->saved.emplace_back(t, false);
    }
    torch::autograd::set_history(out, node);
    return out;
}

}  // namespace thunderkittens::autograd
