// Flags between blocks that are 64 bits wide: not in the umbrella arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

// As load_acquire_global and store_release_global of 32 bits: what was written before the release
// is seen after the acquire.
__device__ __forceinline__ uint64_t load_acquire_mark(const uint64_t* pointer) {
#if defined(__CUDACC__)
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
#else
    return detail::load_flag(pointer, false, "load_acquire_mark");
#endif
}
__device__ __forceinline__ void store_release_mark(uint64_t* pointer, uint64_t value) {
#if defined(__CUDACC__)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
#else
    detail::store_flag(pointer, value, "store_release_mark");
#endif
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
