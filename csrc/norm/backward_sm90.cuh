// Gradients of RMSNorm and LayerNorm: statistics are made again from what was normalised, in the
// same pass that reads the gradient of the result. A row is held in registers, and so is a lane's
// share of the gradients of weight and bias, over all rows that its team takes; each team, or warp
// of teams, then writes a row of partial sums, which a second kernel adds in a fixed order. Rows
// that registers do not hold, or that are not aligned, are read several times, from L1 or L2, and
// their partial sums are kept in memory.
//
// With n = (v - mean) rstd and g = dy w, means over the row:
//   RMSNorm    dv = rstd (g - n mean(g n))
//   LayerNorm  dv = rstd (g - mean(g) - n mean(g n))
// and where the result is gated, n w silu(z): dy silu(z) takes the place of dy, and
// dz = dy n w silu'(z). Where x is gated first, v = x silu(z): dx = dv silu(z), dz = dv x silu'(z).
#pragma once

#include "csrc/norm/backward_divided.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// One unit on its way through the gradient.
template <Config C>
struct Gradient {
    using T = element_of<C.dtype>;
    using S = element_of<C.sum_dtype>;
    static constexpr int UNITS_OF_LANE = units_of(C);
    Unit<S> x;
    Unit<T> dy;
    Unit<T> z;

    template <bool ALIGNED>
    __device__ __forceinline__ void load(const BackwardParams& p, const Place& place,
                                         int64_t column, int count) {
        x = load_unit<ALIGNED>(place.in<S>(p.forward.x) + column, count);
        dy = load_unit<ALIGNED>(place.in<T>(p.grad_out) + column, count);
        if constexpr (C.gated) {
            z = load_unit<ALIGNED>(place.in<T>(p.forward.gate) + column, count);
        }
    }
    // What was normalised.
    __device__ __forceinline__ float value(const Params& p, int i) const {
        if constexpr (C.gated) {
            if (p.gate_first) return x.value(i) * silu<T>(z.value(i));
        }
        return x.value(i);
    }
    // The gradient of the weighted row.
    __device__ __forceinline__ float grad(const Params& p, int i) const {
        if constexpr (C.gated) {
            if (!p.gate_first) return dy.value(i) * silu<T>(z.value(i));
        }
        return dy.value(i);
    }
};

// Statistics of a row.
struct Row {
    float mean = 0, rstd = 0;
    float grad = 0;     // mean of g
    float product = 0;  // mean of g n
};

template <Config C, bool ALIGNED>
struct RowGradient {
    using G = Gradient<C>;
    using T = typename G::T;
    using S = typename G::S;
    const BackwardParams& p;

    // What a unit adds to the first sums, of v and g, or of v^2 and g v.
    __device__ __forceinline__ void add_first(Sums<2>& sums, const G& unit,
                                              const float (&w)[UNIT]) const {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float v = unit.value(p.forward, i), g = unit.grad(p.forward, i) * w[i];
            if constexpr (C.layer) {
                sums.value[0] += v, sums.value[1] += g;
            } else {
                sums.value[0] = fmaf(v, v, sums.value[0]);
                sums.value[1] = fmaf(g, v, sums.value[1]);
            }
        }
    }
    // And to the second ones, of (v - mean)^2 and g (v - mean), of elements in the row.
    __device__ __forceinline__ void add_second(Sums<2>& sums, const G& unit, const float (&w)[UNIT],
                                               float mean, int count) const {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float v = unit.value(p.forward, i) - mean, g = unit.grad(p.forward, i) * w[i];
            if (ALIGNED ? count == 0 : i >= count) continue;
            sums.value[0] = fmaf(v, v, sums.value[0]);
            sums.value[1] = fmaf(g, v, sums.value[1]);
        }
    }
    __device__ __forceinline__ void finish_first(Row& row, const Sums<2>& sums) const {
        const float width = static_cast<float>(p.forward.width);
        if constexpr (C.layer) {
            row.mean = sums.value[0] / width, row.grad = sums.value[1] / width;
        } else {
            finish_second(row, sums);
        }
    }
    __device__ __forceinline__ void finish_second(Row& row, const Sums<2>& sums) const {
        const float width = static_cast<float>(p.forward.width);
        row.rstd = 1.0f / sqrtf(sums.value[0] / width + p.forward.eps);
        row.product = sums.value[1] * row.rstd / width;
    }

    // Writes the gradients of a unit, and adds to those of weight and bias.
    __device__ __forceinline__ void finish(const G& unit, const Unit<S>& grad_sum,
                                           const float (&w)[UNIT], const Row& row,
                                           const Place& place, int64_t column, int count,
                                           float (&weight)[UNIT], float (&bias)[UNIT]) const {
        const Params& f = p.forward;
        float dx[UNIT], dz[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float n = (unit.value(f, i) - row.mean) * row.rstd;
            const float dy = unit.grad(f, i), g = dy * w[i];
            if (ALIGNED ? count > 0 : i < count) weight[i] = fmaf(dy, n, weight[i]);
            if constexpr (C.layer) bias[i] += dy;
            dx[i] = row.rstd * (g - row.grad - n * row.product) + grad_sum.value(i);
            if constexpr (C.gated) {
                const float z = unit.z.value(i), slope = silu_slope<T>(z);
                if (f.gate_first) {
                    dz[i] = dx[i] * unit.x.value(i) * slope;
                    dx[i] *= silu<T>(z);
                } else {
                    dz[i] = unit.dy.value(i) * n * w[i] * slope;
                }
            }
        }
        if constexpr (C.gated) {
            if (p.grad_gate != nullptr) {
                store_unit<ALIGNED>(place.in<T>(p.grad_gate, f.width) + column, rounded<T>(dz),
                                    count);
            }
        }
        if (p.grad_residual != nullptr) {
            store_unit<ALIGNED>(place.in<S>(p.grad_residual, f.width) + column, rounded<S>(dx),
                                count);
        }
        if (p.grad_x == nullptr) return;
        if (f.dropped > 0) {
            const Dropout dropout(seed_of(f), unit_number(f, place.row, column));
#pragma unroll
            for (int i = 0; i < UNIT; ++i) dx[i] *= dropout.factor(f, i);
        }
        store_unit<ALIGNED>(place.in<T>(p.grad_x, f.width) + column, rounded<T>(dx), count);
    }
    __device__ __forceinline__ Unit<S> load_grad_sum(const Place& place, int64_t column,
                                                     int count) const {
        if (p.grad_sum.data == nullptr) return {};
        return load_unit<ALIGNED>(place.in<S>(p.grad_sum) + column, count);
    }
};

template <Config C>
__device__ __forceinline__ void gradients(const BackwardParams& p) {
    using G = Gradient<C>;
    using T = typename G::T;
    constexpr int UNITS_OF_LANE = G::UNITS_OF_LANE;
    const Params& f = p.forward;
    const RowGradient<C, true> of{p};
    const Team team(f);
    const Reducer reducer(f.lanes);
    const auto column = [&](int u) { return (u * team.lanes + team.lane) * UNIT; };

    // Of rows of a step, those that there are.
    const auto place_at = [&](int64_t step) {
        const int64_t row = row_at(p, step, reducer);
        return Place(f, row < f.rows.count ? row : 0);
    };
    const auto count_at = [&](int64_t step, int u) {
        const bool there = step < p.steps && row_at(p, step, reducer) < f.rows.count;
        return there ? max(static_cast<int>(f.width) - column(u), 0) : 0;
    };
    const auto load = [&](G(&units)[UNITS_OF_LANE], int64_t step) {
        const Place place = place_at(step);
#pragma unroll
        for (int u = 0; u < UNITS_OF_LANE; ++u) {
            units[u].template load<true>(p, place, column(u), count_at(step, u));
        }
    };
    // Where few threads have room, the next row is on its way meanwhile.
    constexpr bool AHEAD = C.layer && sizeof(typename G::S) == 2;
    float weight[UNITS_OF_LANE][UNIT] = {}, bias[C.layer ? UNITS_OF_LANE : 1][UNIT] = {};
    G units[UNITS_OF_LANE], next[UNITS_OF_LANE];
    if (AHEAD) load(next, 0);
#pragma unroll 1
    for (int64_t step = 0; step < p.steps; ++step) {
        const Place place = place_at(step);
        const auto count = [&](int u) { return count_at(step, u); };
        if constexpr (AHEAD) {
#pragma unroll
            for (int u = 0; u < UNITS_OF_LANE; ++u) units[u] = next[u];
            load(next, step + 1);
        } else {
            load(units, step);
        }
        Row statistics;
        Sums<2> sums{};
        float w[UNIT];
#pragma unroll
        for (int u = 0; u < UNITS_OF_LANE; ++u) {
            load_factors<true, T>(w, f, place.group, column(u), count(u));
            of.add_first(sums, units[u], w);
        }
        of.finish_first(statistics, team_sums<0>(sums, team.lanes));
        if constexpr (C.layer) {
            sums = {};
#pragma unroll
            for (int u = 0; u < UNITS_OF_LANE; ++u) {
                load_factors<true, T>(w, f, place.group, column(u), count(u));
                of.add_second(sums, units[u], w, statistics.mean, count(u));
            }
            of.finish_second(statistics, team_sums<1>(sums, team.lanes));
        } else if (team.lanes > WARP) {
            arch::sync_block();  // before the sums of the next row
        }
#pragma unroll
        for (int u = 0; u < UNITS_OF_LANE; ++u) {
            load_factors<true, T>(w, f, place.group, column(u), count(u));
            const auto grad_sum = of.load_grad_sum(place, column(u), count(u));
            of.finish(units[u], grad_sum, w, statistics, place, column(u), count(u), weight[u],
                      bias[C.layer ? u : 0]);
        }
    }
    if (p.partials == nullptr) return;
    add_teams(weight, bias, C.layer, team.lanes);
    if (reducer.team != 0) return;
#pragma unroll
    for (int u = 0; u < UNITS_OF_LANE; ++u) {
        const int64_t at = reducer.partial * p.pitch + column(u);
        if (column(u) >= f.width) continue;
        store_partial(p.partials + at, weight[u]);
        if constexpr (C.layer) {
            if (p.partials_bias != nullptr) store_partial(p.partials_bias + at, bias[u]);
        }
    }
}

// Rows from memory, unit by unit. Partial sums are in memory too: those of a team, of which the
// teams of a warp then take the first's.
template <Config C, bool ALIGNED>
__device__ __forceinline__ void gradients_from_memory(const BackwardParams& p) {
    using G = Gradient<C>;
    using T = typename G::T;
    const Params& f = p.forward;
    const RowGradient<C, ALIGNED> of{p};
    const Team team(f);
    const Reducer reducer(f.lanes);
    const int64_t pitch = int64_t{team.lanes} * UNIT;
#pragma unroll 1
    for (int64_t step = 0; step < p.steps; ++step) {
        const int64_t row = row_at(p, step, reducer);
        const bool there = row < f.rows.count;
        const Place place(f, there ? row : 0);
        // All of a warp, since the teams' gradients of the weight are added in it.
        const auto each = [&](auto&& take) {
#pragma unroll 1
            for (int64_t begin = 0; begin < f.width; begin += pitch) {
                const int64_t at = begin + team.lane * UNIT;
                const int count = there ? elements_at(f.width, at) : 0;
                G unit;
                unit.template load<ALIGNED>(p, place, at, count);
                float w[UNIT];
                load_factors<ALIGNED, T>(w, f, place.group, at, count);
                take(unit, w, at, count);
            }
        };
        Row statistics;
        Sums<2> sums{};
        each([&](const G& unit, const float(&w)[UNIT], int64_t, int) {
            of.add_first(sums, unit, w);
        });
        of.finish_first(statistics, team_sums<0>(sums, team.lanes));
        if constexpr (C.layer) {
            sums = {};
            each([&](const G& unit, const float(&w)[UNIT], int64_t, int count) {
                of.add_second(sums, unit, w, statistics.mean, count);
            });
            of.finish_second(statistics, team_sums<1>(sums, team.lanes));
        } else if (team.lanes > WARP) {
            arch::sync_block();
        }
        each([&](const G& unit, const float(&w)[UNIT], int64_t at, int count) {
            float weight[UNIT] = {}, bias[UNIT] = {};
            const auto grad_sum = of.load_grad_sum(place, at, count);
            of.finish(unit, grad_sum, w, statistics, place, at, count, weight, bias);
            if (p.partials == nullptr) return;
            const int64_t to = reducer.partial * p.pitch + at;
            const auto add = [&](float* sums, float(&values)[UNIT]) {
                for (int distance = team.lanes; distance < WARP; distance *= 2) {
#pragma unroll
                    for (int i = 0; i < UNIT; ++i) {
                        values[i] += arch::shuffle_xor(values[i], distance);
                    }
                }
                if (reducer.team != 0 || at >= f.width) return;
                if (step > 0) {
                    const auto before = load_unit<true>(static_cast<const float*>(sums), UNIT);
#pragma unroll
                    for (int i = 0; i < UNIT; ++i) values[i] += before.value(i);
                }
                store_partial(sums, values);
            };
            add(p.partials + to, weight);
            if constexpr (C.layer) {
                if (p.partials_bias != nullptr) add(p.partials_bias + to, bias);
            }
        });
    }
}

template <Config C>
struct Backward {
    static constexpr Config CONFIG = C;
    static constexpr int THREADS = C.path == Path::memory ? MAX_LANES : most_lanes_of_gradient(C);
    // As many registers as let the threads reside; the exact sigmoid does not do with those.
    static constexpr int BLOCKS = C.path == Path::memory && !(C.gated && C.dtype == DType::fp32)
                                      ? resident_threads(C) / MAX_LANES
                                      : 0;
};

template <class B>
__global__ __launch_bounds__(B::THREADS, B::BLOCKS) void norm_backward_kernel(
    const __grid_constant__ BackwardParams p) {
    constexpr Config C = B::CONFIG;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if constexpr (C.path == Path::cluster) {
        divide_gradients<C>(p);
    } else if constexpr (C.units > 0) {
        stream_gradients<C>(p);
    } else if constexpr (C.path == Path::registers) {
        gradients<C>(p);
    } else if (p.forward.aligned) {
        gradients_from_memory<C, true>(p);
    } else {
        gradients_from_memory<C, false>(p);
    }
}

// Adds rows of partial sums: a block has eight columns, a thread of it four of them in each row of
// 128.
struct ReduceShared {
    float4 sums[REDUCE_THREADS];
};
template <bool PORTABLE>
__global__ __launch_bounds__(REDUCE_THREADS) void norm_reduce_kernel(
    const __grid_constant__ BackwardParams p) {
    constexpr int QUADS = REDUCE_COLUMNS / 4, SLICES = REDUCE_THREADS / QUADS;
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const int64_t groups = p.forward.groups, across = groups * p.pitch;
    const int64_t blocks = across / REDUCE_COLUMNS;
    const bool second = int64_t{blockIdx.x} >= blocks;
    const int64_t block = int64_t{blockIdx.x} - (second ? blocks : 0);
    const int quad = static_cast<int>(threadIdx.x) % QUADS;
    const int slice = static_cast<int>(threadIdx.x) / QUADS;
    const int64_t column = block * REDUCE_COLUMNS + quad * 4;
    const float* const from = second ? p.partials_bias : p.partials;
    float4 sum{};
#pragma unroll 4
    for (int64_t row = slice; row < p.count / groups; row += SLICES) {
        const auto v =
            arch::load_global(reinterpret_cast<const float4*>(from + (row * across + column)));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const uint32_t shared = arch::shared_address(&arch::static_shared<ReduceShared>().sums[0]);
    for (int half = SLICES / 2; half > 0; half /= 2) {
        if (slice >= half && slice < 2 * half) {
            arch::store_shared(shared + 16 * static_cast<int>(threadIdx.x), sum);
        }
        arch::sync_block();
        if (slice < half) {
            const auto v = arch::load_shared<float4>(
                shared + 16 * (static_cast<int>(threadIdx.x) + half * QUADS));
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    }
    void* const to = second ? p.grad_bias : p.grad_weight;
    if (slice > 0 || to == nullptr) return;
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    const int64_t group = column / p.pitch, first = column % p.pitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i >= p.forward.width) continue;
        const int64_t at = group * p.forward.width + first + i;
        if (p.weight_dtype == DType::fp32) {
            arch::store_global(static_cast<float*>(to) + at, sums[i]);
        } else if (p.weight_dtype == DType::bf16) {
            arch::store_global(static_cast<kittens::bf16*>(to) + at, __float2bfloat16(sums[i]));
        } else {
            arch::store_global(static_cast<kittens::half*>(to) + at, __float2half(sums[i]));
        }
    }
}

}  // namespace sm90

template <Config C>
void launch_backward(const BackwardParams& params, Stream stream) {
    const int threads = threads_of(params.forward.lanes);
    kittens::launch({.dependent = !C.portable}, sm90::norm_backward_kernel<sm90::Backward<C>>,
                    dim3(static_cast<unsigned>(params.blocks)),
                    dim3(static_cast<unsigned>(threads)),
                    dim3(static_cast<unsigned>(params.forward.slices)), streamed_bytes(C, threads),
                    stream, params);
}

template <bool portable>
void launch_reduce(const BackwardParams& params, Stream stream) {
    const int64_t blocks = params.forward.groups * params.pitch / REDUCE_COLUMNS;
    const int64_t results = params.partials_bias != nullptr ? 2 : 1;
    kittens::launch({.dependent = !portable}, sm90::norm_reduce_kernel<portable>,
                    dim3(static_cast<unsigned>(results * blocks)), dim3(REDUCE_THREADS), dim3(1), 0,
                    stream, params);
}

}  // namespace thunderkittens::norm
