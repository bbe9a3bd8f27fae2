// What blocks need that hand memory over to each other by counters, written by ordinary stores and
// read by TMA: not in the umbrella arch.cuh.
//
// A writer's lanes call fence_async_global and meet, and one calls fence_release_gpu and counts.
// A reader polls by load_relaxed_global, calls fence_acquire_gpu, meets with the lane that issues
// the copies, and that one calls fence_async_global. fence_async and load_acquire_global are the
// same to the program; the first waits for all that the warp has on its way to memory, the second
// for its own answer.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

#if defined(__CUDACC__)
// fetch_add_global of 1 below 2^31, whose answer may come later: additions by one lane of a warp
// are taken for additions by all of it, and waited for.
__device__ __forceinline__ int claim_global(int* counter) {
    int value;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(value)
                 : "l"(counter)
                 : "memory");
    return value;
}
__device__ __forceinline__ void count_global(int* counter) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ int load_relaxed_global(const int* pointer) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void fence_release_gpu() {
    asm volatile("fence.release.gpu;" ::: "memory");
}
__device__ __forceinline__ void fence_acquire_gpu() {
    asm volatile("fence.acquire.gpu;" ::: "memory");
}
// The lane's number, read anew instead of kept in a register.
__device__ __forceinline__ int lane_again() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// Of 16 bytes at once, which the compiler otherwise divides at times.
__device__ __forceinline__ void store_global_whole(void* to, const uint4& value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
#else
inline int claim_global(int* counter) { return fetch_add_global(counter, 1); }
inline void count_global(int* counter) { fetch_add_global(counter, 1); }
inline int load_relaxed_global(const int* pointer) {
    return detail::load_flag(pointer, true, "load_relaxed_global");
}
inline void fence_async_global() { emulated::fence_proxy_global(); }
inline void fence_release_gpu() { emulated::fence_release(); }
inline void fence_acquire_gpu() { emulated::fence_acquire(); }
inline int lane_again() { return kittens::laneid(); }
inline void store_global_whole(void* to, const uint4& value) {
    store_global(static_cast<uint4*>(to), value);
}
#endif

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
