// States as tensors. Host C++ with torch.
#pragma once

#include "csrc/common/tensor.h"

namespace thunderkittens::linear_attention {

// The tensor itself where it is contiguous and begins at a multiple of 16 bytes, which kernels read
// and write at a time, else a copy.
inline Tensor packed_state(const Tensor& tensor) {
    const Tensor x = torch::stable::contiguous(tensor);
    if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0) return x;
    Tensor copy = empty(x.sizes(), x.scalar_type(), x);
    torch::stable::copy_(copy, x);
    return copy;
}

}  // namespace thunderkittens::linear_attention
