// Operands of 16 bits on the emulator, as operands.h has them of CUDA tensors.
#pragma once

#include "csrc/common/emulated.h"

namespace thunderkittens::emulated {

// An operand as TMA reads it. `swapped` when its rows are the matrix's columns.
struct Operand {
    Array array;
    View view;
    bool swapped = false;

    int64_t stride() const { return view.stride[2]; }
    int64_t batch_stride() const { return view.size[1] > 1 ? view.stride[1] : 0; }
};
inline Operand operand(const Array& array) {
    if (const View view = array.view(); fits_tensor_map(view, 2)) return {array, view, false};
    if (const View view = transposed(array.view()); fits_tensor_map(view, 2)) {
        return {array, view, true};
    }
    const Array copy = copy_for_tensor_map(array);
    return {copy, copy.view(), false};
}

}  // namespace thunderkittens::emulated
