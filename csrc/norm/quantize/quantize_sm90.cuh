// RMSNorm and LayerNorm whose results are codes: the row is normalised as in forward_sm90.cuh, in
// the same order of operations, and quantised as by fp8_quantize and nvfp4_quantize, without being
// rounded or written in between.
//
// A lane holds its four units in fp32, as what was read, then as what is normalised: 32 registers.
// What is read and written, 3 bytes an element of bf16 by rows, leaves an SM some 20 instructions
// for each; scales are therefore found by few lanes for all: 128 neighbours by half a warp, which
// divides once for four units.
#pragma once

#include "csrc/norm/cluster.cuh"
#include "csrc/norm/quantize/codes.cuh"

namespace thunderkittens::norm {
namespace sm90 {

// The number of a row whose columns may be divided among blocks.
template <bool DIVIDED>
__device__ __forceinline__ int64_t row_of(const Params& p, const Team& team) {
    return DIVIDED ? team.number / p.slices : team.number;
}

// The scales of a row that is not there, but that the layout has room for.
template <bool DIVIDED>
__device__ __forceinline__ void clear_scales(const QuantizeParams& q, const Team& team) {
    const int64_t row = row_of<DIVIDED>(q.norm, team);
    if (row >= q.padded_rows) return;
    const RowOut out(q, row);
    const int slice = DIVIDED ? static_cast<int>(arch::cluster_rank()) : 0;
    const int64_t apart = 4 * team.lanes * q.norm.slices;
    for (int64_t block = 4 * (slice * team.lanes + team.lane); block < q.scale_pitch;
         block += apart) {
        out.store_scales(block * block_scaled::sm90::NV_BLOCK, 0);
    }
}

// A row in registers: aligned, and with scales of blocks, of half a warp or more. DIVIDED: of this
// block a slice of it, of whole groups of 128.
template <bool DIVIDED>
struct Held {
    const QuantizeParams& q;
    const Params& p;
    const Place place;
    int first;  // column; past all rows where there is none
    int end;    // of the columns
    float v[UNITS][UNIT];
    static constexpr int ENTRIES = entries_of_lane(SLICE_LANES);

    __device__ __forceinline__ Held(const QuantizeParams& _q, const Team& team, bool there)
        : q(_q), p(_q.norm), place(p, there ? row_of<DIVIDED>(p, team) : 0) {
        first = team.lane * UNIT, end = static_cast<int>(p.width);
        if constexpr (DIVIDED) {
            const Slice slice(p);
            first += slice.begin, end = slice.end;
        }
        if (!there) first = 1 << 30;
    }

    __device__ __forceinline__ int column(int u) const { return u * p.lanes * UNIT + first; }
    // Not positive: there is no unit.
    __device__ __forceinline__ int count(int u) const { return end - column(u); }

    template <class S, class T>
    __device__ __forceinline__ void add_residual(const Unit<T> (&x)[UNITS]) {
        // Those of fp32 one or two at a time, for the sake of registers.
        constexpr int BATCH = sizeof(T) == 4 ? 1 : sizeof(S) == 4 ? 2 : UNITS;
#pragma unroll
        for (int begin = 0; begin < UNITS; begin += BATCH) {
            Unit<S> residual[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int u = begin + i;
                residual[i] = load_unit<true>(place.in_any<S>(p.residual) + column(u), count(u));
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int u = begin + i;
                const auto sum = sum_of(x[u], residual[i]);
                store_unit<true>(place.in<S>(p.sum, p.width) + column(u), sum, count(u));
                values_of(v[u], sum);
            }
        }
    }
    __device__ __forceinline__ void load() {
        with_type(q.dtype, [&]<class T>() {
            Unit<T> x[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                x[u] = load_unit<true>(place.in_any<T>(p.x) + column(u), count(u));
            }
            if (p.residual.data == nullptr) {
#pragma unroll
                for (int u = 0; u < UNITS; ++u) values_of(v[u], x[u]);
            } else if (q.sum_dtype == q.dtype) {
                add_residual<T>(x);
            } else if constexpr (sizeof(T) == 2) {
                add_residual<float>(x);
            }
        });
    }
    __device__ __forceinline__ float sum() const {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) sum += v[u][i];
        }
        return sum;
    }
    __device__ __forceinline__ void subtract(float mean) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (count(u) <= 0) continue;
#pragma unroll
            for (int i = 0; i < UNIT; ++i) v[u][i] -= mean;
        }
    }
    // Of the distances from a centre.
    template <bool LAYER>
    __device__ __forceinline__ float squares(float centre) const {
        float squares = 0;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const float taken = count(u) > 0 ? centre : 0.0f;
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                const float distance = LAYER ? v[u][i] - taken : v[u][i];
                squares = fmaf(distance, distance, squares);
            }
        }
        return squares;
    }
    // Takes the mean, and returns the squares of what is left.
    template <bool LAYER>
    __device__ __forceinline__ float centre() {
        if constexpr (DIVIDED) {
            const Exchange<LAYER, false, ENTRIES> exchange(p, p.lanes, UNITS);
            Moments own;
            if constexpr (LAYER) own.mean = exchange.mean_of(sum());
            own.squares = warp_sum(squares<LAYER>(own.mean));
            arch::cluster_wait();  // all blocks are there
            exchange.give(p, 0, own);
            arch::cluster_arrive();
            arch::cluster_wait();
            const Moments all = exchange.take(0, static_cast<float>(p.width));
            if constexpr (LAYER) subtract(all.mean);
            return all.squares;
        }
        if constexpr (LAYER) {
            const float total = team_sums<0>(Sums<1>{{sum()}}, p.lanes).value[0];
            subtract(total / static_cast<float>(p.width));
        }
        return team_sums<1>(Sums<1>{{squares<false>(0)}}, p.lanes).value[0];
    }
    __device__ __forceinline__ void normalise() {
        const float factor = factor_of(p, p.layer ? centre<true>() : centre<false>());
#pragma unroll
        for (int u = 0; u < UNITS; ++u) multiply(v[u], factor);
        if (p.weight == nullptr) return;
        with_type(q.weight_dtype, [&]<class W>() {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                arch::sync_warp();  // a unit at a time, for the sake of registers
                weigh<true, W>(v[u], p, false, 0, column(u), count(u));
            }
            if (p.bias == nullptr) return;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                arch::sync_warp();
                shift<true, W>(v[u], p, false, column(u), count(u));
            }
        });
    }
    __device__ __forceinline__ uint32_t largest_of_row(uint32_t x) const {
        if constexpr (DIVIDED) {
            const Exchange<false, false, ENTRIES> exchange(p, p.lanes, UNITS);
            return exchange.largest(p, 1, largest_of_lanes<WARP>(x));
        } else {
            return largest_of_team(x, p.lanes);
        }
    }
    __device__ __forceinline__ void store(float given) const {
        if (q.output == Output::nvfp4) {
            const RowOut out(q, place.row);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                store_nvfp4<true>(out, given, v[u], static_cast<uint32_t>(column(u)), count(u));
            }
            return;
        }
        float factors[UNITS];
        const auto all = [&](float factor) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) factors[u] = factor;
        };
        if (q.output == Output::tensor) {
            all(given);
        } else if (q.output == Output::row) {
            Magnitude most;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most.add(v[u]);
            const Scale scale(largest_of_row(most.bits()));
            if (first == 0) store_scale(q, place.row, scale.scale);
            all(scale.factor);
        } else {
            uint32_t most[fp8_quantize::sm90::UNITS] = {};
#pragma unroll
            for (int u = 0; u < UNITS; ++u) most[u] = magnitude(v[u]);
            const fp8_quantize::sm90::GroupMaximum groups(most);
            const Scale scale(groups.bits);
            const int own = groups.own, group = column(own) / GROUP;
            if (kittens::laneid() % 2 == 0 && own < UNITS && group * GROUP < end) {
                store_scale(q, group * q.scale_pitch + place.row, scale.scale);
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                factors[u] = arch::shuffle(
                    scale.factor, (kittens::laneid() & LANES_OF_GROUP) | groups.lane_of(u));
            }
        }
        const RowOut out(q, place.row);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            store_fp8<true>(out, v[u], factors[u], static_cast<uint32_t>(column(u)), count(u));
        }
    }
};
static_assert(UNITS == 4 && UNITS <= fp8_quantize::sm90::UNITS);

// A row from memory, unit by unit, as often as it is needed. The statistics are those of a team, as
// in forward_sm90.cuh; what follows is done by warps, one row after the other, so that elements
// that share a scale lie side by side.
template <bool ALIGNED>
struct Read {
    const QuantizeParams& q;
    const Params& p;
    const Place& place;

    __device__ __forceinline__ void values(float (&v)[UNIT], int64_t column, int count,
                                           bool stores_sum = false) const {
        with_type(q.dtype, [&]<class T>() {
            const auto x = load_unit<ALIGNED>(place.in_any<T>(p.x) + column, count);
            if (p.residual.data == nullptr) return values_of(v, x);
            const auto add = [&]<class S>() {
                const auto residual =
                    load_unit<ALIGNED>(place.in_any<S>(p.residual) + column, count);
                const auto sum = sum_of(x, residual);
                values_of(v, sum);
                if (stores_sum)
                    store_unit<ALIGNED>(place.in<S>(p.sum, p.width) + column, sum, count);
            };
            if (q.sum_dtype == q.dtype) {
                add.template operator()<T>();
            } else if constexpr (sizeof(T) == 2) {
                add.template operator()<float>();
            }
        });
    }
    // Zeros past the end of the row.
    __device__ __forceinline__ void normalised(float (&y)[UNIT], int64_t column, int count,
                                               float mean, float factor) const {
        values(y, column, count);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) y[i] -= mean;
        multiply(y, factor);
        if (p.weight != nullptr) {
            with_type(q.weight_dtype, [&]<class W>() {
                weigh<ALIGNED, W>(y, p, false, 0, column, count);
                if (p.bias != nullptr) shift<ALIGNED, W>(y, p, false, column, count);
            });
        }
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            if (i >= count) y[i] = 0;
        }
    }
};

template <bool ALIGNED>
__device__ __forceinline__ void quantize_row(const QuantizeParams& q, float given, int lane,
                                             int lanes, int64_t number, float mean, float factor) {
    const Params& p = q.norm;
    const bool there = number < p.rows.count;
    const Place place(p, there ? number : 0);
    const Read<ALIGNED> read{q, p, place};
    const RowOut out(q, place.row);
    const int64_t width = there ? p.width : 0;
    const auto each = [&](auto&& take) {
#pragma unroll 1
        for (int64_t begin = 0; begin < width; begin += int64_t{lanes} * UNIT) {
            const int64_t column = begin + lane * UNIT;
            const int count = elements_at(width, column);
            float y[UNIT];
            read.normalised(y, column, count, mean, factor);
            take(y, column, count);
        }
    };
    float of_all = given;
    if (q.output == Output::row) {
        uint32_t most = 0;
        each([&](const float(&y)[UNIT], int64_t, int) { most = max(most, magnitude(y)); });
        const Scale scale(largest_of_team(most, lanes));
        if (lane == 0 && there) store_scale(q, place.row, scale.scale);
        of_all = scale.factor;
    }
    each([&](const float(&y)[UNIT], int64_t column, int count) {
        if (q.output == Output::nvfp4) {
            return store_nvfp4<ALIGNED>(out, given, y, column, count);
        }
        float f = of_all;
        if (q.output == Output::row_block) {
            const Scale scale(largest_of_lanes<LANES_OF_GROUP>(magnitude(y)));
            if (column % GROUP == 0 && count > 0) {
                store_scale(q, column / GROUP * q.scale_pitch + place.row, scale.scale);
            }
            f = scale.factor;
        }
        store_fp8<ALIGNED>(out, y, f, column, count);
    });
}

template <bool ALIGNED>
__device__ __forceinline__ void quantize_from_memory(const QuantizeParams& q, float given,
                                                     const Team& team, bool there) {
    const Params& p = q.norm;
    const Place place(p, there ? team.number : 0);
    const Read<ALIGNED> read{q, p, place};
    const int64_t width = there ? p.width : 0, pitch = int64_t{team.lanes} * UNIT;
    float mean = 0, v[UNIT];
    if (p.layer) {
        float sum = 0;
#pragma unroll 1
        for (int64_t column = int64_t{team.lane} * UNIT; column < width; column += pitch) {
            read.values(v, column, elements_at(width, column));
#pragma unroll
            for (int i = 0; i < UNIT; ++i) sum += v[i];
        }
        mean = team_sums<0>(Sums<1>{{sum}}, team.lanes).value[0] / static_cast<float>(p.width);
    }
    float squares = 0;
#pragma unroll 1
    for (int64_t column = int64_t{team.lane} * UNIT; column < width; column += pitch) {
        const int count = elements_at(width, column);
        read.values(v, column, count, true);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float centred = v[i] - mean;
            if (ALIGNED || i < count) squares = fmaf(centred, centred, squares);
        }
    }
    const float factor = factor_of(p, team_sums<1>(Sums<1>{{squares}}, team.lanes).value[0]);
    const int teams = team.lanes < WARP ? WARP / team.lanes : 1;
    const bool block = team.lanes > WARP;
    const int64_t first = team.number - (block ? 0 : kittens::laneid() / team.lanes);
#pragma unroll 1
    for (int i = 0; i < teams; ++i) {
        const int owner = i * min(team.lanes, WARP);
        quantize_row<ALIGNED>(q, given, block ? team.lane : kittens::laneid(),
                              block ? team.lanes : WARP, first + i, arch::shuffle(mean, owner),
                              arch::shuffle(factor, owner));
    }
}

template <QuantizeConfig C>
struct Quantizer {
    static constexpr QuantizeConfig CONFIG = C;
    static constexpr bool DIVIDED = C.path == Path::cluster;
    static constexpr int THREADS = most_lanes(C);
    // Registers for 1024 threads of an SM; where codes are made by operations on bits, for 512.
    static constexpr int BLOCKS = C.path == Path::memory || C.portable ? 1 : 1024 / THREADS;
};

template <class Q>
__global__ __launch_bounds__(Q::THREADS, Q::BLOCKS) void norm_quantize_kernel(
    const __grid_constant__ QuantizeParams q) {
    if constexpr (Q::DIVIDED) begin_cluster();
    arch::wait_for_dependencies();
    arch::launch_dependents();
    const Team team(q.norm);
    const bool there = row_of<Q::DIVIDED>(q.norm, team) < q.norm.rows.count;
    if (!there) clear_scales<Q::DIVIDED>(q, team);
    if constexpr (Q::CONFIG.path != Path::memory) {
        Held<Q::DIVIDED> row(q, team, there);
        row.load();
        const float given = given_factor(q);
        row.normalise();
        row.store(given);
    } else {
        const float given = given_factor(q);
        if (q.norm.aligned) {
            quantize_from_memory<true>(q, given, team, there);
        } else {
            quantize_from_memory<false>(q, given, team, there);
        }
    }
}

}  // namespace sm90

template <QuantizeConfig C>
void launch_quantize(const QuantizeParams& params, Stream stream) {
    const Params& p = params.norm;
    const int64_t rows = std::max(p.rows.count, params.padded_rows);
    kittens::launch({.dependent = !C.portable, .blocks_per_sm = sm90::Quantizer<C>::BLOCKS},
                    sm90::norm_quantize_kernel<sm90::Quantizer<C>>,
                    dim3(static_cast<unsigned>(ceil_div(rows, teams_of(p.lanes)) * p.slices)),
                    dim3(static_cast<unsigned>(threads_of(p.lanes))),
                    dim3(static_cast<unsigned>(p.slices)), 0, stream, params);
}

}  // namespace thunderkittens::norm
