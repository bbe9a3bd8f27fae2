// The ops of Based for CUDA.
#include <tuple>
#include <vector>

#include "csrc/common/tensor.h"
#include "csrc/linear_attention/based/based_body.h"

namespace thunderkittens::linear_attention {

std::tuple<Tensor, Tensor, Tensor> based_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 bool normalize, double eps,
                                                 std::optional<Tensor> numerator,
                                                 std::optional<Tensor> denominator,
                                                 bool return_state) {
    const auto r = based_body<Tensor>(gpu, {q, k, v}, normalize, eps, {numerator, denominator},
                                      return_state, false);
    return {r.out, r.numerator, r.denominator};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> based(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 bool normalize, double eps,
                                                 std::optional<Tensor> numerator,
                                                 std::optional<Tensor> denominator,
                                                 bool return_state) {
    const auto r = based_body<Tensor>(gpu, {q, k, v}, normalize, eps, {numerator, denominator},
                                      return_state, true);
    return {r.out, r.numerator, r.denominator, r.denominators};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> based_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_numerator,
    std::optional<Tensor> grad_denominator, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& denominators, bool normalize, std::optional<Tensor> numerator,
    std::optional<Tensor> denominator, std::vector<bool> needs) {
    return based_backward_body<Tensor>(gpu, grad_out, {grad_numerator, grad_denominator}, {q, k, v},
                                       {out, denominators}, normalize, {numerator, denominator},
                                       needs);
}

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("based_forward", TORCH_BOX(&based_forward));
    m.impl("based", TORCH_BOX(&based));
    m.impl("based_backward", TORCH_BOX(&based_backward));
}

}  // namespace thunderkittens::linear_attention
