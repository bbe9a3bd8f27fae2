// Bulk copies of what is read once: not in the umbrella arch.cuh.
#pragma once

#include "arch.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace arch {

// arch::bulk_load, whose lines L2 gives up first. Others that are there, which would have to be
// written back if they are dirty, are not driven out.
__device__ __forceinline__ void bulk_load_once(uint32_t destination, const void* source,
                                               uint32_t bytes, uint32_t barrier) {
#if defined(__CUDACC__)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(cache_policy_bits(CachePolicy::evict_first))
        : "memory");
#else
    bulk_load(destination, source, bytes, barrier);
#endif
}

}  // namespace arch
}  // namespace kittens::inline KITTENS_BACKEND
