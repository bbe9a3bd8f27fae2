// The part of a chunk that no state goes into, by a warpgroup: from the keys, queries and gates of
// 64 tokens it makes T diag(beta) and P as operands, and the factors of the tokens.
//
// K K^T and Q K^T are accumulators of wgmma. Decays exp(c_i - c_j) are at most one; left of the
// diagonal blocks they are products of two such, by way of the block's first row. exp(c_i) and
// exp(-c_j) alone could overflow. Norms of q and k are factors too, which diagonals of products
// have: no tile is written anew.
#pragma once

#include "csrc/recurrent/gated_delta_rule/consumer_sm90.cuh"
#include "csrc/recurrent/gated_delta_rule/inverse_sm90.cuh"

namespace thunderkittens::recurrent::delta {

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

// What is done to a chunk, by a warpgroup, given its sequence in `work`.
template <class K, class Globals, class Work>
class ChunkSteps {
  public:
    using T = typename K::T;

    __device__ __forceinline__ ChunkSteps(const Globals& _g, const Work& _work)
        : g(_g), work(_work) {}

  protected:
    // Tokens behind the sequence neither decay nor write.
    __device__ __forceinline__ GateValues gate_values(int value_head, int chunk) const {
        GateValues values{};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = chunk * CHUNK + 2 * laneid() + e;
            if (row >= work.sequence.length) continue;
            const int place = work.sequence.begin + work.sequence.first + row;
            values.g[e] = g.g.bits_at(work.sequence.index, value_head, place);
            values.beta[e] = g.beta.bits_at(work.sequence.index, value_head, place);
        }
        return values;
    }
    // Inclusive sums of the log decays, and beta.
    __device__ __forceinline__ void store_gates(TokenGates& tokens, const GateValues& values,
                                                int value_head, int chunk) const {
        const int lane = recomputed_lane();
        const float factor = g.gate.factor(value_head), bias = g.gate.bias(value_head);
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

        __device__ __forceinline__ RowFactors(float scale, const TokenGates& tokens,
                                              const TokenNorms& norms) {
            const int row = 16 * warpgroup::warpid(), lane = recomputed_lane();
            first = tokens.sums.get(row);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int own = row + lane / 4 + 8 * r;
                sum[r] = tokens.sums.get(own);
                key[r] = norms.key.get(own) * tokens.beta.get(own);
                query[r] = K::summary ? 0.0f : norms.query.get(own) * scale;
            }
        }
    };
    // The block of 16 x 16 on the diagonal: of L to the inverse, of P into `weights`.
    __device__ __forceinline__ void weigh_diagonal(
        const TriangularInverse& inverse, const TokenGates& tokens, const TokenNorms& norms,
        const RowFactors& factors, rt<T, 16, CHUNK>& weights, const rt_fl<16, CHUNK>& keys,
        const rt_fl<16, CHUNK>& queries) const {
        const int warp = warpgroup::warpid(), lane = recomputed_lane(), row = lane / 4;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j != warp) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2, column = 8 * (i / 2) + 2 * (lane % 4);
                const auto sum = arch::load_shared<float2>(tokens.sums.address_of(16 * j + column));
                const auto norm = arch::load_shared<float2>(norms.key.address_of(16 * j + column));
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
                                                const TokenGates& tokens, const TokenNorms& norms,
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
                const auto norm = arch::load_shared<float2>(norms.key.address_of(column));
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
    // All of this warp's: those of the two merges, and on the diagonal.
    __device__ __forceinline__ static void store_inverse(typename K::square_tile& to,
                                                         const sv<float, CHUNK>& beta,
                                                         const TriangularInverse& inverse,
                                                         const TriangularInverse::Sums& beside,
                                                         const TriangularInverse::Sums& block) {
        const int warp = warpgroup::warpid();
        store_block(to, beta, block, 2 + warp / 2, warp % 2);
        if (warp < 2) store_block(to, beta, beside, 2 * warp + 1, 2 * warp);
        TriangularInverse::Sums diagonal;
        inverse.load_diagonal(diagonal);
        store_block(to, beta, diagonal, warp, warp);
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
    // Calls store(factor, token, its value).
    template <class Store>
    __device__ __forceinline__ void make_factors(const TokenGates& tokens, const TokenNorms& norms,
                                                 Store store) const {
        const int token = WARP_THREADS * warpgroup::warpid() + recomputed_lane();
        if (token >= CHUNK) return;
        const float sum = tokens.sums.get(token), last = tokens.sums.get(CHUNK - 1);
        const float norm = norms.key.get(token), decay = arch::exp2_approx(sum);
        store(OF_KEYS, token, decay * norm);
        if constexpr (!K::summary)
            store(OF_QUERIES, token, decay * norms.query.get(token) * g.scale);
        store(OF_NEW, token, arch::exp2_approx(last - sum) * norm);
        if (token == 0) store(OF_STATE, 0, arch::exp2_approx(last));
    }

    const Globals& g;
    const Work& work;
};

template <class K>
class Preparer : ChunkSteps<K, DeltaGlobals<K>, DeltaWork<K>> {
  public:
    using T = typename K::T;
    using Steps = ChunkSteps<K, DeltaGlobals<K>, DeltaWork<K>>;

    __device__ __forceinline__ Preparer(const DeltaGlobals<K>& _g, DeltaShared<K>& _shared,
                                        const DeltaWork<K>& _work, int _id)
        : Steps(_g, _work), shared(_shared), id(_id) {}

    // Of the inverse warps 0 and 1 have most: gates and loads are with the other two.
    __device__ __forceinline__ void run() {
        const int chunks = work.sequence.chunks(), warp = warpgroup::warpid();
        if (id >= chunks) return;
        PrepareScratch& scratch = shared.scratch[id];
        const auto inverse = [&] {
            return TriangularInverse(rematerialized(shared).scratch[id], warpgroup::warpid());
        };
        const int head = work.value_head;
        if (warp == gate_warp) store_gates(scratch.gates[0], gate_values(head, id), head, id);
        if (!g.l2_norm && warpgroup::laneid() < CHUNK) {
            for (auto& norms : scratch.norms) {
                norms.key.set(warpgroup::laneid(), 1.0f);
                norms.query.set(warpgroup::laneid(), 1.0f);
            }
        }
#pragma unroll 1
        for (int i = id; i < chunks; i += K::preparers) {
            auto& all = rematerialized(shared);
            auto& stage = all.stages[i % K::stages];
            const int round = i / K::preparers;
            auto& tokens = all.scratch[id].gates[round % 2];
            auto& norms = all.scratch[id].norms[round % 2];
            wait(all.loaded[i % K::stages], i / K::stages % 2);
            rt_fl<16, CHUNK> keys, queries;
            warpgroup::mm_ABt(keys, stage.k, stage.k);
            if constexpr (!K::summary) {
                warpgroup::mm_ABt(queries, stage.q, stage.k);
                if (g.l2_norm) store_query_norms(norms.query, stage.q);
            }
            warpgroup::mma_async_wait<0>(keys);
            if constexpr (!K::summary) warpgroup::mma_async_wait<0>(queries);
            if (g.l2_norm) store_key_norms(norms.key, keys);
            sync();
            const typename Steps::RowFactors factors(g.scale, tokens, norms);
            rt<T, 16, CHUNK> weights;
            weigh_diagonal(inverse(), tokens, norms, factors, weights, keys, queries);
            sync();
            weigh_below(inverse(), tokens, norms, factors, weights, keys, queries);
            GateValues values{};  // of the warpgroup's next chunk; nothing behind the last one
            if (warp == gate_warp) values = gate_values(head, i + K::preparers);
            if (warp < 2) inverse().invert_diagonal();
            sync();
            TriangularInverse::Sums beside = {}, block = {};
            if (warp < 2) inverse().merge_16(beside);
            if (warp == gate_warp && i + K::preparers < chunks) {
                store_gates(all.scratch[id].gates[(round + 1) % 2], values, head, i + K::preparers);
            }
            auto& to = rematerialized(shared).prepared[i % K::slots];
            if (warp == load_warp) {
                if (i >= K::slots) wait(all.empty[i % K::slots], (i / K::slots - 1) % 2);
                // The consumers have also read the keys of the chunk whose place this is.
                if (laneid() == 0 && i + 2 < chunks) load_keys(g, all, work, i + 2);
            }
            sync();
            inverse().merge_32(block);

            store_inverse(to.t, tokens.beta, inverse(), beside, block);
            if constexpr (!K::summary) store_weights(to.p, weights);
            make_factors(tokens, norms, [&](Factor which, int token, float x) {
                to.factors.set(which * CHUNK + token, x);
            });
            arch::fence_async_shared();
            signal_by_warp(all.full[i % K::slots]);
        }
    }

  private:
    using Steps::g;
    using Steps::gate_values;
    using Steps::make_factors;
    using Steps::store_gates;
    using Steps::store_inverse;
    using Steps::store_key_norms;
    using Steps::store_query_norms;
    using Steps::store_weights;
    using Steps::weigh_below;
    using Steps::weigh_diagonal;
    using Steps::work;

    static constexpr int gate_warp = 2, load_warp = 3;

    __device__ __forceinline__ void sync() const { warpgroup::sync(PREPARE_BARRIER + id); }

    DeltaShared<K>& shared;
    const int id;
};

}  // namespace thunderkittens::recurrent::delta
