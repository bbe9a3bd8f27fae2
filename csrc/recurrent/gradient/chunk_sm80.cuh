// What chunk_sm90.cuh computes, for every GPU from compute capability 8.0 on. A block has a chunk
// and the heads of a group, or a share of them, and two roles of four warps: queries are rows in
// one (query_role_sm80.cuh), keys in the other (key_role_sm80.cuh). All warps load. Between two
// steps, of 64 columns of a head each, the first warp makes the gradients of the decays of what
// both roles have summed, and the second that of the skip, while the next step is on its way. A
// block takes 94 KB.
#pragma once

#include "csrc/recurrent/gradient/key_role_sm80.cuh"
#include "csrc/recurrent/gradient/query_role_sm80.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

// The gradients of the tokens of a head, by one warp: over the slices of its values.
struct TokenGradients {
    float states = 0.0f;
    float2 pairs{}, behind{}, weight{};

    template <class K>
    __device__ __forceinline__ void add(const ChunkShared<K>& shared) {
        const auto& sums = shared.sums;
        const auto pair = [](const sv<float, CHUNK>& x) {
            return arch::load_shared<float2>(x.address_of(2 * laneid()));
        };
        const float2 row = pair(sums.row), column = pair(sums.column);
        const float2 b = pair(sums.behind), w = pair(sums.weight);
        pairs = {pairs.x + (row.x - column.x), pairs.y + (row.y - column.y)};
        behind = {behind.x + b.x, behind.y + b.y};
        weight = {weight.x + w.x, weight.y + w.y};
#pragma unroll
        for (int i = 0; i < WARPGROUP_WARPS; ++i) states += shared.state_products.get(i);
    }
};

template <class K>
__device__ __forceinline__ void store_skip(const ChunkWork<K>& work, int head, int slice) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < WARPGROUP_WARPS; ++i) {
        const float2 part =
            arch::load_shared<float2>(work.shared.skip.address_of(VALUES * i + 2 * laneid()));
        sum = {sum.x + part.x, sum.y + part.y};
    }
    float* to = work.g.skip_partials + work.state(head, slice) * VALUES;
    arch::store_global(reinterpret_cast<float2*>(to) + laneid(), sum);
}

template <class K, class Role>
__device__ __forceinline__ void run_role(ChunkWork<K>& work) {
    constexpr int stages = ChunkShared<K>::stages;
    constexpr bool queries = std::is_same_v<Role, QueryRole<K>>;
    const ChunkGlobals& g = work.g;
    Role role(work);
    TokenGradients gradients;
    int head = work.heads().z, slice = 0, at = 0;
    work.load_keys();
    work.template load_before<GRADIENT_CHUNK_THREADS>(0, head, 0);
    work.load_others(0, head, 0);
    arch::cp_async_commit();
    arch::cp_async_wait<0>();
    arch::sync_block();
    role.begin();
#pragma unroll 1
    for (bool more = true; more; ++at) {
        auto& shared = rematerialized(work.shared);
        const int stage = at % stages, next = (at + 1) % stages;
        const bool last_slice = slice + 1 == g.slices;
        const int next_head = last_slice ? head + 1 : head, next_slice = last_slice ? 0 : slice + 1;
        more = next_head < work.heads().w;
        if (stages > 1 && more) {
            work.template load_before<GRADIENT_CHUNK_THREADS>(next, next_head, next_slice);
            work.load_others(next, next_head, next_slice);
            arch::cp_async_commit();
        }
        role.step(shared, stage, head, slice, [&] {
            if (stages > 1 || !more) return;
            arch::named_barrier_sync(QUERY_BARRIER, PORTABLE_THREADS);
            work.template load_before<PORTABLE_THREADS>(next, next_head, next_slice);
            arch::cp_async_commit();
        });
        arch::sync_block();  // all are done with the step, and its sums are there
        const bool makes_tokens = queries && own_warp() == 0;
        float last = 0.0f;
        if (makes_tokens) {  // before this warp loads the next gates
            last = shared.gates[stage].get(CHUNK - 1);
            arch::sync_warp();
        }
        if (stages == 1 && more) {
            work.load_others(next, next_head, next_slice);
            arch::cp_async_commit();
        }
        if (makes_tokens) {
            gradients.add(shared);
            if (last_slice) {
                float* to = g.tokens + work.token_row(head) * (2 * CHUNK) + 2 * laneid();
                arch::store_global(
                    reinterpret_cast<float2*>(to),
                    decay_gradients(gradients.pairs, gradients.behind, last, gradients.states));
                arch::store_global(reinterpret_cast<float2*>(to + CHUNK), gradients.weight);
                gradients = {};
            }
        }
        if (queries && own_warp() == 1 && g.skip_partials != nullptr) store_skip(work, head, slice);
        arch::cp_async_wait<0>();
        arch::sync_block();  // the next step is there, and the sums are free
        head = next_head;
        slice = next_slice;
    }
    role.finish();
}

template <class K>
__global__ __launch_bounds__(GRADIENT_CHUNK_THREADS, 1) void gradient_portable_chunk_kernel(
    const __grid_constant__ ChunkGlobals g) {
    const ChunkTile tile(g, int(blockIdx.x));
    if (tile.at.sequence < 0) return;
    ChunkWork<K> work{g, *reinterpret_cast<ChunkShared<K>*>(shared_memory())};
    if (threadIdx.x == 0) work.keep(tile);
    arch::sync_block();
    if (arch::warp_uniform(warpgroup::groupid()) == 0)
        run_role<K, QueryRole<K>>(work);
    else
        run_role<K, KeyRole<K>>(work);
}

}  // namespace sm80

template <DType dtype, int key_dim>
void launch_portable_gradient_chunks(const GradientParams& params, const GradientWorkspace& w,
                                     Stream stream) {
    using K = GradientTypes<dtype, key_dim>;
    static_assert(sizeof(sm80::ChunkShared<K>) <= PORTABLE_GRADIENT_CHUNK_BYTES);
    const RecurrentParams& call = params.forward;
    const RecurrentProblem& p = call.problem;
    const sm80::ChunkGlobals globals{.q = call.q,
                                     .k = call.k,
                                     .dq = params.dq,
                                     .dk = params.dk,
                                     .v = call.v,
                                     .grad_out = params.grad_out,
                                     .dv = params.dv,
                                     .gates = w.gates,
                                     .before = w.before,
                                     .after = w.after,
                                     .table = w.table,
                                     .skip = call.skip,
                                     .units = w.units,
                                     .tokens = w.tokens,
                                     .skip_partials = w.skip,
                                     .partial = w.partial,
                                     .slots = int(slots_of(p)),
                                     .heads = int(p.heads),
                                     .groups = int(p.groups),
                                     .slices = int(slices_of(p)),
                                     .splits = params.splits,
                                     .key_dim = int(p.key_dim),
                                     .value_dim = int(p.value_dim),
                                     .scale = call.scale,
                                     .packed = p.sequences > 0};
    kittens::launch(sm80::gradient_portable_chunk_kernel<K>,
                    dim3(unsigned(slots_of(p) * p.groups * params.splits)),
                    dim3(sm80::GRADIENT_CHUNK_THREADS), dim3(1), PORTABLE_GRADIENT_CHUNK_BYTES,
                    stream, globals);
}

}  // namespace thunderkittens::recurrent
