// The first kernel of the gated delta rule's gradient: of each chunk what depends on no state. A
// block of one warpgroup has a chunk of one head of the keys. It brings Q and K by TMA, normalises
// them with l2_norm, and multiplies them once, K K^T and Q K^T. For each value head of that head it
// then makes
//   vectors  exp(c), exp(c_last - c), beta and c, by a warp
//   P        scale (Q K^T) o G
//   H        -(I + N diag(beta))^-1 N with N = stril(K K^T) o G, row by row in fp32: a warp has 16
//            columns, of which two lanes share the sums. Powers of N, which would be products, grow
//            and cancel where keys repeat; the rows do not.
#pragma once

#include "csrc/recurrent/gated_delta_rule/within_chunks.cuh"
#include "csrc/recurrent/gated_delta_rule_backward/backward_types_sm90.cuh"

namespace thunderkittens::recurrent {
namespace delta_gradient {

template <class K>
struct DeltaPrepareGlobals {
    using T = typename K::T;
    DeltaTokens<typename K::token_tile> q, k;
    TokenNumbers<T> g, beta;
    DeltaGate gate;
    DeltaSequences sequences;
    tile_rows<typename K::square_tile> solved, scores;
    float* vectors;
    T *normal_q, *normal_k;  // (batch, heads, length, key_dim); null without l2_norm
    float* norms;            // of q, then of k, (batch, heads, length)
    int heads, ratio, key_dim;
    int64_t tokens;  // batch * heads * length
    float scale;
};

template <class K>
struct DeltaPrepareShared {
    typename K::token_tile q, k;
    typename K::square_tile solved, scores;
    sv<float, 64 * DELTA_PITCH> n;
    sv<float, DELTA_CHUNK> c, beta;
    semaphore full;
};

// The vectors of a chunk, by one warp; a lane has two neighbouring tokens.
template <class K>
__device__ __forceinline__ void make_vectors(const DeltaPrepareGlobals<K>& g,
                                             DeltaPrepareShared<K>& shared, const DeltaChunk& chunk,
                                             int value_head, float* vectors) {
    const int lane = laneid();
    const auto [c, beta, last] = sum_gates_of(g, chunk, value_head);
    const auto store = [&](DeltaVector which, float2 pair) {
        arch::store_global(reinterpret_cast<float2*>(vectors + which * DELTA_CHUNK + 2 * lane),
                           pair);
    };
    store(EXP_C, {arch::exp2_approx(c.x), arch::exp2_approx(c.y)});
    store(EXP_REST, {arch::exp2_approx(last - c.x), arch::exp2_approx(last - c.y)});
    store(BETA, beta);
    store(LOG2_C, c);
    arch::store_shared(shared.c.address_of(2 * lane), c);
    arch::store_shared(shared.beta.address_of(2 * lane), beta);
}

// P and N of a value head, from the accumulators of Q K^T and K K^T.
template <class K>
__device__ __forceinline__ void decay_products(DeltaPrepareShared<K>& shared,
                                               const rt_fl<16, 64>& qk, const rt_fl<16, 64>& kk,
                                               float scale) {
    const int row = lane_row(), first = 2 * (laneid() % 4);
    const float2 own = {shared.c.get(row), shared.c.get(row + 8)};
    rt<typename K::T, 16, 64> scores;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 16 * j + 8 * (i / 2) + first, r = row + 8 * (i % 2);
            const float2 c = arch::load_shared<float2>(shared.c.address_of(column));
            const float mine = i % 2 ? own.y : own.x;
            const float2 p = qk.tiles[0][j].data[i], n = kk.tiles[0][j].data[i];
            const float x = column <= r ? arch::exp2_approx(mine - c.x) : 0.0f;
            const float y = column + 1 <= r ? arch::exp2_approx(mine - c.y) : 0.0f;
            scores.tiles[0][j].data[i] = pack_pair<typename K::T>(scale * p.x * x, scale * p.y * y);
            arch::store_shared(
                shared.n.address_of(r * DELTA_PITCH + column),
                float2{column < r ? n.x * x : 0.0f, column + 1 < r ? n.y * y : 0.0f});
        }
    }
    warpgroup::store(shared.scores, scores);
}

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS) void delta_prepare_kernel(
    const __grid_constant__ DeltaPrepareGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DeltaPrepareShared<K>>();
    const int slot = int(blockIdx.x) % g.sequences.slots,
              batch_head = int(blockIdx.x) / g.sequences.slots, head = batch_head % g.heads;
    const DeltaChunk chunk = g.sequences.chunk(batch_head / g.heads, slot);
    if (!chunk.exists || chunk.is_rest) return;
    if (first_thread()) {
        init_semaphore(shared.full, 1);
        arch::mbarrier_init_fence();
        tma::expect(shared.full, shared.q, shared.k);
        g.q.load(shared.q, chunk, head, chunk.row(), 0, shared.full);
        g.k.load(shared.k, chunk, head, chunk.row(), 0, shared.full);
    }
    arch::sync_block();
    wait(shared.full, 0);
    if (g.normal_q != nullptr) {
        normalize_rows<K>(g, shared.q, g.normal_q, g.norms, chunk, head);
        normalize_rows<K>(g, shared.k, g.normal_k, g.norms + g.tokens, chunk, head);
        arch::fence_async_shared();
        arch::sync_block();
    }
    rt_fl<16, 64> qk, kk;
    warpgroup::mm_ABt(kk, shared.k, shared.k);
    warpgroup::mm_ABt(qk, shared.q, shared.k);
    warpgroup::mma_async_wait<0>(kk);
    warpgroup::mma_async_wait<0>(qk);
#pragma unroll 1
    for (int r = 0; r < g.ratio; ++r) {
        const int value_head = head * g.ratio + r;
        const int64_t at =
            (int64_t(chunk.b) * g.heads * g.ratio + value_head) * g.sequences.slots + chunk.slot;
        if (warpid() == 0)
            make_vectors(g, shared, chunk, value_head,
                         g.vectors + at * (DELTA_VECTORS * DELTA_CHUNK));
        if (first_thread()) tma::store_async_read_wait();
        arch::sync_block();
        decay_products(shared, qk, kk, g.scale);
        arch::sync_block();
        solve_columns<K>(shared, [](float h, int, int) { return h; });
        arch::sync_block();
        if (first_thread()) {
            tma::store_async(g.scores, shared.scores, {int(at), 0});
            tma::store_async(g.solved, shared.solved, {int(at), 0});
        }
    }
    if (first_thread()) tma::store_async_wait();
}

}  // namespace delta_gradient

template <DType dtype, int key_dim>
void launch_delta_prepare(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_gradient;
    using K = DeltaTiles<dtype, key_dim>;
    using T = typename K::T;
    constexpr int bytes = delta_prepare_bytes(key_dim);
    static_assert(sizeof(DeltaPrepareShared<K>) + 1024 <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int64_t chunks = delta_chunks(p);
    const auto normal = [&](int64_t offset) {
        return call.l2_norm ? reinterpret_cast<T*>(params.workspace + offset) : nullptr;
    };
    const DeltaPrepareGlobals<K> globals{
        .q = {call.q, p, p.heads, p.key_dim},
        .k = {call.k, p, p.heads, p.key_dim},
        .g = call.g,
        .beta = call.beta,
        .gate = call.gate,
        .sequences = call,
        .solved = tile_rows_of<typename K::square_tile>(params, w.solved, chunks),
        .scores = tile_rows_of<typename K::square_tile>(params, w.scores, chunks),
        .vectors = reinterpret_cast<float*>(params.workspace + w.vectors),
        .normal_q = normal(w.q),
        .normal_k = normal(w.k),
        .norms = reinterpret_cast<float*>(params.workspace + w.norms),
        .heads = int(p.heads),
        .ratio = int(p.value_heads / p.heads),
        .key_dim = int(p.key_dim),
        .tokens = delta_batch(p) * p.heads * p.length,
        .scale = call.scale};
    kittens::launch(delta_prepare_kernel<K>,
                    dim3(unsigned(delta_slots(p) * p.heads * delta_batch(p))),
                    dim3(WARPGROUP_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
