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

}  // namespace arch
}  // namespace kittens::inline on_gpu
