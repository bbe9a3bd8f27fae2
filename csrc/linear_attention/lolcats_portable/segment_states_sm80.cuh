// What each segment of LoLCATS's chunks adds to the sums, for every GPU from compute capability 8.0
// on: of phi(k) v^T and phi(k) over the chunks that its successor's sums have and its own have not,
// and in the gradient, of alpha phi(q) / denominator times dO^T and delta over the queries that its
// predecessor has behind its window. Then their prefix sums.
#pragma once

#include "csrc/linear_attention/based/scan_sm80.cuh"
#include "csrc/linear_attention/lolcats_portable/forward_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class K>
struct LolcatsSegmentGlobals {
    using T = typename K::T;
    KeyRowsOf<T> v;
    QueryRowsOf<T> grad_out;
    FeatureArray<K> features;
    const float* weights;  // of the queries; null: sums of keys
    const int* lengths;
    float* segment_states;
    int heads, length, segments;
};

template <class K, bool of_queries>
__global__ __launch_bounds__(
    PORTABLE_THREADS,
    PORTABLE_BLOCKS_PER_SM) void lolcats_portable_segment_states_kernel(const __grid_constant__
                                                                            LolcatsSegmentGlobals<K>
                                                                                g) {
    using T = typename K::T;
    constexpr int64_t floats = int64_t(2 * K::features) * K::head_dim;
    constexpr int slices = K::head_dim / VALUES;
    constexpr float unit = std::is_same_v<T, half> && of_queries ? HALF_WEIGHT_UNIT : 1.0f;
    auto* values = reinterpret_cast<value_slice<K>*>(shared_memory());
    const int first_column = int(blockIdx.x) % slices * VALUES;
    const LolcatsWorkTile work(int(blockIdx.x) / slices, g.heads, g.segments, g.lengths, g.length);
    // Nobody needs those of the last segment, in the gradient of the first, or of segments without
    // chunks.
    int first, count = 0;
    if constexpr (of_queries) {
        first = work.begin + 1;
        if (work.segment > 0 && work.begin < work.end)
            count = ::min(work.end + 1, work.terrace.chunks()) - first;
    } else {
        first = ::max(work.begin - 1, 0);
        if (work.begin < work.end && !work.last()) count = work.end - 1 - first;
    }
    const auto load = [&](int n) {
        if constexpr (of_queries)
            g.grad_out.template copy<PORTABLE_THREADS>(values[n % 2], work, first + n,
                                                       first_column);
        else
            g.v.template copy<PORTABLE_THREADS>(values[n % 2], work, first + n, first_column);
        arch::cp_async_commit();
    };
    if (count > 0) load(0);
    SliceSums<K> sums;
    sums.clear();
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        const typename SliceSums<K>::Features features(g.features, work.batch_head, first + n);
        arch::cp_async_wait<0>();
        arch::sync_block();
        if (n + 1 < count) load(n + 1);
        if constexpr (of_queries) {
            const float* weights =
                g.weights + (int64_t(work.batch_head) * g.features.chunks + first + n) * CHUNK * 2;
            sums.add_chunk(features, values[n % 2], [&](int k, operand_a<T>& x, float2& sum) {
                const TokenPairs pairs(weights, 16 * k);
                const float2 d = pairs.deltas(x);
                sum = {sum.x + d.x, sum.y + d.y};
                x = pairs.weigh(x, unit);
            });
        } else {
            sums.add_chunk(features, values[n % 2]);
        }
    }
    if constexpr (unit != 1.0f) {
#pragma unroll
        for (int i = 0; i < SliceSums<K>::groups; ++i) scale_tile(sums.sums[i], 1.0f / unit);
    }
    float* to = g.segment_states +
                (int64_t(work.batch_head) * g.segments + work.segment) * (floats + 2 * K::features);
    sums.store(to, to + floats, first_column);
}

}  // namespace sm80

template <class K, bool of_queries>
void launch_portable_segments(const LolcatsParams& params,
                              const sm80::LolcatsSegmentGlobals<K>& globals, Stream stream) {
    const LolcatsProblem& p = params.problem;
    static_assert(2 * sizeof(sm80::value_slice<K>) <= PORTABLE_LOLCATS_SEGMENTS_BYTES);
    kittens::launch({.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM},
                    sm80::lolcats_portable_segment_states_kernel<K, of_queries>,
                    dim3(unsigned(p.batch * p.heads * params.segments * (K::head_dim / VALUES))),
                    dim3(sm80::PORTABLE_THREADS), dim3(1), PORTABLE_LOLCATS_SEGMENTS_BYTES, stream,
                    globals);
    launch_scan<float4>({}, sm80::based_portable_scan_kernel<float4>,
                        {globals.segment_states, nullptr, nullptr, int(state_floats_of_head(p)),
                         params.segments, of_queries},
                        p.batch * p.heads, stream);
}

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_segment_states(const LolcatsParams& params, const LolcatsWorkspace& w,
                                            Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    using T = typename K::T;
    const LolcatsProblem& p = params.problem;
    launch_portable_segments<K, false>(params,
                                       {.v = sm80::key_rows<T>(params.v, w.first_values, p),
                                        .grad_out = sm80::query_rows<T>(params.q, p),
                                        .features = sm80::feature_array<K>(w.k_features, p),
                                        .weights = nullptr,
                                        .lengths = params.initial.lengths,
                                        .segment_states = w.segment_states,
                                        .heads = int(p.heads),
                                        .length = int(p.length),
                                        .segments = params.segments},
                                       stream);
}

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_segment_state_gradients(const LolcatsBackwardParams& params,
                                                     const LolcatsBackwardWorkspace& w,
                                                     Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    using T = typename K::T;
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    launch_portable_segments<K, true>(call,
                                      {.v = sm80::key_rows<T>(call.v, w.forward.first_values, p),
                                       .grad_out = sm80::query_rows<T>(params.grad_out, p),
                                       .features = sm80::feature_array<K>(w.forward.q_features, p),
                                       .weights = w.weights,
                                       .lengths = call.initial.lengths,
                                       .segment_states = w.segment_states,
                                       .heads = int(p.heads),
                                       .length = int(p.length),
                                       .segments = call.segments},
                                      stream);
}

}  // namespace thunderkittens::linear_attention
