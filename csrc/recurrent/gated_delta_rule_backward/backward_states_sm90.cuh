// The second kernel of the gated delta rule's gradient: both recurrences, which know nothing of
// each other and run side by side. A block has 64 columns of the values of one head of a sequence
// and walks over its chunks, forwards for the states S before each chunk and U', or backwards for
// the gradients dS of the states behind each and Y (the formulas: backward.h). A warpgroup
// computes, a warp loads, and another one stores.
//
// Where heads are few, sequences are cut into segments. What a segment makes of a state is
// M S + L, and M^T dS + L' backwards, exactly. A launch before makes L and L' of all segments but
// the last of their direction, and M of those in between, as states that begin as the identity,
// without values. The first segment of a direction needs no M: it begins with the state that is
// given, and its tiles are final. The scan of the forward (scan_sm90.cuh) makes the states between;
// then the other segments run side by side.
//
// A state is kept transposed, values as rows, in fp32 accumulators. So it is the operand of K S
// from registers, and so are the products that follow from it: the three of a chunk that depend on
// each other need no shared memory and no barrier in between, and the warps of the warpgroup meet
// in their products alone. K, Q, V or dO, H and P come by TMA into three stages; states and U' or
// Y leave by TMA from two buffers.
//
// Two blocks with slices of the same values are a cluster: K, Q, H and P are the same for both, and
// each loads one half of them for the two. Only products read these: so an arrival at the other
// block's semaphore need not be a release, which would wait for the warp's stores.
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
    float *first_states, *segment_states, *transitions;
    int count, value_heads, ratio, slices, key_dim, value_dim, segments, blocks_of_head;
    bool summaries, pairs;  // whether two blocks share what they load
    float scale;
};

// What a block does: a slice of the values of a segment, which is the `step`th of its direction, or
// of the columns of its transition.
template <class K>
struct DeltaStatesWork {
    int sequence, value_head, slice, step;
    bool backwards = false, transition = false;

    __device__ __forceinline__ explicit DeltaStatesWork(const DeltaStatesGlobals<K>& g) {
        const int both = 2 * g.slices * (g.segments > 1 ? g.segments - 1 : 1);
        int index = int(blockIdx.x) % g.blocks_of_head;
        const int head = int(blockIdx.x) / g.blocks_of_head;
        value_head = head % g.value_heads;
        sequence = head / g.value_heads;
        if (index < both) {
            slice = index % g.slices;
            backwards = index / g.slices % 2 == 1;
            step = index / g.slices / 2 + (g.segments > 1 && !g.summaries ? 1 : 0);
        } else {
            index -= both;
            transition = true;
            slice = index % ((g.key_dim + 63) / 64);
            step = 1 + index / ((g.key_dim + 63) / 64);
        }
    }
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

    __device__ __forceinline__ void init(bool pairs) {
        for (int s = 0; s < DELTA_STATES_STAGES; ++s) {
            init_semaphore(full[s], 1);
            init_semaphore(empty[s], pairs ? 2 * WARPGROUP_WARPS : WARPGROUP_WARPS);
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
    const DeltaStatesWork<K> work;
    DeltaSequence sequence;
    int head, first, length;  // of the keys; the segment's chunks
    uint32_t rank;            // in the pair
    // Whether states, their gradients, U' and Y are kept: else only what is left in the end.
    bool keeps;

    __device__ __forceinline__ DeltaRecurrence(const DeltaStatesGlobals<K>& _g,
                                               DeltaStatesShared<K>& _shared)
        : g(_g),
          shared(_shared),
          work(_g),
          sequence(_g.sequences.sequence(work.sequence)),
          head(work.value_head / _g.ratio),
          rank(_g.pairs ? arch::cluster_rank() : 0) {
        const int segment = work.backwards ? g.segments - 1 - work.step : work.step;
        const int chunks = sequence.chunks(), part = (chunks + g.segments - 1) / g.segments;
        first = ::min(segment * part, chunks);
        length = ::min(part, chunks - first);
        keeps = !g.summaries || work.step == 0;
    }

    __device__ __forceinline__ int chunk_of(int n) const {
        return first + (work.backwards ? length - 1 - n : n);
    }
    // Of the workspace's tiles: of a chunk, and of a chunk and slice.
    __device__ __forceinline__ int chunk_at(int n) const {
        return (sequence.b * g.value_heads + work.value_head) * g.sequences.slots +
               sequence.first_slot + chunk_of(n);
    }
    __device__ __forceinline__ int tile_at(int n) const {
        return chunk_at(n) * g.slices + work.slice;
    }

    // By one thread.
    __device__ __forceinline__ void load(int n) {
        Stage& to = shared.stages[n % DELTA_STATES_STAGES];
        semaphore& full = shared.full[n % DELTA_STATES_STAGES];
        const int row = chunk_of(n) * DELTA_CHUNK, at = chunk_at(n);
        wait(shared.empty[n % DELTA_STATES_STAGES], n / DELTA_STATES_STAGES % 2 ^ 1);
        if (work.transition)
            tma::expect(full, to.k, to.solved, to.vectors);
        else if (work.backwards)
            tma::expect(full, to.q, to.k, to.values, to.solved, to.scores, to.vectors);
        else
            tma::expect(full, to.k, to.values, to.solved, to.vectors);
        if (!work.transition) {
            (work.backwards ? g.grad_out : g.v)
                .load(to.values, sequence, work.value_head, row, work.slice * DELTA_VALUES, full);
        }
        const auto tokens = [&](auto& tile, const auto& from, uint32_t by) {
            if (!g.pairs)
                from.load(tile, sequence, head, row, 0, full);
            else if (rank == by)
                from.load_shared(tile, sequence, head, row, full, 3);
        };
        const auto of_chunk = [&](auto& tile, const auto& from, uint32_t by) {
            if (!g.pairs)
                tma::load_async(tile, from, {at, 0}, full);
            else if (rank == by)
                tma::cluster::load_async(tile, from, {at, 0}, full, 3);
        };
        tokens(to.k, g.k, 0);
        of_chunk(to.solved, g.solved, work.backwards ? 0 : 1);
        tma::load_async(to.vectors, g.vectors, {at, 0}, full);
        if (!work.backwards) return;
        tokens(to.q, g.q, 1);
        of_chunk(to.scores, g.scores, 1);
    }
    // By each warp, which has read a stage: to the blocks that fill it.
    __device__ __forceinline__ void release(semaphore& empty) const {
        arch::sync_warp();
        if (laneid() != 0) return;
        arrive(empty);
        if (g.pairs) arrive_remote_relaxed(empty, int(rank) ^ 1);
    }

    // The slice's columns of the values, or of the transition.
    __device__ __forceinline__ int columns() const {
        return (work.transition ? g.key_dim : g.value_dim) - work.slice * DELTA_VALUES;
    }
    // Of the slice's first element.
    __device__ __forceinline__ int64_t place_of(const DeltaStates& x) const {
        return work.sequence * x.sequence_stride + work.value_head * x.head_stride +
               work.slice * DELTA_VALUES * x.value_stride;
    }
    // Without branches, so that all loads are on their way together.
    template <class From>
    __device__ __forceinline__ void load_elements(state_tile& state,
                                                  const DeltaStates& from) const {
        const auto* data = static_cast<const From*>(from.data) + place_of(from);
        const int rows = columns();
        for_each_of_state(state, [&](float& x, int row, int column) {
            const bool exists = row < rows && column < g.key_dim;
            const float value =
                convert<float>(arch::load_global(data + ::min(row, rows - 1) * from.value_stride +
                                                 ::min(column, g.key_dim - 1) * from.key_stride));
            x = exists ? value : 0.0f;
        });
    }
    template <class To>
    __device__ __forceinline__ void store_elements(state_tile& state, const DeltaStates& to) const {
        auto* data = static_cast<To*>(to.data) + place_of(to);
        const int rows = columns();
        for_each_of_state(state, [&](float& x, int row, int column) {
            if (row >= rows || column >= g.key_dim) return;
            arch::store_global(data + row * to.value_stride + column * to.key_stride,
                               convert<To>(x));
        });
    }
    __device__ __forceinline__ void load_state(state_tile& state, const DeltaStates& from) const {
        if (from.data == nullptr || columns() <= 0)
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

    // In the workspace, of the block's head: the state behind a step of a direction.
    __device__ __forceinline__ int64_t head_of(bool backward) const {
        return ((backward ? g.count : 0) + work.sequence) * g.value_heads + work.value_head;
    }
    __device__ __forceinline__ DeltaStates state_behind(int step) const {
        const int64_t at = head_of(work.backwards);
        float* const data = step == 0 ? g.first_states + at * g.key_dim * g.value_dim
                                      : g.segment_states + (at * (g.segments - 2) + step - 1) *
                                                               g.key_dim * g.value_dim;
        return {data, true, 0, 0, g.value_dim, 1};
    }
    // M of a direction, in which the block's segment is the `step`th.
    __device__ __forceinline__ DeltaStates transition_of(bool backward, int step) const {
        float* const data = g.transitions + (head_of(backward) * (g.segments - 2) + step - 1) *
                                                g.key_dim * g.key_dim;
        return backward ? DeltaStates{data, true, 0, 0, g.key_dim, 1}
                        : DeltaStates{data, true, 0, 0, 1, g.key_dim};
    }
    // Where the block's state comes from, and where it is left in the end.
    __device__ __forceinline__ DeltaStates begins_with() const {
        if (g.summaries && (work.transition || work.step > 0)) return {};
        if (work.step > 0) return state_behind(work.step - 1);
        return work.backwards ? g.grad_final : g.initial;
    }
    __device__ __forceinline__ DeltaStates ends_as() const {
        if (g.summaries) return state_behind(work.step);
        return work.backwards && work.step == g.segments - 1 ? g.grad_initial : DeltaStates{};
    }

    // The state as an operand, which also goes to its tile.
    __device__ __forceinline__ void publish(rt<T, 16, key_dim>& to, const state_tile& state,
                                            int n) {
        scale_into(to, state, [](int, bool) { return float2{1.0f, 1.0f}; });
        wait(shared.stored[n % 2], n / 2 % 2 ^ 1);
        warpgroup::store(shared.state[n % 2], to);
    }
    // By one thread: the tiles of a step leave, where they are kept.
    __device__ __forceinline__ void store(int n) {
        wait(shared.written[n % 2], n / 2 % 2);
        if (keeps) {
            tma::store_async(work.backwards ? g.grad_states : g.states, shared.state[n % 2],
                             {tile_at(n), 0});
            tma::store_async(work.backwards ? g.grad_values : g.values, shared.result[n % 2],
                             {tile_at(n), 0});
            tma::store_async_read_wait();
        }
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

    // R = V - exp(c) K S in x, which is K S; without values for a transition.
    __device__ __forceinline__ void subtract_from_values(square& x, Stage& stage) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            rt_base<T, row_l> v{};
            if (!work.transition)
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
        load_state(state, begins_with());
        if (work.transition) {
            for_each_of_state(state, [&](float& x, int row, int column) {
                x = work.slice * DELTA_VALUES + row == column ? 1.0f : 0.0f;
            });
        }
#pragma unroll 1
        for (int n = 0; n < length; ++n) {
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
            release(shared.empty[n % DELTA_STATES_STAGES]);
        }
        if (work.transition) {
            store_state(state, transition_of(false, work.step));
            store_state(state, transition_of(true, g.segments - 1 - work.step));
        } else {
            store_state(state, ends_as());
        }
    }

    __device__ __forceinline__ void backwards_over_chunks() {
        state_tile state;
        load_state(state, begins_with());
#pragma unroll 1
        for (int n = 0; n < length; ++n) {
            Stage& stage = shared.stages[n % DELTA_STATES_STAGES];
            rt<T, 16, key_dim> behind;
            publish(behind, state, n);
            wait(shared.full[n % DELTA_STATES_STAGES], n / DELTA_STATES_STAGES % 2);
            // Behind the first product ptxas would have the warps wait for it.
            scale_all(state, vector_at(stage.vectors, EXP_C, DELTA_CHUNK - 1));
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
            release(shared.empty[n % DELTA_STATES_STAGES]);
        }
        store_state(state, ends_as());
    }

    __device__ __forceinline__ void run() {
        const int warp = arch::warp_uniform(warpid());
        if (warp < WARPGROUP_WARPS) {
            if (work.backwards)
                backwards_over_chunks();
            else
                forwards();
        } else if (laneid() == 0 && warp == WARPGROUP_WARPS) {
            for (int n = 0; n < length; ++n) load(n);
        } else if (laneid() == 0) {
            for (int n = 0; n < length; ++n) store(n);
            tma::store_async_wait();
        }
    }
};

template <class K>
__global__ __launch_bounds__(DELTA_STATES_THREADS, 1) void delta_states_kernel(
    const __grid_constant__ DeltaStatesGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DeltaStatesShared<K>>();
    if (first_thread()) shared.init(g.pairs);
    arch::wait_for_dependencies();
    arch::sync_block();
    if (g.pairs) cluster::sync();  // before one loads for the other
    DeltaRecurrence<K>(g, shared).run();
    arch::sync_warp();
    if (g.pairs) cluster::sync();  // the other arrives at this one's semaphores
}

}  // namespace delta_gradient

template <DType dtype, int key_dim>
void launch_delta_states(const DeltaBackwardParams& params, bool summaries, Stream stream) {
    using namespace delta_gradient;
    using K = DeltaTiles<dtype, key_dim>;
    constexpr int bytes = delta_states_bytes(key_dim);
    static_assert(sizeof(DeltaStatesShared<K>) + 1024 <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int64_t chunks = delta_chunks(p), tiles = chunks * params.config.slices;
    const int segments = params.config.segments;
    const int blocks_of_head =
        delta_states_blocks(params.config.slices, p.key_dim, segments, summaries);
    const bool pairs = params.config.pairs && params.config.slices % 2 == 0 &&
                       (!summaries || segments <= 2 || delta_key_slices(p.key_dim) % 2 == 0);
    float* const kept = reinterpret_cast<float*>(params.workspace + w.segment_states);
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
        .first_states = reinterpret_cast<float*>(params.workspace + w.first_states),
        .segment_states = kept,
        .transitions =
            kept + delta_kept_states(p, segments, segments - 2) * p.key_dim * p.value_dim,
        .count = int(p.sequences),
        .value_heads = int(p.value_heads),
        .ratio = int(p.value_heads / p.heads),
        .slices = params.config.slices,
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .segments = segments,
        .blocks_of_head = blocks_of_head,
        .summaries = summaries,
        .pairs = pairs,
        .scale = call.scale};
    const int64_t blocks = p.sequences * p.value_heads * blocks_of_head;
    kittens::launch({.dependent = true}, delta_states_kernel<K>, dim3(unsigned(blocks)),
                    dim3(DELTA_STATES_THREADS), dim3(pairs ? 2 : 1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
