// Loads and stores between global memory, shared memory (of this block or another of the cluster)
// and registers. A group's warps hold bands of rows of a register tile, or pieces of a register
// vector: coordinates then count tiles of all the group's rows. Nothing synchronises: shared memory
// that was written needs the group's sync before other threads read it.
#pragma once

#include "../thread/semaphore.cuh"
#include "global_register.cuh"
#include "global_shared.cuh"
#include "identity.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace detail {

// What one coordinate step of a group means.
template <any_object Object, int WARPS>
struct group_object {
    using type = Object;
};
template <any_register_tile RT, int WARPS>
    requires(WARPS > 1)
struct group_object<RT, WARPS> {
    using type = rt<typename RT::T, RT::rows * WARPS, RT::cols, typename RT::layout>;
};
template <any_register_vector RV, int WARPS>
    requires(WARPS > 1)
struct group_object<RV, WARPS> {
    using type = rv<typename RV::T, RV::length * WARPS, typename RV::layout>;
};

template <any_shared A, any_shared B>
__host__ __device__ constexpr void check_remote_copy() {
    static_assert(same_kind<A, B>, "a copy between blocks is between tiles, or between vectors");
    static_assert(same_shape<A, B>() && std::same_as<typename A::T, typename B::T>,
                  "a copy between blocks is between objects of one size and element type");
}
// Longest run that the cluster's window is accessed in.
template <any_shared... Objects>
__host__ __device__ constexpr int remote_run() {
    using T = typename std::common_type_t<std::type_identity<typename Objects::T>...>::type;
    constexpr int bytes = common_run<Objects...>() * int(sizeof(T));
    static_assert(bytes >= 2, "copies between blocks move at least 2 bytes at a time");
    return (bytes == 8 ? 4 : bytes) / int(sizeof(T));
}

}  // namespace detail

template <int WARPS>
struct memory_ops {
    template <any_object Object>
    using at_of = coord_of<typename detail::group_object<Object, WARPS>::type>;

    // Global memory to registers or shared memory; rows of a tile lie along `axis` of the layout.
    template <int axis = 2, any_object D, global_layout_type GL>
    static __device__ __forceinline__ void load(D& destination, const GL& source,
                                                const at_of<D>& at) {
        const detail::global_window<GL, axis> window(source, at.template position<axis>());
        if constexpr (any_register_tile<D>) {
            detail::load_register_tile(destination, window, band() * D::rows);
        } else if constexpr (any_register_vector<D>) {
            static_assert(axis == 2, "a vector has no rows that could lie along another axis");
            detail::load_register_vector(destination, window, band() * D::length);
        } else {
            detail::load_shared_object(destination, window, thread(), threads);
        }
    }
    template <int axis = 2, global_layout_type GL, any_object S>
    static __device__ __forceinline__ void store(const GL& destination, const S& source,
                                                 const at_of<S>& at) {
        const detail::global_window<GL, axis> window(destination, at.template position<axis>());
        if constexpr (any_register_tile<S>) {
            detail::store_register_tile(window, source, band() * S::rows);
        } else if constexpr (any_register_vector<S>) {
            static_assert(axis == 2, "a vector has no rows that could lie along another axis");
            detail::store_register_vector(window, source, band() * S::length);
        } else {
            detail::store_shared_object(window, source, thread(), threads);
        }
    }
    // With cp.async; every call is one committed group of each calling thread.
    template <int axis = 2, any_shared D, global_layout_type GL>
    static __device__ __forceinline__ void load_async(D& destination, const GL& source,
                                                      const at_of<D>& at) {
        const detail::global_window<GL, axis> window(source, at.template position<axis>());
        detail::load_shared_object_async(destination, window, thread(), threads);
        arch::cp_async_commit();
    }
    // Every thread of the group arrives at the semaphore when its part has landed.
    template <int axis = 2, any_shared D, global_layout_type GL>
    static __device__ __forceinline__ void load_async(D& destination, const GL& source,
                                                      const at_of<D>& at, semaphore& arrived) {
        const detail::global_window<GL, axis> window(source, at.template position<axis>());
        detail::load_shared_object_async(destination, window, thread(), threads);
        arch::cp_async_mbarrier_arrive(arrived.address());
    }
    // At most `pending` of the latest load_async are still in flight, for every thread of the warp
    // (of the group, which meets at named barrier `id`).
    template <int pending = 0>
    static __device__ __forceinline__ void load_async_wait()
        requires(WARPS == 1)
    {
        arch::cp_async_wait<pending>();
        arch::sync_warp();
    }
    template <int pending = 0>
    static __device__ __forceinline__ void load_async_wait(int id) {
        arch::cp_async_wait<pending>();
        group_identity<WARPS>::sync(id);
    }

    // Vectors between shared memory and registers.
    template <any_register_vector RV, any_shared_vector SV>
    static __device__ __forceinline__ void load(RV& destination, const SV& source) {
        check_pieces<RV, SV>();
        const int first = band() * RV::length;
        detail::for_each_element(destination, [&](int index, auto& element) {
            if (index < RV::length) element = convert<typename RV::T>(source.get(first + index));
        });
    }
    template <any_shared_vector SV, any_register_vector RV>
    static __device__ __forceinline__ void store(SV& destination, const RV& source) {
        check_pieces<RV, SV>();
        const int first = band() * RV::length;
        detail::for_each_element(source, [&](int index, const auto& element) {
            if (detail::writes_element<RV>(index)) {
                destination.set(first + index, convert<typename SV::T>(element));
            }
        });
    }

    // From, and to, the shared memory of block `rank` of the cluster: the other object is named by
    // the variable at the same address here. The caller keeps the blocks in step with
    // cluster::sync().
    template <any_shared D, any_shared S>
    static __device__ __forceinline__ void load_remote(D&& destination, const S& source, int rank) {
        using Object = std::remove_cvref_t<D>;
        detail::check_remote_copy<Object, S>();
        constexpr int n = detail::remote_run<Object, S>();
        using Run = detail::elements<typename Object::T, n>;
        detail::for_each_run<n, Object>(thread(), threads, [&](auto... at) {
            const uint32_t from =
                arch::map_shared_rank(source.address_of(at...), static_cast<uint32_t>(rank));
            detail::store_run(destination, at..., arch::load_cluster_shared<Run>(from));
        });
    }
    template <any_shared D, any_shared S>
    static __device__ __forceinline__ void store_remote(D&& destination, const S& source,
                                                        int rank) {
        using Object = std::remove_cvref_t<D>;
        detail::check_remote_copy<Object, S>();
        constexpr int n = detail::remote_run<Object, S>();
        detail::for_each_run<n, Object>(thread(), threads, [&](auto... at) {
            const uint32_t to =
                arch::map_shared_rank(destination.address_of(at...), static_cast<uint32_t>(rank));
            arch::store_cluster_shared(to, detail::load_run<n>(source, at...));
        });
    }

  private:
    static constexpr int threads = group_identity<WARPS>::GROUP_THREADS;
    static __device__ __forceinline__ int thread() { return group_identity<WARPS>::laneid(); }
    static __device__ __forceinline__ int band() {
        if constexpr (WARPS == 1)
            return 0;
        else
            return group_identity<WARPS>::warpid();
    }
    template <any_register_vector RV, any_shared_vector SV>
    static __host__ __device__ constexpr void check_pieces() {
        static_assert(SV::length == RV::length * WARPS,
                      "the shared vector must have the register vector's length times the group's "
                      "warps");
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
