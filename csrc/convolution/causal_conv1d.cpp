// The ops causal_conv1d, causal_conv1d_forward and causal_conv1d_backward for CUDA.
#include "csrc/common/tensor.h"
#include "csrc/convolution/causal_conv1d_body.h"

namespace thunderkittens::convolution {

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight,
                                         std::optional<Tensor> bias, int64_t activation,
                                         std::optional<Tensor> state,
                                         std::optional<Tensor> cu_seqlens, bool return_state) {
    auto r = causal_conv1d_body<Tensor>(gpu, x, weight, bias, activation, state, cu_seqlens,
                                        return_state);
    if (!r.state) r.state = empty({0, x.size(1), weight.size(1) - 1}, x.scalar_type(), x);
    return {std::move(r.out), std::move(*r.state)};
}

Tensor causal_conv1d_forward(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                             int64_t activation, std::optional<Tensor> state,
                             std::optional<Tensor> cu_seqlens) {
    return causal_conv1d_body<Tensor>(gpu, x, weight, bias, activation, state, cu_seqlens, false)
        .out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_state, const Tensor& x, const Tensor& weight,
    std::optional<Tensor> bias, int64_t activation, std::optional<Tensor> state,
    std::optional<Tensor> cu_seqlens, std::vector<bool> needs) {
    return causal_conv1d_backward_body<Tensor>(gpu, grad_out, grad_state, x, weight, bias,
                                               activation, state, cu_seqlens, needs);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("causal_conv1d_forward", TORCH_BOX(&causal_conv1d_forward));
    m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
    m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace thunderkittens::convolution
