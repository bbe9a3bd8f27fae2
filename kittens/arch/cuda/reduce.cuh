// Atomic additions of floats in memory that return nothing.
#pragma once

#include <cuda_runtime.h>

namespace kittens::inline on_gpu {
namespace arch {

__device__ __forceinline__ void reduce_add_global(float* pointer, float value) {
    atomicAdd(pointer, value);
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
