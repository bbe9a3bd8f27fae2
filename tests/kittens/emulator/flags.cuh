// Small kernels whose blocks hand memory over by flags, with a switch for planted defects, each a
// mistake that shows on a GPU only now and then.
#pragma once

#include "kittens.cuh"

namespace defects {

using namespace kittens;

enum class Defect {
    none,
    // handover_kernel
    missing_barrier_before_release,
    missing_barrier_after_acquire,
    missing_acquire,
    released_too_early,
    flag_left_set,
    // counter_kernel
    missing_release_fence,
    missing_acquire_fence,
    miscounted,
    counter_left_set,
    // copies_kernel
    missing_proxy_fence,
    fence_of_shared_memory,
    missing_store_wait,
    wait_for_reads_only,
    // sums_kernel
    two_writers,
    addition_before_store,
    copy_onto_addition,
    // overlap_kernel
    overlapping_copies_differ,
    // store_below_copy_kernel
    store_differs_from_copy,
    count
};

constexpr int VALUES = 128, THREADS = 64;

struct FlagGlobals {
    const float* in;
    float* work;
    float* out;
    int* flags;
};

// ---- one block writes, the other reads when the flag is set, and clears it ----

template <Defect D>
__global__ void handover_kernel(const FlagGlobals g) {
    const int i = int(threadIdx.x);
    if (blockIdx.x == 0) {
        if (D == Defect::released_too_early && i == 0) arch::store_release_global(g.flags, 1);
        for (int j = i; j < VALUES; j += THREADS) {
            arch::store_global(g.work + j, 2 * arch::load_global(g.in + j));
        }
        if constexpr (D != Defect::missing_barrier_before_release) arch::sync_block();
        if (D != Defect::released_too_early && i == 0) arch::store_release_global(g.flags, 1);
        return;
    }
    if (i == 0 && D != Defect::missing_acquire) {
        while (arch::load_acquire_global(g.flags) == 0) {
        }
        if constexpr (D != Defect::flag_left_set) arch::store_release_global(g.flags, 0);
    }
    if constexpr (D != Defect::missing_barrier_after_acquire) arch::sync_block();
    for (int j = i; j < VALUES; j += THREADS) {
        arch::store_global(g.out + j, arch::load_global(g.work + j) + 1);
    }
}

// ---- several blocks write a part each and count; the last block reads all of them ----

constexpr int PARTS = 3;
template <Defect D>
__global__ void counter_kernel(const FlagGlobals g) {
    const int i = int(threadIdx.x), block = int(blockIdx.x);
    if (block < PARTS) {
        arch::store_global(g.work + block * THREADS + i, arch::load_global(g.in + i) + block);
        arch::sync_block();
        if (i != 0) return;
        if constexpr (D != Defect::missing_release_fence) arch::fence_release_gpu();
        arch::count_global(g.flags);
        return;
    }
    if (i == 0) {
        const int awaited = D == Defect::miscounted ? PARTS - 1 : PARTS;
        while (arch::load_relaxed_global(g.flags) < awaited) {
        }
        if constexpr (D != Defect::missing_acquire_fence) arch::fence_acquire_gpu();
        if constexpr (D != Defect::counter_left_set) arch::store_global(g.flags, 0);
    }
    arch::sync_block();
    float sum = 0;
    for (int part = 0; part < PARTS; ++part) sum += arch::load_global(g.work + part * THREADS + i);
    arch::store_global(g.out + i, sum);
}

// ---- a block copies out of shared memory or stores, the other copies into its own ----

struct CopyShared {
    sv_fl<VALUES> values;
    semaphore arrived;
};
template <Defect D, bool BY_COPY>
__global__ void copies_kernel(const FlagGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<CopyShared>();
    const int i = int(threadIdx.x);
    constexpr int bytes = VALUES * int(sizeof(float));
    if (blockIdx.x == 0) {
        for (int j = i; j < VALUES; j += THREADS) {
            const float x = 2 * arch::load_global(g.in + j);
            if constexpr (BY_COPY)
                shared.values.set(j, x);
            else
                arch::store_global(g.work + j, x);
        }
        arch::fence_async_shared();
        arch::sync_block();
        if (i != 0) return;
        if constexpr (BY_COPY) {
            arch::bulk_store(g.work, shared.values.address(), bytes);
            tma::store_commit_group();
            if constexpr (D == Defect::wait_for_reads_only || D == Defect::missing_store_wait)
                tma::store_async_read_wait();
            else
                tma::store_async_wait();
        }
        arch::store_release_global(g.flags, 1);
        return;
    }
    if (i == 0) {
        init_semaphore(shared.arrived, 1);
        arch::mbarrier_init_fence();
        while (arch::load_acquire_global(g.flags) == 0) {
        }
        if constexpr (D == Defect::fence_of_shared_memory)
            arch::fence_async_shared();
        else if constexpr (D != Defect::missing_proxy_fence)
            arch::fence_async();
        arch::store_release_global(g.flags, 0);
        tma::expect_bytes(shared.arrived, bytes);
        arch::bulk_load(shared.values.address(), g.work, bytes, shared.arrived.address());
    }
    arch::sync_block();
    wait(shared.arrived, 0);
    for (int j = i; j < VALUES; j += THREADS) {
        arch::store_global(g.out + j, shared.values.get(j) + 1);
    }
}

// ---- blocks that add to the same places, in turns, the first of them by a store ----

template <Defect D>
__global__ void sums_kernel(const FlagGlobals g) {
    const int i = int(threadIdx.x), block = int(blockIdx.x);
    const bool waits = D != Defect::two_writers && D != Defect::addition_before_store &&
                       D != Defect::copy_onto_addition;
    if (waits && i == 0) {
        while (arch::load_acquire_global(g.flags) < block) {
        }
    }
    arch::sync_block();
    auto* to = reinterpret_cast<float4*>(g.out) + i;
    const float4 value = arch::load_global(reinterpret_cast<const float4*>(g.in) + i);
    const bool stores = D == Defect::two_writers          ? true
                        : D == Defect::copy_onto_addition ? block == 1
                                                          : block == 0;
    if (stores)
        arch::store_global(to, D == Defect::two_writers && block == 1
                                   ? make_float4(value.w, value.z, value.y, value.x)
                                   : value);
    else
        arch::reduce_add_global(reinterpret_cast<float*>(to), value);
    // A place that all blocks write the same value to needs no order.
    if (i == 0) arch::store_global(g.work, 7.0f);
    arch::sync_block();
    if (waits && i == 0) arch::store_release_global(g.flags, block == 2 ? 0 : block + 1);
}

// ---- tiles of several blocks that overlap: the same values may be stored in any order, by copies
// and, as gemm does with tiles that have all their rows, by threads ----

constexpr int OVERLAP_BLOCKS = 3, OVERLAP_STEP = VALUES / 2;
template <Defect D>
__global__ void overlap_kernel(const FlagGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<CopyShared>();
    const int i = int(threadIdx.x), first = int(blockIdx.x) * OVERLAP_STEP;
    const bool wrong = D == Defect::overlapping_copies_differ && blockIdx.x == 2;
    for (int j = i; j < VALUES; j += THREADS) {
        shared.values.set(j, arch::load_global(g.in + first + j) + (wrong && j == 20 ? 1 : 0));
    }
    arch::fence_async_shared();
    arch::sync_block();
    if (blockIdx.x == 1) {
        for (int j = i; j < VALUES; j += THREADS) {
            arch::store_global(g.out + first + j, shared.values.get(j));
        }
        return;
    }
    if (i != 0) return;
    arch::bulk_store(g.out + first, shared.values.address(), VALUES * int(sizeof(float)));
    tma::store_commit_group();
    // What ends with the block needs no wait for its writes.
    if (blockIdx.x == 0)
        tma::store_async_wait();
    else
        tma::store_async_read_wait();
}

// ---- one block stores where another's copy is in flight. Needs two host threads ----

template <Defect D>
__global__ void store_below_copy_kernel(const FlagGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<CopyShared>();
    const int i = int(threadIdx.x);
    const auto wait_for = [&](int value) {
        while (arch::load_acquire_global(g.flags) != value) {
        }
    };
    if (blockIdx.x == 1) {
        if (i == 0) wait_for(1);
        arch::sync_block();
        for (int j = i; j < VALUES; j += THREADS) {
            const bool wrong = D == Defect::store_differs_from_copy && j == 20;
            arch::store_global(g.out + j, arch::load_global(g.in + j) + (wrong ? 1 : 0));
        }
        arch::sync_block();
        if (i == 0) arch::store_release_global(g.flags, 2);
        return;
    }
    for (int j = i; j < VALUES; j += THREADS) shared.values.set(j, arch::load_global(g.in + j));
    arch::fence_async_shared();
    arch::sync_block();
    if (i != 0) return;
    arch::bulk_store(g.out, shared.values.address(), VALUES * int(sizeof(float)));
    tma::store_commit_group();
    arch::store_release_global(g.flags, 1);
    wait_for(2);
    arch::store_release_global(g.flags, 0);
    tma::store_async_wait();
}

}  // namespace defects
