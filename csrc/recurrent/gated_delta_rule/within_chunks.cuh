// What happens within a chunk before a state is there, for the gradient and for portable kernels,
// by 128 threads: norms of rows, sums of gates, and
//   H = -(I + N diag(beta))^-1 N with N = stril(K K^T) o G
// row by row in fp32: a warp has 16 columns, of which two lanes share the sums. Powers of N, which
// would be products, grow and cancel where keys repeat; the rows do not.
#pragma once

#include "csrc/recurrent/gated_delta_rule/chunks.cuh"

namespace thunderkittens::recurrent::delta_common {

// Rows of N: a multiple of 16 bytes, beside whole banks.
constexpr int DELTA_PITCH = 68;

// 1 / sqrt(sum x^2 + eps) of a row; two lanes a row.
template <class K>
__device__ __forceinline__ float row_norm(const typename K::token_tile& tile) {
    using T = typename K::T;
    constexpr int half = K::key_dim / 2;
    const int row = threadIdx.x / 2, first = threadIdx.x % 2 * half;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < half; i += 8) {
        const uint4 word = arch::load_shared<uint4>(tile.address_of(row, first + i));
        const uint32_t parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(parts[n]));
            sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
        }
    }
    return arch::reciprocal_sqrt(sum + arch::shuffle_xor(sum, 1) + DELTA_L2_EPS);
}

// Divides a row by sqrt(sum x^2 + eps), in shared memory and in the workspace; two lanes a row.
template <class K, class Globals>
__device__ __forceinline__ void normalize_rows(const Globals& g, typename K::token_tile& tile,
                                               typename K::T* normal, float* norms,
                                               const DeltaChunk& chunk, int head) {
    using T = typename K::T;
    constexpr int half = K::key_dim / 2;
    const int row = threadIdx.x / 2, first = threadIdx.x % 2 * half;
    const float factor = row_norm<K>(tile);
    const bool exists = row < chunk.tokens();
    const int64_t token =
        (int64_t(chunk.b) * g.heads + head) * g.sequences.length + chunk.begin + chunk.row() + row;
    if (exists && first == 0) arch::store_global(norms + token, factor);
#pragma unroll
    for (int i = 0; i < half; i += 8) {
        const uint32_t at = tile.address_of(row, first + i);
        const uint4 word = arch::load_shared<uint4>(at);
        uint32_t parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 x = unpack_pair<T>(arch::bit_cast<packed_type<T>>(parts[n]));
            parts[n] = arch::bit_cast<uint32_t>(pack_pair<T>(x.x * factor, x.y * factor));
        }
        const uint4 result = {parts[0], parts[1], parts[2], parts[3]};
        arch::store_shared(at, result);
        if (exists && first + i < g.key_dim) {
            arch::store_global(reinterpret_cast<uint4*>(normal + token * g.key_dim + first + i),
                               result);
        }
    }
}

// Of a lane's two neighbouring tokens: the inclusive sums of log2(decay), and beta. By a warp.
struct DeltaGates {
    float2 c, beta;
    float last;  // of all tokens
};
template <class Globals>
__device__ __forceinline__ DeltaGates sum_gates_of(const Globals& g, const DeltaChunk& chunk,
                                                   int value_head) {
    const int lane = laneid();
    const float factor = g.gate.factor(value_head), bias = g.gate.bias(value_head);
    uint32_t given[2], given_beta[2];  // on their way together
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = ::min(chunk.row() + 2 * lane + i, chunk.length - 1);
        given[i] = g.g.load_bits(chunk, value_head, row);
        given_beta[i] = g.beta.load_bits(chunk, value_head, row);
    }
    float decay[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        decay[i] = beta[i] = 0.0f;
        if (chunk.row() + 2 * lane + i < chunk.length) {
            const float x = g.gate.decay(g.g.value(given[i]), factor, bias);
            // Below, the decay is 0 in fp32 anyway; an infinite one would leave no differences.
            decay[i] = fmaxf(x * DELTA_LOG2_E, -130.0f);
            beta[i] = g.gate.beta(g.beta.value(given_beta[i]));
        }
    }
    float sum = decay[0] + decay[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float before = arch::shuffle(sum, (lane - distance) & 31);
        if (lane >= distance) sum += before;
    }
    const float last = arch::shuffle(sum, 31);
    return {{sum - decay[1], sum}, {beta[0], beta[1]}, last};
}

// Row i of H is -(N_i + sum over m < i of N_im beta_m H_m). Lanes l and l + 16 have the same
// column, and every other four terms of its sums. What is kept is result(H_ij, i, j).
template <class K, class Shared, class Result>
__device__ __forceinline__ void solve_columns(Shared& shared, Result result) {
    using T = typename K::T;
    const int warp = arch::warp_uniform(warpgroup::warpid()), lane = laneid();
    const int column = 16 * warp + lane % 16, share = lane / 16;
    float weighted[32];  // beta_m H_m of this lane's terms
#pragma unroll
    for (int i = 0; i < 32; ++i) weighted[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int block = 0; block <= i / 16; ++block) {
            // Rows above the warp's columns are zero.
            if (block < warp) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int m = 16 * block + 8 * n;
                if (m >= i) continue;
                const auto terms =
                    arch::load_shared<float4>(shared.n.address_of(i * DELTA_PITCH + m + 4 * share));
                const int at = m / 2;
                sums[0] = fmaf(terms.x, weighted[at], sums[0]);
                sums[1] = fmaf(terms.y, weighted[at + 1], sums[1]);
                sums[2] = fmaf(terms.z, weighted[at + 2], sums[2]);
                sums[3] = fmaf(terms.w, weighted[at + 3], sums[3]);
            }
        }
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        sum += arch::shuffle_xor(sum, 16);
        const float h = -(shared.n.get(i * DELTA_PITCH + column) + sum);
        const bool own = i / 4 % 2 == share;
        if (own) {
            weighted[i / 8 * 4 + i % 4] = shared.beta.get(i) * h;
            shared.solved.set(i, column, convert<T>(result(h, i, column)));
        }
    }
}

}  // namespace thunderkittens::recurrent::delta_common
