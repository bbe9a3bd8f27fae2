// Who am I: thread, warp and block coordinates, and the dynamic shared memory of the block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kittens::inline on_gpu {

constexpr int WARP_THREADS = 32;
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS;

// The usual element type of `extern __shared__` arrays: its alignment is what swizzled tiles need.
struct alignas(1024) alignment_dummy {
    int dummy;
};

// First byte of the block's dynamic shared memory.
__device__ __forceinline__ int* shared_memory() {
    extern __shared__ alignment_dummy kittens_dynamic_shared_memory[];
    return reinterpret_cast<int*>(&kittens_dynamic_shared_memory[0]);
}

__device__ __forceinline__ int laneid() { return static_cast<int>(threadIdx.x % WARP_THREADS); }
__device__ __forceinline__ int warpid() { return static_cast<int>(threadIdx.x / WARP_THREADS); }

namespace arch {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The first lane's value in all lanes: tells the compiler that it is uniform over the warp. The
// warp must be converged, so it is no part of warpid(), which may be called in a divergent branch.
__device__ __forceinline__ int warp_uniform(int value) {
    return __shfl_sync(0xffffffffu, value, 0);
}
// True in exactly one lane of a fully active warp, without a divergent branch on the lane number
// (PTX ISA, elect.sync).
__device__ __forceinline__ bool elect_one() {
    uint32_t predicate;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(predicate));
    return predicate != 0;
}

// An object in shared memory beside the dynamic one, the same for all threads of the block and for
// all calls with this type and number. It is not initialised.
template <class T, int NUMBER = 0>
__device__ __forceinline__ T& static_shared() {
    __shared__ alignas(alignof(T) < 16 ? 16 : alignof(T)) unsigned char bytes[sizeof(T)];
    return *reinterpret_cast<T*>(bytes);
}

// Size of what shared_memory() points to, as given at the launch.
__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void sleep(unsigned nanoseconds) { __nanosleep(nanoseconds); }
[[noreturn]] __device__ __forceinline__ void trap() {
    __trap();
    __builtin_unreachable();
}

// laneid(), read anew instead of kept in a register.
__device__ __forceinline__ int lane_again() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// blockIdx.x, likewise.
__device__ __forceinline__ int block_again() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
