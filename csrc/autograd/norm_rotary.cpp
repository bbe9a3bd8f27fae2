// The gradients of tk.rms_norm, tk.layer_norm and tk.rotary, as in python/thunderkittens/ops/.
#include <ATen/ATen.h>

#include "csrc/autograd/node.h"

namespace thunderkittens::autograd {

namespace {

// Places of the arguments of a norm and of its gradient's results: x, weight, residual and the
// last, gate or bias. What follows are numbers, of which one is the dropout's probability.
struct Norm {
    std::string op;
    int residual, last;
    int first_number, dropout;
    std::size_t operands;  // that are saved: what was normalised, weight, a gate, the seed
};

variable_list norm_gradient(const Norm& norm, const c10::OperatorHandle& backward, OpNode& node,
                            variable_list& gradients) {
    variable_list result(node.formula.edge_count);
    // A saved tensor is unpacked once.
    const Tensor kept = node.saved_input(0);
    const bool with_residual = !kept.defined();
    Tensor grad_out = gradients[0], grad_sum = with_residual ? gradients[1] : Tensor();
    if (!grad_out.defined() && !grad_sum.defined()) return result;
    const Tensor x = with_residual ? node.saved_output(0) : kept;
    if (!grad_out.defined()) grad_out = node.input_metadata(0).zeros_like();
    const c10::List<bool> needs(
        {node.wanted(0), node.wanted(norm.residual), node.wanted(1), node.wanted(norm.last)});
    torch::jit::Stack stack;
    stack.reserve(16);
    variable_list operands;
    const auto push = [&](const Tensor& tensor) {
        if (tensor.defined()) {
            operands.push_back(tensor);
            stack.emplace_back(tensor);
        } else {
            stack.emplace_back();
        }
    };
    push(grad_out);
    push(grad_sum);
    push(x);
    for (std::size_t i = 1; i < norm.operands; ++i) push(node.saved_input(i));
    for (std::size_t i = norm.first_number; i < node.arguments.size(); ++i) {
        stack.push_back(node.arguments[i]);
    }
    stack.emplace_back(needs);
    call_below(backward, stack);
    const bool separate =
        x.scalar_type() != grad_out.scalar_type() || node.arguments[norm.dropout].toDouble() > 0;
    if (node.wanted(0)) result[0] = stack[0].toTensor();
    if (node.wanted(1)) result[1] = stack[2].toTensor();
    if (node.wanted(norm.residual)) {
        result[norm.residual] = stack[separate ? 1 : 0].toTensor();
    }
    if (node.wanted(norm.last)) result[norm.last] = stack[3].toTensor();
    refuse_double_backward(norm.op, result, operands);
    return result;
}

Formula of_norm(Norm norm, std::vector<int> edges, std::vector<int> saved) {
    Formula formula{.op = norm.op,
                    .name = "thunderkittens_" + norm.op + "Backward",
                    .edges = std::move(edges),
                    .edge_count = 4,
                    .saved_inputs = std::move(saved),
                    .saved_outputs = {1},
                    // x need not live on where it was added to a residual.
                    .keeps = [residual = norm.residual](const c10::IValue* arguments, int place) {
                        return place > 0 || !arguments[residual].isTensor();
                    }};
    formula.gradient = [norm, backward = find_op(norm.op + "_backward")](OpNode& node,
                                                                         variable_list& gradients) {
        return norm_gradient(norm, backward, node, gradients);
    };
    return formula;
}

variable_list rotary_gradient(OpNode& node, variable_list& gradients) {
    variable_list result(1);
    if (!gradients[0].defined() || !node.wanted(0)) return result;
    static const c10::OperatorHandle rotary = find_op("rotary");
    torch::jit::Stack stack;
    stack.emplace_back(gradients[0]);
    for (int i = 0; i < 5; ++i) {
        const Tensor x = node.saved_input(i);
        stack.push_back(x.defined() ? c10::IValue(x) : c10::IValue());
    }
    stack.push_back(node.arguments[6]);
    stack.emplace_back(!node.arguments[7].toBool());
    stack.push_back(node.arguments[8]);
    // It may be differentiated itself.
    rotary.callBoxed(stack);
    result[0] = stack[0].toTensor();
    return result;
}

}  // namespace

// x, weight, residual, gate, seed, eps, weight_offset, dropout_p, gate_first, group_size.
Formula of_rms_norm() {
    return of_norm({.op = "rms_norm",
                    .residual = 2,
                    .last = 3,
                    .first_number = 5,
                    .dropout = 7,
                    .operands = 4},
                   {0, 1, 2, 3, -1, -1, -1, -1, -1, -1}, {0, 1, 3, 4});
}
// x, weight, bias, residual, seed, eps, dropout_p.
Formula of_layer_norm() {
    return of_norm({.op = "layer_norm",
                    .residual = 3,
                    .last = 2,
                    .first_number = 5,
                    .dropout = 6,
                    .operands = 3},
                   {0, 1, 2, 3, -1, -1, -1}, {0, 1, 4});
}
// x, cos, sin, positions, offsets, cu_seqlens, interleaved, inverse, heads.
Formula of_rotary() {
    return {.op = "rotary",
            .name = "thunderkittens_rotaryBackward",
            .edges = {0, -1, -1, -1, -1, -1, -1, -1, -1},
            .edge_count = 1,
            .saved_inputs = {1, 2, 3, 4, 5},
            .gradient = rotary_gradient};
}

}  // namespace thunderkittens::autograd
