// The recurrence of the states' gradients for every GPU from compute capability 8.0 on, by mma.sync
// and cp.async (the formulas: backward.h). That of the states themselves is the portable forward
// without outputs (gated_delta_rule/forward_sm80.cuh), which keeps the states before each chunk and
// U'. Here a block walks backwards, with the same groups and loads
// (gated_delta_rule/chain_sm80.cuh), and keeps the gradients of the states behind each chunk and Y.
#pragma once

#include "csrc/recurrent/gated_delta_rule/chain_sm80.cuh"
#include "csrc/recurrent/gated_delta_rule_backward/backward.h"

namespace thunderkittens::recurrent {
namespace delta_portable {

template <class K>
struct BackwardGlobals : ChainGlobals<K> {
    DeltaStates grad_final, grad_initial;
    int blocks;  // of columns
    float scale;
};

template <class K>
struct Backward : Chain<BackwardGlobals<K>> {
    using Base = Chain<BackwardGlobals<K>>;
    using T = typename K::T;
    using Base::g;
    using Base::shared;
    using typename Base::square;
    using typename Base::state_tile;

    __device__ __forceinline__ Backward(const BackwardGlobals<K>& _g, ChainShared<K>& _shared)
        : Base{_g, _shared, {}, 0, 0, 0} {
        int block = int(blockIdx.x);
        this->first_column = block % g.blocks * (int(blockDim.x) / GROUP_THREADS) * DELTA_VALUES;
        block /= g.blocks;
        this->value_head = block % g.value_heads;
        this->index = block / g.value_heads;
        this->sequence = g.sequences.sequence(this->index);
    }

    __device__ __forceinline__ void run() {
        const int last = this->sequence.chunks() - 1;
        if (last >= 0) {
            this->load_ahead(last, 0);
            load_middle(last);
        }
        arch::cp_async_commit();
        state_tile state;
        part(g.grad_final).load(state);
#pragma unroll 1
        for (int i = last; i >= 0; --i) step(state, i, (last - i) % 2);
        arch::cp_async_wait<0>();
        part(g.grad_initial).store(state);
    }

  private:
    __device__ __forceinline__ StatePart part(const DeltaStates& x) const {
        return {x, this->index, this->value_head, this->column(), g.key_dim, g.value_dim};
    }
    // What the middle of a chunk frees.
    __device__ __forceinline__ void load_middle(int chunk) const {
        this->load_queries(chunk);
        this->load_scores(chunk);
        this->load_values(chunk);
    }
    __device__ __forceinline__ void step(state_tile& state, int i, int stage) const {
        using token_tile = typename K::token_tile;
        using square_tile = typename K::square_tile;
        const auto& vectors = shared.vectors[stage];
        const auto bytes = uint32_t(stage * int(sizeof(token_tile)));
        arch::cp_async_wait<0>();
        arch::sync_block();  // the chunk is there, and all are done with the one behind
        if (i > 0) this->load_ahead(i - 1, stage ^ 1);
        arch::cp_async_commit();
        this->keep_state(state, i);

        square through, y;
        zero(through);
        zero(y);
        const b_walker<token_tile> keys(shared.k[0], 0, 0);
#pragma unroll
        for (int k = 0; k < K::key_dim / 16; ++k) {
            const operand_a<T> a = to_operand_a<T>(block_of(state, k));
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                operand_b<T> b;
                keys.load(b, 16 * j, 16 * k, bytes);
                mma_operands(block_of(through, j), a, b);
            }
        }
        scale_all(state, vector_at(vectors, EXP_C, DELTA_CHUNK - 1));
        const a_walker_of_columns<square_tile> grad_out(shared.values[own_group()], 0,
                                                        16 * own_warp());
        const b_walker_of_rows<square_tile> scores(shared.scores, 0, 0);
        const b_walker_of_rows<token_tile> queries(shared.q, 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            operand_a<T> outputs;
            grad_out.load(outputs, 16 * k, 0, 0);
            add_lower(y, outputs, scores, k);
            const auto weighted = scaled<T>(outputs, 16 * k, [&](int column, bool) {
                const float2 e = vector_pair(vectors, EXP_C, column);
                return float2{g.scale * e.x, g.scale * e.y};
            });
            add_rows(state, weighted, queries, 16 * k);
        }
        operand_a<T> weighted[BLOCKS];
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 f =
                    vector_pair(vectors, EXP_REST, 16 * k + 8 * (e / 2) + 2 * (laneid() % 4));
                const float2 x = through.tiles[0][k].data[e];
                float2& pair = y.tiles[0][k].data[e];
                pair = {fmaf(f.x, x.x, pair.x), fmaf(f.y, x.y, pair.y)};
            }
            weighted[k] = scaled<T>(block_of(y, k), 16 * k, [&](int column, bool) {
                return vector_pair(vectors, BETA, column);
            });
        }
        arch::sync_block();  // all are done with queries, P and dO
        if (i > 0) load_middle(i - 1);
        arch::cp_async_commit();
        const b_walker_of_rows<square_tile> solved(shared.solved[stage], 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) add_lower(y, weighted[k], solved, k);
        this->keep_values(y, i);
        const b_walker_of_rows<token_tile> key_rows(shared.k[0], 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            const auto removed = scaled<T>(block_of(y, k), 16 * k, [&](int column, bool) {
                const float2 f = Base::product_of(vectors, EXP_C, BETA, column);
                return float2{-f.x, -f.y};
            });
            add_rows(state, removed, key_rows, 16 * k, bytes);
        }
    }
    // sum += x times 16 rows of a lower triangular matrix.
    template <class Walker>
    static __device__ __forceinline__ void add_lower(square& sum, const operand_a<T>& x,
                                                     const Walker& matrix, int k) {
#pragma unroll
        for (int j = 0; j <= k; ++j) {
            operand_b<T> b;
            matrix.load(b, 16 * k, 16 * j, 0);
            mma_operands(block_of(sum, j), x, b);
        }
    }
};

template <class K>
__global__ __launch_bounds__(MAX_GROUPS* GROUP_THREADS) void delta_portable_states_kernel(
    const __grid_constant__ BackwardGlobals<K> g) {
    Backward<K>(g, *reinterpret_cast<ChainShared<K>*>(shared_memory())).run();
}

}  // namespace delta_portable

template <DType dtype, int key_dim>
void launch_portable_delta_states(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_portable;
    using K = DeltaTiles<dtype, key_dim>;
    using T = typename K::T;
    constexpr int bytes = portable_delta_chain_bytes(key_dim);
    static_assert(sizeof(ChainShared<K>) <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaPrepared& from = call.prepared;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int slices = params.config.slices, consumers = call.consumers;
    const int blocks = (slices + consumers - 1) / consumers;
    const BackwardGlobals<K> globals{
        {.q = {delta_normal_rows(p, call.q, from.q), p.key_dim},
         .k = {delta_normal_rows(p, call.k, from.k), p.key_dim},
         .values = {params.grad_out, p.value_dim},
         .solved = static_cast<const T*>(from.solved),
         .scores = static_cast<const T*>(from.scores),
         .vectors = from.vectors,
         .kept_states = reinterpret_cast<T*>(params.workspace + w.grad_states),
         .kept_values = reinterpret_cast<T*>(params.workspace + w.grad_values),
         .sequences = call,
         .value_heads = int(p.value_heads),
         .ratio = int(p.value_heads / p.heads),
         .key_dim = int(p.key_dim),
         .value_dim = int(p.value_dim),
         .slices = slices},
        call.final,
        params.grad_initial,
        blocks,
        call.scale};
    kittens::launch(delta_portable_states_kernel<K>,
                    dim3(unsigned(p.sequences * p.value_heads * blocks)),
                    dim3(unsigned(consumers * GROUP_THREADS)), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
