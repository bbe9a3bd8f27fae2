// The first kernel of the gated delta rule's gradient: of each chunk what depends on no state. A
// block of one warpgroup has a chunk of one head of the keys. It brings Q and K by TMA, normalises
// them with l2_norm, and multiplies them once, K K^T and Q K^T. For each value head of that head it
// then makes
//   vectors  exp(c), exp(c_last - c), beta and c, by a warp; those of four heads at a time
//   P        scale (Q K^T) o G
//   H        -(I + N diag(beta))^-1 N with N = stril(K K^T) o G (backward_solve_sm90.cuh)
// P and H lie where Q and K have been. So four blocks share a multiprocessor.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_solve_sm90.cuh"
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
    DeltaTokens<typename K::token_tile> normal_q, normal_k;  // in the workspace, with l2_norm
    tile_rows<typename K::square_tile> solved, scores;
    float* vectors;
    float* norms;  // of q, then of k, (batch, heads, length); null without l2_norm
    int heads, ratio;
    int64_t tokens;  // batch * heads * length
    float scale;
};

constexpr int DELTA_PREPARE_BLOCKS = 4;  // of a multiprocessor

template <class K>
struct DeltaPrepareShared {
    union {
        struct {
            typename K::token_tile q, k;
        };
        struct {  // of a value head, once the products are made
            typename K::square_tile solved, scores;
        };
    };
    sv<float, 64 * DELTA_PITCH> n;
    struct {
        sv<float, DELTA_CHUNK> c, beta;
    } gates[WARPGROUP_WARPS];
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
    auto& gates = shared.gates[warpgroup::warpid()];
    arch::store_shared(gates.c.address_of(2 * lane), c);
    arch::store_shared(gates.beta.address_of(2 * lane), beta);
}

// Divides a row by sqrt(sum x^2 + eps); two lanes a row, every other 16 bytes each.
template <class K>
__device__ __forceinline__ void normalize_tile(const DeltaPrepareGlobals<K>& g,
                                               typename K::token_tile& tile, float* norms,
                                               const DeltaChunk& chunk, int head) {
    using T = typename K::T;
    constexpr int words = K::key_dim / 16;
    const int row = int(threadIdx.x) / 2, share = int(threadIdx.x) % 2;
    const auto place = [&](int i) { return tile.address_of(row, 16 * i + 8 * share); };
    uint4 mine[words];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < words; ++i) {
        mine[i] = arch::load_shared<uint4>(place(i));
        for (const uint32_t word : {mine[i].x, mine[i].y, mine[i].z, mine[i].w}) {
            const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(word));
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
        }
    }
    const float factor = arch::reciprocal_sqrt(sum + arch::shuffle_xor(sum, 1) + DELTA_L2_EPS);
#pragma unroll
    for (int i = 0; i < words; ++i) {
        const auto scaled = [&](uint32_t word) {
            const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(word));
            return arch::bit_cast<uint32_t>(pack_pair<T>(x.x * factor, x.y * factor));
        };
        arch::store_shared(place(i), uint4{scaled(mine[i].x), scaled(mine[i].y), scaled(mine[i].z),
                                           scaled(mine[i].w)});
    }
    if (share == 0 && row < chunk.tokens()) {
        arch::store_global(norms + (int64_t(chunk.b) * g.heads + head) * g.sequences.length +
                               chunk.begin + chunk.row() + row,
                           factor);
    }
}

// P of a value head as an operand, and N to shared memory, from the accumulators of Q K^T and
// K K^T.
template <class K>
__device__ __forceinline__ void decay_products(DeltaPrepareShared<K>& shared,
                                               const sv<float, DELTA_CHUNK>& sums,
                                               rt<typename K::T, 16, 64>& scores,
                                               const rt_fl<16, 64>& qk, const rt_fl<16, 64>& kk,
                                               float scale) {
    const int warp = arch::warp_uniform(warpgroup::warpid());
    const int row = lane_row(), first = 2 * (laneid() % 4);
    const float2 own = {sums.get(row), sums.get(row + 8)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto& score = scores.tiles[0][j].data[i];
            if (j > warp) {
                score = pack_pair<typename K::T>(0.0f, 0.0f);
                continue;
            }
            const int column = 16 * j + 8 * (i / 2) + first, r = row + 8 * (i % 2);
            const float2 c = arch::load_shared<float2>(sums.address_of(column));
            const float mine = i % 2 ? own.y : own.x;
            const float2 p = qk.tiles[0][j].data[i], n = kk.tiles[0][j].data[i];
            const float x = column <= r ? arch::exp2_approx(mine - c.x) : 0.0f;
            const float y = column + 1 <= r ? arch::exp2_approx(mine - c.y) : 0.0f;
            score = pack_pair<typename K::T>(scale * p.x * x, scale * p.y * y);
            const uint32_t to = shared.n.address_of(0) + DeltaSolver::offset(r, column);
            arch::store_shared(to, column < r ? n.x * x : 0.0f);
            arch::store_shared(to + DeltaSolver::offset(0, 1), column + 1 < r ? n.y * y : 0.0f);
        }
    }
}

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS, DELTA_PREPARE_BLOCKS) void delta_prepare_kernel(
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
    const int warp = arch::warp_uniform(warpgroup::warpid());
    const auto place_of = [&](int r) {
        return (int64_t(chunk.b) * g.heads * g.ratio + head * g.ratio + r) * g.sequences.slots +
               chunk.slot;
    };
    const auto make_gates = [&](int r) {
        if (r + warp >= g.ratio) return;
        make_vectors(g, shared, chunk, head * g.ratio + r + warp,
                     g.vectors + place_of(r + warp) * (DELTA_VECTORS * DELTA_CHUNK));
    };
    make_gates(0);
    arch::sync_block();
    wait(shared.full, 0);
    if (g.norms != nullptr) {
        normalize_tile<K>(g, shared.q, g.norms, chunk, head);
        normalize_tile<K>(g, shared.k, g.norms + g.tokens, chunk, head);
        arch::fence_async_shared();
        arch::sync_block();
        if (first_thread()) {
            g.normal_q.store(shared.q, chunk, head, chunk.row(), 0);
            g.normal_k.store(shared.k, chunk, head, chunk.row(), 0);
        }
    }
    rt_fl<16, 64> qk, kk;
    warpgroup::mm_ABt(kk, shared.k, shared.k);
    warpgroup::mm_ABt(qk, shared.q, shared.k);
    warpgroup::mma_async_wait<0>(kk);
    warpgroup::mma_async_wait<0>(qk);
#pragma unroll 1
    for (int r = 0; r < g.ratio; ++r) {
        if (r > 0 && r % WARPGROUP_WARPS == 0) {
            make_gates(r);
            arch::sync_block();
        }
        const auto& gates = shared.gates[r % WARPGROUP_WARPS];
        rt<typename K::T, 16, 64> scores;
        decay_products(shared, gates.c, scores, qk, kk, g.scale);
        arch::sync_warp();
        DeltaSolver solver(shared.n.address_of(0), gates.beta);
        solver.solve_diagonal();
        // What has left from the place of P and H has been read.
        if (first_thread()) tma::store_async_read_wait();
        arch::sync_block();
        warpgroup::store(shared.scores, scores);
        solver.merge_16();
        arch::sync_block();
        solver.merge_32();
        solver.store(shared.solved);
        arch::fence_async_shared();
        arch::sync_block();
        if (first_thread()) {
            tma::store_async(g.scores, shared.scores, {int(place_of(r)), 0});
            tma::store_async(g.solved, shared.solved, {int(place_of(r)), 0});
        }
    }
    if (first_thread()) tma::store_async_wait();
}

}  // namespace delta_gradient

template <DType dtype, int key_dim>
void launch_delta_prepare(const DeltaBackwardParams& params, Stream stream) {
    using namespace delta_gradient;
    using K = DeltaTiles<dtype, key_dim>;
    constexpr int bytes = delta_prepare_bytes(key_dim);
    static_assert(sizeof(DeltaPrepareShared<K>) + 1024 <= bytes);
    const DeltaRuleParams& call = params.forward;
    const DeltaRuleProblem& p = call.problem;
    const DeltaBackwardWorkspace w(p, params.config, call.l2_norm);
    const int64_t chunks = delta_chunks(p);
    const DeltaPrepareGlobals<K> globals{
        .q = {call.q, p, p.heads, p.key_dim},
        .k = {call.k, p, p.heads, p.key_dim},
        .g = call.g,
        .beta = call.beta,
        .gate = call.gate,
        .sequences = call,
        .normal_q = {delta_operand(params, call.q, w.q), p, p.heads, p.key_dim},
        .normal_k = {delta_operand(params, call.k, w.k), p, p.heads, p.key_dim},
        .solved = tile_rows_of<typename K::square_tile>(params, w.solved, chunks),
        .scores = tile_rows_of<typename K::square_tile>(params, w.scores, chunks),
        .vectors = reinterpret_cast<float*>(params.workspace + w.vectors),
        .norms = call.l2_norm ? reinterpret_cast<float*>(params.workspace + w.norms) : nullptr,
        .heads = int(p.heads),
        .ratio = int(p.value_heads / p.heads),
        .tokens = delta_batch(p) * p.heads * p.length,
        .scale = call.scale};
    kittens::launch(delta_prepare_kernel<K>,
                    dim3(unsigned(delta_slots(p) * p.heads * delta_batch(p))),
                    dim3(WARPGROUP_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
