// The gated delta rule for every GPU from compute capability 8.0 on, by mma.sync and cp.async
// (gated_delta_rule.h has the formulas). A first kernel has made T diag(beta), P and the decays of
// all chunks (prepare_sm80.cuh). A block walks over the chunks of a segment of a value head; its
// one or two groups of four warps, without roles, have 64 columns of values each (chain_sm80.cuh).
// The same kernel makes, without outputs, the summary of a segment, and what a gradient keeps of
// each chunk, from H: U' = R + H (beta R), U = beta U' (gated_delta_rule_backward/backward.h).
#pragma once

#include "csrc/recurrent/gated_delta_rule/chain_sm80.cuh"
#include "csrc/recurrent/gated_delta_rule/prepare_sm80.cuh"

namespace thunderkittens::recurrent {
namespace delta_portable {

template <class K>
struct ForwardGlobals : ChainGlobals<K> {
    using T = typename K::T;
    TokenRows<T> out;
    DeltaStates initial, final;
    float *segment_states, *transitions;  // see delta_workspace()
    int segments, blocks, value_blocks;   // blocks: of columns, those of a transition last
    bool summary, has_outputs, is_packed;
};

// Columns of a block, of a segment of a value head; as DeltaWork of types_sm90.cuh.
template <class K>
struct Forward : Chain<ForwardGlobals<K>> {
    using Base = Chain<ForwardGlobals<K>>;
    using T = typename K::T;
    using Base::first_column;
    using Base::g;
    using Base::shared;
    using typename Base::square;
    using typename Base::state_tile;

    int segment, first, end;  // chunks
    bool transition;

    __device__ __forceinline__ Forward(const ForwardGlobals<K>& _g, ChainShared<K>& _shared)
        : Base{_g, _shared, {}, 0, 0, 0} {
        const int groups = int(blockDim.x) / GROUP_THREADS;
        int block = int(blockIdx.x);
        const int columns = block % g.blocks;
        block /= g.blocks;
        this->value_head = block % g.value_heads;
        block /= g.value_heads;
        const int sequences = g.sequences.count;
        this->index = block % sequences;
        segment = block / sequences;
        this->sequence = g.sequences.sequence(this->index);
        transition = g.summary && columns >= g.value_blocks;
        first_column = (columns - (transition ? g.value_blocks : 0)) * groups * DELTA_VALUES;
        const int chunks = this->sequence.chunks(), part = (chunks + g.segments - 1) / g.segments;
        first = ::min(segment * part, chunks);
        end = ::min(first + part, chunks);
    }

    __device__ __forceinline__ void run() {
        if (first < end) {
            this->load_ahead(first, 0);
            load_middle(first);
        }
        arch::cp_async_commit();
        state_tile state;
        load_state(state);
#pragma unroll 1
        for (int i = first; i < end; ++i) step(state, i, (i - first) % 2);
        arch::cp_async_wait<0>();
        store_state(state);
        if (g.is_packed && g.has_outputs && this->index == g.sequences.count - 1 &&
            segment == g.segments - 1)
            clear_rest();
    }

  private:
    // What the middle of a chunk frees.
    __device__ __forceinline__ void load_middle(int chunk) const {
        if (g.has_outputs) this->load_queries(chunk);
        if (!transition) this->load_values(chunk);
    }
    __device__ __forceinline__ void step(state_tile& state, int i, int stage) const {
        const auto& vectors = shared.vectors[stage];
        const bool outputs = g.has_outputs;
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the one before
        if (outputs) this->load_scores(i);
        arch::cp_async_commit();
        if (i + 1 < end) this->load_ahead(i + 1, stage ^ 1);
        arch::cp_async_commit();
        this->keep_state(state, i);

        square u, out;
        zero(u);
        zero(out);
        multiply_state(u, out, state, stage);
        operand_a<T> weighted[BLOCKS];
        subtract_from_values(u, vectors);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            weighted[k] = scaled<T>(block_of(u, k), 16 * k, [&](int column, bool) {
                return vector_pair(vectors, BETA, column);
            });
        }
        arch::cp_async_wait<1>();
        arch::sync_block();  // P is there, and all are done with queries and values
        if (i + 1 < end) load_middle(i + 1);
        arch::cp_async_commit();
        if (g.kept_states == nullptr) zero(u);
        multiply_lower(u, weighted, shared.solved[stage]);
        this->keep_values(u, i);

        if (outputs) {
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k) {
                weighted[k] = scaled<T>(block_of(u, k), 16 * k, [&](int column, bool) {
                    return vector_pair(vectors, BETA, column);
                });
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float2 f =
                        vector_pair(vectors, LOG2_C, 16 * k + 8 * (e / 2) + 2 * (laneid() % 4));
                    float2& pair = out.tiles[0][k].data[e];
                    pair = {pair.x * f.x, pair.y * f.y};
                }
            }
            multiply_lower(out, weighted, shared.scores);
            store_out(out, i);
        }
        scale_all(state, vector_at(vectors, EXP_C, DELTA_CHUNK - 1) /
                             vector_at(vectors, EXP_REST, DELTA_CHUNK - 1));
        const b_walker_of_rows<typename K::token_tile> keys(shared.k[0], 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            const auto added = scaled<T>(block_of(u, k), 16 * k, [&](int column, bool) {
                return Base::product_of(vectors, EXP_REST, BETA, column);
            });
            add_rows(state, added, keys, 16 * k, uint32_t(stage * int(sizeof(shared.k[0]))));
        }
    }
    // K S, and Q S where there are outputs.
    __device__ __forceinline__ void multiply_state(square& with_keys, square& with_queries,
                                                   state_tile& state, int stage) const {
        using token_tile = typename K::token_tile;
        const b_walker<token_tile> keys(shared.k[0], 0, 0), queries(shared.q, 0, 0);
        const auto bytes = uint32_t(stage * int(sizeof(shared.k[0])));
#pragma unroll
        for (int k = 0; k < K::key_dim / 16; ++k) {
            const operand_a<T> a = to_operand_a<T>(block_of(state, k));
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                operand_b<T> b;
                keys.load(b, 16 * j, 16 * k, bytes);
                mma_operands(block_of(with_keys, j), a, b);
            }
            if (!g.has_outputs) continue;
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                operand_b<T> b;
                queries.load(b, 16 * j, 16 * k, 0);
                mma_operands(block_of(with_queries, j), a, b);
            }
        }
    }
    // R in x, which is K S. Values of a transition are zeros.
    __device__ __forceinline__ void subtract_from_values(square& x,
                                                         const typename K::vectors& vectors) const {
        const a_walker_of_columns<typename K::square_tile> values(shared.values[own_group()], 0,
                                                                  16 * own_warp());
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            operand_a<T> v = {};
            if (!transition) values.load(v, 16 * j, 0, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 e =
                    vector_pair(vectors, EXP_C, 16 * j + 8 * (i / 2) + 2 * (laneid() % 4));
                const float2 value = unpack_pair<T>(arch::bit_cast<packed_type<T>>(v.words[i]));
                float2& pair = x.tiles[0][j].data[i];
                pair = {fmaf(-e.x, pair.x, value.x), fmaf(-e.y, pair.y, value.y)};
            }
        }
    }
    // sum += x times a lower triangular matrix's transpose.
    static __device__ __forceinline__ void multiply_lower(square& sum,
                                                          const operand_a<T> (&x)[BLOCKS],
                                                          const typename K::square_tile& matrix) {
        const b_walker<typename K::square_tile> rows(matrix, 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
#pragma unroll
            for (int j = k; j < BLOCKS; ++j) {
                operand_b<T> b;
                rows.load(b, 16 * j, 16 * k, 0);
                mma_operands(block_of(sum, j), x[k], b);
            }
        }
    }
    __device__ __forceinline__ void store_out(square& out, int i) const {
        const int columns = g.value_dim - this->column() - 16 * own_warp();
        if (columns <= 0) return;
        T* const to = g.out.at(this->sequence, this->value_head, i * DELTA_CHUNK) + this->column() +
                      16 * own_warp();
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            store_operand<T>(transposed(to_operand_a<T>(block_of(out, j))),
                             to + 16 * j * g.out.row_stride, g.out.row_stride,
                             this->rows_from(i) - 16 * j, columns);
        }
    }

    __device__ __forceinline__ void load_state(state_tile& state) const {
        if (g.summary) {
            const int row = this->column();
            for_each_of_state(state, [&](float& x, int value, int key) {
                x = transition && key == row + value ? 1.0f : 0.0f;
            });
        } else if (segment > 0) {
            in_workspace(segment - 1).load(state);
        } else {
            StatePart(g.initial, this->index, this->value_head, this->column(), g.key_dim,
                      g.value_dim)
                .load(state);
        }
    }
    __device__ __forceinline__ void store_state(state_tile& state) const {
        if (g.summary) {
            in_workspace(segment).store(state);
        } else if (segment == g.segments - 1) {
            StatePart(g.final, this->index, this->value_head, this->column(), g.key_dim,
                      g.value_dim)
                .store(state);
        }
    }
    // The state behind a segment, or its transition.
    __device__ __forceinline__ StatePart in_workspace(int of_segment) const {
        const int64_t at =
            ((int64_t(this->index) * g.value_heads + this->value_head) * (g.segments - 1) +
             of_segment) *
            g.key_dim;
        if (transition)
            return {
                g.transitions + at * g.key_dim, 1, g.key_dim, this->column(), g.key_dim, g.key_dim};
        return {g.segment_states + at * g.value_dim,
                g.value_dim,
                1,
                this->column(),
                g.key_dim,
                g.value_dim};
    }
    // Outputs of tokens behind the last sequence, by a group.
    __device__ __forceinline__ void clear_rest() const {
        constexpr int words = DELTA_VALUES / 8;
        const int thread = int(threadIdx.x) % GROUP_THREADS;
        const int column = this->column() + 8 * (thread % words);
        if (column >= g.value_dim) return;
        const DeltaSequence rest = g.sequences.sequence(g.sequences.count);
        for (int row = thread / words; row < rest.length; row += GROUP_THREADS / words) {
            arch::store_global(
                reinterpret_cast<uint4*>(g.out.at(rest, this->value_head, row) + column),
                uint4{0, 0, 0, 0});
        }
    }
};

template <class K>
__global__ __launch_bounds__(MAX_GROUPS* GROUP_THREADS) void delta_portable_forward_kernel(
    const __grid_constant__ ForwardGlobals<K> g) {
    Forward<K>(g, *reinterpret_cast<ChainShared<K>*>(shared_memory())).run();
}

}  // namespace delta_portable

template <DType dtype, int key_dim>
void launch_portable_gated_delta_rule(const DeltaRuleParams& call, DeltaWalk walk,
                                      const DeltaKept& kept, Stream stream) {
    using namespace delta_portable;
    using K = DeltaTiles<dtype, key_dim>;
    using T = typename K::T;
    constexpr int bytes = portable_delta_chain_bytes(key_dim);
    static_assert(sizeof(ChainShared<K>) <= bytes);
    const DeltaRuleProblem& p = call.problem;
    const DeltaPrepared& from = call.prepared;
    const bool summary = walk == DeltaWalk::summaries;
    const auto blocks_of = [&](int64_t columns) {
        const int64_t of_block = call.consumers * DELTA_VALUES;
        return (columns + of_block - 1) / of_block;
    };
    const int64_t columns = walk == DeltaWalk::kept ? kept.slices * DELTA_VALUES : p.value_dim;
    const int64_t value_blocks = blocks_of(columns);
    const int64_t blocks = value_blocks + (summary ? blocks_of(p.key_dim) : 0);
    const int64_t segments = summary ? call.segments - 1 : call.segments;
    const int64_t states = delta_segments_kept(p, call.segments) * p.key_dim * p.value_dim;
    const ForwardGlobals<K> globals{{.q = {delta_normal_rows(p, call.q, from.q), p.key_dim},
                                     .k = {delta_normal_rows(p, call.k, from.k), p.key_dim},
                                     .values = {call.v, p.value_dim},
                                     .solved = static_cast<const T*>(from.solved),
                                     .scores = static_cast<const T*>(from.scores),
                                     .vectors = from.vectors,
                                     .kept_states = static_cast<T*>(kept.states),
                                     .kept_values = static_cast<T*>(kept.values),
                                     .sequences = call,
                                     .value_heads = int(p.value_heads),
                                     .ratio = int(p.value_heads / p.heads),
                                     .key_dim = int(p.key_dim),
                                     .value_dim = int(p.value_dim),
                                     .slices = kept.slices},
                                    TokenRows<T>(call.out, p.value_dim),
                                    call.initial,
                                    walk == DeltaWalk::kept ? DeltaStates{} : call.final,
                                    call.workspace,
                                    call.workspace == nullptr ? nullptr : call.workspace + states,
                                    call.segments,
                                    int(blocks),
                                    int(value_blocks),
                                    summary,
                                    walk == DeltaWalk::outputs,
                                    p.packed};
    kittens::launch(delta_portable_forward_kernel<K>,
                    dim3(unsigned(p.sequences * p.value_heads * blocks * segments)),
                    dim3(unsigned(call.consumers * GROUP_THREADS)), dim3(1), bytes, stream,
                    globals);
}

}  // namespace thunderkittens::recurrent
