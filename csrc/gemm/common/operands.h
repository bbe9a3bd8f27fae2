// Operands of 16 bits as gemm and grouped_gemm give them to TMA. Host C++ without
// torch.
#pragma once

#include <utility>

#include "csrc/common/backend.h"

namespace thunderkittens::gemm {

// An operand as TMA reads it: rows of adjacent elements. `swapped` when those rows are the matrix's
// columns.
template <class Tensor>
struct Operand {
    Tensor tensor;  // keeps a copy alive
    View view;
    bool swapped = false;

    int64_t stride() const { return view.stride[2]; }
    int64_t batch_stride() const { return view.size[1] > 1 ? view.stride[1] : 0; }
};

template <class Tensor>
Operand<Tensor> operand(const Tensor& tensor) {
    Tensor readable = for_tensor_map(tensor, true);
    const View view = as_4d(readable);
    const bool swapped = !fits_tensor_map(view, static_cast<int>(readable.element_size()));
    return {std::move(readable), swapped ? transposed(view) : view, swapped};
}

}  // namespace thunderkittens::gemm
