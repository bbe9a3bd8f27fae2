// The states that the gradients of the chunks need, on Hopper: of each head and 64 columns of the
// values the state before each chunk, forwards, and the gradient of the state behind it, backwards:
//   forwards    S  <- e^(c_64) S  + sum over j of w_j e^(c_64 - c_j) v_j k_j^T
//   backwards   dS <- e^(c_64) dS + scale sum over i of e^(c_i) dO_i q_i^T
// A block is a warpgroup that loads for itself and has one direction of one sequence, head, slice
// of the values and segment. The state stays in fp32 registers, values as rows. Its product takes
// v^T or dO^T from registers, where each token is weighted, and k or q from shared memory; what
// leaves for memory is a copy in the operands' dtype.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int GRADIENT_STATES_STAGES = 2;

template <class K>
struct StatesGlobals {
    Rows<typename K::key_tile> q, k;
    Rows<typename K::value_tile> v, grad_out;
    TokenNumbers gates;
    typename K::state_layout before, after;
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
    } stages[GRADIENT_STATES_STAGES];
    typename K::state_tile out;
    TokenVector gates[GRADIENT_STATES_STAGES];
    sv<float, 2 * WARPGROUP_WARPS> scratch;
    semaphore full[GRADIENT_STATES_STAGES];
};

// What a block works on.
struct StatesWork {
    bool backwards;
    int sequence, head, slice, segment, run;
    SlotTokens tokens;
    int first_slot, begin, end;  // chunks

    template <class Globals>
    __device__ __forceinline__ StatesWork(const Globals& g, int index) {
        backwards = index % 2 == 1;
        segment = index / 2 % g.segments;
        run = index / 2 / g.segments;
        slice = run % g.slices;
        head = run / g.slices % g.heads;
        sequence = run / g.slices / g.heads;
        const int2 found = g.sequences.tokens(sequence);
        tokens = {sequence, found.x, found.y, 0};
        first_slot = g.sequences.first_slot(sequence, found.x);
        const int chunks = (found.y + CHUNK - 1) / CHUNK;
        const int share = (chunks + g.segments - 1) / g.segments;
        begin = ::min(segment * share, chunks);
        end = ::min(begin + share, chunks);
    }
    __device__ __forceinline__ int chunk(int i) const {
        return backwards ? end - 1 - i : begin + i;
    }
    // Of the segments' states: (2, runs, segments).
    __device__ __forceinline__ int64_t part(int runs, int segments) const {
        return (int64_t(backwards) * runs + run) * segments + segment;
    }
};

// Calls f(two neighbours of a state in registers, value, key).
template <class State, class F>
__device__ __forceinline__ void for_each_pair(State& state, F f) {
#pragma unroll
    for (int j = 0; j < State::width; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f(state.tiles[0][j].data[i], lane_row() + 8 * (i % 2),
              16 * j + 8 * (i / 2) + 2 * (laneid() % 4));
        }
    }
}

template <class State>
__device__ __forceinline__ void load_state(State& state, const StateOperand& from,
                                           const StatesWork& work, int value_dim, int key_dim) {
    zero(state);
    if (from.data == nullptr) return;
    const float* data =
        from.data + (work.sequence * from.sequence_stride + work.head * from.head_stride);
    for_each_pair(state, [&](float2& pair, int row, int column) {
        const int value = work.slice * VALUES + row;
        if (value >= value_dim) return;
        const float* at = data + (value * from.value_stride + column * from.key_stride);
        if (column < key_dim) pair.x = arch::load_global(at);
        if (column + 1 < key_dim) pair.y = arch::load_global(at + from.key_stride);
    });
}
template <class State>
__device__ __forceinline__ void store_state(const StateOperand& to, State& state,
                                            const StatesWork& work, int value_dim, int key_dim) {
    if (to.data == nullptr) return;
    float* data = to.data + (work.sequence * to.sequence_stride + work.head * to.head_stride);
    for_each_pair(state, [&](const float2& pair, int row, int column) {
        const int value = work.slice * VALUES + row;
        if (value >= value_dim) return;
        float* at = data + (value * to.value_stride + column * to.key_stride);
        if (column < key_dim) arch::store_global(at, pair.x);
        if (column + 1 < key_dim) arch::store_global(at + to.key_stride, pair.y);
    });
}

// The transposed tile of values as an operand, its tokens weighted: of a chunk's cumulative decays
// and weights in `gates`.
template <class K>
__device__ __forceinline__ void load_weighted(typename K::operand& to,
                                              typename K::value_tile& values,
                                              const TokenVector& gates, bool backwards, float last,
                                              float scale) {
    using T = typename K::T;
    rt<T, CHUNK, 16, col_l> columns;
    warp::load(columns, values.template subtile<CHUNK, 16>({0, warpgroup::warpid()}));
#pragma unroll
    for (int j = 0; j < CHUNK / 16; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = 16 * j + 8 * half + 2 * (laneid() % 4);
            const float2 c = arch::load_shared<float2>(gates.address_of(token));
            float2 factor;
            if (backwards) {
                factor = {scale * arch::exp2_approx(c.x), scale * arch::exp2_approx(c.y)};
            } else {
                const float2 w = arch::load_shared<float2>(gates.address_of(CHUNK + token));
                factor = {w.x * arch::exp2_approx(last - c.x), w.y * arch::exp2_approx(last - c.y)};
            }
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                const float2 x = unpack_pair<T>(columns.tiles[j][0].data[i]);
                to.tiles[0][j].data[i] = pack_pair<T>(factor.x * x.x, factor.y * x.y);
            }
        }
    }
}

// The power of two that a state in half is divided by, so that its copy does not overflow. Rounds
// take turns with the places of the warps' maxima.
template <class State>
__device__ __forceinline__ float unit_of(const State& state, const sv<float, 8>& scratch,
                                         int round) {
    float most = linear_attention::warp_maximum(linear_attention::largest_magnitude(state));
    const int first = round % 2 * WARPGROUP_WARPS;
    if (laneid() == 0) arch::store_shared(scratch.address_of(first + warpgroup::warpid()), most);
    warpgroup::sync(1);
#pragma unroll
    for (int w = 0; w < WARPGROUP_WARPS; ++w) most = ::fmaxf(most, scratch.get(first + w));
    const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
    if (exponent < 14 || exponent > 127) return 1.0f;
    return arch::bit_cast<float>(uint32_t(127 - 13 + exponent) << 23);
}
template <class State>
__device__ __forceinline__ void store_divided(const any_shared_tile auto& to, const State& state,
                                              float unit) {
    State divided = state;
    scale_tile(divided, 1.0f / unit);
    warpgroup::store(to, divided);
}

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS, 3) void gradient_states_kernel(
    const __grid_constant__ StatesGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<StatesShared<K>>();
    if (first_thread()) {
        for (auto& full : shared.full) init_semaphore(full, 1);
        arch::mbarrier_init_fence();
    }
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const StatesWork work(g, int(blockIdx.x));
    const int count = work.end - work.begin;
    const auto load_chunk = [&](int i) {
        const int chunk = work.chunk(i), stage = i % GRADIENT_STATES_STAGES;
        SlotTokens at = work.tokens;
        at.chunk = chunk;
        auto& to = shared.stages[stage];
        semaphore& full = shared.full[stage];
        tma::expect(full, to.keys, to.values, shared.gates[stage]);
        const auto& keys = work.backwards ? g.q : g.k;
        const auto& values = work.backwards ? g.grad_out : g.v;
        load_rows(to.keys, keys, at, work.head / g.group_heads, 0, full);
        load_rows(to.values, values, at, work.head, work.slice * VALUES, full);
        tma::load_async(shared.gates[stage], g.gates,
                        {0, 0, (work.first_slot + chunk) * g.heads + work.head, 0}, full);
    };
    arch::sync_block();
    if (first_thread()) {
        for (int i = 0; i < GRADIENT_STATES_STAGES && i < count; ++i) load_chunk(i);
    }
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
        const int stage = i % GRADIENT_STATES_STAGES;
        auto& from = shared.stages[stage];
        if (!g.sums) {
            float unit = 1.0f;
            if constexpr (K::in_units) {
                unit = unit_of(state, shared.scratch, i);
                store_divided(shared.out, state, unit);
            } else {
                warpgroup::store(shared.out, state);
            }
            arch::fence_async_shared();
            warpgroup::sync(1);
            if (first_thread()) {
                const int slot = work.first_slot + work.chunk(i);
                const int at = (slot * g.heads + work.head) * g.slices + work.slice;
                if constexpr (K::in_units)
                    arch::store_global(g.units + (2 * int64_t(at) + work.backwards), unit);
                tma::store_async(work.backwards ? g.after : g.before, shared.out, {at, 0, 0});
            }
        }
        wait(shared.full[stage], i / GRADIENT_STATES_STAGES % 2);
        const float last = shared.gates[stage].get(CHUNK - 1);
        typename K::operand values;
        load_weighted<K>(values, from.values, shared.gates[stage], work.backwards, last, g.scale);
        scale_tile(state, arch::exp2_approx(last));
        decay += last;
        warpgroup::mma_AB(state, values, from.keys);
        warpgroup::mma_async_wait<0>(state);
        if (first_thread()) tma::store_async_read_wait();
        warpgroup::sync(1);  // the stage and the tile of the copy are free
        if (first_thread() && i + GRADIENT_STATES_STAGES < count)
            load_chunk(i + GRADIENT_STATES_STAGES);
    }
    if (g.sums) {
        float* to = g.segment_states + part * (VALUES * K::key_dim);
        for_each_pair(state, [&](const float2& pair, int row, int column) {
            arch::store_global(reinterpret_cast<float2*>(to + (row * K::key_dim + column)), pair);
        });
        if (first_thread()) arch::store_global(g.segment_decays + part, decay);
    } else if (work.backwards && work.segment == 0) {
        store_state(g.grad_initial, state, work, g.value_dim, g.key_dim);
    }
    if (first_thread()) tma::store_async_wait();
}

template <class K>
typename K::state_layout state_layout_of(void* data, const RecurrentProblem& p) {
    return typename K::state_layout(static_cast<typename K::T*>(data), nullptr,
                                    slots_of(p) * p.heads * slices_of(p), nullptr, nullptr);
}
inline TokenNumbers token_numbers_of(float* data, const RecurrentProblem& p) {
    return TokenNumbers(data, nullptr, nullptr, slots_of(p) * p.heads, nullptr);
}

template <DType dtype, int key_dim>
void launch_gradient_states(const GradientParams& params, const GradientWorkspace& w, bool sums,
                            Stream stream) {
    using K = GradientTypes<dtype, key_dim>;
    static_assert(sizeof(StatesShared<K>) + 1024 <= GRADIENT_STATES_BYTES);
    const RecurrentParams& call = params.forward;
    const RecurrentProblem& p = call.problem;
    const int64_t runs = states_of(p) * p.heads * slices_of(p);
    const StatesGlobals<K> globals{
        .q = rows_of<typename K::key_tile>(call.q, p, p.groups, p.key_dim),
        .k = rows_of<typename K::key_tile>(call.k, p, p.groups, p.key_dim),
        .v = rows_of<typename K::value_tile>(call.v, p, p.heads, p.value_dim),
        .grad_out = rows_of<typename K::value_tile>(params.grad_out, p, p.heads, p.value_dim),
        .gates = token_numbers_of(w.gates, p),
        .before = state_layout_of<K>(w.before, p),
        .after = state_layout_of<K>(w.after, p),
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
    kittens::launch({.dependent = true, .blocks_per_sm = 3}, gradient_states_kernel<K>,
                    dim3(unsigned(2 * runs * params.segments)), dim3(WARPGROUP_THREADS), dim3(1),
                    GRADIENT_STATES_BYTES, stream, globals);
}

}  // namespace thunderkittens::recurrent
