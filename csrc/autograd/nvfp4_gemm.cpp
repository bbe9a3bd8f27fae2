// The gradients of tk.nvfp4_gemm with respect to activations and bias, as in
// python/thunderkittens/ops/nvfp4_gemm.py.
#include <ATen/ATen.h>

#include "csrc/autograd/node.h"

namespace thunderkittens::autograd {

namespace {

variable_list nvfp4_gemm_gradient(OpNode& node, const variable_list& gradients) {
    variable_list result(2);  // of a and bias
    if (!gradients[0].defined()) return result;
    static const c10::OperatorHandle op = find_op("nvfp4_gemm"),
                                     restore = find_op("nvfp4_dequantize", "prepared"),
                                     product = find_op("gemm_forward");
    const Tensor a = node.saved_input(0), data = node.saved_input(1), scale = node.saved_input(2),
                 bias = node.saved_input(3);
    const c10::IValue &n = node.arguments[3], none;
    const int64_t activation = node.arguments[5].toInt();
    {
        const at::NoGradGuard no_grad;
        Tensor grad = gradients[0];
        if (activation != 0) {
            const c10::IValue row = bias.defined() ? c10::IValue(bias) : none;
            const Tensor z = call_below(op, {a, data, scale, n, row, 0, at::kFloat, none});
            grad = through_activation(grad.to(at::kFloat), z, activation);
        }
        if (node.wanted(0)) {
            const Tensor weight = call_below(
                restore, {data, at::ones_like(scale), n, a.sym_size(-1), a.scalar_type()});
            const Tensor sums =
                call_below(product, {grad.to(a.scalar_type()), weight, none, at::kFloat});
            result[0] = (sums * scale).to(a.scalar_type());
        }
        if (node.wanted(1)) result[1] = grad.sum({0}, false, at::kFloat).to(a.scalar_type());
    }
    variable_list operands{gradients[0], a};
    if (bias.defined()) operands.push_back(bias);
    refuse_double_backward("nvfp4_gemm", result, operands);
    return result;
}

}  // namespace

Formula of_nvfp4_gemm() {
    return {.op = "nvfp4_gemm",
            .name = "thunderkittens_nvfp4_gemmBackward",
            .edges = {0, -1, -1, -1, 1, -1, -1, -1},
            .edge_count = 2,
            .saved_inputs = {0, 1, 2, 4},
            .gradient = nvfp4_gemm_gradient};
}

}  // namespace thunderkittens::autograd
