// The gradients of LoLCATS's maps, dW = x^T dz over all tokens of a head: parts, each the sum over
// a share of the tokens of one head of one sequence, in fp32.
#pragma once

#include "csrc/linear_attention/lolcats/gradient_common.cuh"

namespace thunderkittens::linear_attention {

template <class K>
struct FeatureMapGradientGlobals {
    typename K::token_layout q;
    KeysAndValues<K> kv;
    typename LolcatsGradient<K>::projected_layout dq_projected, dk_projected;
    const int *lengths, *queries_done, *keys_done;
    float* parts;  // (2, batch_heads, parts, head_dim, features)
    int heads, length, shares;
    int64_t batch_heads;
    bool continued, want_q, want_k;
    bool after_keys;  // the kernel for the keys came before this one
};

template <class K>
struct FeatureMapGradientShared {
    static constexpr int stages = 4;
    struct Stage {
        typename K::token_tile x;
        typename LolcatsGradient<K>::projected_tile projected;
    } stage[stages];
    semaphore full[stages];
};

template <class K>
__global__ __launch_bounds__(WARPGROUP_THREADS, 2) void lolcats_feature_map_gradient_kernel(
    const __grid_constant__ FeatureMapGradientGlobals<K> g) {
    using Shared = FeatureMapGradientShared<K>;
    constexpr int rows = K::head_dim / 64;
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<Shared>();
    const bool keys = blockIdx.y == 1;
    if (threadIdx.x == 0) {
        for (int s = 0; s < Shared::stages; ++s) init_semaphore(shared.full[s], 1);
        arch::mbarrier_init_fence();
    }
    arch::launch_dependents();
    // This kernel begins when all blocks of the one before have, and fills what these leave idle.
    // It waits for flags of heads; where there are none, the queries' map needs no wait behind the
    // kernel for the keys, which has waited for that for the queries.
    const bool wanted = keys ? g.want_k : g.want_q;
    const int* done = keys ? g.keys_done : g.queries_done;
    const bool waits = done == nullptr && (keys || !g.after_keys);
    if (waits || !wanted)
        arch::wait_for_dependencies();
    else
        arch::skip_dependencies();
    if (!wanted) return;
    arch::sync_block();
    const LolcatsWorkTile work(int(blockIdx.x), g.heads, g.shares, g.lengths, g.length);
    const int count = work.end - work.begin;
    const auto load_chunk = [&](int n) {
        auto& to = shared.stage[n % Shared::stages];
        semaphore& full = shared.full[n % Shared::stages];
        const int chunk = work.begin + n;
        tma::expect(full, to.x, to.projected);
        const int head = keys ? work.head / g.kv.group : work.head;
        if (keys && g.continued && chunk < CACHE / CHUNK)
            tma::load_async(to.x, g.kv.first_k, elements(work.b, head, chunk * CHUNK, 0), full);
        else
            tma::load_async(to.x, keys ? g.kv.k : g.q,
                            elements(work.b, head, work.terrace.row(chunk), 0), full);
        tma::load_async(to.projected, keys ? g.dk_projected : g.dq_projected,
                        elements(0, work.batch_head, chunk * CHUNK, 0), full);
    };
    if (threadIdx.x == 0) {
        if (done != nullptr) wait_for_flag(done + work.batch_head);
        for (int n = 0; n < Shared::stages && n < count; ++n) load_chunk(n);
    }
    typename K::projection sums[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) zero(sums[r]);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        auto& stage = shared.stage[n % Shared::stages];
        wait(shared.full[n % Shared::stages], n / Shared::stages % 2);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            warpgroup::mma_AtB(sums[r], stage.x.template subtile<CHUNK, 64>({0, r}),
                               stage.projected);
        }
        warpgroup::mma_async_wait<0>(sums[0]);
        if constexpr (rows > 1) pin(sums[1]);
        warpgroup::sync(1);
        if (threadIdx.x == 0 && n + Shared::stages < count) load_chunk(n + Shared::stages);
    }
    float* to = g.parts + ((keys ? g.batch_heads : 0) * g.shares + int64_t(blockIdx.x)) *
                              K::head_dim * K::features;
#pragma unroll
    for (int r = 0; r < rows; ++r) store_rows(to + r * 64 * K::features, 64, 0, sums[r]);
    // This kernel does not end before the one for the keys.
    if (keys && blockIdx.x + 1 == gridDim.x) arch::wait_for_dependencies();
}

template <DType dtype, int head_dim, int features>
void launch_lolcats_feature_map_gradient(const LolcatsBackwardParams& params,
                                         const LolcatsBackwardWorkspace& w, Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    static_assert(sizeof(FeatureMapGradientShared<K>) + 1024 <= LOLCATS_FEATURE_MAP_GRADIENT_BYTES);
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    const FeatureMapGradientGlobals<K> globals{
        .q = token_layout_of<typename K::token_layout>(call.q, p, p.heads, p.length),
        .kv = KeysAndValues<K>(call, w.forward),
        .dq_projected = projected_layout_of<K>(w.dq_projected, p),
        .dk_projected = projected_layout_of<K>(w.dk_projected, p),
        .lengths = call.initial.lengths,
        .queries_done = w.queries_done,
        .keys_done = w.keys_done,
        .parts = w.map_partials,
        .heads = int(p.heads),
        .length = int(p.length),
        .shares = params.map_splits,
        .batch_heads = p.batch * p.heads,
        .continued = p.continued,
        .want_q = params.dq_map != nullptr,
        .want_k = params.dk_map != nullptr,
        .after_keys = params.wants_keys()};
    kittens::launch({.dependent = true}, lolcats_feature_map_gradient_kernel<K>,
                    dim3(unsigned(globals.batch_heads * params.map_splits), 2),
                    dim3(WARPGROUP_THREADS), dim3(1), LOLCATS_FEATURE_MAP_GRADIENT_BYTES, stream,
                    globals);
}

}  // namespace thunderkittens::linear_attention
