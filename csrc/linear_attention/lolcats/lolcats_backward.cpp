// The gradient of LoLCATS for CUDA.
#include <tuple>
#include <vector>

#include "csrc/common/tensor.h"
#include "csrc/linear_attention/lolcats/lolcats_backward_body.h"

namespace thunderkittens::linear_attention {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lolcats_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_map,
    const Tensor& k_map, const Tensor& alpha, const Tensor& beta, const Tensor& out,
    const Tensor& maxima, const Tensor& denominators, std::optional<Tensor> numerator,
    std::optional<Tensor> denominator, std::optional<Tensor> keys, std::optional<Tensor> values,
    std::optional<Tensor> lengths, std::vector<bool> needs) {
    return lolcats_backward_body<Tensor>(gpu, grad_out, {q, k, v, q_map, k_map, alpha, beta},
                                         {out, maxima, denominators},
                                         {numerator, denominator, keys, values, lengths}, needs);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("lolcats_backward", TORCH_BOX(&lolcats_backward));
}

}  // namespace thunderkittens::linear_attention
