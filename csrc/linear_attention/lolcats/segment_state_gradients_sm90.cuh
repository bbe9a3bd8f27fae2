// What the queries of each segment add to the sums of LoLCATS's gradient for the keys before: those
// of alpha phi(q) / denominator times dO^T and delta. One warpgroup per segment of a head; then
// their sums over all segments behind each.
#pragma once

#include "csrc/linear_attention/based/scan_sm90.cuh"
#include "csrc/linear_attention/lolcats/gradient_common.cuh"

namespace thunderkittens::linear_attention {

template <class K>
struct SegmentStateGradientsGlobals {
    typename K::token_layout q, grad_out;
    typename K::map_layout q_map;
    WeightsLayout weights;
    const int* lengths;
    float* segment_states;
    int heads, length, segments;
};

template <class K>
struct SegmentStateGradientsShared {
    static constexpr int stages = 2;
    typename K::map_tile q_map;
    struct Stage {
        typename K::token_tile q, grad_out;
        WeightVector weights;
    } stage[stages];
    typename K::feature_tile features[K::groups];
    semaphore maps, full[stages];
};

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS) void lolcats_segment_state_gradients_kernel(
    const __grid_constant__ SegmentStateGradientsGlobals<K> g) {
    using Shared = SegmentStateGradientsShared<K>;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<Shared>();
    if (threadIdx.x == 0) {
        init_semaphore(shared.maps, 1);
        for (int s = 0; s < Shared::stages; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    arch::wait_for_dependencies();
    arch::sync_block();
    const LolcatsWorkTile work(int(blockIdx.x), g.heads, g.segments, g.lengths, g.length);
    // The chunks that the segment before sees and this one does not; nobody needs the first's.
    const int first = work.begin + 1;
    const int last = ::min(work.end + 1, work.terrace.chunks());
    const int count = work.segment > 0 && work.begin < work.end ? last - first : 0;
    const auto load_chunk = [&](int n) {
        auto& to = shared.stage[n % Shared::stages];
        semaphore& full = shared.full[n % Shared::stages];
        const int chunk = first + n, row = work.terrace.row(chunk);
        tma::expect(full, to.q, to.grad_out, to.weights);
        tma::load_async(to.q, g.q, elements(work.b, work.head, row, 0), full);
        tma::load_async(to.grad_out, g.grad_out, elements(work.b, work.head, row, 0), full);
        tma::load_async(to.weights, g.weights, {0, 0, work.batch_head, chunk}, full);
    };
    if (threadIdx.x == 0 && count > 0) {
        tma::expect(shared.maps, shared.q_map);
        tma::load_async(shared.q_map, g.q_map, elements(0, work.head, 0, 0), shared.maps);
        for (int n = 0; n < Shared::stages && n < count; ++n) load_chunk(n);
    }
    LolcatsRunningState<K> sums;
    sums.clear();
    if (count > 0) wait(shared.maps, 0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        auto& stage = shared.stage[n % Shared::stages];
        typename K::projection z;
        typename K::Features features;
        discard(z);
        wait(shared.full[n % Shared::stages], n / Shared::stages % 2);
        warpgroup::mm_AB(z, stage.q, shared.q_map);
        warpgroup::mma_async_wait<0>(z);
        make_weighted_features<K>(features, z, stage.weights);
        store_features<K>(shared.features, features);
        arch::fence_async_shared();
        warpgroup::sync(1);
        sums.issue(shared.features, stage.grad_out);
        add_delta<K>(sums, shared.features, stage.weights);
        sums.wait();
        warpgroup::sync(1);
        if (threadIdx.x == 0 && n + Shared::stages < count) load_chunk(n + Shared::stages);
    }
    constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
    float* to = g.segment_states +
                (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
    sums.store(to, to + floats);
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_segment_state_gradients(const LolcatsBackwardParams& params,
                                            const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(SegmentStateGradientsShared<K>) + 1024 <=
                  LOLCATS_SEGMENT_STATE_GRADIENTS_BYTES);
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    const int64_t batch_heads = p.batch * p.heads;
    const SegmentStateGradientsGlobals<K> globals{
        .q = token_layout_of<typename K::token_layout>(call.q, p, p.heads, p.length),
        .grad_out =
            token_layout_of<typename K::token_layout>(params.grad_out, p, p.heads, p.length),
        .q_map = map_layout_of<typename K::map_layout>(call.q_map, p.heads),
        .weights =
            WeightsLayout(w.weights, nullptr, nullptr, batch_heads, chunks_of(p) * CHUNK * 2),
        .lengths = call.initial.lengths,
        .segment_states = w.segment_states,
        .heads = int(p.heads),
        .length = int(p.length),
        .segments = call.segments};
    kittens::launch({.dependent = true}, lolcats_segment_state_gradients_kernel<K>,
                    dim3(unsigned(batch_heads * call.segments)), dim3(WARPGROUP_THREADS), dim3(1),
                    LOLCATS_SEGMENT_STATE_GRADIENTS_BYTES, stream, globals);
    launch_scan<float4>(
        {w.segment_states, nullptr, nullptr, int(state_floats_of_head(p)), call.segments, true},
        batch_heads, stream);
}

}  // namespace thunderkittens::linear_attention
