// mbarrier objects (PTX ISA, "mbarrier"): arrival counts, transaction bytes, phases. Before sm_90 a
// waiting thread polls, an arrival counts one, and there are no transactions.
#pragma once

#include <cstdint>

#include "threads.cuh"

namespace kittens::inline on_gpu {
namespace arch {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_invalidate(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine,
// neither of which there is before sm_90.
__device__ __forceinline__ void mbarrier_init_fence() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t count = 1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    for (uint32_t i = 0; i < count; ++i) {
        asm volatile(
            "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier)
            : "memory");
    }
#else
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(count)
                 : "memory");
#endif
}
// Arrives at the barrier at the same offset in the block of rank `rank`.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank,
                                                       uint32_t count = 1) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote], %2;\n}\n" ::"r"(barrier),
        "r"(rank), "r"(count)
        : "memory");
}
// The same without release semantics: publishes no writes, and so costs none of the fence to the
// whole GPU that the release costs.
__device__ __forceinline__ void mbarrier_arrive_remote_relaxed(uint32_t barrier, uint32_t rank,
                                                               uint32_t count = 1) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote], %2;\n}\n" ::"r"(barrier),
        "r"(rank), "r"(count)
        : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    return done != 0;
}
// May suspend the thread for a time that the hardware limits; true when the phase has completed.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ bool mbarrier_try_wait_cluster(uint32_t barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    while (!mbarrier_test_wait(barrier, phase)) {
    }
#else
    while (!mbarrier_try_wait(barrier, phase)) {
    }
#endif
}
// For barriers that other blocks of the cluster arrive at with data of theirs behind the arrival.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t phase) {
    while (!mbarrier_try_wait_cluster(barrier, phase)) {
    }
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
