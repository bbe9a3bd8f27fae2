// Prefetches of global memory (PTX ISA, "prefetch").
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

// Asks for the line at this address. Nothing waits for it, and whoever writes there meanwhile does
// so in L2 too.
__device__ __forceinline__ void prefetch_global(const void* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
