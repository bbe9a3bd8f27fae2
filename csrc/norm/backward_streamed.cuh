// Gradients of rows that stream through shared memory. A lane has the same columns of every row
// that its team takes, so that its shares of the gradients of weight and bias are few, and takes
// several rows together, a batch, so that sums over the team cost little for each: lanes exchange
// the sums of different rows, and one barrier serves them all.
//
// What a lane reads of the next batches is on its way meanwhile, by cp.async, in places of shared
// memory that no other lane touches: they need no barrier. Its weights lie there too, in fp32. The
// formulas are those of backward_sm90.cuh; with a = dy rstd and v less the mean, the gradient of
// the weight sums a v, and dv = a w - v rstd^2 mean(g n) - rstd mean(g).
#pragma once

#include "csrc/norm/cluster.cuh"
#include "csrc/norm/partials.cuh"

namespace thunderkittens::norm {
namespace sm90 {

template <Config C>
struct Stream {
    using T = element_of<C.dtype>;
    using S = element_of<C.sum_dtype>;
    static constexpr int U = C.units, ROWS = streamed_rows(C);
    static constexpr int STAGES = streamed_stages(C);
    static constexpr bool DIVIDED = C.path == Path::cluster;
    // 16 bytes each, of the gradient behind those of x.
    static constexpr int OF_X = Unit<S>::WORDS / 4, OF_DY = Unit<T>::WORDS / 4;
    static constexpr int PIECES = ROWS * U * (OF_X + OF_DY);
    static constexpr int SUMS = 2 * ROWS;
    static_assert(streamed_bytes(C, 1) == 16 * STAGES * PIECES + 4 * UNIT * U);
};

// A lane on its way over the rows of its team. PLAIN: rows have one stride, dx is all that is
// written, and nothing is added to it.
template <Config C, bool PLAIN>
struct Streamed {
    using P = Stream<C>;
    using T = typename P::T;
    using S = typename P::S;
    static constexpr int U = P::U, ROWS = P::ROWS;
    // What is added is on its way during the sums, where registers are left.
    static constexpr bool EARLY = !PLAIN && U < 4;
    // What stays in registers from the first sums to the results, in fp32; the rest is read again.
    static constexpr bool X_STAYS = !C.layer || U == 1 || (PLAIN && U == 2);
    static constexpr bool DY_STAYS = C.layer ? PLAIN && U == 1 : U < 4;

    const BackwardParams& p;
    const Team team;
    uint32_t base;   // of the lane in shared memory
    uint32_t pitch;  // bytes between pieces of a lane
    uint32_t row;    // of the batch at hand, the first
    int begin, end;  // columns of the block, where a row is divided
    const char* x_ahead;
    const char* dy_ahead;
    char* dx;
    Unit<S> x[ROWS][U];
    Unit<T> dy[ROWS][U];
    float weight[U][UNIT], bias[C.layer ? U : 1][UNIT];

    __device__ __forceinline__ uint32_t rows() const {
        return static_cast<uint32_t>(p.forward.rows.count);
    }
    __device__ __forceinline__ uint32_t next() const { return p.between; }
    __device__ __forceinline__ int column(int u) const {
        const int in_team = (u * team.lanes + team.lane) * UNIT;
        return P::DIVIDED ? begin + in_team : in_team;
    }
    // Of a whole row the width stays where it is, which spares a register.
    __device__ __forceinline__ bool has(int u) const {
        return column(u) < (P::DIVIDED ? end : static_cast<int>(p.forward.width));
    }

    __device__ __forceinline__ Streamed(const BackwardParams& params, uint32_t first)
        : p(params), team(params.forward), row(first) {
        const Params& f = p.forward;
        if constexpr (P::DIVIDED) {
            const Slice slice(f);
            begin = slice.begin, end = slice.end;
        }
        pitch = 16 * blockDim.x;
        base = arch::shared_address(kittens::shared_memory()) + 16 * threadIdx.x;
        if constexpr (PLAIN) {
            const int64_t at = column(0);
            x_ahead = reinterpret_cast<const char*>(static_cast<const S*>(f.x.data) +
                                                    (first * f.x.stride[0] + at));
            dy_ahead = reinterpret_cast<const char*>(static_cast<const T*>(p.grad_out.data) +
                                                     (first * p.grad_out.stride[0] + at));
            dx = reinterpret_cast<char*>(static_cast<T*>(p.grad_x) + (first * f.width + at));
        }
    }
    // Weights to shared memory; sums are zero.
    __device__ __forceinline__ void begin_sums() {
        const uint32_t group = Place(p.forward, row).group;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            load_factors<true, T>(w, p.forward, group, column(u), has(u) ? UNIT : 0);
            const auto unit = rounded<float>(w);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto& v = unit.words;
                arch::store_shared(of_weights(u, i),
                                   uint4{v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]});
            }
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                weight[u][i] = 0.0f;
                if constexpr (C.layer) bias[u][i] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ uint32_t of_weights(int u, int i) const {
        return base + static_cast<uint32_t>(P::STAGES * P::PIECES + 2 * u + i) * pitch;
    }
    __device__ __forceinline__ void load_weights_of(float (&w)[UNIT], int u) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto v = arch::load_shared<float4>(of_weights(u, i));
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
    }

    // Asks for a batch, of which rows and columns that there are not become zeros.
    __device__ __forceinline__ void ask(uint32_t stage, int batches) {
        const Params& f = p.forward;
        uint32_t ahead = row + static_cast<uint32_t>(batches * ROWS) * next();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool there = ahead < rows();
            if constexpr (!PLAIN) {
                const Place place(f, there ? ahead : 0);
                x_ahead = reinterpret_cast<const char*>(place.in<S>(f.x) + column(0));
                dy_ahead = reinterpret_cast<const char*>(place.in<T>(p.grad_out) + column(0));
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const uint32_t to = stage + static_cast<uint32_t>(r * U + u) * pitch;
                const int64_t at = int64_t{u} * team.lanes * UNIT;
                const auto bring = [&](const char* from, uint32_t place, int pieces, int first) {
#pragma unroll
                    for (int i = 0; i < pieces; ++i) {
                        const uint32_t piece = static_cast<uint32_t>((first + i) * (ROWS * U));
                        arch::cp_async<16>(place + piece * pitch, from + 16 * i, there && has(u));
                    }
                };
                bring(x_ahead + at * static_cast<int>(sizeof(S)), to, P::OF_X, 0);
                bring(dy_ahead + at * static_cast<int>(sizeof(T)), to, P::OF_DY, P::OF_X);
            }
            ahead += next();
            if constexpr (PLAIN) {
                x_ahead += next() * f.x.stride[0] * static_cast<int>(sizeof(S));
                dy_ahead += next() * p.grad_out.stride[0] * static_cast<int>(sizeof(T));
            }
        }
        arch::cp_async_commit();
    }
    template <class E>
    __device__ __forceinline__ void take(Unit<E>& unit, uint32_t from, int first) const {
#pragma unroll
        for (int i = 0; i < Unit<E>::WORDS / 4; ++i) {
            const uint32_t piece = static_cast<uint32_t>((first + i) * (ROWS * U));
            const auto v = arch::load_shared<uint4>(from + piece * pitch);
            unit.words[4 * i] = v.x, unit.words[4 * i + 1] = v.y;
            unit.words[4 * i + 2] = v.z, unit.words[4 * i + 3] = v.w;
        }
    }
    template <bool OF_X, bool OF_DY>
    __device__ __forceinline__ void take_unit(uint32_t stage, int r, int u) {
        const uint32_t from = stage + static_cast<uint32_t>(r * U + u) * pitch;
        if constexpr (OF_X) take(x[r][u], from, 0);
        if constexpr (OF_DY) take(dy[r][u], from, P::OF_X);
    }

    // Of v and g, or of v^2 and g v.
    __device__ __forceinline__ void add_first(float (&sums)[P::SUMS], uint32_t stage) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            load_weights_of(w, u);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                take_unit<true, true>(stage, r, u);
                float &first = sums[r], &second = sums[ROWS + r];
#pragma unroll
                for (int i = 0; i < UNIT; ++i) {
                    const float v = x[r][u].value(i), d = dy[r][u].value(i);
                    if constexpr (C.layer) {
                        first += v, second = fmaf(d, w[i], second);
                    } else {
                        first = fmaf(v, v, first), second = fmaf(d * w[i], v, second);
                    }
                }
            }
        }
    }
    // Of (v - mean)^2 and g (v - mean).
    __device__ __forceinline__ void add_second(float (&sums)[P::SUMS], const float (&mean)[ROWS],
                                               uint32_t stage) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            load_weights_of(w, u);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                take_unit<!X_STAYS, !DY_STAYS>(stage, r, u);
                float &first = sums[r], &second = sums[ROWS + r];
                const float centre = has(u) ? mean[r] : 0.0f;
#pragma unroll
                for (int i = 0; i < UNIT; ++i) {
                    const float v = x[r][u].value(i) - centre;
                    first = fmaf(v, v, first);
                    second = fmaf(dy[r][u].value(i) * w[i], v, second);
                }
            }
        }
    }

    __device__ __forceinline__ Unit<S> load_grad_sum(int r, int u) const {
        const uint32_t at = row + static_cast<uint32_t>(r) * next();
        if (p.grad_sum.data == nullptr || at >= rows()) return {};
        return load_unit<true>(Place(p.forward, at).in<S>(p.grad_sum) + column(u),
                               has(u) ? UNIT : 0);
    }
    __device__ __forceinline__ void store(float (&results)[UNIT], int r, int u) {
        const Params& f = p.forward;
        const uint32_t at = row + static_cast<uint32_t>(r) * next();
        if (at >= rows() || !has(u)) return;
        if constexpr (PLAIN) {
            const int64_t from = int64_t{u} * team.lanes * UNIT + r * (next() * f.width);
            store_unit<true>(reinterpret_cast<T*>(dx) + from, rounded<T>(results), UNIT);
        } else {
            const Place place(f, at);
            if (p.grad_residual != nullptr) {
                store_unit<true>(place.in<S>(p.grad_residual, f.width) + column(u),
                                 rounded<S>(results), UNIT);
            }
            if (p.grad_x == nullptr) return;
            if (f.dropped > 0) {
                const Dropout dropout(seed_of(f), unit_number(f, at, column(u)));
#pragma unroll
                for (int i = 0; i < UNIT; ++i) results[i] *= dropout.factor(f, i);
            }
            store_unit<true>(place.in<T>(p.grad_x, f.width) + column(u), rounded<T>(results), UNIT);
        }
    }

    // What the gradient of a row is made with: dv = dy rstd w + (v - centre) slope + grad.
    struct Factors {
        float centre, rstd, slope, grad;
    };
    // From rstd, the sum of g (v - mean) and the mean of g. Of a row that there is not, whose sums
    // are zero, rstd is zero.
    __device__ __forceinline__ Factors factors_of(float centre, float squares, float product,
                                                  float grad, int r, float reciprocal) const {
        const bool there = row + static_cast<uint32_t>(r) * next() < rows();
        const float factor = arch::reciprocal_sqrt(fmaf(squares, reciprocal, p.forward.eps));
        const float rstd = there ? factor : 0.0f;
        product = product * rstd * reciprocal;
        return {centre, rstd, -rstd * (rstd * product), grad * -rstd};
    }
    // Gradients of a unit of row `r`; `added` gives what is added to them.
    template <class Added>
    __device__ __forceinline__ void finish(const Unit<S>& of_x, const Unit<T>& of_dy,
                                           const float (&w)[UNIT], const Factors& f, int r, int u,
                                           Added&& added) {
        const float centre = has(u) ? f.centre : 0.0f;
        float results[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const float d = of_dy.value(i), a = d * f.rstd;
            float v = of_x.value(i);
            if constexpr (C.layer) v -= centre;
            weight[u][i] = fmaf(a, v, weight[u][i]);
            if constexpr (C.layer) bias[u][i] += d;
            results[i] = C.layer ? fmaf(v, f.slope, f.grad) : v * f.slope;
            results[i] = fmaf(a, w[i], results[i]);
        }
        if constexpr (!PLAIN) {
            const Unit<S> more = added();
#pragma unroll
            for (int i = 0; i < UNIT; ++i) results[i] += more.value(i);
        }
        store(results, r, u);
    }
    __device__ __forceinline__ void advance() {
        row += ROWS * next();
        if constexpr (PLAIN) dx += ROWS * (next() * p.forward.width) * static_cast<int>(sizeof(T));
    }

    __device__ __forceinline__ void step(uint32_t stage, int batch, float reciprocal) {
        const float width = static_cast<float>(p.forward.width);
        float sums[P::SUMS] = {}, mean[ROWS] = {}, grad[ROWS] = {};
        add_first(sums, stage);
        if (X_STAYS && DY_STAYS) ask(stage, P::STAGES);
        Unit<S> added[EARLY ? ROWS : 1][EARLY ? U : 1];
        if constexpr (EARLY) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int u = 0; u < U; ++u) added[r][u] = load_grad_sum(r, u);
            }
        }
        batch_sums(sums, team.lanes, C.layer ? 0 : batch % 2);
        if constexpr (C.layer) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                mean[r] = divide(sums[r], width, reciprocal);
                grad[r] = divide(sums[ROWS + r], width, reciprocal);
                sums[r] = 0.0f, sums[ROWS + r] = 0.0f;
            }
            add_second(sums, mean, stage);
            batch_sums(sums, team.lanes, 1);
        }
        Factors factors[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            factors[r] = factors_of(mean[r], sums[r], sums[ROWS + r], grad[r], r, reciprocal);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            load_weights_of(w, u);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                take_unit<!X_STAYS, !DY_STAYS>(stage, r, u);
                finish(x[r][u], dy[r][u], w, factors[r], r, u, [&] {
                    return EARLY ? added[EARLY ? r : 0][EARLY ? u : 0] : load_grad_sum(r, u);
                });
            }
        }
        advance();
        if (!X_STAYS || !DY_STAYS) ask(stage, P::STAGES - 1);
    }

    __device__ __forceinline__ uint32_t stage_at(int batch) const {
        return base + static_cast<uint32_t>(batch % P::STAGES) * (P::PIECES * pitch);
    }
    __device__ __forceinline__ void run() {
        const int batches = static_cast<int>((p.steps + (ROWS - 1)) / ROWS);
        const float reciprocal = 1.0f / static_cast<float>(p.forward.width);
#pragma unroll
        for (int i = 0; i < P::STAGES; ++i) ask(stage_at(i), i);
        begin_sums();
        arch::sync_block();  // a batch's sums have been cleared
#pragma unroll 1
        for (int batch = 0; batch < batches; ++batch) {
            arch::cp_async_wait<P::STAGES - 1>();
            step(stage_at(batch), batch, reciprocal);
        }
        arch::cp_async_wait<0>();
    }

    // The row of partial sums of a block, or of the teams of a warp.
    __device__ __forceinline__ void store_partials() {
        // Made anew: where it is kept from the first row on, a register is missing.
        uint32_t block = blockIdx.x, thread = threadIdx.x;
        arch::pin_register(block);
        arch::pin_register(thread);
        if constexpr (P::DIVIDED) block /= static_cast<uint32_t>(p.forward.slices);
        const Reducer reducer(team.lanes, block, thread);
        // Teams of four units a lane are no smaller than a warp: see set_team().
        if constexpr (U < 4) add_teams(weight, bias, C.layer, team.lanes);
        if (reducer.team != 0) return;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (!has(u)) continue;
            const int64_t at = int64_t{reducer.partial} * p.pitch + column(u);
            store_partial(p.partials + at, weight[u]);
            if constexpr (C.layer) {
                if (p.partials_bias != nullptr) store_partial(p.partials_bias + at, bias[u]);
            }
        }
    }
};

__device__ __forceinline__ bool is_plain(const BackwardParams& p) {
    return p.forward.rows.dims == 1 && p.forward.dropped == 0 && p.grad_sum.data == nullptr &&
           p.grad_residual == nullptr && p.grad_x != nullptr;
}

template <Config C>
__device__ __forceinline__ void stream_gradients(const BackwardParams& p) {
    const Params& f = p.forward;
    const Reducer reducer(f.lanes);
    clear_batch_sums<Stream<C>::SUMS>(static_cast<int>(blockDim.x));
    const auto run = [&]<bool PLAIN>() {
        const auto first = static_cast<uint32_t>(row_at(p, 0, reducer));
        Streamed<C, PLAIN> streamed(p, first);
        streamed.run();
        if (p.partials != nullptr) streamed.store_partials();
    };
    // Of layer_norm with four units a lane, fp16 spills where a kernel has both.
    constexpr bool ONE = C.layer && C.units == 4 && C.dtype == DType::fp16;
    if (!ONE && is_plain(p)) {
        run.template operator()<!ONE>();
    } else {
        run.template operator()<false>();
    }
}

}  // namespace sm90
}  // namespace thunderkittens::norm
