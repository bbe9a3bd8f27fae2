// Tensors that kernels read in words of up to 16 bytes, and bulk copies from multiples of that.
#pragma once

#include "csrc/common/tensor.h"

namespace thunderkittens {

// The tensor itself where it is contiguous and begins at a multiple of 16 bytes, else a copy.
inline Tensor aligned_and_contiguous(const Tensor& tensor) {
    Tensor packed = torch::stable::contiguous(tensor);
    const bool aligned = reinterpret_cast<uintptr_t>(packed.data_ptr()) % 16 == 0;
    return aligned ? packed : torch::stable::clone(packed);
}

}  // namespace thunderkittens
