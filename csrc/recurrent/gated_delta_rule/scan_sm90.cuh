// The states between the segments of a sequence: S <- M S + L for one segment after the other, in
// fp32. A block has a few columns of the states of a head, a thread a row: of M, whose columns are
// adjacent in memory, it reads its elements a batch at a time, and of S the columns' elements from
// shared memory. The portable kernel is the same.
#pragma once

#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int SCAN_THREADS = int(DELTA_MAX_KEY_DIM), SCAN_BATCH = 32;

struct ScanGlobals {
    DeltaStates initial;
    float *states, *transitions;  // of all segments but the last, see delta_workspace()
    int value_heads, key_dim, value_dim, slices, segments;
};

template <int columns, bool portable>
__global__ __launch_bounds__(SCAN_THREADS) void delta_scan_kernel(
    const __grid_constant__ ScanGlobals g) {
    static_assert(columns % 4 == 0);
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<sv<float, SCAN_THREADS * columns>>();
    const int row = int(threadIdx.x), head = int(blockIdx.x) / g.slices;
    const int first = int(blockIdx.x) % g.slices * columns;
    const bool exists = row < g.key_dim;
    const StateView initial(g.initial, head / g.value_heads, head % g.value_heads);
    float state[columns] = {};
    if (exists && initial.data != nullptr) {
        initial.with_type([&](auto* data) {
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                state[c] = convert<float>(arch::load_global(
                    data + (row * initial.key_stride + (first + c) * initial.value_stride)));
            }
        });
    }
#pragma unroll 1
    for (int segment = 0; segment < g.segments - 1; ++segment) {
        const int64_t kept = (int64_t(head) * (g.segments - 1) + segment) * g.key_dim;
        float* const added = g.states + ((kept + row) * g.value_dim + first);
        const float* const transition = g.transitions + (kept * g.key_dim + row);
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            arch::store_shared(shared.address_of(row * columns + c),
                               float4{state[c], state[c + 1], state[c + 2], state[c + 3]});
        }
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            float4 four = {};
            if (exists) four = arch::load_global(reinterpret_cast<const float4*>(added + c));
            state[c] = four.x, state[c + 1] = four.y;
            state[c + 2] = four.z, state[c + 3] = four.w;
        }
        arch::sync_block();
#pragma unroll 1
        for (int from = 0; from < g.key_dim; from += SCAN_BATCH) {
            float m[SCAN_BATCH];
#pragma unroll
            for (int i = 0; i < SCAN_BATCH; ++i) {
                const bool there = exists && from + i < g.key_dim;
                m[i] = there ? arch::load_global(transition + int64_t(from + i) * g.key_dim) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < SCAN_BATCH; ++i) {
#pragma unroll
                for (int c = 0; c < columns; c += 4) {
                    const auto x =
                        arch::load_shared<float4>(shared.address_of((from + i) * columns + c));
                    state[c] = fmaf(m[i], x.x, state[c]);
                    state[c + 1] = fmaf(m[i], x.y, state[c + 1]);
                    state[c + 2] = fmaf(m[i], x.z, state[c + 2]);
                    state[c + 3] = fmaf(m[i], x.w, state[c + 3]);
                }
            }
        }
        if (exists) {
#pragma unroll
            for (int c = 0; c < columns; c += 4) {
                arch::store_global(reinterpret_cast<float4*>(added + c),
                                   float4{state[c], state[c + 1], state[c + 2], state[c + 3]});
            }
        }
        arch::sync_block();
    }
}

}  // namespace thunderkittens::recurrent::delta

namespace thunderkittens::recurrent {

template <int columns, bool portable>
void launch_delta_scan(const DeltaRuleParams& params, Stream stream) {
    const DeltaRuleProblem& p = params.problem;
    const int64_t states = delta_segments_kept(p, params.segments) * p.key_dim * p.value_dim;
    const int64_t slices = p.value_dim / columns;
    const delta::ScanGlobals globals{.initial = params.initial,
                                     .states = params.workspace,
                                     .transitions = params.workspace + states,
                                     .value_heads = int(p.value_heads),
                                     .key_dim = int(p.key_dim),
                                     .value_dim = int(p.value_dim),
                                     .slices = int(slices),
                                     .segments = params.segments};
    constexpr int bytes = delta::SCAN_THREADS * columns * int(sizeof(float)) + 1024;
    kittens::launch(delta::delta_scan_kernel<columns, portable>,
                    dim3(unsigned(p.sequences * p.value_heads * slices)), dim3(delta::SCAN_THREADS),
                    dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
