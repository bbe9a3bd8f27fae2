// What each segment of the chunks adds to the state: the sums of phi(k) v^T and phi(k) over the
// chunks that its successor's state has and its own has not. Two warpgroups take turns with the
// chunks, and the second's sums are added to the first's at last; one warp brings K and V.
#pragma once

#include "csrc/linear_attention/lolcats/feature_map.cuh"
#include "csrc/linear_attention/lolcats/running_state.cuh"

namespace thunderkittens::linear_attention {

constexpr int LOLCATS_SEGMENT_STATES_THREADS = 3 * WARPGROUP_THREADS;

template <class K>
struct LolcatsSegmentStatesGlobals {
    KeysAndValues<K> kv;
    typename K::map_layout k_map;
    const int* lengths;
    float* segment_states;
    int heads, length, segments;
};

template <class K>
struct LolcatsSegmentStatesShared {
    static constexpr int stages = 4;
    typename K::map_tile k_map;
    struct Stage {
        typename K::token_tile k, v;
    } stage[stages];
    typename K::feature_tile features[2][K::groups];
    semaphore maps, full[stages], empty[stages];
};

template <class K>
__global__ __launch_bounds__(LOLCATS_SEGMENT_STATES_THREADS, 1) void lolcats_segment_states_kernel(
    const __grid_constant__ LolcatsSegmentStatesGlobals<K> g) {
    using Shared = LolcatsSegmentStatesShared<K>;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<Shared>();
    if (threadIdx.x == 0) {
        init_semaphore(shared.maps, 1);
        for (int s = 0; s < Shared::stages; ++s) {
            init_semaphore(shared.full[s], 1);
            init_semaphore(shared.empty[s], 1);
        }
        arch::mbarrier_init_fence();
    }
    arch::wait_for_dependencies();
    arch::sync_block();
    // Not for a scan: its small blocks would crowd where the first blocks end.
    if (g.segments <= ADDED_SEGMENTS) arch::launch_dependents();
    const LolcatsWorkTile work(int(blockIdx.x), int(blockIdx.y), g.heads, g.segments, g.lengths,
                               g.length);
    // Nobody needs the last segment's sums, or those of segments without chunks.
    const int first = ::max(work.begin - 1, 0);
    const int count = work.begin < work.end && !work.last() ? work.end - 1 - first : 0;
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == 2) {
        warpgroup::decrease_registers<24>();
        if (warpgroup::elect_leader() && count > 0) {
            tma::expect(shared.maps, shared.k_map);
            tma::load_async(shared.k_map, g.k_map, elements(0, work.head, 0, 0), shared.maps);
            pipeline_state<Shared::stages> at;
            for (int n = 0; n < count; ++n) {
                wait(shared.empty[at.stage], at.phase ^ 1);
                auto& stage = shared.stage[at.stage];
                // Backwards: L2 keeps what the next kernel begins with.
                g.kv.load(stage.k, stage.v, work, first + count - 1 - n, g.lengths != nullptr,
                          shared.full[at.stage]);
                at.advance();
            }
        }
        arch::sync_block();
        return;
    }
    warpgroup::increase_registers<240>();
    LolcatsRunningState<K> sums;
    sums.clear();
    if (count > 0) wait(shared.maps, 0);
    auto& feature_tiles = shared.features[role];
    pipeline_state<Shared::stages> at;
    at.advance(role);
#pragma unroll 1
    for (int n = role; n < count; n += 2) {
        auto& stage = shared.stage[at.stage];
        typename K::projection z;
        typename K::Features features;
        wait(shared.full[at.stage], at.phase);
        warpgroup::mm_AB(z, stage.k, shared.k_map);
        warpgroup::mma_async_wait<0>(z);
        make_scaled_features<K>(features, z, 1.0f);
        warpgroup::sync(1 + role);  // the features' tile is free
        store_feature_rows<K>(feature_tiles, features);
        arch::fence_async_shared();
        warpgroup::sync(1 + role);
        sums.issue(feature_tiles, stage.v);
        count_features(sums, feature_tiles);
        sums.wait();
        if (warpgroup::laneid() == 0) arrive(shared.empty[at.stage]);
        at.advance(2);
    }
    // The second's sums go where keys and values were, once both are done with these.
    arch::named_barrier_sync(3, 2 * WARPGROUP_THREADS);
    constexpr int pairs = K::groups * K::head_dim / 4;
    static_assert((pairs + 1) * WARPGROUP_THREADS * sizeof(float2) <=
                  sizeof(shared.stage) + sizeof(shared.features));
    const uint32_t place = arch::shared_address(&shared.stage) + 8 * warpgroup::laneid();
    int index = 0;
    if (role == 1) {
        sums.for_each_pair([&](const float2& pair, int, int) {
            arch::store_shared(place + uint32_t(1024 * index++), pair);
        });
        arch::store_shared(place + uint32_t(1024 * index), sums.denominator);
    }
    arch::sync_block();
    if (role == 1) return;
    const auto add = [&](float2& pair) {
        const float2 x = arch::load_shared<float2>(place + uint32_t(1024 * index++));
        pair = {pair.x + x.x, pair.y + x.y};
    };
    sums.for_each_pair([&](float2& pair, int, int) { add(pair); });
    add(sums.denominator);
    constexpr int64_t size = int64_t(2 * K::features) * (K::head_dim + 1);
    sums.store_segment(g.segment_states +
                       (int64_t(work.batch_head) * g.segments + work.segment) * size);
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_segment_states(const LolcatsParams& params, const LolcatsWorkspace& workspace,
                                   Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(LolcatsSegmentStatesShared<K>) + 1024 <= LOLCATS_SEGMENT_STATES_BYTES);
    const LolcatsProblem& p = params.problem;
    const LolcatsSegmentStatesGlobals<K> globals{
        .kv = KeysAndValues<K>(params, workspace),
        .k_map = map_layout_of<typename K::map_layout>(params.k_map, p.heads),
        .lengths = params.initial.lengths,
        .segment_states = workspace.segment_states,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = params.segments};
    // A scan reads the last segments' states, too.
    const int64_t segments = scans(params.segments) ? params.segments : params.segments - 1;
    kittens::launch({.dependent = p.continued}, lolcats_segment_states_kernel<K>,
                    dim3(unsigned(p.batch * p.heads), unsigned(segments)),
                    dim3(LOLCATS_SEGMENT_STATES_THREADS), dim3(1), LOLCATS_SEGMENT_STATES_BYTES,
                    stream, globals);
}

}  // namespace thunderkittens::linear_attention
