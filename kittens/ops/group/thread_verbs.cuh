// Operations of one thread, called by a whole group: one elected thread does the work, and it is
// always the same one, so that waiting for stores of its own works. Waits are for all threads.
#pragma once

#include "../thread/semaphore.cuh"
#include "../thread/tma.cuh"
#include "identity.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <int WARPS>
struct thread_verbs {
    static __device__ __forceinline__ void arrive(semaphore& s, uint32_t count = 1) {
        if (elected()) kittens::arrive(s, count);
    }
    static __device__ __forceinline__ void arrive_remote(semaphore& s, int rank,
                                                         uint32_t count = 1) {
        if (elected()) kittens::arrive_remote(s, rank, count);
    }
    static __device__ __forceinline__ void wait(semaphore& s, int phase) {
        kittens::wait(s, phase);
    }
    static __device__ __forceinline__ void init_semaphore(semaphore& s, int threads,
                                                          int transactions = 0) {
        if (elected()) kittens::init_semaphore(s, threads, transactions);
    }
    static __device__ __forceinline__ void invalidate_semaphore(semaphore& s) {
        if (elected()) kittens::invalidate_semaphore(s);
    }

    struct tma {
        using CachePolicy = arch::CachePolicy;

        template <class... Objects>
        static __device__ __forceinline__ void expect(semaphore& s, const Objects&... objects) {
            if (elected()) kittens::tma::expect(s, objects...);
        }
        static __device__ __forceinline__ void expect_bytes(semaphore& s, uint32_t bytes) {
            if (elected()) kittens::tma::expect_bytes(s, bytes);
        }
        template <int axis = 2, CachePolicy policy = CachePolicy::normal, any_shared Object,
                  global_layout_type GL>
        static __device__ __forceinline__ void load_async(Object& destination, const GL& source,
                                                          const coord_of<Object>& at,
                                                          semaphore& arrived) {
            if (elected()) kittens::tma::load_async<axis, policy>(destination, source, at, arrived);
        }
        template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile,
                  ragged_layout_type G>
        static __device__ __forceinline__ void load_async(Tile& destination, const G& source,
                                                          const ragged_coord& at,
                                                          semaphore& arrived) {
            if (elected()) kittens::tma::load_async<policy>(destination, source, at, arrived);
        }
        template <CachePolicy policy = CachePolicy::normal, any_shared_tile Tile,
                  ragged_layout_type G>
        static __device__ __forceinline__ void store_async(const G& destination, const Tile& source,
                                                           const ragged_coord& at) {
            if (elected()) kittens::tma::store_async<policy>(destination, source, at);
        }
        template <any_shared Object, int axis = 2, global_layout_type GL>
        static __device__ __forceinline__ void prefetch(const GL& source,
                                                        const coord_of<Object>& at) {
            if (elected()) kittens::tma::prefetch<Object, axis>(source, at);
        }
        template <int axis = 2, CachePolicy policy = CachePolicy::normal, any_shared Object,
                  global_layout_type GL>
        static __device__ __forceinline__ void store_async(const GL& destination,
                                                           const Object& source,
                                                           const coord_of<Object>& at) {
            if (elected()) kittens::tma::store_async<axis, policy>(destination, source, at);
        }
        template <int axis = 2, any_shared Object, global_layout_type GL>
        static __device__ __forceinline__ void store_add_async(const GL& destination,
                                                               const Object& source,
                                                               const coord_of<Object>& at) {
            if (elected()) kittens::tma::store_add_async<axis>(destination, source, at);
        }
        template <int axis = 2, any_shared Object, global_layout_type GL>
        static __device__ __forceinline__ void store_min_async(const GL& destination,
                                                               const Object& source,
                                                               const coord_of<Object>& at) {
            if (elected()) kittens::tma::store_min_async<axis>(destination, source, at);
        }
        template <int axis = 2, any_shared Object, global_layout_type GL>
        static __device__ __forceinline__ void store_max_async(const GL& destination,
                                                               const Object& source,
                                                               const coord_of<Object>& at) {
            if (elected()) kittens::tma::store_max_async<axis>(destination, source, at);
        }
        static __device__ __forceinline__ void store_commit_group() {
            if (elected()) kittens::tma::store_commit_group();
        }
        // The elected thread waits; the group's sync tells the others.
        template <int pending = 0>
        static __device__ __forceinline__ void store_async_wait() {
            if (elected()) kittens::tma::store_async_wait<pending>();
        }
        template <int pending = 0>
        static __device__ __forceinline__ void store_async_read_wait() {
            if (elected()) kittens::tma::store_async_read_wait<pending>();
        }

        struct cluster {
            template <int axis = 2, CachePolicy policy = CachePolicy::normal, any_shared Object,
                      global_layout_type GL>
            static __device__ __forceinline__ void load_async(Object& destination, const GL& source,
                                                              const coord_of<Object>& at,
                                                              semaphore& arrived, uint16_t blocks) {
                if (elected()) {
                    kittens::tma::cluster::load_async<axis, policy>(destination, source, at,
                                                                    arrived, blocks);
                }
            }
            template <any_shared Object>
            static __device__ __forceinline__ void store_async(Object& destination,
                                                               const Object& source, int rank,
                                                               semaphore& arrived) {
                if (elected()) {
                    kittens::tma::cluster::store_async(destination, source, rank, arrived);
                }
            }
        };
    };

  private:
    static __device__ __forceinline__ bool elected() {
        return group_identity<WARPS>::elect_leader();
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
