// Small kernels with a switch for planted defects, each a mistake that is easily made and that a
// GPU often forgives. The emulator must find every one, and none in the kernels as they should be.
#pragma once

#include "defect.h"

namespace defects {

// ---- C = A B with a ring of stages: one producer and two consumer warpgroups, wgmma, TMA ----

constexpr int STAGES = 2, STEPS = 6;
using a_tile = st_bf<64, 64>;
using b_tile = st_bf<64, 128>;
using c_tile = st_bf<64, 128>;
using narrow_tile = st_bf<64, 64, true, 64>;  // a_tile with a narrower swizzle

struct ProductGlobals {
    gl<bf16, 1, 1, -1, -1, a_tile, narrow_tile> a;
    gl<bf16, 1, 1, -1, -1, b_tile> b;
    gl<bf16, 1, 1, -1, -1, c_tile> c;
};
struct ProductShared {
    struct Stage {
        a_tile a[2];
        b_tile b;
    } stages[STAGES];
    c_tile c[2];
    semaphore full[STAGES], empty[STAGES];
};

template <Defect D>
__device__ void load_stages(const ProductGlobals& g, ProductShared& shared) {
    for (int k = 0; k < STEPS; ++k) {
        const int s = k % STAGES, phase = k / STAGES % 2;
        auto& stage = shared.stages[s];
        if (D != Defect::missing_empty_wait || k != STAGES + 1) wait(shared.empty[s], phase ^ 1);
        constexpr int wrong = D == Defect::expect_too_few_bytes    ? -16
                              : D == Defect::expect_too_many_bytes ? 16
                                                                   : 0;
        tma::expect_bytes(shared.full[s], uint32_t(int(sizeof(stage)) + wrong));
        for (int i = 0; i < 2; ++i) {
            if constexpr (D == Defect::wrong_swizzle) {
                tma::load_async(reinterpret_cast<narrow_tile&>(stage.a[i]), g.a, {i, k},
                                shared.full[s]);
            } else if constexpr (D == Defect::misaligned_coordinate) {
                tma::load_async(stage.a[i], g.a, elements(64 * i, 64 * k + 4), shared.full[s]);
            } else {
                const int step = D == Defect::wrong_tile_coordinate ? (k + 1) % STEPS : k;
                tma::load_async(stage.a[i], g.a, {i, step}, shared.full[s]);
            }
        }
        tma::load_async(stage.b, g.b, {k, 0}, shared.full[s]);
    }
}

template <Defect D>
__device__ void multiply_stages(const ProductGlobals& g, ProductShared& shared, int consumer) {
    rt_fl<16, 128> sum;
    warp::zero(sum);
    for (int k = 0; k < STEPS; ++k) {
        const int s = k % STAGES, phase = k / STAGES % 2;
        auto& stage = shared.stages[s];
        if (D != Defect::missing_full_wait || k != 3) {
            wait(shared.full[s], D == Defect::wrong_phase ? phase ^ 1 : phase);
        }
        if constexpr (D == Defect::missing_accumulator_fence) {
            detail::wgmma_product<false, false>(sum, stage.a[consumer], stage.b, true);
            warpgroup::mma_commit_group();
        } else if constexpr (D == Defect::missing_commit) {
            warpgroup::mma_fence(sum);
            detail::wgmma_product<false, false>(sum, stage.a[consumer], stage.b, true);
        } else if constexpr (D == Defect::swapped_transpose) {
            warpgroup::mma_AtB(sum, stage.a[consumer], stage.b);
        } else if (D == Defect::diverging_warpgroup && warpgroup::warpid() == 3) {
            warpgroup::mma_AB(sum, stage.a[1 - consumer], stage.b);
        } else {
            warpgroup::mma_AB(sum, stage.a[consumer], stage.b);
        }
        const bool releases =
            warpgroup::laneid() == 0 && !(D == Defect::lost_arrive && k == 2 && consumer == 0);
        if (D == Defect::early_release && releases) arrive(shared.empty[s]);
        if constexpr (D != Defect::missing_mma_wait) warpgroup::mma_async_wait(sum);
        if (D != Defect::early_release && releases) {
            arrive(shared.empty[s], D == Defect::too_many_arrivals ? 2 : 1);
        }
    }
    c_tile& tile = shared.c[consumer];
    if constexpr (D == Defect::missing_mma_wait) {
        rt_fl<16, 128> taken = sum;  // as a kernel that goes on too early would see it
        warpgroup::mma_async_wait(sum);
        warpgroup::store(tile, taken);
    } else {
        warpgroup::store(tile, sum);
    }
    constexpr int wrong = D == Defect::wrong_barrier_count ? 128 : 0;
    arch::named_barrier_sync(1 + consumer, 128 + (warpgroup::warpid() == 0 ? wrong : 0));
    if (warpgroup::laneid() == 0) {
        if constexpr (D == Defect::missing_store_fence) {
            for (int i = 0; i < 2; ++i) {
                arch::tma_store(g.c.tensor_map<c_tile>(), tile.address() + i * c_tile::stripe_bytes,
                                {64 * i, 64 * consumer, 0, 0});
            }
            tma::store_commit_group();
        } else {
            tma::store_async(g.c, tile, {consumer, 0});
        }
        if constexpr (D != Defect::store_without_read_wait) tma::store_async_read_wait();
    }
}

template <Defect D>
__global__ __launch_bounds__(384) void product_kernel(const __grid_constant__ ProductGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<ProductShared>();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init_semaphore(shared.full[s], 1);
            init_semaphore(shared.empty[s], 2);
        }
        if constexpr (D != Defect::missing_init_fence) arch::mbarrier_init_fence();
    }
    if constexpr (D != Defect::missing_init_barrier) arch::sync_block();
    if (D != Defect::early_access_to_global_memory) arch::wait_for_dependencies();
    if (warpgroup::groupid() == 2) {
        warpgroup::decrease_registers<D == Defect::registers_past_launch ? 32 : 24>();
        if (warpgroup::elect_leader()) load_stages<D>(g, shared);
    } else {
        warpgroup::increase_registers<D == Defect::too_many_registers ? 256 : 240>();
        multiply_stages<D>(g, shared, warpgroup::groupid());
    }
}

// ---- operands that threads write: from registers into shared memory, and in registers ----

struct OperandGlobals {
    gl<bf16, 1, 1, 64, 64> a;
    gl<bf16, 1, 1, 64, 64> b;
    gl<float, 1, 1, 64, 64> c;
};
struct OperandShared {
    st_bf<64, 64> a, b;
};
template <Defect D>
__global__ void operand_kernel(const __grid_constant__ OperandGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<OperandShared>();
    rt_bf<16, 64> a, b;
    rt_fl<16, 64> sum;
    warpgroup::load(a, g.a, {0, 0});
    warpgroup::load(b, g.b, {0, 0});
    warpgroup::store(shared.b, b);
    warpgroup::store(shared.a, a);
    if constexpr (D != Defect::missing_operand_fence) arch::fence_async_shared();
    if constexpr (D != Defect::missing_operand_barrier) arch::sync_block();
    warpgroup::mm_AB(sum, a, shared.b);
    if constexpr (D == Defect::operand_written_in_flight) warp::zero(a);
    if constexpr (D == Defect::tile_written_in_flight) {
        shared.b.set(0, 0, convert<bf16>(0.0f));
    }
    warpgroup::mma_async_wait(sum);
    warpgroup::mma_AB(sum, shared.a, shared.b);
    warpgroup::mma_async_wait(sum);
    warpgroup::store(g.c, sum, {0, 0});
}

// ---- shared memory without tensor cores ----

struct ExchangeGlobals {
    const float* in;
    float* out;
    int count;
};
template <Defect D>
__global__ void exchange_kernel(const ExchangeGlobals g) {
    auto& values = arch::static_shared<sv_fl<256>>();
    const int i = int(threadIdx.x);
    const float* source = g.in + i / 4 * 4;
    if (i % 4 == 0) arch::cp_async<16>(values.address_of(i), source);
    arch::cp_async_commit();
    if constexpr (D != Defect::missing_cp_async_wait) arch::cp_async_wait<0>();
    if constexpr (D != Defect::missing_block_barrier) arch::sync_block();
    float x = values.get(255 - i);
    arch::sync_block();
    values.set(i, x);
    if constexpr (D != Defect::missing_warp_barrier) arch::sync_warp();
    x = values.get(i ^ 1);
    if (D != Defect::diverging_shuffle || laneid() < 16) x += arch::shuffle_xor(x, 2);
    if (D == Defect::shared_store_out_of_bounds && i == 255) values.set(4096, x);
    if (D == Defect::misaligned_load && i == 3) {
        arch::load_shared<float4>(values.address_of(1));
    }
    if (D == Defect::store_into_input && i == 7) arch::store_global(const_cast<float*>(g.in), x);
    arch::store_global(g.out + i + (D == Defect::global_store_out_of_bounds ? 1 : 0), x);
}

// ---- two blocks of a cluster: multicast, remote arrival, distributed shared memory ----

using row = sv_fl<256>;
struct ClusterGlobals {
    gl<float, 1, 1, -1, 256, row> in;
    float* out;
};
struct ClusterShared {
    row values;
    sv_fl<32> inbox;
    semaphore arrived, message;
};
template <Defect D>
__global__ void cluster_kernel(const __grid_constant__ ClusterGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& shared = al.allocate<ClusterShared>();
    const int rank = cluster::rank(), peer = 1 - rank;
    if (threadIdx.x == 0) {
        init_semaphore(shared.arrived, 1);
        init_semaphore(shared.message, 1);
        arch::mbarrier_init_fence();
        tma::expect(shared.arrived, shared.values);
    }
    if constexpr (D == Defect::missing_cluster_barrier)
        arch::sync_block();
    else
        cluster::sync();
    if (rank == 0 && threadIdx.x == 0) {
        const uint16_t blocks = D == Defect::wrong_multicast_mask ? 0b111 : 0b11;
        tma::cluster::load_async(shared.values, g.in, {0, 0}, shared.arrived, blocks);
    }
    wait(shared.arrived, 0);
    const float x = shared.values.get(int(threadIdx.x));
    if (threadIdx.x == 0) {
        arch::store_cluster_shared(arch::map_shared_rank(shared.inbox.address(), uint32_t(peer)),
                                   x + float(rank));
        if constexpr (D == Defect::relaxed_release)
            arrive_remote_relaxed(shared.message, peer);
        else
            arrive_remote(shared.message, peer);
    }
    wait_cluster(shared.message, 0);
    const uint32_t theirs = shared.values.address_of(255 - int(threadIdx.x));
    const float y = arch::load_cluster_shared<float>(arch::map_shared_rank(theirs, uint32_t(peer)));
    arch::store_global(g.out + rank * 256 + int(threadIdx.x), x + shared.inbox.get(0) + y);
    if constexpr (D != Defect::missing_exit_barrier) cluster::sync();
}

// ---- blocks that take turns at global memory, in the order in which they begin ----

struct TurnGlobals {
    int *begun, *turn, *value;
};
constexpr int TURN_BLOCKS = 4, TURN_WARPS = 3;
template <Defect D>
__global__ void turns_kernel(const TurnGlobals g) {
    auto& first = arch::static_shared<sv_fl<32>>();
    if (threadIdx.x == 0) first.set(0, float(TURN_WARPS * arch::fetch_add_global(g.begun, 1)));
    arch::sync_block();
    if (laneid() != 0) return;
    // The last warp's turn comes first.
    const int turn = int(first.get(0)) + TURN_WARPS - 1 - warpid();
    while (arch::load_acquire_global(g.turn) < turn) {
    }
    arch::store_global(g.value, 3 * arch::load_global(g.value) + turn);
    if (D != Defect::lost_turn || turn != 4) arch::store_release_global(g.turn, turn + 1);
}

// ---- segments of a ragged layout: each is copied by tiles that reach beyond its end ----

using segment_tile = st_bf<16, 64>;
struct SegmentGlobals {
    ragged_gl<bf16, segment_tile> in, out;
};
constexpr int SEGMENTS[] = {0, 21, 24, 40};  // where they begin, and the last ends
template <Defect D>
__global__ void segments_kernel(const __grid_constant__ SegmentGlobals g) {
    shared_allocator<> al(shared_memory());
    auto& tile = al.allocate<segment_tile>();
    auto& arrived = al.allocate<semaphore>();
    if (threadIdx.x != 0) return;
    init_semaphore(arrived, 1);
    arch::mbarrier_init_fence();
    int phase = 0;
    for (int i = 2; i >= 0; --i) {
        const int begin = SEGMENTS[i], length = SEGMENTS[i + 1] - begin;
        for (int row = 0; row < length; row += segment_tile::rows, phase ^= 1) {
            tma::expect(arrived, tile);
            tma::load_async(tile, g.in,
                            {.begin = begin,
                             .length = length + (D == Defect::segment_beyond_rows ? 1 : 0),
                             .row = row - (D == Defect::tile_before_segment ? 8 : 0)},
                            arrived);
            wait(arrived, phase);
            const int last = D == Defect::wrong_segment ? SEGMENTS[3] - begin : length;
            tma::store_async(g.out, tile, {.begin = begin, .length = last, .row = row});
            tma::store_async_read_wait();
        }
        tma::store_async_wait();
    }
}

}  // namespace defects
