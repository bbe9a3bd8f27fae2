// The ops rms_norm, rms_norm_forward and rms_norm_backward for CUDA.
#include <tuple>

#include "csrc/common/tensor.h"
#include "csrc/norm/rms_norm_body.h"

namespace thunderkittens::norm {
namespace {

using Given = std::optional<Tensor>;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Given& weight, const Given& residual,
                                    const Given& gate, const Given& seed, double eps,
                                    double weight_offset, double dropout_p, bool gate_first,
                                    int64_t group_size) {
    return with_sum(rms_norm_body<Tensor>(gpu, x,
                                          {.weight = weight,
                                           .residual = residual,
                                           .gate = gate,
                                           .seed = seed,
                                           .eps = eps,
                                           .offset = weight_offset,
                                           .dropout = dropout_p,
                                           .gate_first = gate_first,
                                           .group_size = group_size}));
}

Tensor rms_norm_single(const Tensor& x, const Given& weight, const Given& gate, double eps,
                       double weight_offset, bool gate_first, int64_t group_size) {
    return rms_norm_body<Tensor>(gpu, x,
                                 {.weight = weight,
                                  .gate = gate,
                                  .eps = eps,
                                  .offset = weight_offset,
                                  .gate_first = gate_first,
                                  .group_size = group_size})
        .out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_out, const Given& grad_sum, const Tensor& x, const Given& weight,
    const Given& gate, const Given& seed, double eps, double weight_offset, double dropout_p,
    bool gate_first, int64_t group_size, std::vector<bool> needs) {
    auto result = rms_norm_backward_body<Tensor>(gpu, grad_out, grad_sum, x,
                                                 {.weight = weight,
                                                  .gate = gate,
                                                  .seed = seed,
                                                  .eps = eps,
                                                  .offset = weight_offset,
                                                  .dropout = dropout_p,
                                                  .gate_first = gate_first,
                                                  .group_size = group_size},
                                                 needs);
    return {std::move(result.x), std::move(result.residual), std::move(result.weight),
            std::move(result.last)};
}

}  // namespace
}  // namespace thunderkittens::norm

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("rms_norm", TORCH_BOX(&thunderkittens::norm::rms_norm));
    m.impl("rms_norm_forward", TORCH_BOX(&thunderkittens::norm::rms_norm));
    m.impl("rms_norm_forward.single", TORCH_BOX(&thunderkittens::norm::rms_norm_single));
    m.impl("rms_norm_backward", TORCH_BOX(&thunderkittens::norm::rms_norm_backward));
}
