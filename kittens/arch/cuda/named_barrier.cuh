// Named barriers: 16 per block, number 0 is __syncthreads (PTX ISA, "bar").
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Among all threads of the block.
__device__ __forceinline__ void block_barrier_sync(int id) {
    asm volatile("bar.sync %0;" ::"r"(id) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
