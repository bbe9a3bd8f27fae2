// The part of a chunk that no state goes into, by a warpgroup: from the keys, queries and gates of
// 64 tokens it makes T diag(beta) and P as operands, and the factors of the tokens.
//
// K K^T and Q K^T are accumulators of wgmma. Decays exp(c_i - c_j) are at most one; left of the
// diagonal blocks they are products of two such, by way of the block's first row. exp(c_i) and
// exp(-c_j) alone could overflow. Norms of q and k are factors too, which diagonals of products
// have: no tile is written anew.
#pragma once

#include "csrc/recurrent/gated_delta_rule/inverse_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int PREPARE_BARRIER = 1, CONSUME_BARRIER = 3;  // and that of the next warpgroup

// One thread: the keys and queries of a chunk.
template <class K>
__device__ __forceinline__ void load_keys(const DeltaGlobals<K>& g, DeltaShared<K>& shared,
                                          const DeltaWork<K>& work, int chunk) {
    auto& stage = shared.stages[chunk % K::stages];
    semaphore& loaded = shared.loaded[chunk % K::stages];
    if constexpr (K::summary) {
        work.sequence.load(stage.k, g.k, work.head, chunk * CHUNK, 0, loaded);
        return;
    }
    tma::expect(loaded, stage.q, stage.k);
    work.sequence.load_more(stage.k, g.k, work.head, chunk * CHUNK, 0, loaded);
    work.sequence.load_more(stage.q, g.q, work.head, chunk * CHUNK, 0, loaded);
}

// A lane's two tokens of a chunk: what decay and beta are made of, as it lies in memory.
struct GateValues {
    uint32_t g[2], beta[2];
};

template <class K>
class Preparer {
  public:
    using T = typename K::T;

    __device__ __forceinline__ Preparer(const DeltaGlobals<K>& _g, DeltaShared<K>& _shared,
                                        const DeltaWork<K>& _work, int _id)
        : g(_g), shared(_shared), work(_work), id(_id) {}

    // Of the inverse warps 0 and 1 have most: gates and loads are with the other two.
    __device__ __forceinline__ void run() {
        const int chunks = work.sequence.chunks(), warp = warpgroup::warpid();
        if (id >= chunks) return;
        PrepareScratch& scratch = shared.scratch[id];
        const auto inverse = [&] { return TriangularInverse(rematerialized(shared).scratch[id]); };
        if (warp == gate_warp) store_gates(scratch.tokens[0], gate_values(id), id);
        if (!g.l2_norm && warpgroup::laneid() < CHUNK) {
            for (auto& tokens : scratch.tokens) {
                tokens.key_norm.set(warpgroup::laneid(), 1.0f);
                tokens.query_norm.set(warpgroup::laneid(), 1.0f);
            }
        }
#pragma unroll 1
        for (int i = id; i < chunks; i += K::preparers) {
            auto& all = rematerialized(shared);
            auto& stage = all.stages[i % K::stages];
            const int round = i / K::preparers;
            auto& tokens = all.scratch[id].tokens[round % 2];
            wait(all.loaded[i % K::stages], i / K::stages % 2);
            rt_fl<16, CHUNK> keys, queries;
            warpgroup::mm_ABt(keys, stage.k, stage.k);
            if constexpr (!K::summary) {
                warpgroup::mm_ABt(queries, stage.q, stage.k);
                if (g.l2_norm) store_query_norms(tokens.query_norm, stage.q);
            }
            warpgroup::mma_async_wait<0>(keys);
            if constexpr (!K::summary) warpgroup::mma_async_wait<0>(queries);
            if (g.l2_norm) store_key_norms(tokens.key_norm, keys);
            sync();
            const RowFactors factors(*this, tokens);
            rt<T, 16, CHUNK> weights;
            weigh_diagonal(inverse(), tokens, factors, weights, keys, queries);
            sync();
            weigh_below(inverse(), tokens, factors, weights, keys, queries);
            GateValues values{};  // of the warpgroup's next chunk; nothing behind the last one
            if (warp == gate_warp) values = gate_values(i + K::preparers);
            if (warp < 2) inverse().invert_diagonal();
            sync();
            TriangularInverse::Sums beside = {}, block = {};
            if (warp < 2) inverse().merge_16(beside);
            if (warp == gate_warp && i + K::preparers < chunks) {
                store_gates(all.scratch[id].tokens[(round + 1) % 2], values, i + K::preparers);
            }
            auto& to = rematerialized(shared).prepared[i % K::slots];
            if (warp == load_warp) {
                if (i >= K::slots) wait(all.empty[i % K::slots], (i / K::slots - 1) % 2);
                // The consumers have also read the keys of the chunk whose place this is.
                if (laneid() == 0 && i + 2 < chunks) load_keys(g, all, work, i + 2);
            }
            sync();
            inverse().merge_32(block);

            store_block(to.t, tokens.beta, block, 2 + warp / 2, warp % 2);
            if (warp < 2) store_block(to.t, tokens.beta, beside, 2 * warp + 1, 2 * warp);
            TriangularInverse::Sums diagonal;
            inverse().load_diagonal(diagonal);
            store_block(to.t, tokens.beta, diagonal, warp, warp);
            if constexpr (!K::summary) store_weights(to.p, weights);
            store_factors(to, tokens);
            arch::fence_async_shared();
            signal_by_warp(all.full[i % K::slots]);
        }
    }

  private:
    static constexpr int gate_warp = 2, load_warp = 3;

    __device__ __forceinline__ void sync() const { warpgroup::sync(PREPARE_BARRIER + id); }

    // Tokens behind the sequence neither decay nor write.
    __device__ __forceinline__ GateValues gate_values(int chunk) const {
        GateValues values{};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = chunk * CHUNK + 2 * laneid() + e;
            if (row >= work.sequence.length) continue;
            const int place = work.sequence.begin + work.sequence.first + row;
            values.g[e] = g.g.bits_at(work.sequence.index, work.value_head, place);
            values.beta[e] = g.beta.bits_at(work.sequence.index, work.value_head, place);
        }
        return values;
    }
    // Inclusive sums of the log decays, and beta.
    __device__ __forceinline__ void store_gates(PrepareScratch::Tokens& tokens,
                                                const GateValues& values, int chunk) const {
        const int lane = recomputed_lane();
        const float factor = g.gate.factor(work.value_head), bias = g.gate.bias(work.value_head);
        float decay[2], beta[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool exists = chunk * CHUNK + 2 * lane + e < work.sequence.length;
            decay[e] = exists ? g.gate.decay(g.g.value(values.g[e]), factor, bias) : 0.0f;
            beta[e] = exists ? g.gate.beta(g.beta.value(values.beta[e])) : 0.0f;
        }
        float sum = decay[0] + decay[1];
#pragma unroll
        for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
            const float before = arch::shuffle(sum, ::max(lane - distance, 0));
            if (lane >= distance) sum += before;
        }
        const float before = arch::shuffle(sum, ::max(lane - 1, 0));
        const float first = (lane > 0 ? before : 0.0f) + decay[0];
        arch::store_shared(tokens.sums.address_of(2 * lane), float2{first, sum});
        arch::store_shared(tokens.beta.address_of(2 * lane), float2{beta[0], beta[1]});
    }
    // 1 / sqrt(sum x^2 + eps) of the warp's rows: the diagonals of two products of eight rows with
    // themselves, whose B operands are halves of the A operand.
    __device__ __forceinline__ void store_query_norms(sv<float, CHUNK>& to,
                                                      const typename K::key_tile& tile) const {
        const int first = 16 * warpgroup::warpid();
        const operand_walker<operand_a, true, typename K::key_tile> rows(tile, first, 0);
        float sums[2][4] = {};
#pragma unroll
        for (int step = 0; step < K::key_dim / 16; ++step) {
            operand_a<T> a;
            rows.load(a, 0, 16 * step, 0);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t b[2] = {a.words[half], a.words[half + 2]};
                arch::mma_sync<T, T>::fma(sums[half], a.words, b, sums[half]);
            }
        }
        const int lane = recomputed_lane(), row = lane / 4;
        if (lane % 4 != row / 2) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sums[half][2 * half], next = sums[half][2 * half + 1];
            to.set(first + 8 * half + row,
                   arch::reciprocal_sqrt((row % 2 == 0 ? sum : next) + DELTA_L2_EPS));
        }
    }
    // The same of keys: their sums are the diagonal of K K^T.
    __device__ __forceinline__ void store_key_norms(sv<float, CHUNK>& to,
                                                    const rt_fl<16, CHUNK>& products) const {
        const int warp = warpgroup::warpid(), lane = recomputed_lane(), row = lane / 4;
        if (lane % 4 != row / 2) return;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j != warp) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = products.tiles[0][j].data[3 * half];
                to.set(16 * j + 8 * half + row,
                       arch::reciprocal_sqrt((row % 2 == 0 ? pair.x : pair.y) + DELTA_L2_EPS));
            }
        }
    }
    // Of a lane's two rows: what scores of keys and of queries are multiplied by, and the sums of
    // their log decays, those of the warp's first row too.
    struct RowFactors {
        float key[2], query[2], sum[2], first;

        __device__ __forceinline__ RowFactors(const Preparer& of,
                                              const PrepareScratch::Tokens& tokens) {
            const int row = 16 * warpgroup::warpid(), lane = recomputed_lane();
            first = tokens.sums.get(row);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int own = row + lane / 4 + 8 * r;
                sum[r] = tokens.sums.get(own);
                key[r] = tokens.key_norm.get(own) * tokens.beta.get(own);
                query[r] = K::summary ? 0.0f : tokens.query_norm.get(own) * of.g.scale;
            }
        }
    };
    // The block of 16 x 16 on the diagonal: of L to the inverse, of P into `weights`.
    __device__ __forceinline__ void weigh_diagonal(const TriangularInverse& inverse,
                                                   const PrepareScratch::Tokens& tokens,
                                                   const RowFactors& factors,
                                                   rt<T, 16, CHUNK>& weights,
                                                   const rt_fl<16, CHUNK>& keys,
                                                   const rt_fl<16, CHUNK>& queries) const {
        const int warp = warpgroup::warpid(), lane = recomputed_lane(), row = lane / 4;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j != warp) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2, column = 8 * (i / 2) + 2 * (lane % 4);
                const auto sum = arch::load_shared<float2>(tokens.sums.address_of(16 * j + column));
                const auto norm =
                    arch::load_shared<float2>(tokens.key_norm.address_of(16 * j + column));
                const int distance = row + 8 * r - column;
                const float decay[2] = {
                    distance >= 0 ? arch::exp2_approx(factors.sum[r] - sum.x) * norm.x : 0.0f,
                    distance >= 1 ? arch::exp2_approx(factors.sum[r] - sum.y) * norm.y : 0.0f};
                const float2 key = keys.tiles[0][j].data[i];
                arch::store_shared(inverse.place(j, row + 8 * r, column),
                                   key.x * factors.key[r] * decay[0]);
                arch::store_shared(inverse.place(j, row + 8 * r, column + 1),
                                   key.y * factors.key[r] * decay[1]);
                if constexpr (!K::summary) {
                    const float2 query = queries.tiles[0][j].data[i];
                    weights.tiles[0][j].data[i] =
                        pack_pair<T>(query.x * factors.query[r] * decay[0],
                                     query.y * factors.query[r] * decay[1]);
                }
            }
        }
    }
    // The blocks left of it. Their decays are products of two that are at most one: from a column
    // to the warp's first row, and from there on.
    __device__ __forceinline__ void weigh_below(const TriangularInverse& inverse,
                                                const PrepareScratch::Tokens& tokens,
                                                const RowFactors& factors,
                                                rt<T, 16, CHUNK>& weights,
                                                const rt_fl<16, CHUNK>& keys,
                                                const rt_fl<16, CHUNK>& queries) const {
        const int warp = warpgroup::warpid(), lane = recomputed_lane();
        float key_factor[2], query_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float decay = arch::exp2_approx(factors.sum[r] - factors.first);
            key_factor[r] = factors.key[r] * decay;
            query_factor[r] = factors.query[r] * decay;
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 16 - 1; ++j) {
            if (j >= warp) continue;
            TriangularInverse::Sums block;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 16 * j + 8 * half + 2 * (lane % 4);
                const auto sum = arch::load_shared<float2>(tokens.sums.address_of(column));
                const auto norm = arch::load_shared<float2>(tokens.key_norm.address_of(column));
                const float decay[2] = {arch::exp2_approx(factors.first - sum.x) * norm.x,
                                        arch::exp2_approx(factors.first - sum.y) * norm.y};
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float2 key = keys.tiles[0][j].data[2 * half + r];
                    block[half][2 * r] = key.x * key_factor[r] * decay[0];
                    block[half][2 * r + 1] = key.y * key_factor[r] * decay[1];
                    if constexpr (!K::summary) {
                        const float2 query = queries.tiles[0][j].data[2 * half + r];
                        weights.tiles[0][j].data[2 * half + r] =
                            pack_pair<T>(query.x * query_factor[r] * decay[0],
                                         query.y * query_factor[r] * decay[1]);
                    }
                }
            }
            inverse.store_below(warp, j, block);
        }
    }
    // A block of T with the columns' beta.
    __device__ __forceinline__ static void store_block(typename K::square_tile& to,
                                                       const sv<float, CHUNK>& beta,
                                                       const TriangularInverse::Sums& x, int row,
                                                       int column) {
        uint32_t words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto factor = arch::load_shared<float2>(
                beta.address_of(16 * column + 8 * half + 2 * (recomputed_lane() % 4)));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                words[2 * half + r] = arch::bit_cast<uint32_t>(
                    pack_pair<T>(x[half][2 * r] * factor.x, x[half][2 * r + 1] * factor.y));
            }
        }
        store_words(to, row, column, words);
    }
    __device__ __forceinline__ static void store_words(typename K::square_tile& to, int row,
                                                       int column, const uint32_t (&words)[4]) {
        const int lane = recomputed_lane();
        arch::store_matrix_x4(
            to.address_of(16 * row + lane % 8 + 8 * (lane / 8 % 2), 16 * column + 8 * (lane / 16)),
            words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ void store_weights(typename K::square_tile& to,
                                                  const rt<T, 16, CHUNK>& weights) const {
        const int warp = warpgroup::warpid();
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j > warp) continue;
            store_words(to, warp, j,
                        reinterpret_cast<const uint32_t(&)[4]>(weights.tiles[0][j].data));
        }
    }
    __device__ __forceinline__ void store_factors(Prepared<K>& to,
                                                  const PrepareScratch::Tokens& tokens) const {
        const int token = WARP_THREADS * warpgroup::warpid() + recomputed_lane();
        if (token >= CHUNK) return;
        const float sum = tokens.sums.get(token), last = tokens.sums.get(CHUNK - 1);
        const float norm = tokens.key_norm.get(token), decay = arch::exp2_approx(sum);
        to.key_factor.set(token, decay * norm);
        if constexpr (!K::summary) {
            to.query_factor.set(token, decay * tokens.query_norm.get(token) * g.scale);
        }
        to.new_factor.set(token, arch::exp2_approx(last - sum) * norm);
        if (token == CHUNK - 1) to.decay.set(0, decay);
    }

    const DeltaGlobals<K>& g;
    DeltaShared<K>& shared;
    const DeltaWork<K>& work;
    const int id;
};

}  // namespace thunderkittens::recurrent::delta
