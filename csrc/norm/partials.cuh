// What gradients sum: the rows of a team, partial rows of weight and bias, and sums of several rows
// over a team at once.
#pragma once

#include "csrc/norm/units.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// Eight partial sums of a row of them, whose pitch is a multiple of a unit.
__device__ __forceinline__ void store_partial(float* at, const float (&sums)[UNIT]) {
    store_unit<true>(at, rounded<float>(sums), UNIT);
}

// A row of partial sums is that of a block, or of the teams of a warp.
struct Reducer {
    int teams, team;  // that share it
    int partial;

    __device__ __forceinline__ Reducer(int lanes, uint32_t block, uint32_t thread) {
        const bool whole_block = lanes > WARP;
        teams = whole_block ? 1 : WARP / lanes;
        team = whole_block ? 0 : static_cast<int>(thread % WARP) / lanes;
        partial = static_cast<int>(whole_block ? block : block * (BLOCK / WARP) + thread / WARP);
    }
    __device__ __forceinline__ explicit Reducer(int lanes)
        : Reducer(lanes, blockIdx.x, threadIdx.x) {}
};

// What the teams of a warp have summed, of columns that they share.
template <int COUNT, int BIASES>
__device__ __forceinline__ void add_teams(float (&weight)[COUNT][UNIT], float (&bias)[BIASES][UNIT],
                                          bool with_bias, int lanes) {
#pragma unroll 1
    for (int distance = lanes; distance < WARP; distance *= 2) {
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                weight[u][i] += arch::shuffle_xor(weight[u][i], distance);
                if (BIASES == COUNT && with_bias) {
                    bias[BIASES == COUNT ? u : 0][i] +=
                        arch::shuffle_xor(bias[BIASES == COUNT ? u : 0][i], distance);
                }
            }
        }
    }
}

// Row `step` of a team: those of a warp are neighbours. Where rows have weights of their own, the
// teams of a warp, and of its next steps, keep to the same: the rows of partial sums are then
// those of one group each.
__device__ __forceinline__ int64_t row_at(const BackwardParams& p, int64_t step, const Reducer& r) {
    if (p.forward.groups > 1) return (step * r.teams + r.team) * p.count + r.partial;
    return (step * p.count + r.partial) * r.teams + r.team;
}

// Of a batch, by warps: as many as a team may have.
template <int COUNT>
struct BatchShared {
    float sums[2][COUNT][MAX_LANES / WARP];
};
// Sums over a team, for all of its lanes. Halves of a warp exchange halves of the sums, until each
// lane has a share of one; `slot` alternates, since one barrier is between the writes and reads of
// a slot, and the next barrier is that of the other.
template <int COUNT>
__device__ __forceinline__ void batch_sums(float (&x)[COUNT], int lanes, int slot) {
    const int lane = kittens::laneid();
    if (lanes < WARP) {
#pragma unroll
        for (int distance = WARP / 4; distance > 0; distance /= 2) {
            if (distance >= lanes) continue;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) x[i] += arch::shuffle_xor(x[i], distance);
        }
        return;
    }
    constexpr int SHARE = WARP / COUNT;  // lanes that have the same sum
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2) {
        const int distance = half * SHARE;
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float low = x[i], high = x[i + half];
            x[i] = (upper ? high : low) + arch::shuffle_xor(upper ? low : high, distance);
        }
    }
    float sum = x[0];
#pragma unroll
    for (int distance = SHARE / 2; distance > 0; distance /= 2) {
        sum += arch::shuffle_xor(sum, distance);
    }
    if (lanes > WARP) {
        constexpr int WARPS = MAX_LANES / WARP, PART = WARPS / SHARE;
        auto& shared = arch::static_shared<BatchShared<COUNT>>();
        const int index = lane / SHARE, part = lane % SHARE;
        if (part == 0) {
            arch::store_shared(arch::shared_address(&shared.sums[slot][index][kittens::warpid()]),
                               sum);
        }
        arch::sync_block();
        const uint32_t from = arch::shared_address(&shared.sums[slot][index][part * PART]);
        sum = arch::load_shared<float>(from);
#pragma unroll
        for (int i = 1; i < PART; ++i) {
            sum += arch::load_shared<float>(from + static_cast<uint32_t>(4 * i));
        }
#pragma unroll
        for (int distance = SHARE / 2; distance > 0; distance /= 2) {
            sum += arch::shuffle_xor(sum, distance);
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = arch::shuffle(sum, i * SHARE);
}
// Of warps that there are not, zeros. To be followed by a barrier.
template <int COUNT>
__device__ __forceinline__ void clear_batch_sums(int threads) {
    auto& shared = arch::static_shared<BatchShared<COUNT>>();
    constexpr int FLOATS = sizeof(BatchShared<COUNT>) / sizeof(float);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < FLOATS; i += threads) {
        arch::store_shared(arch::shared_address(&shared.sums[0][0][0] + i), 0.0f);
    }
}

// A quotient of which the reciprocal is known, to the last bit but in rare cases.
__device__ __forceinline__ float divide(float x, float by, float reciprocal) {
    const float quotient = x * reciprocal;
    return fmaf(fmaf(-quotient, by, x), reciprocal, quotient);
}

}  // namespace sm90
}  // namespace thunderkittens::norm
