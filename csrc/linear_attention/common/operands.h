// What the ops of linear attention check of their tensors, and what their kernels need of them.
// Host C++ without torch.
#pragma once

#include <algorithm>
#include <vector>

#include "csrc/common/backend.h"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

template <class Tensor>
void check_shape(const char* op, const char* name, const Tensor& x,
                 const std::vector<int64_t>& shape) {
    const auto& sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
}

template <class Tensor>
void check_tensor(const char* op, const char* name, const Tensor& x,
                  const std::vector<int64_t>& shape, DType dtype, const Tensor& q) {
    check_same_device(op, name, x, "q", q);
    check_shape(op, name, x, shape);
    TK_CHECK(x.scalar_type() == Backend<Tensor>::scalar_type(dtype), op, ": ", name, " must be ",
             torch_name(dtype), ", got ", dtype_text_of(x));
}

template <class Tensor>
Operand operand(const Tensor& x) {
    const View view = as_4d(x);
    return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

}  // namespace thunderkittens::linear_attention
