// The features of all queries and keys, softmax(x W) and softmax(-x W), for the portable kernels of
// LoLCATS. A block has a few chunks of one head; each of its four warps 16 of a chunk's tokens.
#pragma once

#include "csrc/linear_attention/lolcats_portable/types_sm80.cuh"

namespace thunderkittens::linear_attention {
namespace sm80 {

constexpr int CHUNKS_OF_A_SHARE = 4;

template <class K>
struct FeaturesGlobals {
    using T = typename K::T;
    QueryRowsOf<T> q;
    KeyRowsOf<T> k;
    StridedRows<T> q_map, k_map;
    FeatureArray<K> q_features, k_features;
    const int* lengths;
    int heads, length, shares;
};

template <class K>
struct FeaturesShared {
    typename K::token_tile x[2];
    typename K::map_tile map;
};

template <class K>
__global__
__launch_bounds__(PORTABLE_THREADS, PORTABLE_BLOCKS_PER_SM) void lolcats_portable_features_kernel(
    const __grid_constant__ FeaturesGlobals<K> g) {
    using T = typename K::T;
    auto& shared = *reinterpret_cast<FeaturesShared<K>*>(shared_memory());
    // Blocks of the queries, then of the keys.
    const int of_each = int(gridDim.x) / 2, index = int(blockIdx.x) % of_each;
    const bool keys = int(blockIdx.x) >= of_each;
    const LolcatsWorkTile work(index, g.heads, g.shares, g.lengths, g.length);
    const auto load = [&](int chunk) {
        auto& to = shared.x[chunk % 2];
        if (keys)
            g.k.template copy<PORTABLE_THREADS>(to, work, chunk);
        else
            g.q.template copy<PORTABLE_THREADS>(to, work, chunk);
        arch::cp_async_commit();
    };
    const StridedRows<T>& map = keys ? g.k_map : g.q_map;
    copy_rows<PORTABLE_THREADS>(shared.map, map.at(0, work.head, 0, 0), map.row_stride, 0,
                                K::head_dim);
    if (work.begin < work.end) load(work.begin);
    const FeatureArray<K>& to = keys ? g.k_features : g.q_features;
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        arch::cp_async_wait<0>();
        arch::sync_block();
        if (chunk + 1 < work.end) load(chunk + 1);
        typename K::projection z;
        zero(z);
        const a_walker<typename K::token_tile> tokens(shared.x[chunk % 2], warp_row(), 0);
        const b_walker_of_rows<typename K::map_tile> columns(shared.map, 0, 0);
#pragma unroll
        for (int k = 0; k < K::head_dim / 16; ++k) {
            operand_a<T> a;
            tokens.load(a, 0, 16 * k, 0);
#pragma unroll
            for (int j = 0; j < K::features / 16; ++j) {
                operand_b<T> b;
                columns.load(b, 16 * k, 16 * j, 0);
                mma_operands(block_of(z, j), a, b);
            }
        }
        typename K::Features features;
        make_scaled_features<K>(features, z, 1.0f);
#pragma unroll
        for (int b = 0; b < feature_blocks<K>; ++b) {
            const auto& data = features.groups[b / 4].tiles[0][b % 4].data;
            arch::store_global(
                to.at(work.batch_head, chunk, own_warp(), b),
                make_uint4(arch::bit_cast<uint32_t>(data[0]), arch::bit_cast<uint32_t>(data[1]),
                           arch::bit_cast<uint32_t>(data[2]), arch::bit_cast<uint32_t>(data[3])));
        }
    }
}

}  // namespace sm80

template <DType dtype, int head_dim, int features>
void launch_portable_lolcats_features(const LolcatsParams& params, const LolcatsWorkspace& w,
                                      Stream stream) {
    using K = LolcatsKernel<dtype, head_dim, features>;
    using T = typename K::T;
    const LolcatsProblem& p = params.problem;
    constexpr int share = sm80::CHUNKS_OF_A_SHARE;
    static_assert(sizeof(sm80::FeaturesShared<K>) <= PORTABLE_FEATURES_BYTES);
    const sm80::FeaturesGlobals<K> globals{.q = sm80::query_rows<T>(params.q, p),
                                           .k = sm80::key_rows<T>(params.k, w.first_keys, p),
                                           .q_map = params.q_map,
                                           .k_map = params.k_map,
                                           .q_features = sm80::feature_array<K>(w.q_features, p),
                                           .k_features = sm80::feature_array<K>(w.k_features, p),
                                           .lengths = params.initial.lengths,
                                           .heads = int(p.heads),
                                           .length = int(p.length),
                                           .shares = int((chunks_of(p) + share - 1) / share)};
    kittens::launch(
        {.blocks_per_sm = sm80::PORTABLE_BLOCKS_PER_SM}, sm80::lolcats_portable_features_kernel<K>,
        dim3(unsigned(2 * p.batch * p.heads * globals.shares)), dim3(sm80::PORTABLE_THREADS),
        dim3(1), PORTABLE_FEATURES_BYTES, stream, globals);
}

}  // namespace thunderkittens::linear_attention
