// The verbs at warp scope as free functions: `add(c, a, b)` is `warp::add(c, a, b)`. Each takes a
// tile or vector first, so that CUDA's functions of the same name (max, exp2, ...) keep their
// numbers under `using namespace kittens`.
#pragma once

#include "group/group.cuh"
#include "verbs.h"

namespace kittens::inline KITTENS_BACKEND {

// Any further arguments go through as they are.
#define KITTENS_FREE(name)                                                                 \
    template <any_object D, class... Arguments>                                            \
    __device__ __forceinline__ decltype(auto) name(D&& d, const Arguments&... arguments) { \
        return warp::name(d, arguments...);                                                \
    }
#define KITTENS_FREE_ROW_COL(name) \
    KITTENS_FREE(name) KITTENS_FREE(name##_row) KITTENS_FREE(name##_col)
#define KITTENS_FREE_REDUCTION(name, functor)                                              \
    KITTENS_FREE(row_##name)                                                               \
    KITTENS_FREE(col_##name)                                                               \
    template <scalar T, any_vector V, class... Source>                                     \
    __device__ __forceinline__ void name(T& result, const V& v, const Source&... source) { \
        warp::name(result, v, source...);                                                  \
    }

KITTENS_CONSTANT_VERBS(KITTENS_FREE)
KITTENS_UNARY_VERBS(KITTENS_FREE)
KITTENS_BINARY_VERBS(KITTENS_FREE_ROW_COL)
KITTENS_REDUCTIONS(KITTENS_FREE_REDUCTION)
KITTENS_MASK_VERBS(KITTENS_FREE)
KITTENS_FREE(sum)
KITTENS_FREE(prod)
KITTENS_FREE(fma_AxBtC)
KITTENS_FREE(fma_AxCtB)
KITTENS_FREE(broadcast_row)
KITTENS_FREE(broadcast_col)
KITTENS_FREE(apply)
KITTENS_FREE(copy)
KITTENS_FREE(swap_layout)
KITTENS_FREE(swap_layout_inplace)
KITTENS_FREE(take_columns)
KITTENS_FREE(transpose_sep)
KITTENS_FREE(transpose_inplace)
KITTENS_FREE(load_remote)
KITTENS_FREE(store_remote)
KITTENS_FREE(mma_AB)
KITTENS_FREE(mma_ABt)
KITTENS_FREE(mma_AtB)
KITTENS_FREE(mma_AtBt)
#undef KITTENS_FREE
#undef KITTENS_FREE_ROW_COL
#undef KITTENS_FREE_REDUCTION

template <int rows, any_register_tile RT>
__device__ __forceinline__ auto& subtile_inplace(RT& tile, int i) {
    return warp::subtile_inplace<rows>(tile, i);
}
template <int length, any_shared_vector SV>
__device__ __forceinline__ auto& subvec_inplace(SV& vector, int i) {
    return warp::subvec_inplace<length>(vector, i);
}

// Between shared memory and registers.
template <any_register D, any_shared S>
__device__ __forceinline__ void load(D& destination, const S& source) {
    warp::load(destination, source);
}
template <any_shared D, any_register S>
__device__ __forceinline__ void store(D&& destination, const S& source) {
    warp::store(destination, source);
}
// From and to global memory. Coordinates count objects, or elements(...).
template <int axis = 2, any_object D, global_layout_type GL>
__device__ __forceinline__ void load(D& destination, const GL& source, const coord_of<D>& at) {
    warp::load<axis>(destination, source, at);
}
template <int axis = 2, global_layout_type GL, any_object S>
__device__ __forceinline__ void store(const GL& destination, const S& source,
                                      const coord_of<S>& at) {
    warp::store<axis>(destination, source, at);
}
template <int axis = 2, any_shared D, global_layout_type GL>
__device__ __forceinline__ void load_async(D& destination, const GL& source,
                                           const coord_of<D>& at) {
    warp::load_async<axis>(destination, source, at);
}
template <int axis = 2, any_shared D, global_layout_type GL>
__device__ __forceinline__ void load_async(D& destination, const GL& source, const coord_of<D>& at,
                                           semaphore& arrived) {
    warp::load_async<axis>(destination, source, at, arrived);
}
// At most `pending` of this warp's latest load_async are still in flight.
template <int pending = 0>
__device__ __forceinline__ void load_async_wait() {
    warp::load_async_wait<pending>();
}

// All threads of the block; barrier 0 unless told otherwise.
namespace everyone {
__device__ __forceinline__ void sync(int id = 0) { arch::block_barrier_sync(id); }
}  // namespace everyone

// Programmatic dependent launch.
namespace pdl {
// Lets the next kernel of the stream begin its prologue.
__device__ __forceinline__ void arrive() { arch::launch_dependents(); }
// Until what the previous kernel wrote is visible.
__device__ __forceinline__ void wait() { arch::wait_for_dependencies(); }
}  // namespace pdl

}  // namespace kittens::inline KITTENS_BACKEND
