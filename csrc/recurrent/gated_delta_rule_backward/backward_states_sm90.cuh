// The second kernel of the gated delta rule's gradient: both recurrences, which know nothing of
// each other and run side by side. A block has 64 columns of the values of one head of a sequence
// and walks over its chunks, forwards for the states S before each chunk and U', or backwards for
// the gradients dS of the states behind each and Y (the formulas: backward.h). A warpgroup
// computes, a warp loads, and another one stores.
//
// A state is kept transposed, values as rows, in fp32 accumulators. So it is the operand of K S
// from registers, and so are the products that follow from it: the three of a chunk that depend on
// each other need no shared memory and no barrier in between, and the warps of the warpgroup meet
// in their products alone. K, Q, V or dO, H and P come by TMA into three stages; states and U' or
// Y leave by TMA from two buffers.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_prepare_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_gradient {

constexpr int DELTA_STATES_STAGES = 3;
constexpr int DELTA_STATES_THREADS = WARPGROUP_THREADS + 2 * WARP_THREADS;

template <class K>
struct DeltaStatesGlobals {
    using T = typename K::T;
    DeltaTokens<typename K::token_tile> q, k;
    DeltaTokens<typename K::square_tile> v, grad_out;
    tile_rows<typename K::square_tile> solved, scores;
    vector_rows<typename K::vectors> vectors;
    tile_rows<typename K::token_tile> states, grad_states;
    tile_rows<typename K::square_tile> values, grad_values;
    DeltaStates initial, grad_final, grad_initial;
    DeltaSequences sequences;
    int value_heads, ratio, slices, key_dim, value_dim;
    float scale;
};

template <class K>
struct DeltaStatesShared {
    struct Stage {
        typename K::token_tile q, k;
        typename K::square_tile values, solved, scores;  // of V or dO
        typename K::vectors vectors;
    };
    typename K::token_tile state[2];
    typename K::square_tile result[2];
    Stage stages[DELTA_STATES_STAGES];
    semaphore full[DELTA_STATES_STAGES], empty[DELTA_STATES_STAGES], written[2], stored[2];

    __device__ __forceinline__ void init() {
        for (int s = 0; s < DELTA_STATES_STAGES; ++s) {
            init_semaphore(full[s], 1);
            init_semaphore(empty[s], WARPGROUP_WARPS);
        }
        for (int s = 0; s < 2; ++s) {
            init_semaphore(written[s], WARPGROUP_WARPS);
            init_semaphore(stored[s], 1);
        }
        arch::mbarrier_init_fence();
    }
};

// The lane's elements of a state: f(value, column of the values, of the keys).
template <int key_dim, class F>
__device__ __forceinline__ void for_each_of_state(rt_fl<16, key_dim>& state, F f) {
    const int row = lane_row(), column = 2 * (laneid() % 4);
#pragma unroll
    for (int j = 0; j < key_dim / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2& pair = state.tiles[0][j].data[i];
            const int r = row + 8 * (i % 2), c = 16 * j + 8 * (i / 2) + column;
            f(pair.x, r, c);
            f(pair.y, r, c + 1);
        }
    }
}

template <class K>
struct DeltaRecurrence {
    using T = typename K::T;
    static constexpr int key_dim = K::key_dim;
    using state_tile = rt_fl<16, key_dim>;
    using square = rt_fl<16, 64>;
    using operand = rt<T, 16, 64>;
    using Stage = typename DeltaStatesShared<K>::Stage;

    const DeltaStatesGlobals<K>& g;
    DeltaStatesShared<K>& shared;
    DeltaSequence sequence;
    int index, head, value_head, slice;  // of the sequence, of the keys
    bool backwards;

    __device__ __forceinline__ int count() const { return sequence.chunks(); }
    __device__ __forceinline__ int chunk_of(int n) const { return backwards ? count() - 1 - n : n; }
    // Of the workspace's tiles: of a chunk, and of a chunk and slice.
    __device__ __forceinline__ int chunk_at(int n) const {
        return (sequence.b * g.value_heads + value_head) * g.sequences.slots + sequence.first_slot +
               chunk_of(n);
    }
    __device__ __forceinline__ int tile_at(int n) const { return chunk_at(n) * g.slices + slice; }

    // By one thread.
    __device__ __forceinline__ void load(int n) {
        Stage& to = shared.stages[n % DELTA_STATES_STAGES];
        semaphore& full = shared.full[n % DELTA_STATES_STAGES];
        const int row = chunk_of(n) * DELTA_CHUNK, at = chunk_at(n);
        wait(shared.empty[n % DELTA_STATES_STAGES], n / DELTA_STATES_STAGES % 2 ^ 1);
        if (backwards) {
            tma::expect(full, to.q, to.k, to.values, to.solved, to.scores, to.vectors);
            g.q.load(to.q, sequence, head, row, 0, full);
            tma::load_async(to.scores, g.scores, {at, 0}, full);
        } else {
            tma::expect(full, to.k, to.values, to.solved, to.vectors);
        }
        g.k.load(to.k, sequence, head, row, 0, full);
        (backwards ? g.grad_out : g.v)
            .load(to.values, sequence, value_head, row, slice * DELTA_VALUES, full);
        tma::load_async(to.solved, g.solved, {at, 0}, full);
        tma::load_async(to.vectors, g.vectors, {at, 0}, full);
    }

    // Without branches, so that all loads are on their way together.
    template <class From>
    __device__ __forceinline__ void load_elements(state_tile& state,
                                                  const DeltaStates& from) const {
        const auto* first = static_cast<const From*>(from.data) + place_of(from);
        const int rows = g.value_dim - slice * DELTA_VALUES;
        for_each_of_state(state, [&](float& x, int row, int column) {
            const bool exists = row < rows && column < g.key_dim;
            const float value =
                convert<float>(arch::load_global(first + ::min(row, rows - 1) * from.value_stride +
                                                 ::min(column, g.key_dim - 1) * from.key_stride));
            x = exists ? value : 0.0f;
        });
    }
    template <class To>
    __device__ __forceinline__ void store_elements(state_tile& state, const DeltaStates& to) const {
        auto* first = static_cast<To*>(to.data) + place_of(to);
        const int rows = g.value_dim - slice * DELTA_VALUES;
        for_each_of_state(state, [&](float& x, int row, int column) {
            if (row >= rows || column >= g.key_dim) return;
            arch::store_global(first + row * to.value_stride + column * to.key_stride,
                               convert<To>(x));
        });
    }
    // Of the slice's first element.
    __device__ __forceinline__ int64_t place_of(const DeltaStates& x) const {
        return index * x.sequence_stride + value_head * x.head_stride +
               slice * DELTA_VALUES * x.value_stride;
    }
    __device__ __forceinline__ void load_state(state_tile& state, const DeltaStates& from) const {
        if (from.data == nullptr || slice * DELTA_VALUES >= g.value_dim)
            zero(state);
        else if (from.is_fp32)
            load_elements<float>(state, from);
        else
            load_elements<bf16>(state, from);
    }
    __device__ __forceinline__ void store_state(state_tile& state, const DeltaStates& to) const {
        if (to.data == nullptr) return;
        if (to.is_fp32)
            store_elements<float>(state, to);
        else
            store_elements<bf16>(state, to);
    }

    // The state as an operand, which also goes to its tile.
    __device__ __forceinline__ void publish(rt<T, 16, key_dim>& to, const state_tile& state,
                                            int n) {
        scale_into(to, state, [](int, bool) { return float2{1.0f, 1.0f}; });
        wait(shared.stored[n % 2], n / 2 % 2 ^ 1);
        warpgroup::store(shared.state[n % 2], to);
    }
    // By one thread: the tiles of a step leave.
    __device__ __forceinline__ void store(int n) {
        wait(shared.written[n % 2], n / 2 % 2);
        tma::store_async(backwards ? g.grad_states : g.states, shared.state[n % 2],
                         {tile_at(n), 0});
        tma::store_async(backwards ? g.grad_values : g.values, shared.result[n % 2],
                         {tile_at(n), 0});
        tma::store_async_read_wait();
        arrive(shared.stored[n % 2]);
    }
    // U' or Y, with which the tiles of a step are written.
    __device__ __forceinline__ void hand_over(const square& result, int n) {
        warpgroup::store(shared.result[n % 2], result);
        signal_by_warp(shared.written[n % 2]);
    }
    static __device__ __forceinline__ float2 product_of(const Stage& stage, DeltaVector a,
                                                        DeltaVector b, int column) {
        const float2 x = vector_pair(stage.vectors, a, column);
        const float2 y = vector_pair(stage.vectors, b, column);
        return {x.x * y.x, x.y * y.y};
    }

    // R = V - exp(c) K S in x, which is K S.
    __device__ __forceinline__ void subtract_from_values(square& x, Stage& stage) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            rt_base<T, row_l> v;
            load_transposed(v, stage.values, 16 * j, 16 * warpgroup::warpid());
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                const float2 e = vector_pair(stage.vectors, EXP_C, column);
                const float2 value = unpack_pair<T>(v.data[i]);
                float2& pair = x.tiles[0][j].data[i];
                pair = {fmaf(-e.x, pair.x, value.x), fmaf(-e.y, pair.y, value.y)};
            }
        }
    }

    __device__ __forceinline__ void forwards() {
        state_tile state;
        load_state(state, g.initial);
#pragma unroll 1
        for (int n = 0; n < count(); ++n) {
            Stage& stage = shared.stages[n % DELTA_STATES_STAGES];
            rt<T, 16, key_dim> before;
            publish(before, state, n);
            wait(shared.full[n % DELTA_STATES_STAGES], n / DELTA_STATES_STAGES % 2);
            square u;
            operand weighted;
            warpgroup::mm_ABt(u, before, stage.k);
            warpgroup::mma_async_wait<0>(u);
            subtract_from_values(u, stage);
            scale_into(weighted, u,
                       [&](int column, bool) { return vector_pair(stage.vectors, BETA, column); });
            warpgroup::mma_ABt(u, weighted, stage.solved);
            scale_all(state, vector_at(stage.vectors, EXP_C, DELTA_CHUNK - 1));
            warpgroup::mma_async_wait<0>(u);
            operand added;
            scale_into(added, u,
                       [&](int column, bool) { return product_of(stage, EXP_REST, BETA, column); });
            warpgroup::mma_AB(state, added, stage.k);
            hand_over(u, n);
            warpgroup::mma_async_wait<0>(state);
            signal_by_warp(shared.empty[n % DELTA_STATES_STAGES]);
        }
    }

    __device__ __forceinline__ void backwards_over_chunks() {
        state_tile state;
        load_state(state, g.grad_final);
#pragma unroll 1
        for (int n = 0; n < count(); ++n) {
            Stage& stage = shared.stages[n % DELTA_STATES_STAGES];
            rt<T, 16, key_dim> behind;
            publish(behind, state, n);
            wait(shared.full[n % DELTA_STATES_STAGES], n / DELTA_STATES_STAGES % 2);
            square through, y;
            operand outputs, weighted;
            warpgroup::mm_ABt(through, behind, stage.k);
            warpgroup::mm_AtB(y, stage.values, stage.scores);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                load_transposed(outputs.tiles[0][j], stage.values, 16 * j,
                                16 * warpgroup::warpid());
            }
            scale_into(outputs, outputs, [&](int column, bool) {
                const float2 e = vector_pair(stage.vectors, EXP_C, column);
                return float2{g.scale * e.x, g.scale * e.y};
            });
            scale_all(state, vector_at(stage.vectors, EXP_C, DELTA_CHUNK - 1));
            warpgroup::mma_AB(state, outputs, stage.q);
            warpgroup::mma_async_wait<1>(through);
            warpgroup::mma_async_wait<1>(y);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                    const float2 e = vector_pair(stage.vectors, EXP_REST, column);
                    const float2 x = through.tiles[0][j].data[i];
                    float2& pair = y.tiles[0][j].data[i];
                    pair = {fmaf(e.x, x.x, pair.x), fmaf(e.y, x.y, pair.y)};
                }
            }
            scale_into(weighted, y,
                       [&](int column, bool) { return vector_pair(stage.vectors, BETA, column); });
            warpgroup::mma_AB(y, weighted, stage.solved);
            warpgroup::mma_async_wait<0>(y);
            operand removed;
            scale_into(removed, y, [&](int column, bool) {
                const float2 f = product_of(stage, EXP_C, BETA, column);
                return float2{-f.x, -f.y};
            });
            warpgroup::mma_AB(state, removed, stage.k);
            hand_over(y, n);
            warpgroup::mma_async_wait<0>(state);
            signal_by_warp(shared.empty[n % DELTA_STATES_STAGES]);
        }
        store_state(state, g.grad_initial);
    }

    __device__ __forceinline__ void run() {
        const int warp = arch::warp_uniform(warpid());
        if (warp < WARPGROUP_WARPS) {
            if (backwards)
                backwards_over_chunks();
            else
                forwards();
        } else if (laneid() == 0) {
            for (int n = 0; n < count(); ++n) {
                if (warp == WARPGROUP_WARPS)
                    load(n);
                else
                    store(n);
            }
            if (warp > WARPGROUP_WARPS) tma::store_async_wait();
        }
    }
};

template <class K>
__global__ __launch_bounds__(DELTA_STATES_THREADS, 1) void delta_states_kernel(
    const __grid_constant__ DeltaStatesGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DeltaStatesShared<K>>();
    if (first_thread()) shared.init();
    arch::wait_for_dependencies();
    arch::sync_block();
    int index = int(blockIdx.x);
    const bool backwards = index % 2 == 1;
    index /= 2;
    const int slice = index % g.slices;
    index /= g.slices;
    const int value_head = index % g.value_heads, s = index / g.value_heads;
    DeltaRecurrence<K>{
        g, shared, g.sequences.sequence(s), s, value_head / g.ratio, value_head, slice, backwards}
        .run();
}

}  // namespace delta_gradient

template <DType dtype, int key_dim>
void launch_delta_states(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_gradient;
    using K = DeltaTiles<dtype, key_dim>;
    constexpr int bytes = delta_states_bytes(key_dim);
    static_assert(sizeof(DeltaStatesShared<K>) + 1024 <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int64_t chunks = delta_chunks(p), tiles = chunks * params.config.slices;
    using square = typename K::square_tile;
    using token = typename K::token_tile;
    const DeltaStatesGlobals<K> globals{
        .q = {delta_operand(params, call.q, w.q), p, p.heads, p.key_dim},
        .k = {delta_operand(params, call.k, w.k), p, p.heads, p.key_dim},
        .v = {call.v, p, p.value_heads, p.value_dim},
        .grad_out = {params.grad_out, p, p.value_heads, p.value_dim},
        .solved = tile_rows_of<square>(params, w.solved, chunks),
        .scores = tile_rows_of<square>(params, w.scores, chunks),
        .vectors = vector_rows_of<typename K::vectors>(params, w.vectors, chunks),
        .states = tile_rows_of<token>(params, w.states, tiles),
        .grad_states = tile_rows_of<token>(params, w.grad_states, tiles),
        .values = tile_rows_of<square>(params, w.values, tiles),
        .grad_values = tile_rows_of<square>(params, w.grad_values, tiles),
        .initial = call.initial,
        .grad_final = call.final,
        .grad_initial = params.grad_initial,
        .sequences = call,
        .value_heads = int(p.value_heads),
        .ratio = int(p.value_heads / p.heads),
        .slices = params.config.slices,
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .scale = call.scale};
    const int64_t blocks = 2 * p.sequences * p.value_heads * params.config.slices;
    kittens::launch({.dependent = true}, delta_states_kernel<K>, dim3(unsigned(blocks)),
                    dim3(DELTA_STATES_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
