// The states between the segments of a sequence: S <- M S + L for one segment after the other, in
// fp32. A block has a few columns of the states of a head. For the product a thread has a row of M
// and a share of the keys: these elements of M, whose columns are adjacent in memory, come into one
// of two sets of registers while the segment before is computed with the other, and S is in shared
// memory. The sums of the shares and L then are what a thread has two elements of. The portable
// kernel is the same.
#pragma once

#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int SCAN_ROWS = int(DELTA_MAX_KEY_DIM), SCAN_SHARES = DELTA_SCAN_THREADS / SCAN_ROWS,
              SCAN_KEYS = SCAN_ROWS / SCAN_SHARES;

struct ScanGlobals {
    DeltaStates initial;
    float *states, *transitions;  // of all segments but the last, see delta_workspace()
    int value_heads, key_dim, value_dim, slices, segments;
};

template <int columns>
struct ScanShared {
    sv<float, SCAN_ROWS * columns> state;
    sv<float, SCAN_SHARES * SCAN_ROWS * columns> parts;
};

template <int columns, bool portable>
__global__ __launch_bounds__(DELTA_SCAN_THREADS) void delta_scan_kernel(
    const __grid_constant__ ScanGlobals g) {
    static_assert(columns % 4 == 0 && SCAN_ROWS * columns == 2 * DELTA_SCAN_THREADS);
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<ScanShared<columns>>();
    const int thread = int(threadIdx.x), head = int(blockIdx.x) / g.slices;
    const int first = int(blockIdx.x) % g.slices * columns;
    const int row = thread % SCAN_ROWS, share = thread / SCAN_ROWS;

    // Of M, clamped addresses, so that all loads are on their way together.
    float transitions[2][SCAN_KEYS];
    const int64_t kept = int64_t(head) * (g.segments - 1) * g.key_dim;
    const float* transition = g.transitions + (kept * g.key_dim + ::min(row, g.key_dim - 1));
    const auto load_transition = [&](float(&m)[SCAN_KEYS]) {
#pragma unroll
        for (int i = 0; i < SCAN_KEYS; ++i)
            m[i] = arch::load_global(transition +
                                     ::min(share * SCAN_KEYS + i, g.key_dim - 1) * g.key_dim);
        transition += g.key_dim * g.key_dim;
    };
    // Of the states, the thread's two elements.
    const int own_row = 2 * thread / columns, own_column = first + 2 * thread % columns;
    const bool exists = own_row < g.key_dim;
    float* place = g.states + ((kept + own_row) * g.value_dim + own_column);
    float2 state = {}, added = {};
    const StateView initial(g.initial, head / g.value_heads, head % g.value_heads);
    if (exists && initial.data != nullptr) {
        initial.with_type([&](auto* data) {
            const auto* from =
                data + (own_row * initial.key_stride + own_column * initial.value_stride);
            state.x = convert<float>(arch::load_global(from));
            state.y = convert<float>(arch::load_global(from + initial.value_stride));
        });
    }
    load_transition(transitions[0]);
    if (exists) added = arch::load_global(reinterpret_cast<const float2*>(place));
    const auto pass = [&](const float(&m)[SCAN_KEYS], float(&ahead)[SCAN_KEYS], int segment) {
        const bool more = segment + 2 < g.segments;
        if (more) load_transition(ahead);
        arch::store_shared(shared.state.address_of(2 * thread), state);
        arch::sync_block();
        float sums[columns] = {};
#pragma unroll
        for (int i = 0; i < SCAN_KEYS; ++i) {
#pragma unroll
            for (int c = 0; c < columns; c += 4) {
                const auto x = arch::load_shared<float4>(
                    shared.state.address_of((share * SCAN_KEYS + i) * columns + c));
                sums[c] = fmaf(m[i], x.x, sums[c]);
                sums[c + 1] = fmaf(m[i], x.y, sums[c + 1]);
                sums[c + 2] = fmaf(m[i], x.z, sums[c + 2]);
                sums[c + 3] = fmaf(m[i], x.w, sums[c + 3]);
            }
        }
#pragma unroll
        for (int c = 0; c < columns; c += 4) {
            arch::store_shared(shared.parts.address_of(thread * columns + c),
                               float4{sums[c], sums[c + 1], sums[c + 2], sums[c + 3]});
        }
        arch::sync_block();
        state = added;
#pragma unroll
        for (int s = 0; s < SCAN_SHARES; ++s) {
            const auto part = arch::load_shared<float2>(
                shared.parts.address_of(s * SCAN_ROWS * columns + 2 * thread));
            state = {state.x + part.x, state.y + part.y};
        }
        if (!exists) {
            state = {};
            return;
        }
        arch::store_global(reinterpret_cast<float2*>(place), state);
        place += g.key_dim * g.value_dim;
        if (more) added = arch::load_global(reinterpret_cast<const float2*>(place));
    };
#pragma unroll 1
    for (int segment = 0; segment < g.segments - 1; segment += 2) {
        pass(transitions[0], transitions[1], segment);
        if (segment + 2 < g.segments) pass(transitions[1], transitions[0], segment + 1);
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
    constexpr int bytes = delta_scan_bytes(columns);
    static_assert(sizeof(delta::ScanShared<columns>) + 1024 <= bytes);
    kittens::launch(delta::delta_scan_kernel<columns, portable>,
                    dim3(unsigned(p.sequences * p.value_heads * slices)), dim3(DELTA_SCAN_THREADS),
                    dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
