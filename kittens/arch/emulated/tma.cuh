// The tensor memory accelerator: bulk copies between global and shared memory, tensor maps of four
// dimensions and plain byte ranges. Every function is called by one thread.
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

enum class CachePolicy { normal, evict_first, evict_last };
enum class Reduction { add, min, max };

// Element coordinates, innermost dimension first.
struct TmaCoordinates {
    int c, r, d, b;
    operator emulated::BoxOrigin() const { return {4, {c, r, d, b, 0}}; }
};

inline void tma_prefetch_map(const CUtensorMap* map) { emulated::prefetch_map(map); }
template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_load(uint32_t destination, const CUtensorMap* map, TmaCoordinates at,
                     uint32_t barrier) {
    emulated::load_box(destination, map, at, barrier, -1);
}
template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_load_multicast(uint32_t destination, const CUtensorMap* map, TmaCoordinates at,
                               uint32_t barrier, uint16_t block_mask) {
    emulated::load_box(destination, map, at, barrier, block_mask);
}
inline void tma_prefetch(const CUtensorMap* map, TmaCoordinates at) {
    emulated::prefetch_box(map, at);
}
template <CachePolicy POLICY = CachePolicy::normal>
inline void tma_store(const CUtensorMap* map, uint32_t source, TmaCoordinates at) {
    emulated::store_box(map, source, at, emulated::Combine::copy);
}
template <Reduction REDUCTION>
inline void tma_store_reduce(const CUtensorMap* map, uint32_t source, TmaCoordinates at) {
    constexpr auto how = REDUCTION == Reduction::add   ? emulated::Combine::add
                         : REDUCTION == Reduction::min ? emulated::Combine::min
                                                       : emulated::Combine::max;
    emulated::store_box(map, source, at, how);
}
inline void tma_store_commit() { emulated::commit_stores(); }
template <int PENDING = 0>
inline void tma_store_wait() {
    emulated::wait_for_stores(PENDING, false);
}
template <int PENDING = 0>
inline void tma_store_read_wait() {
    emulated::wait_for_stores(PENDING, true);
}
inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    emulated::load_range(destination, source, bytes, barrier);
}
inline void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
    emulated::store_range(destination, source, bytes, emulated::Combine::copy);
}
inline void bulk_store_add(float* destination, uint32_t source, uint32_t bytes) {
    emulated::store_range(destination, source, bytes, emulated::Combine::add);
}
inline void bulk_copy_to_cluster(uint32_t destination, uint32_t source, uint32_t bytes,
                                 uint32_t barrier) {
    emulated::copy_to_cluster(destination, source, bytes, barrier);
}

inline void bulk_load_evict_first(uint32_t destination, const void* source, uint32_t bytes,
                                  uint32_t barrier) {
    bulk_load(destination, source, bytes, barrier);
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
