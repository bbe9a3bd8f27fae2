// All that no state goes into, of all chunks side by side, before the kernel that walks over them:
// a block of one warpgroup has a chunk of one head of the keys. It brings Q and K by TMA and
// multiplies them once, K K^T and Q K^T. For each value head of that head it then makes
// T diag(beta), P and the factors (prepare_sm90.cuh). T and P lie where Q and K have been, so that
// four blocks share a multiprocessor and fill each other's waits.
#pragma once

#include "csrc/recurrent/gated_delta_rule/chunks.cuh"
#include "csrc/recurrent/gated_delta_rule/prepare_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int PREPASS_BLOCKS = 4;  // of a multiprocessor

template <class K>
struct PrepassGlobals {
    using T = typename K::T;
    RowLayout<typename K::key_tile> q, k;
    NumberView<T> g, beta;
    GateView gate;
    delta_common::DeltaSequences sequences;
    PreparedChunks<K> prepared;
    float* factors;
    int heads, ratio;
    float scale;
    bool l2_norm;
};

struct PrepassWork {
    DeltaSequence sequence;
};

template <class K>
struct PrepassShared {
    union {
        struct {
            typename K::key_tile q, k;
        };
        struct {  // once the products are made
            typename K::square_tile t, p;
        };
    };
    InverseScratch scratch;
    TokenGates gates[WARPGROUP_WARPS];  // of value heads
    TokenNorms norms;
    semaphore loaded;
};

template <class K>
class Prepass : ChunkSteps<K, PrepassGlobals<K>, PrepassWork> {
  public:
    using T = typename K::T;
    using Steps = ChunkSteps<K, PrepassGlobals<K>, PrepassWork>;

    __device__ __forceinline__ Prepass(const PrepassGlobals<K>& _g, PrepassShared<K>& _shared,
                                       const PrepassWork& _work, int _head, int _chunk)
        : Steps(_g, _work), shared(_shared), head(_head), chunk(_chunk) {}

    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) load();
        make_gates(0);
        if (!g.l2_norm && threadIdx.x < CHUNK) {
            shared.norms.key.set(int(threadIdx.x), 1.0f);
            shared.norms.query.set(int(threadIdx.x), 1.0f);
        }
        arch::sync_block();
        wait(shared.loaded, 0);
        rt_fl<16, CHUNK> keys, queries;
        warpgroup::mm_ABt(keys, shared.k, shared.k);
        warpgroup::mm_ABt(queries, shared.q, shared.k);
        if (g.l2_norm) store_query_norms(shared.norms.query, shared.q);
        warpgroup::mma_async_wait<0>(keys);
        warpgroup::mma_async_wait<0>(queries);
        if (g.l2_norm) store_key_norms(shared.norms.key, keys);
        arch::sync_block();
        clear_upper();
#pragma unroll 1
        for (int r = 0; r < g.ratio; ++r) {
            if (r > 0 && r % WARPGROUP_WARPS == 0) {
                make_gates(r);
                arch::sync_block();
            }
            make_head(r, keys, queries);
        }
        if (threadIdx.x == 0) tma::store_async_wait();
    }

  private:
    using Steps::g;
    using Steps::gate_values;
    using Steps::make_factors;
    using Steps::store_block;
    using Steps::store_gates;
    using Steps::store_key_norms;
    using Steps::store_query_norms;
    using Steps::store_weights;
    using Steps::weigh_below;
    using Steps::weigh_diagonal;
    using Steps::work;

    __device__ __forceinline__ void load() const {
        init_semaphore(shared.loaded, 1);
        arch::mbarrier_init_fence();
        tma::expect(shared.loaded, shared.q, shared.k);
        work.sequence.load_more(shared.k, g.k, head, chunk * CHUNK, 0, shared.loaded);
        work.sequence.load_more(shared.q, g.q, head, chunk * CHUNK, 0, shared.loaded);
    }
    // Of four value heads, a warp each.
    __device__ __forceinline__ void make_gates(int first) const {
        const int warp = warpgroup::warpid(), value_head = head * g.ratio + first + warp;
        if (first + warp >= g.ratio) return;
        store_gates(shared.gates[warp], gate_values(value_head, chunk), value_head, chunk);
    }
    // Zeros in the blocks above the diagonals of T and P.
    __device__ __forceinline__ void clear_upper() const {
#pragma unroll
        for (int i = int(threadIdx.x); i < CHUNK * CHUNK / 8; i += WARPGROUP_THREADS) {
            const int row = i / (CHUNK / 8), column = i % (CHUNK / 8) * 8;
            if (column / 16 <= row / 16) continue;
            arch::store_shared(shared.t.address_of(row, column), uint4{0, 0, 0, 0});
            arch::store_shared(shared.p.address_of(row, column), uint4{0, 0, 0, 0});
        }
    }
    __device__ __forceinline__ void make_head(int r, const rt_fl<16, CHUNK>& keys,
                                              const rt_fl<16, CHUNK>& queries) const {
        auto& all = rematerialized(shared);
        const int warp = arch::warp_uniform(recomputed_warp());
        const auto& gates = all.gates[r % WARPGROUP_WARPS];
        const int at =
            (work.sequence.index * g.heads * g.ratio + head * g.ratio + r) * g.prepared.slots +
            work.sequence.first_slot + chunk;
        const auto inverse = [&] {
            return TriangularInverse(rematerialized(shared).scratch, recomputed_warp());
        };
        const typename Steps::RowFactors factors(g.scale, gates, all.norms);
        rt<T, 16, CHUNK> weights;
        weigh_diagonal(inverse(), gates, all.norms, factors, weights, keys, queries);
        // T and P of the value head before have been read.
        if (threadIdx.x == 0) tma::store_async_read_wait();
        arch::sync_block();
        weigh_below(inverse(), gates, all.norms, factors, weights, keys, queries);
        store_weights(all.p, weights);
        if (warp < 2) inverse().invert_diagonal();
        arch::sync_block();
        if (warp < 2) {
            TriangularInverse::Sums block = {};
            inverse().merge_16(block);
            store_block(all.t, gates.beta, block, 2 * warp + 1, 2 * warp);
        }
        float* const to = g.factors + int64_t(at) * K::factors::length;
        make_factors(gates, all.norms, [&](Factor which, int token, float x) {
            arch::store_global(to + which * CHUNK + token, x);
        });
        arch::sync_block();
        TriangularInverse::Sums last = {};
        inverse().merge_32(last);
        store_block(all.t, gates.beta, last, 2 + warp / 2, warp % 2);
        inverse().load_diagonal(last);
        store_block(all.t, gates.beta, last, warp, warp);
        arch::fence_async_shared();
        arch::sync_block();
        if (threadIdx.x != 0) return;
        tma::store_async(g.prepared.t, all.t, {at, 0});
        tma::store_async(g.prepared.p, all.p, {at, 0});
    }

    PrepassShared<K>& shared;
    const int head, chunk;
};

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS, PREPASS_BLOCKS) void delta_prepass_kernel(
    const __grid_constant__ PrepassGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<PrepassShared<K>>();
    const int slot = int(blockIdx.x) % g.sequences.slots,
              batch_head = int(blockIdx.x) / g.sequences.slots;
    const auto chunk = g.sequences.chunk(batch_head / g.heads, slot);
    if (!chunk.exists || chunk.is_rest) return;
    const PrepassWork work{{chunk.b, chunk.begin, chunk.length, chunk.first_slot}};
    Prepass<K>(g, shared, work, batch_head % g.heads, slot - chunk.first_slot).run();
}

}  // namespace thunderkittens::recurrent::delta

namespace thunderkittens::recurrent {

template <DType dtype, int key_dim>
void launch_delta_prepass(const DeltaRuleParams& params, Stream stream) {
    using K = delta::DeltaKernel<dtype, key_dim, 1, false, true>;
    constexpr int bytes = delta_prepass_bytes(key_dim);
    static_assert(sizeof(delta::PrepassShared<K>) + 1024 <= bytes);
    const DeltaRuleProblem& p = params.problem;
    const delta::PrepassGlobals<K> globals{
        .q = {params.q, p, p.heads, p.key_dim},
        .k = {params.k, p, p.heads, p.key_dim},
        .g = {params.g, p.packed},
        .beta = {params.beta, p.packed},
        .gate = {params.gate.A_log, params.gate.dt_bias, params.gate.beta_sigmoid,
                 params.gate.allow_neg_eigval},
        .sequences = params,
        .prepared = params,
        .factors = params.prepared.vectors,
        .heads = int(p.heads),
        .ratio = int(p.value_heads / p.heads),
        .scale = params.scale,
        .l2_norm = params.l2_norm};
    kittens::launch(delta::delta_prepass_kernel<K>,
                    dim3(unsigned(delta_slots(p) * p.heads * delta_batch(p))),
                    dim3(kittens::WARPGROUP_THREADS), dim3(1), bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
