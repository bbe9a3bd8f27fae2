// The chunks of the gated delta rule's gradient for every GPU from compute capability 8.0 on, by
// mma.sync and cp.async: what backward_gradients_sm90.cuh computes, in the same order of sums (the
// formulas: backward.h). A block of eight warps has a chunk of one head of the keys and walks over
// its value heads, and over slices of 64 of their columns. Four warps make dQ, four dK and dV, each
// warp of 16 tokens, whose sums stay in registers over all value heads. Then the first warp makes
// dg and dbeta of the sums over rows. The scores of the first four and of the others, dPG and W, go
// to the memory of what is read no more, for the products with their transposes.
#pragma once

#include "csrc/recurrent/gated_delta_rule/products_sm80.cuh"
#include "csrc/recurrent/gated_delta_rule_backward/backward_gates_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_portable {

using namespace delta_gradient;

constexpr int GRADIENT_THREADS = 2 * GROUP_THREADS;

template <class _K>
struct GradientsGlobals {
    using K = _K;
    using T = typename K::T;
    TokenRows<T> q, k, grad_out;
    const T *states, *grad_states, *values, *grad_values;
    const float* vectors;
    TokenRows<T> dq, dk, dv;
    TokenNumbers<T> g, beta, dg, dbeta;
    DeltaGate gate;
    DeltaSequences sequences;
    const float* norms;  // null without l2_norm
    float* gates;
    int heads, ratio, slices, key_dim, value_dim;
    int64_t tokens;
    float scale;
};

template <class K>
struct GradientsShared {
    typename K::token_tile q, k;
    typename K::token_tile state, grad_state;  // of a slice: columns of values as rows
    typename K::square_tile values, grad_values;
    typename K::square_tile grad_out;
    typename K::vectors vectors;
    sv<float, DELTA_CHUNK> rows[DELTA_ROW_SUMS];
    sv<float, GRADIENT_THREADS / WARP_THREADS> products;  // <S, dS>
};

template <class K>
struct Gradients {
    // What the verbs of backward_rows_sm90.cuh ask for.
    using T = typename K::T;
    using sum_tile = rt_fl<16, K::key_dim>;
    using square = rt_fl<16, 64>;
    static constexpr int key_dim = K::key_dim;
    using token_tile = typename K::token_tile;
    using square_tile = typename K::square_tile;
    using Rows = b_walker_of_rows<token_tile>;

    const GradientsGlobals<K>& g;
    GradientsShared<K>& shared;
    DeltaChunk chunk;
    int head;

    __device__ __forceinline__ int64_t chunk_at(int value_head) const {
        return (int64_t(chunk.b) * g.heads * g.ratio + value_head) * g.sequences.slots + chunk.slot;
    }

    __device__ __forceinline__ void run() {
        const bool queries = own_group() == 0;
        if (!chunk.exists || chunk.is_rest) {
            clear(queries);
            return;
        }
        copy_rows(shared.q, g.q.at(chunk, head, chunk.row()), g.q.row_stride, chunk.tokens(),
                  g.key_dim);
        copy_rows(shared.k, g.k.at(chunk, head, chunk.row()), g.k.row_stride, chunk.tokens(),
                  g.key_dim);
        sum_tile sum;
        zero(sum);
        float2 total = {0.0f, 0.0f};
#pragma unroll 1
        for (int r = 0; r < g.ratio; ++r) add_head(sum, total, head * g.ratio + r, queries);
        if (queries)
            finish_rows<Gradients>(g.dq, g.norms, g, sum, total, shared.q, chunk, head);
        else
            finish_rows<Gradients>(g.dk, g.norms == nullptr ? nullptr : g.norms + g.tokens, g, sum,
                                   total, shared.k, chunk, head);
    }

  private:
    __device__ __forceinline__ void clear(bool queries) const {
        if (queries) {
            clear_rows<Gradients>(g.dq, chunk, head);
            for (int r = 0; r < g.ratio && own_warp() == 0; ++r)
                clear_gates(g, chunk, head * g.ratio + r,
                            [&] { return chunk_at(head * g.ratio + r); });
            return;
        }
        clear_rows<Gradients>(g.dk, chunk, head);
        for (int r = 0; r < g.ratio; ++r) clear_rows<Gradients>(g.dv, chunk, head * g.ratio + r);
    }

    __device__ __forceinline__ void load_slice(int64_t at, int value_head, int slice) const {
        const int64_t tile = at * g.slices + slice;
        copy_tile(shared.values, g.values + tile * DELTA_SQUARE);
        copy_tile(shared.grad_values, g.grad_values + tile * DELTA_SQUARE);
        copy_rows(shared.grad_out,
                  g.grad_out.at(chunk, value_head, chunk.row()) + slice * DELTA_VALUES,
                  g.grad_out.row_stride, chunk.tokens(), g.value_dim - slice * DELTA_VALUES);
        copy_tile(shared.state, g.states + tile * (DELTA_VALUES * key_dim));
        copy_tile(shared.grad_state, g.grad_states + tile * (DELTA_VALUES * key_dim));
        if (slice == 0) copy_vector(shared.vectors, g.vectors + at * shared.vectors.length);
        arch::cp_async_commit();
    }
    // The thread's part of <S, dS>.
    __device__ __forceinline__ float multiply_states() const {
        constexpr int words = key_dim / 8;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < DELTA_VALUES * words / GRADIENT_THREADS; ++n) {
            const int i = int(threadIdx.x) + n * GRADIENT_THREADS, row = i / words,
                      column = i % words * 8;
            const auto x = arch::load_shared<uint4>(shared.state.address_of(row, column)),
                       y = arch::load_shared<uint4>(shared.grad_state.address_of(row, column));
            add_product<T>(sum, x.x, y.x);
            add_product<T>(sum, x.y, y.y);
            add_product<T>(sum, x.z, y.z);
            add_product<T>(sum, x.w, y.w);
        }
        return sum;
    }

    // Both roles, which meet before memory is used for something else. Sums of the rows:
    struct RowSums {
        float2 queries = {0.0f, 0.0f}, keys = {0.0f, 0.0f}, states = {0.0f, 0.0f},
               betas = {0.0f, 0.0f};
    };
    __device__ __forceinline__ void add_head(sum_tile& sum, float2& total, int value_head,
                                             bool queries) const {
        const int64_t at = chunk_at(value_head);
        square products;
        zero(products);
        RowSums rows;
        float inner = 0.0f;
#pragma unroll 1
        for (int slice = 0; slice < g.slices; ++slice) {
            arch::sync_block();  // all are done with the slice before
            load_slice(at, value_head, slice);
            arch::cp_async_wait<0>();
            arch::sync_block();
            inner += multiply_states();
            if (queries)
                add_query_slice(sum, products);
            else
                add_key_slice(sum, products, total, rows, value_head, slice);
        }
        rt<T, 16, 64> scores;
        if (queries)
            decayed<true>(scores, products, shared.vectors, {g.scale, g.scale});
        else
            decayed<false>(scores, products, shared.vectors, {-1.0f, -1.0f});
        const Rows keys(shared.k, 0, 0);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            if (k <= own_warp()) add_rows(sum, operand_of(scores, k), keys, 16 * k);
        }
        arch::sync_block();  // all are done with the values
        square_tile& place = queries ? shared.grad_out : shared.values;
        linear_attention::sm80::store_operand_rows(place, 16 * own_warp(), scores);
        inner = warp_sum(inner);
        if (laneid() == 0) shared.products.set(warpid(), inner);
        arch::sync_block();  // the scores are there
        if (queries) {
            const float2 now = dot_rows<Gradients>(shared.q, sum);
            store_row_sums(shared.rows[QUERY_ROWS], {now.x - total.x, now.y - total.y});
            total = now;
        } else {
            add_transposed(sum, total, rows);
            store_row_sums(shared.rows[KEY_ROWS], rows.keys);
            store_row_sums(shared.rows[STATE_ROWS], rows.states);
            store_row_sums(shared.rows[BETA_ROWS], rows.betas);
        }
        arch::sync_block();  // the sums of the rows are there
        if (warpid() != 0) return;
        const GateInputs inputs(g, g.vectors, chunk, value_head, at);
        finish_gates<GRADIENT_THREADS / WARP_THREADS>(g, shared.rows, shared.products, inputs,
                                                      chunk, value_head, at);
    }

    static __device__ __forceinline__ operand_a<T> operand_of(const rt<T, 16, 64>& x, int k) {
        operand_a<T> a;
#pragma unroll
        for (int i = 0; i < 4; ++i) a.words[i] = arch::bit_cast<uint32_t>(x.tiles[0][k].data[i]);
        return a;
    }
    __device__ __forceinline__ float2 row_vector(DeltaVector which) const {
        return {vector_at(shared.vectors, which, lane_row()),
                vector_at(shared.vectors, which, lane_row() + 8)};
    }
    static __device__ __forceinline__ operand_a<T> scaled_rows(const operand_a<T>& x, float2 f) {
        return scaled<T>(
            x, 0, [=](int, bool lower) { return lower ? float2{f.y, f.y} : float2{f.x, f.x}; });
    }
    // sum += x times 16 columns of values of U', of the tokens up to the warp's.
    __device__ __forceinline__ void multiply_values(square& sum, const operand_a<T>& x,
                                                    const b_walker_of_rows<square_tile>& values,
                                                    int k) const {
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            if (j > own_warp()) continue;
            operand_b<T> b;
            values.load(b, 16 * k, 16 * j, 0);
            mma_operands(block_of(sum, j), x, b);
        }
    }

    // dO U'^T; dQ += scale exp(c) dO S^T
    __device__ __forceinline__ void add_query_slice(sum_tile& dq, square& products) const {
        const float2 e = row_vector(EXP_C), factor = {g.scale * e.x, g.scale * e.y};
        const a_walker<square_tile> grad_out(shared.grad_out, 16 * own_warp(), 0);
        const b_walker_of_rows<square_tile> values(shared.values, 0, 0);
        const Rows states(shared.state, 0, 0);
#pragma unroll 1
        for (int k = 0; k < BLOCKS; ++k) {
            operand_a<T> x;
            grad_out.load(x, 0, 16 * k, 0);
            multiply_values(products, x, values, k);
            add_rows(dq, scaled_rows(x, factor), states, 16 * k);
        }
    }
    // dV = beta Y; dV U'^T; dK += exp(c_last - c) U dS^T, then -exp(c) dV S^T
    __device__ __forceinline__ void add_key_slice(sum_tile& dk, square& products, float2& total,
                                                  RowSums& rows, int value_head, int slice) const {
        const float2 beta = row_vector(BETA), e = row_vector(EXP_C), rest = row_vector(EXP_REST);
        const a_walker_of_columns<square_tile> own_values(shared.values, 0, 16 * own_warp()),
            own_grads(shared.grad_values, 0, 16 * own_warp());
        const b_walker_of_rows<square_tile> values(shared.values, 0, 0);
        const Rows states(shared.state, 0, 0), grad_states(shared.grad_state, 0, 0);
        float2 of_beta = {0.0f, 0.0f};
#pragma unroll 1
        for (int k = 0; k < BLOCKS; ++k) {
            operand_a<T> u, y;
            own_values.load(u, 16 * k, 0, 0);
            own_grads.load(y, 16 * k, 0, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_product<T>(i % 2 ? of_beta.y : of_beta.x, u.words[i], y.words[i]);
            const operand_a<T> dv = scaled_rows(y, beta);
            store_values(dv, value_head, slice * DELTA_VALUES + 16 * k);
            multiply_values(products, dv, values, k);
            add_rows(dk, scaled_rows(u, {beta.x * rest.x, beta.y * rest.y}), grad_states, 16 * k);
        }
        rows.betas = {rows.betas.x + quad_sum(of_beta.x), rows.betas.y + quad_sum(of_beta.y)};
        advance(rows.states, total, dk, 1.0f);
#pragma unroll 1
        for (int k = 0; k < BLOCKS; ++k) {
            operand_a<T> y;
            own_grads.load(y, 16 * k, 0, 0);
            add_rows(dk, scaled_rows(y, {-beta.x * e.x, -beta.y * e.y}), states, 16 * k);
        }
        advance(rows.keys, total, dk, 1.0f);
    }
    // dK += W^T K + dPG^T Q, behind W K
    __device__ __forceinline__ void add_transposed(sum_tile& dk, float2& total,
                                                   RowSums& rows) const {
        advance(rows.keys, total, dk, 1.0f);
        const a_walker_of_columns<square_tile> erased(shared.values, 0, 16 * own_warp()),
            scores(shared.grad_out, 0, 16 * own_warp());
        const Rows keys(shared.k, 0, 0), queries(shared.q, 0, 0);
#pragma unroll 1
        for (int k = own_warp(); k < BLOCKS; ++k) {
            operand_a<T> x;
            erased.load(x, 16 * k, 0, 0);
            add_rows(dk, x, keys, 16 * k);
            scores.load(x, 16 * k, 0, 0);
            add_rows(dk, x, queries, 16 * k);
        }
        advance(rows.keys, total, dk, -1.0f);
    }
    // What K . dK has grown by.
    __device__ __forceinline__ void advance(float2& rows, float2& total, const sum_tile& dk,
                                            float sign) const {
        const float2 now = dot_rows<Gradients>(shared.k, dk);
        rows = {fmaf(sign, now.x - total.x, rows.x), fmaf(sign, now.y - total.y, rows.y)};
        total = now;
    }
    __device__ __forceinline__ void store_values(const operand_a<T>& dv, int value_head,
                                                 int column) const {
        if (g.dv.data == nullptr) return;
        const int row = chunk.row() + 16 * own_warp();
        store_operand<T>(dv, g.dv.at(chunk, value_head, row) + column, g.dv.row_stride,
                         chunk.length - row, g.value_dim - column);
    }
};

template <class K>
__global__ __launch_bounds__(GRADIENT_THREADS) void delta_portable_gradients_kernel(
    const __grid_constant__ GradientsGlobals<K> g) {
    const int slot = int(blockIdx.x) % g.sequences.slots,
              b_head = int(blockIdx.x) / g.sequences.slots;
    Gradients<K>{g, *reinterpret_cast<GradientsShared<K>*>(shared_memory()),
                 g.sequences.chunk(b_head / g.heads, slot), b_head % g.heads}
        .run();
}

}  // namespace delta_portable

template <DType dtype, int key_dim>
void launch_portable_delta_gradients(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_portable;
    using K = DeltaTiles<dtype, key_dim>;
    using T = typename K::T;
    constexpr int bytes = portable_delta_gradients_bytes(key_dim);
    static_assert(sizeof(GradientsShared<K>) <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const auto at = [&](int64_t offset) {
        return reinterpret_cast<const T*>(params.workspace + offset);
    };
    const bool sums = params.grad_A_log != nullptr || params.grad_dt_bias != nullptr;
    const GradientsGlobals<K> globals{
        .q = {delta_normal_rows(p, call.q, call.prepared.q), p.key_dim},
        .k = {delta_normal_rows(p, call.k, call.prepared.k), p.key_dim},
        .grad_out = {params.grad_out, p.value_dim},
        .states = at(w.states),
        .grad_states = at(w.grad_states),
        .values = at(w.values),
        .grad_values = at(w.grad_values),
        .vectors = call.prepared.vectors,
        .dq = {params.dq, p.key_dim},
        .dk = {params.dk, p.key_dim},
        .dv = {params.dv, p.value_dim},
        .g = call.g,
        .beta = call.beta,
        .dg = params.dg,
        .dbeta = params.dbeta,
        .gate = call.gate,
        .sequences = call,
        .norms = call.l2_norm ? call.prepared.norms : nullptr,
        .gates = sums ? reinterpret_cast<float*>(params.workspace + w.gates) : nullptr,
        .heads = int(p.heads),
        .ratio = int(p.value_heads / p.heads),
        .slices = params.config.slices,
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .tokens = delta_batch(p) * p.heads * p.length,
        .scale = call.scale};
    kittens::launch(delta_portable_gradients_kernel<K>,
                    dim3(unsigned(delta_batch(p) * p.heads * delta_slots(p))),
                    dim3(GRADIENT_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
