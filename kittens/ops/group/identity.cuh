// Who we are inside a group of warps, and barriers of the group.
#pragma once

#include "../../arch/arch.cuh"

namespace kittens::inline KITTENS_BACKEND {

template <int WARPS>
struct group_identity {
    static_assert(WARPS > 0 && WARPS <= 32, "a group has 1 to 32 warps");
    static constexpr int GROUP_WARPS = WARPS;
    static constexpr int GROUP_THREADS = WARPS * WARP_THREADS;
    static constexpr int PRODUCER_REGISTERS = 24;

    static __device__ __forceinline__ int laneid() {
        return static_cast<int>(threadIdx.x % GROUP_THREADS);
    }
    static __device__ __forceinline__ int warpid() { return kittens::warpid() % GROUP_WARPS; }
    static __device__ __forceinline__ int groupid() { return kittens::warpid() / GROUP_WARPS; }
    // Barrier `id` (1-15) among the threads of this group; ids of groups that run at once must
    // differ.
    static __device__ __forceinline__ void sync(int id) {
        if constexpr (WARPS == 1)
            arch::sync_warp();
        else
            arch::named_barrier_sync(id, GROUP_THREADS);
    }
    static __device__ __forceinline__ void sync()
        requires(WARPS == 1)
    {
        arch::sync_warp();
    }
    // Announces arrival without waiting.
    static __device__ __forceinline__ void arrive(int id) {
        arch::named_barrier_arrive(id, GROUP_THREADS);
    }
    // True in one thread of the group.
    static __device__ __forceinline__ bool elect_leader() {
        return warpid() == 0 && arch::elect_one();
    }
    template <int REGISTERS>
    static __device__ __forceinline__ void increase_registers() {
        arch::increase_registers<REGISTERS>();
    }
    template <int REGISTERS>
    static __device__ __forceinline__ void decrease_registers() {
        arch::decrease_registers<REGISTERS>();
    }
    // The usual split of the register file between one producer warpgroup and several consumers.
    static __device__ __forceinline__ void producer_registers() {
        arch::decrease_registers<PRODUCER_REGISTERS>();
    }
    template <int CONSUMER_WARPGROUPS>
    static __device__ __forceinline__ void consumer_registers() {
        constexpr int at_launch = 512 / (CONSUMER_WARPGROUPS + 1) / 8 * 8;
        constexpr int share = (at_launch * (CONSUMER_WARPGROUPS + 1) - PRODUCER_REGISTERS) /
                              CONSUMER_WARPGROUPS / 8 * 8;
        arch::increase_registers<(share < 256 ? share : 256)>();
    }
};

}  // namespace kittens::inline KITTENS_BACKEND
