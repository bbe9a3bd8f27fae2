// The part of a chunk that no state goes into, by a warpgroup: from the keys, queries and gates of
// 64 tokens it makes T diag(beta) and P as operands, and the factors of the tokens.
//
// K K^T and Q K^T are accumulators of wgmma. The decays exp(c_i - c_j), which are at most one,
// multiply both; exp(c_i) and exp(-c_j) by themselves could overflow. Norms of q and k are factors
// too: no tile is written anew.
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

    __device__ __forceinline__ void run() {
        PrepareScratch& scratch = shared.scratch[id];
        const bool makes_gates = warpgroup::warpid() == 0;
        float gate_factor = 0.0f, gate_bias = 0.0f;
        GateValues values{};
        if (makes_gates) {
            gate_factor = g.gate.factor(work.value_head);
            gate_bias = g.gate.bias(work.value_head);
            if (id < work.sequence.chunks()) values = gate_values(id);
        }
        if (!g.l2_norm && warpgroup::laneid() < CHUNK) {
            for (auto& tokens : scratch.tokens) {
                tokens.key_norm.set(warpgroup::laneid(), 1.0f);
                tokens.query_norm.set(warpgroup::laneid(), 1.0f);
            }
        }
#pragma unroll 1
        for (int i = id; i < work.sequence.chunks(); i += K::preparers) {
            auto& all = rematerialized(shared);
            auto& stage = all.stages[i % K::stages];
            auto& tokens = all.scratch[id].tokens[i / K::preparers % 2];
            if (makes_gates) {
                store_gates(tokens, values, i, gate_factor, gate_bias);
                values = gate_values(i + K::preparers);  // nothing behind the last chunk
            }
            wait(all.loaded[i % K::stages], i / K::stages % 2);
            rt_fl<16, CHUNK> keys, queries;
            warpgroup::mm_ABt(keys, stage.k, stage.k);
            if constexpr (!K::summary) warpgroup::mm_ABt(queries, stage.q, stage.k);
            if (g.l2_norm) {
                store_norms(tokens.key_norm, stage.k);
                if constexpr (!K::summary) store_norms(tokens.query_norm, stage.q);
            }
            sync();
            warpgroup::mma_async_wait<0>(keys);
            if constexpr (!K::summary) warpgroup::mma_async_wait<0>(queries);
            rt<T, 16, CHUNK> weights;
            weigh(scratch.matrix, tokens, weights, keys, queries);
            arch::sync_warp();
            TriangularInverse inverse(scratch.matrix.address());
            inverse.invert_diagonal();
            sync();
            inverse.merge_16();
            sync();
            inverse.merge_32();

            auto& to = all.prepared[i % K::slots];
            if (i >= K::slots) wait(all.empty[i % K::slots], (i / K::slots - 1) % 2);
            // The consumers have also read the keys of the chunk whose place this is.
            if (warpgroup::laneid() == 0 && i + 2 < work.sequence.chunks())
                load_keys(g, all, work, i + 2);
            inverse.store(to.t, tokens.beta);
            if constexpr (!K::summary) store_weights(to.p, weights);
            store_factors(to, tokens);
            arch::fence_async_shared();
            signal_by_warp(all.full[i % K::slots]);
        }
    }

  private:
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
                                                const GateValues& values, int chunk, float factor,
                                                float bias) const {
        float decay[2], beta[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool exists = chunk * CHUNK + 2 * laneid() + e < work.sequence.length;
            decay[e] = exists ? g.gate.decay(g.g.value(values.g[e]), factor, bias) : 0.0f;
            beta[e] = exists ? g.gate.beta(g.beta.value(values.beta[e])) : 0.0f;
        }
        float sum = decay[0] + decay[1];
#pragma unroll
        for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
            const float before = arch::shuffle(sum, ::max(laneid() - distance, 0));
            if (laneid() >= distance) sum += before;
        }
        const float before = arch::shuffle(sum, ::max(laneid() - 1, 0));
        const float first = (laneid() > 0 ? before : 0.0f) + decay[0];
        arch::store_shared(tokens.sums.address_of(2 * laneid()), float2{first, sum});
        arch::store_shared(tokens.beta.address_of(2 * laneid()), float2{beta[0], beta[1]});
    }
    // 1 / sqrt(sum x^2 + eps) of the rows, two threads a row. Those of one row read in different
    // banks.
    __device__ __forceinline__ void store_norms(sv<float, CHUNK>& to,
                                                const typename K::key_tile& tile) const {
        const int row = warpgroup::laneid() / 2, half_row = warpgroup::laneid() % 2;
        constexpr int units = K::key_dim / 16;
        float sum = 0.0f;
#pragma unroll
        for (int u = 0; u < units; ++u) {
            const int unit = units == 8 ? u ^ (4 * half_row) : u;
            const auto words =
                arch::load_shared<uint4>(tile.address_of(row, 8 * (half_row * units + unit)));
            for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
                const float2 two = unpack_pair<T>(arch::bit_cast<packed_type<T>>(word));
                sum = fmaf(two.x, two.x, fmaf(two.y, two.y, sum));
            }
        }
        sum += arch::shuffle_xor(sum, 1);
        if (half_row == 0) to.set(row, arch::reciprocal_sqrt(sum + DELTA_L2_EPS));
    }
    // L into the scratch, P as an operand.
    __device__ __forceinline__ void weigh(const sv<float, CHUNK * PrepareScratch::pitch>& matrix,
                                          const PrepareScratch::Tokens& tokens,
                                          rt<T, 16, CHUNK>& weights, const rt_fl<16, CHUNK>& keys,
                                          const rt_fl<16, CHUNK>& queries) const {
        const int warp = warpgroup::warpid(), row = 16 * warp + laneid() / 4;
        float sum[2], key_factor[2], query_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] = tokens.sums.get(row + 8 * r);
            key_factor[r] = tokens.key_norm.get(row + 8 * r) * tokens.beta.get(row + 8 * r);
            query_factor[r] = K::summary ? 0.0f : tokens.query_norm.get(row + 8 * r) * g.scale;
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j > warp) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2, column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                const auto before = arch::load_shared<float2>(tokens.sums.address_of(column));
                const auto norm = arch::load_shared<float2>(tokens.key_norm.address_of(column));
                const int distance = row + 8 * r - column;
                const float decay[2] = {
                    distance >= 0 ? arch::exp2_approx(sum[r] - before.x) * norm.x : 0.0f,
                    distance >= 1 ? arch::exp2_approx(sum[r] - before.y) * norm.y : 0.0f};
                const float2 key = keys.tiles[0][j].data[i];
                const uint32_t to = matrix.address_of(column * PrepareScratch::pitch + row + 8 * r);
                arch::store_shared(to, key.x * key_factor[r] * decay[0]);
                arch::store_shared(to + 4 * PrepareScratch::pitch,
                                   key.y * key_factor[r] * decay[1]);
                if constexpr (!K::summary) {
                    const float2 query = queries.tiles[0][j].data[i];
                    weights.tiles[0][j].data[i] = pack_pair<T>(
                        query.x * query_factor[r] * decay[0], query.y * query_factor[r] * decay[1]);
                }
            }
        }
    }
    __device__ __forceinline__ void store_weights(typename K::square_tile& to,
                                                  const rt<T, 16, CHUNK>& weights) const {
        const int warp = warpgroup::warpid(), lane = laneid();
        const int row = 16 * warp + lane % 8 + 8 * (lane / 8 % 2);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if (j > warp) continue;
            const auto& words = reinterpret_cast<const uint32_t(&)[4]>(weights.tiles[0][j].data);
            arch::store_matrix_x4(to.address_of(row, 16 * j + 8 * (lane / 16)), words[0], words[1],
                                  words[2], words[3]);
        }
    }
    __device__ __forceinline__ void store_factors(Prepared<K>& to,
                                                  const PrepareScratch::Tokens& tokens) const {
        const int token = warpgroup::laneid();
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
