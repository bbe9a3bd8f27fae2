// What the kernels of the family share: where rows lie, sums over a team, the numbers that dropout
// draws, weights, gates.
#pragma once

#include "csrc/norm/norm.h"
#include "csrc/norm/unit.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// Where a row lies in each operand, and which weights are its. Rows are fewer than 2^31, which
// spares registers, and divisions of 64 bits.
struct Place {
    uint32_t row, index[3], group;
    bool single;  // dimension of rows

    __device__ __forceinline__ Place(const Params& p, int64_t _row)
        : row(static_cast<uint32_t>(_row)), index{row, 0, 0}, group(0), single(p.rows.dims == 1) {
        if (p.rows.dims > 1) {
            const auto size = static_cast<uint32_t>(p.rows.size[0]);
            index[0] = row % size, index[1] = row / size;
            if (p.rows.dims > 2) {
                const auto next = static_cast<uint32_t>(p.rows.size[1]);
                index[2] = index[1] / next, index[1] %= next;
            }
        }
        if (p.groups > 1) group = row % static_cast<uint32_t>(p.groups);
    }
    template <class T>
    __device__ __forceinline__ const T* in(const Operand& x) const {
        const T* const at = static_cast<const T*>(x.data) + index[0] * x.stride[0];
        return single ? at : at + (index[1] * x.stride[1] + index[2] * x.stride[2]);
    }
    // The same without asking whether there are more dimensions, which takes a register.
    template <class T>
    __device__ __forceinline__ const T* in_any(const Operand& x) const {
        return static_cast<const T*>(x.data) +
               (index[0] * x.stride[0] + index[1] * x.stride[1] + index[2] * x.stride[2]);
    }
    template <class T>
    __device__ __forceinline__ T* in(void* out, int64_t width) const {
        return static_cast<T*>(out) + row * width;
    }
};

// Sums over a team, the same bits for all of its lanes. A team is a part of a warp, or the block.
// The sums of one NUMBER are not followed by others of it without those of another in between.
template <int COUNT>
struct Sums {
    float value[COUNT];
};
template <int COUNT>
struct TeamShared {
    float warps[COUNT][WARP];
};
template <int NUMBER, int COUNT>
__device__ __forceinline__ Sums<COUNT> team_sums(Sums<COUNT> x, int lanes) {
    const auto add_lanes = [&](int distance) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x.value[i] += arch::shuffle_xor(x.value[i], distance);
    };
    if (lanes < WARP) {
#pragma unroll
        for (int distance = WARP / 4; distance > 0; distance /= 2) {
            if (distance < lanes) add_lanes(distance);
        }
        return x;
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) add_lanes(distance);
    if (lanes == WARP) return x;
    auto& shared = arch::static_shared<TeamShared<COUNT>, NUMBER>();
    const int warps = lanes / WARP, lane = kittens::laneid();
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            arch::store_shared(arch::shared_address(&shared.warps[i][kittens::warpid()]),
                               x.value[i]);
        }
    }
    arch::sync_block();
    // Of a few warps' sums the first lanes' order is that of all 32, with fewer zeros.
    const auto add_warps = [&]<int AMONG>() {
        const int warp = lane % AMONG;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            x.value[i] = 0;
            if (warp < warps) {
                x.value[i] = arch::load_shared<float>(arch::shared_address(&shared.warps[i][warp]));
            }
        }
#pragma unroll
        for (int distance = AMONG / 2; distance > 0; distance /= 2) add_lanes(distance);
    };
    if (warps <= 4)
        add_warps.template operator()<4>();
    else
        add_warps.template operator()<MAX_LANES / WARP>();
    return x;
}

// Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") of the
// number of a unit: 16 bits for each of its elements, below which it is dropped.
struct Dropout {
    uint32_t words[4];

    __device__ __forceinline__ Dropout(uint2 key, uint64_t unit) {
        uint32_t x[4] = {static_cast<uint32_t>(unit), static_cast<uint32_t>(unit >> 32), 0, 0};
#pragma unroll
        for (int i = 0; i < 10; ++i) {
            const uint64_t a = uint64_t{0xd2511f53u} * x[0], b = uint64_t{0xcd9e8d57u} * x[2];
            x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ key.x;
            x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ key.y;
            x[1] = static_cast<uint32_t>(b);
            x[3] = static_cast<uint32_t>(a);
            key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = x[i];
    }
    // What the element is multiplied by.
    __device__ __forceinline__ float factor(const Params& p, int i) const {
        const uint32_t drawn = words[i / 2] >> 16 * (i % 2) & 0xffffu;
        return drawn < p.dropped ? 0.0f : p.scale;
    }
};
__device__ __forceinline__ uint64_t unit_number(const Params& p, uint32_t row, int64_t column) {
    return static_cast<uint64_t>(row * p.row_units + column / UNIT);
}

// Eight weights, or biases, in the dtype of x or in fp32.
template <bool ALIGNED, class T>
__device__ __forceinline__ void load_weights(float (&w)[UNIT], const void* from, bool wide,
                                             int64_t at, int count) {
    if (wide || std::is_same_v<T, float>) {
        const auto unit = load_unit<ALIGNED>(static_cast<const float*>(from) + at, count);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) w[i] = unit.value(i);
    } else {
        const auto unit = load_unit<ALIGNED>(static_cast<const T*>(from) + at, count);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) w[i] = unit.value(i);
    }
}
// Those that the normalised row is multiplied by; of a row without weights, ones.
template <bool ALIGNED, class T>
__device__ __forceinline__ void load_given_factors(float (&w)[UNIT], const Params& p, bool wide,
                                                   uint32_t group, int64_t column, int count) {
    load_weights<ALIGNED, T>(w, p.weight, wide, group * p.width + column, count);
    if (p.offset == 0) return;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) w[i] += p.offset;
}
template <bool ALIGNED, class T>
__device__ __forceinline__ void load_factors(float (&w)[UNIT], const Params& p, uint32_t group,
                                             int64_t column, int count) {
    if (p.weight != nullptr) {
        return load_given_factors<ALIGNED, T>(w, p, p.wide_weight, group, column, count);
    }
#pragma unroll
    for (int i = 0; i < UNIT; ++i) w[i] = 1.0f;
}
// A unit, of which the mean has been taken: normalised by a factor, multiplied by its weights, and
// shifted. Each is rounded, for the same bits in every kernel.
__device__ __forceinline__ void multiply(float (&y)[UNIT], float factor) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i) y[i] = arch::multiply_rounded(y[i], factor);
}
template <bool ALIGNED, class T>
__device__ __forceinline__ void weigh(float (&y)[UNIT], const Params& p, bool wide, uint32_t group,
                                      int64_t column, int count) {
    float w[UNIT];
    load_given_factors<ALIGNED, T>(w, p, wide, group, column, count);
#pragma unroll
    for (int i = 0; i < UNIT; ++i) y[i] = arch::multiply_rounded(y[i], w[i]);
}
template <bool ALIGNED, class T>
__device__ __forceinline__ void shift(float (&y)[UNIT], const Params& p, bool wide, int64_t column,
                                      int count) {
    float b[UNIT];
    load_weights<ALIGNED, T>(b, p.bias, wide, column, count);
#pragma unroll
    for (int i = 0; i < UNIT; ++i) y[i] += b[i];
}
__device__ __forceinline__ float factor_of(const Params& p, float squares) {
    return 1.0f / sqrtf(squares / static_cast<float>(p.width) + p.eps);
}

// sigmoid(z), which is exact to fp32 for fp32 alone.
template <class T>
__device__ __forceinline__ float sigmoid(float z) {
    if constexpr (std::is_same_v<T, float>) {
        return 1.0f / (1.0f + expf(-z));
    } else {
        return arch::reciprocal_approx(1.0f + arch::exp2_approx(z * -1.4426950408889634f));
    }
}
template <class T>
__device__ __forceinline__ float silu(float z) {
    return z * sigmoid<T>(z);
}
// Its derivative.
template <class T>
__device__ __forceinline__ float silu_slope(float z) {
    const float s = sigmoid<T>(z);
    return s * (1.0f + z * (1.0f - s));
}

// How many elements of a unit at this column lie in the row.
__device__ __forceinline__ int elements_at(int64_t width, int64_t column) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{UNIT}, width - column)));
}

// A thread's place in its team, and the number of the team. A team is a part of a warp, or the
// block.
struct Team {
    int lanes, lane;
    int64_t number;

    // Divisions by powers of two.
    __device__ __forceinline__ Team(int _lanes, int teams) : lanes(_lanes) {
        const int thread = static_cast<int>(threadIdx.x);
        if (lanes > WARP) {
            lane = thread, number = blockIdx.x;
        } else {
            lane = thread & (lanes - 1);
            number = int64_t{blockIdx.x} * teams + thread * teams / BLOCK;
        }
    }
    __device__ __forceinline__ explicit Team(const Params& p) : Team(p.lanes, p.teams) {}
};

__device__ __forceinline__ uint2 seed_of(const Params& p) {
    return p.dropped > 0 ? arch::load_global(static_cast<const uint2*>(p.seed)) : uint2{};
}

}  // namespace sm90
}  // namespace thunderkittens::norm
