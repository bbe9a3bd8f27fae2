// What states_sm90.cuh computes for every GPU from compute capability 8.0 on: a block has four
// warps and one direction of one sequence, head, slice of the values and segment. A warp has 16
// columns of the values as rows of the state, in fp32 accumulators, from which the copies of 16
// bits go straight to memory. Two stages take 49 KB: two blocks share a multiprocessor of any GPU.
#pragma once

#include "csrc/recurrent/common/products_sm80.cuh"
#include "csrc/recurrent/gradient/states_sm90.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

struct StatesGlobals {
    Operand q, k, v, grad_out;
    const float* gates;
    void *before, *after;
    Sequences sequences;
    StateOperand initial, grad_final, grad_initial;
    float *segment_states, *segment_decays, *units;
    int heads, group_heads, slices, segments, key_dim, value_dim, runs;
    float scale;
    bool sums;  // of each segment alone, which begin with nothing
};

template <class K>
struct StatesShared {
    struct Stage {
        typename K::key_tile keys;
        typename K::value_tile values;
    } stages[2];
    TokenVector gates[2];
};

__device__ __forceinline__ Sequence sequence_of(const SlotTokens& at, bool packed) {
    return {at.sequence, packed ? 0 : at.sequence, at.begin, at.length};
}
// By a warp: what a slot has of a head.
__device__ __forceinline__ void load_gates(const TokenVector& to, const float* gates, int64_t at) {
    arch::cp_async<16>(to.address_of(4 * laneid()), gates + at * (2 * CHUNK) + 4 * laneid());
}

// `unit_of`, by memory that is free until all have read it.
template <class State>
__device__ __forceinline__ float state_unit(const State& state, TokenVector& scratch) {
    float most = linear_attention::warp_maximum(linear_attention::largest_magnitude(state));
    const int warp = own_warp();
    if (laneid() == 0) scratch.set(warp, most);
    arch::sync_block();
#pragma unroll
    for (int w = 0; w < WARPGROUP_WARPS; ++w) most = ::fmaxf(most, scratch.get(w));
    arch::sync_block();
    const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
    if (exponent < 14 || exponent > 127) return 1.0f;
    return arch::bit_cast<float>(uint32_t(127 - 13 + exponent) << 23);
}

template <class K>
__global__ __launch_bounds__(
    PORTABLE_THREADS,
    portable_blocks_per_sm(
        K::key_dim)) void gradient_portable_states_kernel(const __grid_constant__ StatesGlobals g) {
    using T = typename K::T;
    auto& shared = *reinterpret_cast<StatesShared<K>*>(shared_memory());
    const StatesWork work(g, int(blockIdx.x));
    const int count = work.end - work.begin, warp = own_warp();
    const Sequence sequence = sequence_of(work.tokens, g.sequences.cu_seqlens != nullptr);
    const auto load_chunk = [&](int i) {
        const int chunk = work.chunk(i), row = chunk * CHUNK, column = work.slice * VALUES;
        auto& to = shared.stages[i % 2];
        const Operand& keys = work.backwards ? g.q : g.k;
        const Operand& values = work.backwards ? g.grad_out : g.v;
        tile_copy<typename K::key_tile>::load(
            to.keys, address_in<T>(keys, sequence, work.head / g.group_heads, row, 0),
            keys.row_stride, sequence.length - row, g.key_dim);
        tile_copy<typename K::value_tile>::load(
            to.values, address_in<T>(values, sequence, work.head, row, column), values.row_stride,
            sequence.length - row, g.value_dim - column);
        if (warp == 0)
            load_gates(shared.gates[i % 2], g.gates,
                       int64_t(work.first_slot + chunk) * g.heads + work.head);
        arch::cp_async_commit();
    };
    if (count > 0) load_chunk(0);
    typename K::state state;
    const int64_t part = work.part(g.runs, g.segments);
    if (g.sums) {
        zero(state);
    } else if (g.segment_states != nullptr) {
        const float* from = g.segment_states + part * (VALUES * K::key_dim);
        for_each_pair(state, [&](float2& pair, int row, int column) {
            pair = arch::load_global(
                reinterpret_cast<const float2*>(from + (row * K::key_dim + column)));
        });
    } else {
        load_state(state, work.backwards ? g.grad_final : g.initial, work, g.value_dim, g.key_dim);
    }
    float decay = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        auto& from = shared.stages[i % 2];
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the one before
        float unit = 1.0f;
        if constexpr (K::in_units) {
            if (!g.sums) unit = state_unit(state, shared.gates[(i + 1) % 2]);
        }
        if (i + 1 < count) load_chunk(i + 1);
        if (!g.sums) {
            const int64_t slot = work.first_slot + work.chunk(i);
            const int64_t at = (slot * g.heads + work.head) * g.slices + work.slice;
            T* to = static_cast<T*>(work.backwards ? g.after : g.before) +
                    (at * VALUES + 16 * warp) * K::key_dim;
            if constexpr (K::in_units) {
                if (threadIdx.x == 0) arch::store_global(g.units + (2 * at + work.backwards), unit);
                typename K::state divided = state;
                scale_tile(divided, 1.0f / unit);
                attention::store_rows<T>(divided, to, K::key_dim, 16, K::key_dim);
            } else {
                attention::store_rows<T>(state, to, K::key_dim, 16, K::key_dim);
            }
        }
        const TokenVector& gates = shared.gates[i % 2];
        const float last = gates.get(CHUNK - 1);
        scale_tile(state, arch::exp2_approx(last));
        decay += last;
        const a_walker_of_columns<typename K::value_tile> values(from.values, 0, 16 * warp);
        const b_walker_of_rows<typename K::key_tile> keys(from.keys, 0, 0);
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            operand_a<T> a;
            values.load(a, 16 * j, 0, 0);
            scale_columns(a, [&](int token) -> float2 {
                const float2 c = arch::load_shared<float2>(gates.address_of(16 * j + token));
                if (work.backwards)
                    return {g.scale * arch::exp2_approx(c.x), g.scale * arch::exp2_approx(c.y)};
                const float2 w =
                    arch::load_shared<float2>(gates.address_of(CHUNK + 16 * j + token));
                return {w.x * arch::exp2_approx(last - c.x), w.y * arch::exp2_approx(last - c.y)};
            });
            add_tokens(state, a, keys, j);
        }
    }
    if (g.sums) {
        float* to = g.segment_states + part * (VALUES * K::key_dim);
        for_each_pair(state, [&](const float2& pair, int row, int column) {
            arch::store_global(reinterpret_cast<float2*>(to + (row * K::key_dim + column)), pair);
        });
        if (threadIdx.x == 0) arch::store_global(g.segment_decays + part, decay);
    } else if (work.backwards && work.segment == 0) {
        store_state(g.grad_initial, state, work, g.value_dim, g.key_dim);
    }
}

}  // namespace sm80

template <DType dtype, int key_dim>
void launch_portable_gradient_states(const GradientParams& params, const GradientWorkspace& w,
                                     bool sums, Stream stream) {
    using K = GradientTypes<dtype, key_dim>;
    static_assert(sizeof(sm80::StatesShared<K>) <= portable_gradient_states_bytes(key_dim));
    const RecurrentParams& call = params.forward;
    const RecurrentProblem& p = call.problem;
    const int64_t runs = states_of(p) * p.heads * slices_of(p);
    const sm80::StatesGlobals globals{.q = call.q,
                                      .k = call.k,
                                      .v = call.v,
                                      .grad_out = params.grad_out,
                                      .gates = w.gates,
                                      .before = w.before,
                                      .after = w.after,
                                      .sequences = Sequences(call),
                                      .initial = call.initial,
                                      .grad_final = params.grad_final,
                                      .grad_initial = params.grad_initial,
                                      .segment_states = w.segment_states,
                                      .segment_decays = w.segment_decays,
                                      .units = w.units,
                                      .heads = int(p.heads),
                                      .group_heads = int(heads_per_group(p)),
                                      .slices = int(slices_of(p)),
                                      .segments = params.segments,
                                      .key_dim = int(p.key_dim),
                                      .value_dim = int(p.value_dim),
                                      .runs = int(runs),
                                      .scale = call.scale,
                                      .sums = sums};
    kittens::launch({.blocks_per_sm = portable_blocks_per_sm(key_dim)},
                    sm80::gradient_portable_states_kernel<K>,
                    dim3(unsigned(2 * runs * params.segments)), dim3(sm80::PORTABLE_THREADS),
                    dim3(1), portable_gradient_states_bytes(key_dim), stream, globals);
}

}  // namespace thunderkittens::recurrent
