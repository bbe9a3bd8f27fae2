// Memory that is written again: kernels with a switch for planted defects, in which a write comes
// without order behind what still reads, and the same kernels as they should be.
#pragma once

#include "defect.h"

namespace defects {

// ---- one block: threads read, then stores, cp.async, TMA or stmatrix write ----

struct ReuseGlobals {
    const float* in;
    float* out;
    float* copy;  // 256 of them
};
struct ReuseShared {
    sv_fl<256> values;
    st_bf<16, 64> tile;
    semaphore empty, arrived;
};
template <Defect D, Defect WITHOUT>
__device__ void sync_block_unless() {
    if constexpr (D != WITHOUT) arch::sync_block();
}
template <Defect D>
__device__ float reuse_by_threads(const ReuseGlobals& g, ReuseShared& shared) {
    const int i = int(threadIdx.x);
    auto& values = shared.values;
    values.set(i, arch::load_global(g.in + i));
    arch::sync_block();
    float x = values.get(255 - i);
    // Words that warp 1 has read.
    sync_block_unless<D, Defect::store_before_others_have_read>();
    if (warpid() == 6) values.set(i, x);
    arch::sync_block();
    x = values.get(i ^ 1);
    if constexpr (D != Defect::store_before_other_lanes_have_read) arch::sync_warp();
    if (i % 2 == 1) values.set(i, x);
    arch::sync_block();
    x = values.get(255 - i);
    sync_block_unless<D, Defect::cp_async_before_others_have_read>();
    if (i % 4 == 0) arch::cp_async<16>(values.address_of(i), g.in + i);
    arch::cp_async_commit();
    arch::cp_async_wait<0>();
    arch::sync_block();
    return x + values.get(255 - i);
}
template <Defect D>
__device__ float reuse_by_copies(const ReuseGlobals& g, ReuseShared& shared) {
    const int i = int(threadIdx.x);
    auto& values = shared.values;
    if constexpr (D != Defect::arrival_before_other_lanes_have_read) arch::sync_warp();
    const bool arrives = D != Defect::arrival_of_half_the_warps || warpid() < 4;
    if (laneid() == 0 && arrives) arrive(shared.empty);
    if (i == 0) {
        wait(shared.empty, 0);
        tma::expect_bytes(shared.arrived, 1024);
        arch::bulk_load(values.address(), g.in, 1024, shared.arrived.address());
    }
    wait(shared.arrived, 0);
    const float x = values.get(i);
    values.set(i, 2 * x);
    arch::fence_async_shared();
    arch::sync_block();
    if (i == 0) {
        arch::bulk_store(g.copy, values.address(), 1024);
        tma::store_commit_group();
        tma::store_async_read_wait();
    }
    sync_block_unless<D, Defect::store_before_a_copy_has_read>();
    values.set(255 - i, x);
    arch::sync_block();
    return values.get(i);
}
template <Defect D>
__device__ float reuse_by_matrices(ReuseShared& shared) {
    if (warpid() >= 4) return 0;
    const int row = laneid() % 16, col = 16 * warpid() + laneid() / 16 * 8;
    const int next = 16 * ((warpid() + 1) % 4) + laneid() / 16 * 8;
    uint32_t r[4] = {}, s[4];
    for (uint32_t& word : r) word = uint32_t(warpid() + 1);
    arch::store_matrix_x4(shared.tile.address_of(row, col), r[0], r[1], r[2], r[3]);
    warpgroup::sync(1);
    arch::load_matrix_x4(s[0], s[1], s[2], s[3], shared.tile.address_of(row, next));
    if constexpr (D != Defect::stmatrix_before_ldmatrix) warpgroup::sync(1);
    arch::store_matrix_x4(shared.tile.address_of(row, col), r[0], r[1], r[2], r[3]);
    return float(s[0] + s[3]);
}
template <Defect D>
__global__ void reuse_kernel(const ReuseGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<ReuseShared>();
    if (threadIdx.x == 0) {
        init_semaphore(shared.empty, D == Defect::arrival_of_half_the_warps ? 4 : 8);
        init_semaphore(shared.arrived, 1);
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    float x = reuse_by_threads<D>(g, shared);
    x += reuse_by_copies<D>(g, shared);
    x += reuse_by_matrices<D>(shared);
    arch::store_global(g.out + threadIdx.x, x);
}

// ---- two blocks of a cluster that read and write each other's shared memory ----

struct RemoteShared {
    sv_fl<256> values, received;
    sv_fl<32> inbox;
    semaphore message[2], taken, arrived, copied;
};
template <Defect D>
__device__ float remote_messages(RemoteShared& shared, int rank) {
    if (threadIdx.x != 0) return 0;
    float sum = 0;
    for (int i = 0; i < 2; ++i) {
        if (rank == 0) {
            if (i == 1) wait_cluster(shared.taken, 0);
            arch::store_cluster_shared(arch::map_shared_rank(shared.inbox.address(), 1u),
                                       float(i + 1));
            arrive_remote(shared.message[i], 1);
        } else {
            wait_cluster(shared.message[i], 0);
            sum += shared.inbox.get(0);
            if constexpr (D == Defect::message_taken_by_a_relaxed_arrival)
                arrive_remote_relaxed(shared.taken, 0);
            else
                arrive_remote(shared.taken, 0);
        }
    }
    return sum;
}
template <Defect D>
__global__ void remote_kernel(float* out) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<RemoteShared>();
    const int rank = cluster::rank(), peer = 1 - rank, i = int(threadIdx.x);
    if (i == 0) {
        for (semaphore* s : {&shared.message[0], &shared.message[1], &shared.taken, &shared.arrived,
                             &shared.copied}) {
            init_semaphore(*s, 1);
        }
        arch::mbarrier_init_fence();
        tma::expect_bytes(shared.arrived, 1024);
    }
    shared.values.set(i, float(i + rank));
    arch::fence_async_shared();
    cluster::sync();
    float x = remote_messages<D>(shared, rank);
    const uint32_t theirs = shared.values.address_of(255 - i);
    x += arch::load_cluster_shared<float>(arch::map_shared_rank(theirs, uint32_t(peer)));
    if constexpr (D == Defect::store_before_the_peer_has_read)
        arch::sync_block();
    else
        cluster::sync();
    shared.values.set(i, 1.f);
    arch::fence_async_shared();
    cluster::sync();
    if (i == 0) {
        arch::bulk_copy_to_cluster(arch::map_shared_rank(shared.received.address(), uint32_t(peer)),
                                   shared.values.address(), 1024,
                                   arch::map_shared_rank(shared.arrived.address(), uint32_t(peer)));
        wait_cluster(shared.arrived, 0);
        arrive_remote(shared.copied, peer);
    }
    if constexpr (D != Defect::store_before_the_peer_has_copied) wait_cluster(shared.copied, 0);
    shared.values.set(i, 2.f);
    wait_cluster(shared.arrived, 0);
    x += shared.received.get(i);
    arch::store_global(out + 256 * rank + i, x);
    if (D == Defect::block_ends_before_its_copy && rank == 1 && i == 0)
        tma::expect_bytes(shared.arrived, 1024);
    arch::fence_async_shared();
    cluster::sync();
    if constexpr (D == Defect::block_ends_before_its_copy) {
        if (rank == 0 && i == 0) {
            arch::bulk_copy_to_cluster(arch::map_shared_rank(shared.received.address(), 1),
                                       shared.values.address(), 1024,
                                       arch::map_shared_rank(shared.arrived.address(), 1));
        }
        if (rank == 1) wait_cluster(shared.arrived, 1);
    }
}

// ---- products, of which each warp knows when its own part is over ----

struct PartsGlobals {
    gl<bf16, 1, 1, 64, 64> a, b;
    gl<float, 1, 1, 64, 64> c;
};
struct PartsShared {
    st_bf<64, 64> a, b;
};
constexpr int PARTS_THREADS = 160;
template <Defect D>
__device__ void rewrite_after_product(const rt_bf<16, 64>& a, const rt_bf<16, 64>& b,
                                      PartsShared& shared) {
    // A warp's own rows of A are read by its own part alone.
    const int rows = (warpid() + (D == Defect::rows_of_another_warp ? 1 : 0)) % 4;
    auto own_rows = shared.a.template subtile<16, 64>({rows, 0});
    warp::store(own_rows, a);
    if constexpr (D != Defect::operand_before_all_parts_are_over) warpgroup::sync(1);
    warpgroup::store(shared.b, b);
    arch::fence_async_shared();
    warpgroup::sync(1);
}
template <Defect D>
__global__ void parts_kernel(const __grid_constant__ PartsGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<PartsShared>();
    constexpr bool one_warp = D == Defect::one_part_tells_of_all;
    if (warpid() == 4) {  // writes B once more at the end
        arch::named_barrier_sync(2, one_warp ? 64 : PARTS_THREADS);
        shared.b.set(laneid(), 0, convert<bf16>(0.0f));
        return;
    }
    rt_bf<16, 64> a, b;
    rt_fl<16, 64> sum;
    warpgroup::load(a, g.a, {0, 0});
    warpgroup::load(b, g.b, {0, 0});
    warpgroup::store(shared.a, a);
    warpgroup::store(shared.b, b);
    arch::fence_async_shared();
    warpgroup::sync(1);
    warpgroup::mm_AB(sum, shared.a, shared.b);
    warpgroup::mma_async_wait(sum);
    rewrite_after_product<D>(a, b, shared);
    warpgroup::mma_AB(sum, shared.a, shared.b);
    warpgroup::mma_async_wait(sum);
    if (!one_warp || warpid() == 0) arch::named_barrier_arrive(2, one_warp ? 64 : PARTS_THREADS);
    warpgroup::store(g.c, sum, {0, 0});
}

}  // namespace defects
