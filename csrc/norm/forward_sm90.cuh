// RMSNorm and LayerNorm: the row is read once, with what is added to it or gates it, and held in
// registers, from which statistics and results are made; statistics are in fp32. Rows that
// registers do not hold, and those that are not aligned, are read again for each step, from L1 or
// L2.
//
// A lane has four units of a row, up to sixteen where the block has one long row: 64 bytes or more
// on their way, beside as many of the residual. Rows are those of memory bandwidth:
// what is computed is hidden as long as many loads are in flight.
#pragma once

#include "csrc/norm/cluster.cuh"
#include "csrc/norm/units.cuh"

namespace thunderkittens::norm {
namespace sm90 {

template <Config C>
struct Forward {
    static constexpr Config CONFIG = C;
    using T = element_of<C.dtype>;
    using S = element_of<C.sum_dtype>;                // of the sum
    using V = std::conditional_t<C.gated, float, S>;  // of what is normalised
    static constexpr int COUNT = UNITS * (C.path != Path::wide ? 1 : sizeof(V) == 2 ? 4 : 2);
    // Units that are loaded together.
    static constexpr int BATCH = C.path == Path::wide ? 2 : UNITS;
    static constexpr int THREADS = C.path == Path::wide ? WIDE_THREADS : most_lanes_of_forward(C);
    static constexpr bool DIVIDED = C.path == Path::cluster;
    static constexpr int ENTRIES = entries_of_lane(SLICE_LANES);
    // Registers for 1024 threads of an SM, where a row of 16 bits leaves so many, and for 768 of
    // what is gated; of 8.0 some would be spilled.
    static constexpr int RESIDENT = C.path == Path::wide || C.portable ? THREADS
                                    : sizeof(V) == 2                   ? 1024
                                    : C.path == Path::memory           ? THREADS
                                    : C.gated && sizeof(T) == 2        ? 768
                                                                       : 512;
    static constexpr int BLOCKS = RESIDENT / THREADS;
};

// x, with what is added to it: as it is returned, rounded.
template <Config C>
__device__ __forceinline__ auto with_residual(const Params& p,
                                              const Unit<typename Forward<C>::T>& x,
                                              const Unit<typename Forward<C>::S>& residual,
                                              uint2 seed, uint32_t row, int64_t column) {
    float v[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) v[i] = x.value(i);
    if (p.dropped > 0) {
        const Dropout dropout(seed, unit_number(p, row, column));
#pragma unroll
        for (int i = 0; i < UNIT; ++i) v[i] *= dropout.factor(p, i);
    }
#pragma unroll
    for (int i = 0; i < UNIT; ++i) v[i] += residual.value(i);
    return rounded<typename Forward<C>::S>(v);
}
template <class V, class T>
__device__ __forceinline__ Unit<V> gated(const Params& p, const Unit<T>& x, const Unit<T>& z) {
    float v[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        v[i] = x.value(i);
        if (p.gate_first) v[i] *= silu<T>(z.value(i));
    }
    return rounded<V>(v);
}
template <class V, class T>
__device__ __forceinline__ Unit<V> converted(const Unit<T>& x) {
    if constexpr (std::is_same_v<V, T>) {
        return x;
    } else {
        float v[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) v[i] = x.value(i);
        return rounded<V>(v);
    }
}

// Results of a unit.
template <Config C, bool ALIGNED, class V, class T>
__device__ __forceinline__ Unit<T> result_of(const Params& p, const Unit<V>& values,
                                             const Unit<T>& gate, uint32_t group, int64_t column,
                                             int count, float mean, float factor) {
    float y[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) y[i] = values.value(i);
    if (p.layer) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) y[i] -= mean;
    }
    multiply(y, factor);
    if (p.weight != nullptr) weigh<ALIGNED, T>(y, p, p.wide_weight, group, column, count);
    if constexpr (C.gated) {
        if (!p.gate_first) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) y[i] *= silu<T>(gate.value(i));
        }
    } else {
        if (p.bias != nullptr) shift<ALIGNED, T>(y, p, p.wide_weight, column, count);
    }
    return rounded<T>(y);
}

// Pairs stay as they are in registers, where the compiler would keep the floats that were made of
// them.
template <class V, int COUNT>
__device__ __forceinline__ void keep_packed(Unit<V> (&values)[COUNT]) {
    if constexpr (Unit<V>::PAIRS) {
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
#pragma unroll
            for (int i = 0; i < Unit<V>::WORDS; ++i) arch::pin_register(values[u].words[i]);
        }
    }
}
// The same with weights and biases that are there.
template <Config C, bool LAYER, class V, class T>
__device__ __forceinline__ Unit<T> direct_result_of(const Params& p, const Unit<V>& values,
                                                    const Unit<T>& gate, const Unit<T>& weight,
                                                    const Unit<T>& bias, float mean, float factor) {
    float y[UNIT], w[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        y[i] = values.value(i);
        if constexpr (LAYER) y[i] -= mean;
        w[i] = weight.value(i);
    }
    multiply(y, factor);
    if (p.offset != 0) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) w[i] += p.offset;
    }
#pragma unroll
    for (int i = 0; i < UNIT; ++i) y[i] = arch::multiply_rounded(y[i], w[i]);
    if constexpr (C.gated) {
        if (!p.gate_first) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) y[i] *= silu<T>(gate.value(i));
        }
    } else if (p.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) y[i] += bias.value(i);
    }
    return rounded<T>(y);
}

// Whether weights are of the dtype of x, 16 bits: they are then on their way during the sums.
template <class T>
__device__ __forceinline__ bool has_factors(const Params& p) {
    return sizeof(T) == 2 && p.weight != nullptr && !p.wide_weight;
}

// A row in registers. LAYER: the mean is taken. FIRST: the gate is applied before; then what is
// normalised needs fp32, and the gate is not kept.
template <Config C, bool LAYER, bool FIRST>
__device__ __forceinline__ void normalise_as(const Params& p) {
    using F = Forward<C>;
    using T = typename F::T;
    using S = typename F::S;
    using V = std::conditional_t<C.gated && !FIRST, T, typename F::V>;
    constexpr bool KEEPS_GATE = C.gated && !FIRST;
    const Team team(C.path == Path::wide ? WIDE_THREADS : p.lanes, p.teams);
    const int64_t number = F::DIVIDED ? team.number / p.slices : team.number;
    const bool there = number < p.rows.count;
    const Place place(p, there ? number : 0);
    int first_column = team.lane * UNIT, end = static_cast<int>(p.width);
    const int apart = team.lanes * UNIT;
    if constexpr (F::DIVIDED) {
        const Slice slice(p);
        first_column += slice.begin, end = slice.end;
    }
    const int width = (there ? end : 0) - first_column;
    const auto count = [&](int u) { return width - u * apart; };  // not positive: there is none
    // One address of a lane, from which its units have the same distances in every operand.
    const auto at = [&]<class E>(E* row, int u) { return row + int64_t{u} * apart; };

    Unit<V> values[F::COUNT];
    Unit<T> gates[KEEPS_GATE ? F::COUNT : 1]{};
    const T* const x_row = place.in<T>(p.x) + first_column;
#pragma unroll
    for (int first = 0; first < F::COUNT; first += F::BATCH) {
        Unit<T> x[F::BATCH];
#pragma unroll
        for (int u = 0; u < F::BATCH; ++u) {
            x[u] = load_unit<true>(at(x_row, first + u), count(first + u));
        }
        if constexpr (C.gated) {
            const T* const gate_row = place.in<T>(p.gate) + first_column;
            Unit<T> z[F::BATCH];
#pragma unroll
            for (int u = 0; u < F::BATCH; ++u) z[u] = load_unit<true>(at(gate_row, u), count(u));
#pragma unroll
            for (int u = 0; u < F::BATCH; ++u) {
                if constexpr (KEEPS_GATE) {
                    values[u] = x[u], gates[u] = z[u];
                } else {
                    values[u] = gated<V>(p, x[u], z[u]);
                }
            }
        } else if (p.residual.data != nullptr) {
            const S* const residual_row = place.in<S>(p.residual) + first_column;
            S* const sum_row = place.in<S>(p.sum, p.width) + first_column;
            Unit<S> residual[F::BATCH];
#pragma unroll
            for (int u = 0; u < F::BATCH; ++u) {
                residual[u] = load_unit<true>(at(residual_row, first + u), count(first + u));
            }
#pragma unroll
            for (int u = 0; u < F::BATCH; ++u) {
                values[first + u] = with_residual<C>(p, x[u], residual[u], seed_of(p), place.row,
                                                     first_column + (first + u) * apart);
                store_unit<true>(at(sum_row, first + u), values[first + u], count(first + u));
            }
        } else {
#pragma unroll
            for (int u = 0; u < F::BATCH; ++u) values[first + u] = converted<V>(x[u]);
        }
    }

    [[maybe_unused]] const std::conditional_t<F::DIVIDED, Exchange<LAYER, false, F::ENTRIES>,
                                              NoExchange> exchange(p, team.lanes, UNITS);
    float mean = 0;
    if constexpr (LAYER) {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < F::COUNT; ++u) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) sum += values[u].value(i);
        }
        if constexpr (F::DIVIDED) {
            mean = exchange.mean_of(sum);
        } else {
            mean = team_sums<0>(Sums<1>{{sum}}, team.lanes).value[0] / static_cast<float>(p.width);
        }
    }
    if constexpr (LAYER) keep_packed(values);
    float squares = 0;
#pragma unroll
    for (int u = 0; u < F::COUNT; ++u) {
        const float centre = LAYER && count(u) > 0 ? mean : 0.0f;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            float v = values[u].value(i);
            if constexpr (LAYER) v -= centre;
            squares = fmaf(v, v, squares);
        }
    }
    // Weights of as many units as are loaded together, and the bias of one.
    Unit<T> weights[UNITS], bias{};
    const auto load_weight = [&](int u) {
        const int64_t from = place.group * p.width + first_column;
        return load_unit<true>(at(static_cast<const T*>(p.weight) + from, u), count(u));
    };
    const auto load_weights = [&](int first) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) weights[u] = load_weight(first + u);
    };
    const auto load_bias = [&](int u) {
        if (C.gated || p.bias == nullptr || u >= F::COUNT) return;
        bias = load_unit<true>(at(static_cast<const T*>(p.bias) + first_column, u), count(u));
    };
    const bool direct = has_factors<T>(p);
    if constexpr (F::DIVIDED) {
        squares = warp_sum(squares);
        arch::cluster_wait();  // all blocks are there
        exchange.give(p, 0, {.mean = mean, .squares = squares});
        arch::cluster_arrive();
    }
    if (direct) load_weights(0), load_bias(0);
    if constexpr (F::DIVIDED) {
        arch::cluster_wait();
        const Moments all = exchange.take(0, static_cast<float>(p.width));
        mean = all.mean, squares = all.squares;
    } else {
        squares = team_sums<1>(Sums<1>{{squares}}, team.lanes).value[0];
    }
    const float factor = factor_of(p, squares);
    keep_packed(values);
    T* const out_row = place.in<T>(p.out, p.width) + first_column;
    if (direct) {
#pragma unroll
        for (int first = 0; first < F::COUNT; first += UNITS) {
            if (first > 0) load_weights(first);
#pragma unroll
            for (int i = 0; i < UNITS; ++i) {
                const int u = first + i;
                const Unit<T> now = bias;
                load_bias(u + 1);
                const auto y = direct_result_of<C, LAYER>(p, values[u], gates[KEEPS_GATE ? u : 0],
                                                          weights[i], now, mean, factor);
                store_unit<true>(at(out_row, u), y, count(u));
            }
        }
        return;
    }
#pragma unroll
    for (int u = 0; u < F::COUNT; ++u) {
        const auto y = result_of<C, true>(p, values[u], gates[KEEPS_GATE ? u : 0], place.group,
                                          first_column + u * apart, count(u), mean, factor);
        store_unit<true>(at(out_row, u), y, count(u));
    }
}
template <Config C>
__device__ __forceinline__ void normalise(const Params& p) {
    if constexpr (C.gated) {
        if (p.gate_first)
            normalise_as<C, false, true>(p);
        else
            normalise_as<C, false, false>(p);
    } else if (p.layer) {
        normalise_as<C, true, false>(p);
    } else {
        normalise_as<C, false, false>(p);
    }
}

// A row from memory, unit by unit, as often as it is needed.
template <Config C, bool ALIGNED>
__device__ __forceinline__ void normalise_from_memory(const Params& p) {
    using F = Forward<C>;
    using T = typename F::T;
    using S = typename F::S;
    using V = typename F::V;
    const Team team(p);
    const bool there = team.number < p.rows.count;
    const Place place(p, there ? team.number : 0);
    const int64_t width = there ? p.width : 0, pitch = int64_t{team.lanes} * UNIT;
    const auto each = [&](auto&& take) {
#pragma unroll 1
        for (int64_t column = int64_t{team.lane} * UNIT; column < width; column += pitch) {
            const int count = elements_at(width, column);
            const auto x = load_unit<ALIGNED>(place.in<T>(p.x) + column, count);
            if constexpr (C.gated) {
                const auto z = load_unit<ALIGNED>(place.in<T>(p.gate) + column, count);
                take(gated<V>(p, x, z), z, column, count);
            } else if (p.residual.data != nullptr) {
                const auto residual = load_unit<ALIGNED>(place.in<S>(p.residual) + column, count);
                take(with_residual<C>(p, x, residual, seed_of(p), place.row, column), x, column,
                     count);
            } else {
                take(converted<V>(x), x, column, count);
            }
        }
    };
    float mean = 0;
    if (p.layer) {
        float sum = 0;
        each([&](const Unit<V>& values, const Unit<T>&, int64_t, int) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) sum += values.value(i);
        });
        mean = team_sums<0>(Sums<1>{{sum}}, team.lanes).value[0] / static_cast<float>(p.width);
    }
    float squares = 0;
    each([&](const Unit<V>& values, const Unit<T>&, int64_t, int count) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float centred = values.value(i) - mean;
            if (ALIGNED || i < count) squares = fmaf(centred, centred, squares);
        }
    });
    const float factor = factor_of(p, team_sums<1>(Sums<1>{{squares}}, team.lanes).value[0]);
    each([&](const Unit<V>& values, const Unit<T>& gate, int64_t column, int count) {
        if constexpr (!C.gated) {
            if (p.residual.data != nullptr)
                store_unit<ALIGNED>(place.in<S>(p.sum, p.width) + column, values, count);
        }
        const auto y =
            result_of<C, ALIGNED>(p, values, gate, place.group, column, count, mean, factor);
        store_unit<ALIGNED>(place.in<T>(p.out, p.width) + column, y, count);
    });
}

// (A template over a type, which nvcc wants of kernels.)
template <class F>
__global__ __launch_bounds__(F::THREADS,
                             F::BLOCKS) void norm_forward_kernel(const __grid_constant__ Params p) {
    constexpr Config C = F::CONFIG;
    if constexpr (F::DIVIDED) begin_cluster();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    if constexpr (C.path != Path::memory) {
        normalise<C>(p);
    } else if (p.aligned) {
        normalise_from_memory<C, true>(p);
    } else {
        normalise_from_memory<C, false>(p);
    }
}

}  // namespace sm90

template <Config C>
void launch(const Params& params, Stream stream) {
    const int64_t blocks = ceil_div(params.rows.count, teams_of(params.lanes)) * params.slices;
    kittens::launch({.dependent = !C.portable, .blocks_per_sm = sm90::Forward<C>::BLOCKS},
                    sm90::norm_forward_kernel<sm90::Forward<C>>,
                    dim3(static_cast<unsigned>(blocks)),
                    dim3(static_cast<unsigned>(threads_of(params.lanes))),
                    dim3(static_cast<unsigned>(params.slices)), 0, stream, params);
}

}  // namespace thunderkittens::norm
