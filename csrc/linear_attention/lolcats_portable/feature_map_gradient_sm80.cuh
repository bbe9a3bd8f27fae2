// The gradients of LoLCATS's maps, dW = x^T dz over all tokens of a head, as in
// lolcats/feature_map_gradient_sm90.cuh, for every GPU from compute capability 8.0 on: parts, each
// the sum over a share of the tokens. Each of four warps has 16 rows of W, or twice as many.
#pragma once

#include "csrc/linear_attention/lolcats_portable/types_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

template <class K>
struct MapGlobals {
    using T = typename K::T;
    QueryRowsOf<T> q;
    KeyRowsOf<T> k;
    const T *dq_projected, *dk_projected;
    const int* lengths;
    float* parts;  // (2, batch_heads, shares, head_dim, features)
    int heads, length, shares, chunks;
    int64_t batch_heads;
    bool want_q, want_k;
};

template <class K>
struct MapShared {
    struct Stage {
        typename K::token_tile x;
        st<typename K::T, CHUNK, K::features> projected;
    } stages[2];
};

template <class K>
__global__ __launch_bounds__(
    PORTABLE_THREADS,
    PORTABLE_BLOCKS_PER_SM) void lolcats_portable_map_gradient_kernel(const __grid_constant__
                                                                          MapGlobals<K>
                                                                              g) {
    using T = typename K::T;
    constexpr int groups = K::head_dim / 64, blocks = K::features / 16;
    using projected_tile = decltype(MapShared<K>::Stage::projected);
    // Blocks of the queries' map, then of the keys'.
    const int of_each = int(gridDim.x) / 2, index = int(blockIdx.x) % of_each;
    const bool keys = int(blockIdx.x) >= of_each;
    if (!(keys ? g.want_k : g.want_q)) return;
    auto& shared = *reinterpret_cast<MapShared<K>*>(shared_memory());
    const LolcatsWorkTile work(index, g.heads, g.shares, g.lengths, g.length);
    const T* projected = keys ? g.dk_projected : g.dq_projected;
    const auto load = [&](int chunk) {
        auto& to = shared.stages[chunk % 2];
        if (keys)
            g.k.template copy<PORTABLE_THREADS>(to.x, work, chunk);
        else
            g.q.template copy<PORTABLE_THREADS>(to.x, work, chunk);
        const int64_t first = int64_t(work.batch_head) * g.chunks * CHUNK;
        copy_rows<PORTABLE_THREADS>(to.projected, projected + first * K::features, K::features,
                                    chunk * CHUNK, g.chunks * CHUNK);
        arch::cp_async_commit();
    };
    if (work.begin < work.end) load(work.begin);
    rt_fl<16, K::features> sums[groups];
#pragma unroll
    for (int i = 0; i < groups; ++i) zero(sums[i]);
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        auto& stage = shared.stages[chunk % 2];
        arch::cp_async_wait<0>();
        arch::sync_block();
        if (chunk + 1 < work.end) load(chunk + 1);
        const operand_walker<operand_a, false, typename K::token_tile> x(stage.x, 0, warp_row());
        const b_walker_of_rows<projected_tile> z(stage.projected, 0, 0);
#pragma unroll
        for (int k = 0; k < TOKEN_BLOCKS; ++k) {
            operand_a<T> a[groups];
#pragma unroll
            for (int i = 0; i < groups; ++i) x.load(a[i], 16 * k, 64 * i, 0);
#pragma unroll
            for (int j = 0; j < blocks; ++j) {
                operand_b<T> b;
                z.load(b, 16 * k, 16 * j, 0);
#pragma unroll
                for (int i = 0; i < groups; ++i) mma_operands(block_of(sums[i], j), a[i], b);
            }
        }
    }
    float* to =
        g.parts + ((keys ? g.batch_heads : 0) * g.shares + index) * K::head_dim * K::features;
#pragma unroll
    for (int i = 0; i < groups; ++i)
        store_warp_rows(to, K::features, 64 * i + warp_row(), K::head_dim, sums[i]);
}

}  // namespace sm80

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_feature_map_gradient(const LolcatsBackwardParams& params,
                                                  const LolcatsBackwardWorkspace& w,
                                                  Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    using T = typename K::T;
    const LolcatsParams& call = params.forward;
    const LolcatsProblem& p = call.problem;
    static_assert(sizeof(sm80::MapShared<K>) <= PORTABLE_FEATURE_MAP_GRADIENT_BYTES);
    const sm80::MapGlobals<K> globals{.q = sm80::query_rows<T>(call.q, p),
                                      .k = sm80::key_rows<T>(call.k, w.forward.first_keys, p),
                                      .dq_projected = static_cast<const T*>(w.dq_projected),
                                      .dk_projected = static_cast<const T*>(w.dk_projected),
                                      .lengths = call.initial.lengths,
                                      .parts = w.map_partials,
                                      .heads = int(p.heads),
                                      .length = int(p.length),
                                      .shares = params.map_splits,
                                      .chunks = int(chunks_of(p)),
                                      .batch_heads = p.batch * p.heads,
                                      .want_q = params.dq_map != nullptr,
                                      .want_k = params.dk_map != nullptr};
    kittens::launch({.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM},
                    sm80::lolcats_portable_map_gradient_kernel<K>,
                    dim3(unsigned(2 * globals.batch_heads * params.map_splits)),
                    dim3(sm80::PORTABLE_THREADS), dim3(1), PORTABLE_FEATURE_MAP_GRADIENT_BYTES,
                    stream, globals);
}

}  // namespace thunderkittens::linear_attention
