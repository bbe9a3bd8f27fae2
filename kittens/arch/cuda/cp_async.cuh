// cp.async: 4, 8 or 16 bytes from global to shared memory without passing through registers.
#pragma once

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

// Copies the first `read_bytes` (0 to BYTES) bytes and writes zeros to the rest.
template <int BYTES>
__device__ __forceinline__ void cp_async_partial(uint32_t destination, const void* source,
                                                 int read_bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination),
                     "l"(source), "r"(read_bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination),
                     "l"(source), "n"(BYTES), "r"(read_bytes)
                     : "memory");
    }
}
// Copies BYTES bytes, or writes zeros where `valid` is false (the source is then not read).
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32_t destination, const void* source,
                                         bool valid = true) {
    cp_async_partial<BYTES>(destination, source, valid ? BYTES : 0);
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most PENDING of this thread's latest groups are still in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// The barrier receives an arrival of this thread when all its earlier cp.async have completed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
