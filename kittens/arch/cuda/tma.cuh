// The tensor memory accelerator: bulk copies between global and shared memory, tensor maps of four
// dimensions (column, row, depth, batch) and plain byte ranges (PTX ISA, "cp.async.bulk").
// Every function is called by one thread.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kittens::inline on_gpu {
namespace arch {

enum class CachePolicy { normal, evict_first, evict_last };

// Policies as `createpolicy` encodes them for a whole access.
__device__ __forceinline__ constexpr uint64_t cache_policy_bits(CachePolicy policy) {
    return policy == CachePolicy::evict_first  ? 0x12F0000000000000ull
           : policy == CachePolicy::evict_last ? 0x14F0000000000000ull
                                               : 0x1000000000000000ull;
}

// Element coordinates, innermost dimension first.
struct TmaCoordinates {
    int c, r, d, b;
};

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map,
                                         TmaCoordinates at, uint32_t barrier) {
    if constexpr (POLICY == CachePolicy::normal) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
            "l"(map), "r"(barrier), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
            "l"(map), "r"(barrier), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b),
            "l"(cache_policy_bits(POLICY))
            : "memory");
    }
}
// Writes the tile, and signals the barrier, at the same offsets in every block whose bit is set.
template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map,
                                                   TmaCoordinates at, uint32_t barrier,
                                                   uint16_t block_mask) {
    if constexpr (POLICY == CachePolicy::normal) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
            "l"(map), "r"(barrier), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b), "h"(block_mask)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(
                destination),
            "l"(map), "r"(barrier), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b), "h"(block_mask),
            "l"(cache_policy_bits(POLICY))
            : "memory");
    }
}
// Brings a tile into L2 only.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, TmaCoordinates at) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b)
        : "memory");
}

template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source,
                                          TmaCoordinates at) {
    if constexpr (POLICY == CachePolicy::normal) {
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
            "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
            "r"(source), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint "
            "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(map),
            "r"(source), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b), "l"(cache_policy_bits(POLICY))
            : "memory");
    }
}

enum class Reduction { add, min, max };

#define KITTENS_TMA_REDUCE(NAME)                                              \
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta." NAME    \
                 ".tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), \
                 "r"(source), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b)      \
                 : "memory")
template <Reduction REDUCTION>
__device__ __forceinline__ void tma_store_reduce(const CUtensorMap* map, uint32_t source,
                                                 TmaCoordinates at) {
    if constexpr (REDUCTION == Reduction::add) KITTENS_TMA_REDUCE("add");
    if constexpr (REDUCTION == Reduction::min) KITTENS_TMA_REDUCE("min");
    if constexpr (REDUCTION == Reduction::max) KITTENS_TMA_REDUCE("max");
}
#undef KITTENS_TMA_REDUCE

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most PENDING of this thread's store groups are not yet visible in memory.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Waits only until their shared memory has been read and may be written again.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_read_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Plain ranges: 16-byte aligned addresses, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_store_add(float* destination, uint32_t source,
                                               uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}
// To the shared memory of another block of the cluster; destination and barrier are mapped
// addresses.
__device__ __forceinline__ void bulk_copy_to_cluster(uint32_t destination, uint32_t source,
                                                     uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(destination),
        "r"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// bulk_load of what is read once: L2 gives its lines up first. Others that are there, which would
// have to be written back if they are dirty, are not driven out.
__device__ __forceinline__ void bulk_load_evict_first(uint32_t destination, const void* source,
                                                      uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(cache_policy_bits(CachePolicy::evict_first))
        : "memory");
}

}  // namespace arch
}  // namespace kittens::inline on_gpu
