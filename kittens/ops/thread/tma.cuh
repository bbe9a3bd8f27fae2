// TMA transfers of whole tiles and vectors, called by one thread. A tile goes stripe by stripe, so
// that a ragged last column is filled with zeros (or not written) instead of running into the next
// row.
#pragma once

#include "../../types/global/gl.cuh"
#include "../../types/global/ragged.cuh"
#include "semaphore.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace tma {

using arch::CachePolicy;

// Bytes that a transfer of an object moves: its elements, without the padding that alignment adds
// behind a small one. Arrays of objects likewise; other structs count whole.
template <class Object>
__host__ __device__ constexpr uint32_t transfer_bytes() {
    if constexpr (std::is_array_v<Object>) {
        return uint32_t(std::extent_v<Object>) * transfer_bytes<std::remove_extent_t<Object>>();
    } else if constexpr (any_shared_tile<Object> || any_shared_vector<Object>) {
        return uint32_t(Object::num_elements) * uint32_t(sizeof(typename Object::T));
    } else {
        return uint32_t(sizeof(Object));
    }
}

// Announces the exact bytes of the objects that will arrive, and arrives.
template <class... Objects>
__device__ __forceinline__ void expect(semaphore& s, const Objects&...) {
    arch::mbarrier_arrive_expect(s.address(), (transfer_bytes<Objects>() + ...));
}
__device__ __forceinline__ void expect_bytes(semaphore& s, uint32_t bytes) {
    arch::mbarrier_arrive_expect(s.address(), bytes);
}

// Calls transfer(offset in the shared object in bytes, global coordinates) for every box of the
// object.
template <int axis, class Object, class Transfer>
__device__ __forceinline__ void for_each_box(const coord<Object>& at, Transfer transfer) {
    const element_coord e = at.template position<axis>();
    if constexpr (any_shared_tile<Object>) {
        constexpr int box = detail::box_rows<Object>;
#pragma unroll
        for (int stripe = 0; stripe < Object::stripes; ++stripe) {
#pragma unroll
            for (int row = 0; row < Object::rows; row += box) {
                constexpr int row_bytes = Object::stripe_cols * int(sizeof(typename Object::T));
                transfer(uint32_t(stripe * Object::stripe_bytes + row * row_bytes),
                         arch::TmaCoordinates{
                             e.c + stripe * Object::stripe_cols, e.r + (axis == 2 ? row : 0),
                             e.d + (axis == 1 ? row : 0), e.b + (axis == 0 ? row : 0)});
            }
        }
    } else {
        constexpr int box = detail::box_length<Object>;
#pragma unroll
        for (int i = 0; i < Object::length; i += box) {
            transfer(uint32_t(i * int(sizeof(typename Object::T))),
                     arch::TmaCoordinates{e.c + i, e.r, e.d, e.b});
        }
    }
}

template <class Object, int axis = 2, global_layout_type GL>
__device__ __forceinline__ void prefetch_map(const GL& source) {
    arch::tma_prefetch_map(source.template tensor_map<Object, axis>());
}

template <int axis = 2, CachePolicy policy = CachePolicy::normal, class Object,
          global_layout_type GL>
__device__ __forceinline__ void load_async(Object& destination, const GL& source,
                                           const coord_of<Object>& at, semaphore& arrived) {
    const CUtensorMap* map = source.template tensor_map<Object, axis>();
    const uint32_t to = destination.address(), barrier = arrived.address();
    for_each_box<axis>(at, [&](uint32_t offset, arch::TmaCoordinates from) {
        arch::tma_load<policy>(to + offset, map, from, barrier);
    });
}
// Brings the object into L2; `Object` is named, nothing in shared memory is touched.
template <class Object, int axis = 2, global_layout_type GL>
__device__ __forceinline__ void prefetch(const GL& source, const coord_of<Object>& at) {
    const CUtensorMap* map = source.template tensor_map<Object, axis>();
    for_each_box<axis>(at,
                       [&](uint32_t, arch::TmaCoordinates from) { arch::tma_prefetch(map, from); });
}

__device__ __forceinline__ void store_commit_group() { arch::tma_store_commit(); }
// At most `pending` groups of this thread are not yet written; 0 waits for all.
template <int pending = 0>
__device__ __forceinline__ void store_async_wait() {
    arch::tma_store_wait<pending>();
}
// ... not yet read out of shared memory, which may then be written again.
template <int pending = 0>
__device__ __forceinline__ void store_async_read_wait() {
    arch::tma_store_read_wait<pending>();
}

// Stores commit a group of their own. Only a barrier is needed between writing the object and
// storing it: the store makes what this thread has seen of shared memory visible to the copy engine
// itself.
template <int axis = 2, CachePolicy policy = CachePolicy::normal, class Object,
          global_layout_type GL>
__device__ __forceinline__ void store_async(const GL& destination, const Object& source,
                                            const coord_of<Object>& at) {
    const CUtensorMap* map = destination.template tensor_map<Object, axis>();
    const uint32_t from = source.address();
    arch::fence_async_shared();
    for_each_box<axis>(at, [&](uint32_t offset, arch::TmaCoordinates to) {
        arch::tma_store<policy>(map, from + offset, to);
    });
    store_commit_group();
}

// Segments of rows. Rows of the tile beyond the segment's end load as zeros and are not stored; the
// tile must not begin before the segment. Columns are clipped as in other layouts.
__device__ __forceinline__ arch::TmaCoordinates5 ragged_box(const ragged_coord& at, int col,
                                                            int row) {
    return {col, host::RAGGED_WINDOW - at.length + at.row + row, at.begin + at.length,
            host::RAGGED_WINDOW, at.head};
}
__device__ __forceinline__ void require_segment(const ragged_coord& at, int rows) {
    arch::require(at.row >= 0, "a tile begins before its segment: ragged_coord's row is negative");
    arch::require(at.begin >= 0 && at.length >= 0 && at.length <= rows - at.begin,
                  "ragged_coord's segment is not within the layout's rows");
}
template <any_shared_tile Tile, class Transfer>
__device__ __forceinline__ void for_each_box(const ragged_coord& at, int rows, Transfer transfer) {
    require_segment(at, rows);
    constexpr int box = kittens::detail::box_rows<Tile>;
#pragma unroll
    for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
#pragma unroll
        for (int row = 0; row < Tile::rows; row += box) {
            constexpr int row_bytes = Tile::stripe_cols * int(sizeof(typename Tile::T));
            transfer(uint32_t(stripe * Tile::stripe_bytes + row * row_bytes),
                     ragged_box(at, at.col + stripe * Tile::stripe_cols, row));
        }
    }
}
template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile, ragged_layout_type G>
__device__ __forceinline__ void load_async(Tile& destination, const G& source,
                                           const ragged_coord& at, semaphore& arrived) {
    const CUtensorMap* map = source.template tensor_map<Tile>();
    const uint32_t to = destination.address(), barrier = arrived.address();
    for_each_box<Tile>(at, source.rows, [&](uint32_t offset, arch::TmaCoordinates5 from) {
        arch::tma_load_5d<policy>(to + offset, map, from, barrier);
    });
}
// The rows of a tile from `tile_row` on, as many as a transfer of the layout moves: of a segment
// of their own. All transfers to a tile together bring its bytes.
template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile, ragged_layout_type G>
__device__ __forceinline__ void load_piece_async(Tile& destination, int tile_row, const G& source,
                                                 const ragged_coord& at, semaphore& arrived) {
    constexpr int row_bytes = Tile::stripe_cols * int(sizeof(typename Tile::T));
    require_segment(at, source.rows);
    arch::require(tile_row >= 0 && tile_row < Tile::rows && tile_row % 8 == 0,
                  "a piece of a tile begins at one of its rows, a multiple of 8");
    const CUtensorMap* map = source.template tensor_map<Tile>();
    const uint32_t to = destination.address() + static_cast<uint32_t>(tile_row * row_bytes);
#pragma unroll
    for (int stripe = 0; stripe < Tile::stripes; ++stripe) {
        arch::tma_load_5d<policy>(to + stripe * Tile::stripe_bytes, map,
                                  ragged_box(at, at.col + stripe * Tile::stripe_cols, 0),
                                  arrived.address());
    }
}
template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile, ragged_layout_type G>
__device__ __forceinline__ void store_async(const G& destination, const Tile& source,
                                            const ragged_coord& at) {
    const CUtensorMap* map = destination.template tensor_map<Tile>();
    const uint32_t from = source.address();
    arch::fence_async_shared();
    for_each_box<Tile>(at, destination.rows, [&](uint32_t offset, arch::TmaCoordinates5 to) {
        arch::tma_store_5d<policy>(map, from + offset, to);
    });
    store_commit_group();
}
// Adds to the rows of the segment; for float, bf16 and half.
template <any_shared_tile Tile, ragged_layout_type G>
__device__ __forceinline__ void store_add_async(const G& destination, const Tile& source,
                                                const ragged_coord& at) {
    static_assert(!float_8bit<typename Tile::T>, "TMA reduces no 8-bit floats");
    const CUtensorMap* map = destination.template tensor_map<Tile>();
    const uint32_t from = source.address();
    arch::fence_async_shared();
    for_each_box<Tile>(at, destination.rows, [&](uint32_t offset, arch::TmaCoordinates5 to) {
        arch::tma_store_reduce_5d<arch::Reduction::add>(map, from + offset, to);
    });
    store_commit_group();
}
template <class Tile, ragged_layout_type G>
__device__ __forceinline__ void prefetch_map(const G& source) {
    arch::tma_prefetch_map(source.template tensor_map<Tile>());
}

namespace detail {
template <arch::Reduction reduction, int axis, class Object, global_layout_type GL>
__device__ __forceinline__ void store_reduce_async(const GL& destination, const Object& source,
                                                   const coord_of<Object>& at) {
    using T = typename Object::T;
    static_assert(!float_8bit<T>, "TMA reduces no 8-bit floats");
    static_assert(reduction == arch::Reduction::add || !std::same_as<T, float>,
                  "TMA has min and max for 16-bit floats only");
    const CUtensorMap* map = destination.template tensor_map<Object, axis>();
    const uint32_t from = source.address();
    arch::fence_async_shared();
    for_each_box<axis>(at, [&](uint32_t offset, arch::TmaCoordinates to) {
        arch::tma_store_reduce<reduction>(map, from + offset, to);
    });
    store_commit_group();
}
}  // namespace detail
template <int axis = 2, class Object, global_layout_type GL>
__device__ __forceinline__ void store_add_async(const GL& destination, const Object& source,
                                                const coord_of<Object>& at) {
    detail::store_reduce_async<arch::Reduction::add, axis>(destination, source, at);
}
template <int axis = 2, class Object, global_layout_type GL>
__device__ __forceinline__ void store_min_async(const GL& destination, const Object& source,
                                                const coord_of<Object>& at) {
    detail::store_reduce_async<arch::Reduction::min, axis>(destination, source, at);
}
template <int axis = 2, class Object, global_layout_type GL>
__device__ __forceinline__ void store_max_async(const GL& destination, const Object& source,
                                                const coord_of<Object>& at) {
    detail::store_reduce_async<arch::Reduction::max, axis>(destination, source, at);
}

namespace cluster {

template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile, ragged_layout_type G>
__device__ __forceinline__ void load_async(Tile& destination, const G& source,
                                           const ragged_coord& at, semaphore& arrived,
                                           uint16_t blocks) {
    const CUtensorMap* map = source.template tensor_map<Tile>();
    const uint32_t to = destination.address(), barrier = arrived.address();
    for_each_box<Tile>(at, source.rows, [&](uint32_t offset, arch::TmaCoordinates5 from) {
        arch::tma_load_multicast_5d<policy>(to + offset, map, from, barrier, blocks);
    });
}

// Bytes that will arrive at this semaphore in another block of the cluster are announced there by
// that block itself; here only the transfer is started. The object and the semaphore are written at
// the same offsets in every block whose bit of `blocks` is set.
template <int axis = 2, CachePolicy policy = CachePolicy::normal, class Object,
          global_layout_type GL>
__device__ __forceinline__ void load_async(Object& destination, const GL& source,
                                           const coord_of<Object>& at, semaphore& arrived,
                                           uint16_t blocks) {
    const CUtensorMap* map = source.template tensor_map<Object, axis>();
    const uint32_t to = destination.address(), barrier = arrived.address();
    for_each_box<axis>(at, [&](uint32_t offset, arch::TmaCoordinates from) {
        arch::tma_load_multicast<policy>(to + offset, map, from, barrier, blocks);
    });
}

// Copies an object of this block to block `rank`, where it takes the place that `destination` has
// here; its bytes complete on that block's `arrived`. The swizzle is part of the address: both
// objects must begin at the same offset from a multiple of 1024 bytes.
template <class Object>
__device__ __forceinline__ void store_async(Object& destination, const Object& source, int rank,
                                            semaphore& arrived) {
    constexpr uint32_t bytes = transfer_bytes<Object>();
    static_assert(bytes % 16 == 0, "a copy to another block moves a multiple of 16 bytes");
    const auto block = static_cast<uint32_t>(rank);
    arch::bulk_copy_to_cluster(arch::map_shared_rank(destination.address(), block),
                               source.address(), bytes,
                               arch::map_shared_rank(arrived.address(), block));
}

}  // namespace cluster
}  // namespace tma

// Cluster-wide barrier, all threads of all blocks.
namespace cluster {
__device__ __forceinline__ void arrive() { arch::cluster_arrive(); }
__device__ __forceinline__ void wait() { arch::cluster_wait(); }
__device__ __forceinline__ void sync() {
    arch::cluster_arrive();
    arch::cluster_wait();
}
__device__ __forceinline__ int rank() { return static_cast<int>(arch::cluster_rank()); }
}  // namespace cluster

}  // namespace kittens::inline KITTENS_BACKEND
