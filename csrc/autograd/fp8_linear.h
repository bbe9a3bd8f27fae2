// tk.fp8_linear and its gradient, as in python/thunderkittens/ops/_fp8_linear.py.
#pragma once

#include <optional>

#include "csrc/autograd/node.h"

namespace thunderkittens::autograd {

// x (M, K), weight (N, K), bias (N,); `cast` is the dtype that autocast converts them to; the
// granularities are those of the op fp8_quantize.
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  std::optional<at::ScalarType> cast, int64_t granularity_x,
                  int64_t granularity_weight, at::ScalarType grad_dtype, bool accurate);

}  // namespace thunderkittens::autograd
