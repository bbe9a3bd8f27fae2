// TMA on tensor maps of five dimensions, which describe segments of rows (host/tensor_map.h).
// Always with a cache policy, so that one form of each instruction is enough.
#pragma once

#include "tma.cuh"

namespace kittens::inline on_gpu {
namespace arch {

// Element coordinates, innermost dimension first.
struct TmaCoordinates5 {
    int c, r, end, wrap, b;
};

#define KITTENS_TMA_AT "r"(at.c), "r"(at.r), "r"(at.end), "r"(at.wrap), "r"(at.b)

template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map,
                                         TmaCoordinates5 at, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "l"(cache_policy_bits(POLICY)), KITTENS_TMA_AT
        : "memory");
}
template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map,
                                                   TmaCoordinates5 at, uint32_t barrier,
                                                   uint16_t block_mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;" ::"r"(
            destination),
        "l"(map), "r"(barrier), "h"(block_mask), "l"(cache_policy_bits(POLICY)), KITTENS_TMA_AT
        : "memory");
}
template <CachePolicy POLICY = CachePolicy::normal>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source,
                                          TmaCoordinates5 at) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint "
        "[%0, {%3, %4, %5, %6, %7}], [%1], %2;" ::"l"(map),
        "r"(source), "l"(cache_policy_bits(POLICY)), KITTENS_TMA_AT
        : "memory");
}
template <Reduction REDUCTION>
__device__ __forceinline__ void tma_store_reduce(const CUtensorMap* map, uint32_t source,
                                                 TmaCoordinates5 at) {
    static_assert(REDUCTION == Reduction::add, "segments of rows are added to only");
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(source), KITTENS_TMA_AT
        : "memory");
}
#undef KITTENS_TMA_AT

}  // namespace arch
}  // namespace kittens::inline on_gpu
