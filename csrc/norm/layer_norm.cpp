// The ops layer_norm, layer_norm_forward and layer_norm_backward for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/norm/layer_norm_body.h"

namespace thunderkittens::norm {
namespace {

using Given = std::optional<Tensor>;

std::tuple<Tensor, Tensor> layer_norm(const Tensor& x, const Given& weight, const Given& bias,
                                      const Given& residual, const Given& seed, double eps,
                                      double dropout_p) {
    return with_sum(layer_norm_body<Tensor>(gpu, x,
                                            {.weight = weight,
                                             .bias = bias,
                                             .residual = residual,
                                             .seed = seed,
                                             .eps = eps,
                                             .dropout = dropout_p}));
}

Tensor layer_norm_single(const Tensor& x, const Given& weight, const Given& bias, double eps) {
    return layer_norm_body<Tensor>(gpu, x, {.weight = weight, .bias = bias, .eps = eps}).out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad_out, const Given& grad_sum, const Tensor& x, const Given& weight,
    const Given& seed, double eps, double dropout_p, std::vector<bool> needs) {
    auto result = layer_norm_backward_body<Tensor>(
        gpu, grad_out, grad_sum, x,
        {.weight = weight, .seed = seed, .eps = eps, .dropout = dropout_p}, needs);
    return {std::move(result.x), std::move(result.residual), std::move(result.weight),
            std::move(result.last)};
}

}  // namespace
}  // namespace thunderkittens::norm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("layer_norm", TORCH_BOX(&thunderkittens::norm::layer_norm));
    m.impl("layer_norm_forward", TORCH_BOX(&thunderkittens::norm::layer_norm));
    m.impl("layer_norm_forward.single", TORCH_BOX(&thunderkittens::norm::layer_norm_single));
    m.impl("layer_norm_backward", TORCH_BOX(&thunderkittens::norm::layer_norm_backward));
}
