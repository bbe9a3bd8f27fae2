// What the ops of convolutions check of their tensors, and what their kernels are told of them.
// Host C++ without torch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "csrc/common/backend.h"
#include "csrc/convolution/convolution.h"

namespace thunderkittens::convolution {

template <class Tensor>
void check_sizes(const char* op, const char* name, const Tensor& x,
                 std::initializer_list<int64_t> shape) {
    const auto& sizes = x.sizes();
    TK_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), op, ": ", name,
             " must have shape ", tuple_text(shape), ", got ", shape_text(x));
}

// Weights or biases: contiguous and aligned, of the dtype of x or fp32.
template <class Tensor>
Tensor coefficients(const char* op, const char* name, const Tensor& values, const Tensor& x,
                    DType dtype, std::initializer_list<int64_t> shape) {
    check_same_device(op, name, values, "x", x);
    check_sizes(op, name, values, shape);
    check_dtype(op, name, values, {dtype, DType::fp32});
    return aligned_and_contiguous(values);
}
template <class Tensor>
Coefficients coefficients_of(const Tensor& values) {
    return {values.data_ptr(),
            Backend<Tensor>::dtype_of(values.scalar_type()) == std::optional(DType::fp32)};
}

// (batch, channels, tokens), without the stride of a dimension of one element.
template <class Tensor>
Operand operand_of(const Tensor& x) {
    const View view = as_4d(x);
    return {const_cast<void*>(view.data), view.stride[1], view.stride[2], view.stride[3]};
}

// Whether a tensor is accessed by vectors of 16 bytes of channels or of tokens.
template <class Tensor>
bool has_layout(const Tensor& x, Layout layout) {
    const View view = as_4d(x);
    const int along = layout == Layout::channels ? 2 : 3;
    const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
    bool fits = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride[along] == 1 &&
                view.size[along] % elements == 0;
    for (int i = 1; i < 4; ++i) {
        fits = fits && (i == along || view.size[i] == 1 || view.stride[i] % elements == 0);
    }
    return fits;
}
template <class... Tensors>
Layout layout_of(const Tensors&... tensors) {
    for (const Layout layout : {Layout::channels, Layout::tokens}) {
        if ((has_layout(tensors, layout) && ...)) return layout;
    }
    return Layout::any;
}

}  // namespace thunderkittens::convolution
