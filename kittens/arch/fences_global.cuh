// Fences and counters of what blocks write to global memory for TMA of others: not in the umbrella
// arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

// arch::fence_async of global memory alone, which does not wait for the GPU to see earlier writes.
__device__ __forceinline__ void fence_async_global() {
#if defined(__CUDACC__)
    asm volatile("fence.proxy.async.global;" ::: "memory");
#else
    fence_async();
#endif
}
// arch::fence_gpu without an order that all threads agree on.
__device__ __forceinline__ void fence_release_gpu() {
#if defined(__CUDACC__)
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
    fence_gpu();
#endif
}
__device__ __forceinline__ void count_global(int* counter) {
#if defined(__CUDACC__)
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
#else
    fetch_add_global(counter, 1);
#endif
}
// arch::fetch_add_global(counter, 1) by one lane, whose answer is not waited for before it is used:
// the compiler would gather those of several lanes by shuffles.
__device__ __forceinline__ int claim_global(int* counter) {
#if defined(__CUDACC__)
    int value;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(value)
                 : "l"(counter)
                 : "memory");
    return value;
#else
    return fetch_add_global(counter, 1);
#endif
}
// The lane's number, read anew instead of kept in a register.
__device__ __forceinline__ int lane_again() {
#if defined(__CUDACC__)
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#else
    return kittens::laneid();
#endif
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
