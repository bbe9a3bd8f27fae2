// The gradients of tk.gemm: products of transposed views, and the gradient of what an activation is
// applied to, as in python/thunderkittens/ops/gemm.py and _gemm_backward.py.
#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <utility>

#include "csrc/autograd/node.h"

namespace thunderkittens::autograd {

namespace {

// csrc/library.cpp
enum { NO_ACTIVATION, RELU, GELU, GELU_TANH, SILU };
enum { NO_GATE, BLOCKED };

}  // namespace

bool column_by_column(const Tensor& x) { return x.sym_stride(-2) == 1 && x.sym_stride(-1) != 1; }

// PyTorch's operations have gradients themselves.
Tensor through_activation(const Tensor& grad, const Tensor& z, int64_t activation) {
    switch (activation) {
        case NO_ACTIVATION: return grad;
        case RELU: return at::threshold_backward(grad, z, 0);
        case SILU: {
            if (!c10::GradMode::is_enabled()) return at::silu_backward(grad, z);
            const Tensor wide = z.to(at::kFloat);  // PyTorch's kernel has no derivative
            const Tensor sigmoid = wide.sigmoid();
            return (grad.to(at::kFloat) * sigmoid * (1 + wide * (1 - sigmoid)))
                .to(grad.scalar_type());
        }
        default: return at::gelu_backward(grad, z, activation == GELU_TANH ? "tanh" : "none");
    }
}

namespace {

// a @ b * alpha, recorded where the gradient is to be differentiated itself.
Tensor product(const Tensor& a, const Tensor& b, double alpha) {
    static const c10::OperatorHandle ops[] = {find_op("gemm_forward"),
                                              find_op("gemm_forward", "fused"), find_op("gemm"),
                                              find_op("gemm", "fused")};
    const bool fused = alpha != 1;
    torch::jit::Stack stack{a, b, c10::IValue(), c10::IValue()};
    if (fused) {
        for (c10::IValue x : {c10::IValue(), c10::IValue(0), c10::IValue(0), c10::IValue(alpha),
                              c10::IValue(1.0)}) {
            stack.push_back(std::move(x));
        }
    }
    if (transform_active() || c10::GradMode::is_enabled()) {
        ops[2 + fused].callBoxed(stack);
    } else {
        call_below(ops[fused], stack);
    }
    return stack[0].toTensor();
}

struct Wanted {
    bool a, b, bias;
};

// Gradients of alpha * a @ b + bias, in the order of a and of b.
void product_gradients(Tensor a, const Tensor& b, Tensor grad, double alpha, Wanted wanted,
                       variable_list& result) {
    if (wanted.bias) {
        std::vector<int64_t> rows(grad.dim() - 1);
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
        result[2] = grad.sum(rows).to(a.scalar_type());
    }
    grad = grad.to(a.scalar_type());
    if (wanted.a) {
        result[0] = column_by_column(a) && a.dim() == b.dim()
                        ? product(b, grad.transpose(-2, -1), alpha).transpose(-2, -1)
                        : product(grad, b.transpose(-2, -1), alpha);
    }
    if (wanted.b) {
        if (a.dim() > b.dim()) {  // one product over all rows of the batch
            a = a.flatten(0, 1);
            grad = grad.flatten(0, 1);
        }
        result[1] = column_by_column(b)
                        ? product(grad.transpose(-2, -1), a, alpha).transpose(-2, -1)
                        : product(a.transpose(-2, -1), grad, alpha);
    }
}

Tensor activate(const Tensor& z, int64_t activation) {
    return activation == SILU ? at::silu(z) : at::gelu(z);
}

// The gradient of what an activation is applied to.
Tensor preactivation_gradient(const Tensor& grad, const Tensor& z, int64_t activation,
                              int64_t gate) {
    if (gate == NO_GATE) return through_activation(grad, z, activation);
    if (!c10::GradMode::is_enabled()) {
        static const c10::OperatorHandle op = find_op("gemm_backward");
        return call_below(op, {grad, z, activation, gate});
    }
    const variable_list halves = gate == BLOCKED ? z.chunk(2, -1) : variable_list();
    const Tensor gates = gate == BLOCKED ? halves[0] : z.slice(-1, 0, {}, 2);
    const Tensor values = gate == BLOCKED ? halves[1] : z.slice(-1, 1, {}, 2);
    const Tensor of_gates = through_activation(grad * values, gates, activation);
    const Tensor of_values = grad * activate(gates, activation);
    return gate == BLOCKED ? at::cat({of_gates, of_values}, -1)
                           : at::stack({of_gates, of_values}, -1).flatten(-2);
}

// Without gradients to record, views and PyTorch's kernels skip autograd, too, where no dispatch
// mode or subclass sees them: they expect what autograd makes of a call. Hooks that unpack saved
// tensors do not skip it: a checkpoint computes and records them again.
struct MaybeBelow {
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    explicit MaybeBelow(const Tensor& grad) {
        const bool seen = c10::impl::TorchDispatchModeTLS::any_modes_set() ||
                          grad.key_set().has(c10::DispatchKey::Python);
        if (!c10::GradMode::is_enabled() && !transform_active() && !seen) guard.emplace();
    }
};

variable_list gemm_gradient(OpNode& node, const variable_list& gradients) {
    variable_list result(3);
    if (!gradients[0].defined()) return result;
    const Tensor a = node.saved_input(0), b = node.saved_input(1);
    const MaybeBelow below(gradients[0]);
    const Wanted wanted{node.wanted(0), node.wanted(1), node.wanted(2)};
    product_gradients(a, b, gradients[0], 1, wanted, result);
    return result;
}

variable_list fused_gradient(OpNode& node, const variable_list& gradients) {
    variable_list result(4);  // of a, b, bias and residual
    const Tensor a = node.saved_input(0), b = node.saved_input(1), z = node.saved_output(0);
    const MaybeBelow below(a);
    Tensor grad = gradients[0];
    const Tensor& grad_z = gradients[1];
    const int64_t activation = node.arguments[5].toInt(), gate = node.arguments[6].toInt();
    const double alpha = node.arguments[7].toDouble(), beta = node.arguments[8].toDouble();
    if (grad.defined() && node.wanted(3)) result[3] = beta == 1 ? grad : grad * beta;
    if (!grad.defined()) {
        grad = grad_z;
    } else if (activation != NO_ACTIVATION || gate != NO_GATE) {
        grad = preactivation_gradient(grad, z, activation, gate);
        if (grad_z.defined()) grad = grad + grad_z;
    }
    if (!grad.defined()) return result;
    const Wanted wanted{node.wanted(0), node.wanted(1), node.wanted(2)};
    product_gradients(a, b, grad, alpha, wanted, result);
    return result;
}

// The groups' products, in the order of `like`, recorded where needed.
Tensor grouped_product(const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& like) {
    static const c10::OperatorHandle forward = find_op("grouped_gemm_forward"),
                                     recorded = find_op("grouped_gemm");
    const bool turned = column_by_column(like);
    torch::jit::Stack stack{turned ? b.transpose(-2, -1) : a, turned ? a.transpose(-2, -1) : b,
                            offs};
    if (transform_active() || c10::GradMode::is_enabled()) {
        recorded.callBoxed(stack);
    } else {
        call_below(forward, stack);
    }
    const Tensor result = stack[0].toTensor();
    return turned ? result.transpose(-2, -1) : result;
}

variable_list grouped_gradient(OpNode& node, const variable_list& gradients) {
    variable_list result(2);
    const Tensor &grad = gradients[0], a = node.saved_input(0), b = node.saved_input(1),
                 offs = node.saved_input(2);
    if (!grad.defined()) return result;
    const MaybeBelow below(grad);
    if (node.wanted(0)) result[0] = grouped_product(grad, b.transpose(-2, -1), offs, a);
    if (node.wanted(1)) result[1] = grouped_product(a.transpose(-2, -1), grad, offs, b);
    return result;
}

Formula formula_of(const char* name, std::vector<int> edges, int edge_count) {
    return {.op = name,
            .name = std::string("thunderkittens_") + name + "Backward",
            .edges = std::move(edges),
            .edge_count = edge_count,
            .saved_inputs = {0, 1}};
}

}  // namespace

Formula of_gemm() {
    Formula formula = formula_of("gemm", {0, 1, 2, -1}, 3);
    formula.gradient = gemm_gradient;
    return formula;
}

Formula of_fused_gemm() {
    Formula formula = formula_of("gemm_fused", {0, 1, 2, -1, 3, -1, -1, -1, -1}, 4);
    formula.saved_outputs = {1};
    formula.gradient = fused_gradient;
    return formula;
}

Formula of_grouped_gemm() {
    Formula formula = formula_of("grouped_gemm", {0, 1, -1}, 2);
    formula.saved_inputs = {0, 1, 2};
    formula.gradient = grouped_gradient;
    return formula;
}

}  // namespace thunderkittens::autograd
