// Semaphores: mbarriers in shared memory. One thread calls each function, or all of them to wait.
#pragma once

#include "../../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {

struct alignas(8) semaphore {
    uint64_t value;

    __device__ __forceinline__ uint32_t address() const { return arch::shared_address(this); }
};

// A phase ends when `threads + transactions` arrivals and all expected bytes have come in.
__device__ __forceinline__ void init_semaphore(semaphore& s, int threads, int transactions = 0) {
    arch::mbarrier_init(s.address(), static_cast<uint32_t>(threads + transactions));
}
__device__ __forceinline__ void invalidate_semaphore(semaphore& s) {
    arch::mbarrier_invalidate(s.address());
}
__device__ __forceinline__ void arrive(semaphore& s, uint32_t count = 1) {
    arch::mbarrier_arrive(s.address(), count);
}
// Arrives at the same semaphore of another block of the cluster.
__device__ __forceinline__ void arrive_remote(semaphore& s, int rank, uint32_t count = 1) {
    arch::mbarrier_arrive_remote(s.address(), static_cast<uint32_t>(rank), count);
}
// To hand back a buffer that this block has only read: orders no writes, and costs no fence
// (measured in a GEMM's main loop: the fence makes the whole loop 1.6 times slower).
__device__ __forceinline__ void arrive_remote_relaxed(semaphore& s, int rank, uint32_t count = 1) {
    arch::mbarrier_arrive_remote_relaxed(s.address(), static_cast<uint32_t>(rank), count);
}
// Returns when the phase of this parity (0 first) has completed.
__device__ __forceinline__ void wait(semaphore& s, int phase) {
    arch::mbarrier_wait(s.address(), static_cast<uint32_t>(phase));
}
// The same for semaphores that other blocks of the cluster arrive at.
__device__ __forceinline__ void wait_cluster(semaphore& s, int phase) {
    arch::mbarrier_wait_cluster(s.address(), static_cast<uint32_t>(phase));
}
__device__ __forceinline__ bool test_wait(semaphore& s, int phase) {
    return arch::mbarrier_test_wait(s.address(), static_cast<uint32_t>(phase));
}
__device__ __forceinline__ bool try_wait(semaphore& s, int phase) {
    return arch::mbarrier_try_wait(s.address(), static_cast<uint32_t>(phase));
}
__device__ __forceinline__ void arrive_and_wait(semaphore& s, int phase) {
    arrive(s);
    wait(s, phase);
}

// Parities of a ring of up to 16 stages, one bit each: wait(s[i], get_phasebit<half>(bits, i)),
// then update_phasebit. Half 0 starts at phase 0 (data), half 1 at phase 1 (a free slot needs no
// first wait).
template <int half>
__device__ __forceinline__ int get_phasebit(uint32_t bits, int stage) {
    return static_cast<int>((bits >> (stage + half * 16)) & 1);
}
template <int half>
__device__ __forceinline__ void update_phasebit(uint32_t& bits, int stage) {
    bits ^= 1u << (stage + half * 16);
}

}  // namespace kittens::inline KITTENS_BACKEND
