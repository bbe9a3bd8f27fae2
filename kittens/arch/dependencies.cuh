// Threads of a dependent launch that need nothing of the kernels before: not in the umbrella
// arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

// In place of wait_for_dependencies(), by a thread that reads nothing that a kernel which may still
// run writes, but flags, and writes nothing that such a kernel reads or writes.
__device__ __forceinline__ void skip_dependencies() {
#if !defined(__CUDACC__)
    wait_for_dependencies();  // launches run one after the other
#endif
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
