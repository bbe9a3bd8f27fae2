// Registers whose value is not wanted any more. A tile that a loop's body declares, and a product
// overwrites, would otherwise be kept from one round to the next: as far as the compiler knows, the
// product reads it.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

__device__ __forceinline__ void discard_register(float& value) {
#if defined(__CUDACC__)
    asm volatile("" : "=f"(value));
#else
    value = 0.0f;
#endif
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
