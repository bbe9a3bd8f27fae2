// What depends on no state, for every GPU from compute capability 8.0 on, before the kernels that
// walk over the chunks. A block of four warps has a chunk of a head of the keys: K K^T and Q K^T
// once, by mma.sync, and then for each value head of that head H, P and the vectors
// (within_chunks.cuh).
//
// A forward gets T diag(beta), beta_i (delta_ij + H_ij beta_j), in the place of H: U is then one
// product, linear in a rounded R. Where keys repeat, R's roundings cancel in what the state sums;
// those of R and beta R would not. It keeps norms of q and k as factors of what they multiply:
//   EXP_C     exp(c) |k|^-1                     EXP_REST  exp(c_last - c) |k|^-1
//   LOG2_C    scale exp(c) |q|^-1, of outputs   BETA      1
// and exp(c_last) is what the last of the first two have as their ratio. For a gradient the rows
// themselves are normalised and written, and the vectors are those that it has elsewhere.
#pragma once

#include "csrc/recurrent/gated_delta_rule/products_sm80.cuh"

namespace thunderkittens::recurrent {
namespace delta_portable {

template <class K>
struct PrepareGlobals {
    using T = typename K::T;
    TokenRows<T> q, k;
    TokenNumbers<T> g, beta;
    DeltaGate gate;
    DeltaSequences sequences;
    T *solved, *scores;
    float* vectors;
    T *normal_q, *normal_k;  // null, or (batch, heads, length, key_dim)
    float* norms;            // of q, then of k, (batch, heads, length)
    int heads, ratio, key_dim;
    int64_t tokens;  // batch * heads * length
    float scale;
    bool l2_norm, for_gradient;
};

template <class K>
struct PrepareShared {
    struct Rows {
        typename K::token_tile q, k;
    };
    struct Solve {
        typename K::square_tile solved;
        sv<float, 64 * DELTA_PITCH> n;
        sv<float, DELTA_CHUNK> beta;
    };
    union {
        Rows rows;
        Solve solve;
    };
    sv<float, DELTA_CHUNK> c, key_norm, query_norm;

    __device__ PrepareShared() {}
};

// The vectors of a chunk, by one warp; a lane has two neighbouring tokens.
template <class K>
__device__ __forceinline__ void make_vectors(const PrepareGlobals<K>& g, PrepareShared<K>& shared,
                                             const DeltaGates& gates, float* vectors) {
    const int lane = laneid();
    const float2 c = gates.c, k = arch::load_shared<float2>(shared.key_norm.address_of(2 * lane)),
                 q = arch::load_shared<float2>(shared.query_norm.address_of(2 * lane));
    const float2 e = {arch::exp2_approx(c.x), arch::exp2_approx(c.y)},
                 rest = {arch::exp2_approx(gates.last - c.x), arch::exp2_approx(gates.last - c.y)};
    const auto store = [&](DeltaVector which, float2 pair) {
        arch::store_global(reinterpret_cast<float2*>(vectors + which * DELTA_CHUNK + 2 * lane),
                           pair);
    };
    store(EXP_C, {e.x * k.x, e.y * k.y});
    store(EXP_REST, {rest.x * k.x, rest.y * k.y});
    store(BETA, g.for_gradient ? gates.beta : float2{1.0f, 1.0f});
    store(LOG2_C, g.for_gradient ? c : float2{g.scale * e.x * q.x, g.scale * e.y * q.y});
    arch::store_shared(shared.c.address_of(2 * lane), c);
    arch::store_shared(shared.solve.beta.address_of(2 * lane), gates.beta);
}

// P to memory and N, of a value head, from the accumulators of Q K^T and K K^T.
template <class K>
__device__ __forceinline__ void decay_products(PrepareShared<K>& shared, const rt_fl<16, 64>& qk,
                                               const rt_fl<16, 64>& kk, float scale,
                                               typename K::T* to) {
    const int row = lane_row(), first = 2 * (laneid() % 4);
    float c_of[2], key[2], query[2];
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        c_of[low] = shared.c.get(row + 8 * low);
        key[low] = shared.key_norm.get(row + 8 * low);
        query[low] = scale * shared.query_norm.get(row + 8 * low);
    }
    rt_fl<16, 64> scores;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * j + 8 * (i / 2) + first, low = i % 2, r = row + 8 * low;
            const float2 c = arch::load_shared<float2>(shared.c.address_of(column)),
                         norm = arch::load_shared<float2>(shared.key_norm.address_of(column));
            const float2 p = qk.tiles[0][j].data[i], n = kk.tiles[0][j].data[i];
            const float x = column <= r ? arch::exp2_approx(c_of[low] - c.x) * norm.x : 0.0f;
            const float y = column + 1 <= r ? arch::exp2_approx(c_of[low] - c.y) * norm.y : 0.0f;
            scores.tiles[0][j].data[i] = {query[low] * p.x * x, query[low] * p.y * y};
            arch::store_shared(shared.solve.n.address_of(r * DELTA_PITCH + column),
                               float2{column < r ? key[low] * n.x * x : 0.0f,
                                      column + 1 < r ? key[low] * n.y * y : 0.0f});
        }
    }
    store_tile_rows(scores, to);
}

template <class K>
__global__ __launch_bounds__(GROUP_THREADS) void delta_portable_prepare_kernel(
    const __grid_constant__ PrepareGlobals<K> g) {
    using T = typename K::T;
    auto& shared = *reinterpret_cast<PrepareShared<K>*>(shared_memory());
    auto& rows = shared.rows;
    const int slot = int(blockIdx.x) % g.sequences.slots,
              batch_head = int(blockIdx.x) / g.sequences.slots, head = batch_head % g.heads;
    const DeltaChunk chunk = g.sequences.chunk(batch_head / g.heads, slot);
    if (!chunk.exists || chunk.is_rest) return;
    const int warp = own_warp();
    copy_rows(rows.q, g.q.at(chunk, head, chunk.row()), g.q.row_stride, chunk.tokens(), g.key_dim);
    copy_rows(rows.k, g.k.at(chunk, head, chunk.row()), g.k.row_stride, chunk.tokens(), g.key_dim);
    arch::cp_async_commit();
    arch::cp_async_wait<0>();
    arch::sync_block();
    float key_norm = 1.0f, query_norm = 1.0f;
    if (g.normal_q != nullptr) {
        normalize_rows<K>(g, rows.q, g.normal_q, g.norms, chunk, head);
        normalize_rows<K>(g, rows.k, g.normal_k, g.norms + g.tokens, chunk, head);
    } else if (g.l2_norm) {
        key_norm = row_norm<K>(rows.k);
        query_norm = row_norm<K>(rows.q);
    }
    if (threadIdx.x % 2 == 0) {
        shared.key_norm.set(int(threadIdx.x) / 2, key_norm);
        shared.query_norm.set(int(threadIdx.x) / 2, query_norm);
    }
    arch::sync_block();
    rt_fl<16, 64> qk, kk;
    zero(qk);
    zero(kk);
    {
        const a_walker<typename K::token_tile> queries(rows.q, 16 * warp, 0),
            own_keys(rows.k, 16 * warp, 0);
        const b_walker<typename K::token_tile> keys(rows.k, 0, 0);
#pragma unroll
        for (int step = 0; step < K::key_dim / 16; ++step) {
            operand_a<T> q, k;
            queries.load(q, 0, 16 * step, 0);
            own_keys.load(k, 0, 16 * step, 0);
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                if (j > warp) continue;
                operand_b<T> b;
                keys.load(b, 16 * j, 16 * step, 0);
                mma_operands(block_of(qk, j), q, b);
                mma_operands(block_of(kk, j), k, b);
            }
        }
    }
#pragma unroll 1
    for (int r = 0; r < g.ratio; ++r) {
        const int value_head = head * g.ratio + r;
        const int64_t at =
            (int64_t(chunk.b) * g.heads * g.ratio + value_head) * g.sequences.slots + chunk.slot;
        arch::sync_block();  // all are done with the rows, or with the head before
        if (warpid() == 0) {
            make_vectors(g, shared, sum_gates_of(g, chunk, value_head),
                         g.vectors + at * (DELTA_VECTORS * DELTA_CHUNK));
        }
        arch::sync_block();
        decay_products<K>(shared, qk, kk, g.scale, g.scores + at * DELTA_SQUARE);
        arch::sync_block();
        const float beta = shared.solve.beta.get(16 * warp + laneid() % 16);
        solve_columns<K>(shared.solve, [&](float h, int row, int column) {
            if (g.for_gradient) return h;
            return shared.solve.beta.get(row) * fmaf(h, beta, row == column ? 1.0f : 0.0f);
        });
        arch::sync_block();
#pragma unroll
        for (int i = 0; i < DELTA_SQUARE / 8 / GROUP_THREADS; ++i) {
            const int word = int(threadIdx.x) + i * GROUP_THREADS;
            arch::store_global(
                reinterpret_cast<uint4*>(g.solved + at * DELTA_SQUARE) + word,
                arch::load_shared<uint4>(shared.solve.solved.address_of(word / 8, word % 8 * 8)));
        }
    }
}

}  // namespace delta_portable

template <DType dtype, int key_dim>
void launch_portable_delta_prepare(const DeltaRuleParams& call, Stream stream) {
    using namespace delta_portable;
    using K = DeltaTiles<dtype, key_dim>;
    using T = typename K::T;
    constexpr int bytes = portable_delta_prepare_bytes(key_dim);
    static_assert(sizeof(PrepareShared<K>) <= bytes);
    const DeltaRuleProblem& p = call.problem;
    const DeltaPrepared& to = call.prepared;
    const PrepareGlobals<K> globals{.q = {call.q, p.key_dim},
                                    .k = {call.k, p.key_dim},
                                    .g = call.g,
                                    .beta = call.beta,
                                    .gate = call.gate,
                                    .sequences = call,
                                    .solved = static_cast<T*>(to.solved),
                                    .scores = static_cast<T*>(to.scores),
                                    .vectors = to.vectors,
                                    .normal_q = static_cast<T*>(to.q),
                                    .normal_k = static_cast<T*>(to.k),
                                    .norms = to.norms,
                                    .heads = int(p.heads),
                                    .ratio = int(p.value_heads / p.heads),
                                    .key_dim = int(p.key_dim),
                                    .tokens = delta_batch(p) * p.heads * p.length,
                                    .scale = call.scale,
                                    .l2_norm = call.l2_norm,
                                    .for_gradient = to.for_gradient};
    kittens::launch(delta_portable_prepare_kernel<K>,
                    dim3(unsigned(delta_slots(p) * p.heads * delta_batch(p))), dim3(GROUP_THREADS),
                    dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
