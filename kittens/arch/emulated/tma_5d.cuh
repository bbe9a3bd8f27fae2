// TMA on tensor maps of five dimensions, which describe segments of rows (host/tensor_map.h).
#pragma once

#include "tma.cuh"

namespace kittens::inline on_cpu {
namespace arch {

// Element coordinates, innermost dimension first.
struct TmaCoordinates5 {
    int c, r, end, wrap, b;
    operator emulated::BoxOrigin() const { return {5, {c, r, end, wrap, b}}; }
};

template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_load(uint32_t destination, const CUtensorMap* map, TmaCoordinates5 at,
                     uint32_t barrier) {
    emulated::load_box(destination, map, at, barrier, -1);
}
template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_load_multicast(uint32_t destination, const CUtensorMap* map, TmaCoordinates5 at,
                               uint32_t barrier, uint16_t block_mask) {
    emulated::load_box(destination, map, at, barrier, block_mask);
}
template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_store(const CUtensorMap* map, uint32_t source, TmaCoordinates5 at) {
    emulated::store_box(map, source, at, emulated::Combine::copy);
}
template <Reduction REDUCTION>
inline void tma_store_reduce(const CUtensorMap* map, uint32_t source, TmaCoordinates5 at) {
    static_assert(REDUCTION == Reduction::add, "segments of rows are added to only");
    emulated::store_box(map, source, at, emulated::Combine::add);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
