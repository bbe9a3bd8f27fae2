// Memory fences, above all between the generic proxy (ordinary loads and stores) and the async
// proxy (TMA, wgmma) (PTX ISA, "fence.proxy").
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

// Ordinary writes to shared memory before it are seen by TMA and wgmma issued after it.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for all state spaces (global memory written here and read by TMA later).
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_cluster() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}
__device__ __forceinline__ void fence_gpu() { __threadfence(); }

// Of memory that blocks hand over to each other by counters, written by ordinary stores and read by
// TMA. A writer's lanes call fence_async_global and meet, and one calls fence_release_gpu and
// counts. A reader polls by load_relaxed_global, calls fence_acquire_gpu, meets with the lane that
// issues the copies, and that one calls fence_async_global. fence_async and load_acquire_global are
// the same to the program; the first waits for all that the warp has on its way to memory, the
// second for its own answer.
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void fence_release_gpu() {
    asm volatile("fence.release.gpu;" ::: "memory");
}
__device__ __forceinline__ void fence_acquire_gpu() {
    asm volatile("fence.acquire.gpu;" ::: "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
