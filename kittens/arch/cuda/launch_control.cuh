// Programmatic dependent launch (PTX ISA, "griddepcontrol"). Before sm_90 there is none, and
// these do nothing: kernels for that are launched behind all that is before them.
#pragma once

namespace kittens::inline on_gpu {
namespace arch {

// Blocks until the grids that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void wait_for_dependencies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next grid of the stream start its prologue.
__device__ __forceinline__ void launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In place of wait_for_dependencies(), by a thread that reads nothing that a kernel which may still
// run writes, but flags, and writes nothing that such a kernel reads or writes.
__device__ __forceinline__ void skip_dependencies() {}

}  // namespace arch
}  // namespace kittens::inline on_gpu
