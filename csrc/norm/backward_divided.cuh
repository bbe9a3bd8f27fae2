// Gradients of long rows, which the blocks of a cluster divide. Each block streams its slice of the
// cluster's rows as backward_streamed.cuh does, one row after the other; the moments of a row are
// exchanged once, and while they are on their way, the row before is finished and the next one
// begun: a lane holds both in registers. So no load, barrier or exchange is waited for as long as
// memory is the limit.
#pragma once

#include "csrc/norm/backward_streamed.cuh"

namespace thunderkittens::norm {
namespace sm90 {

template <Config C, bool PLAIN>
struct Divided : Streamed<C, PLAIN> {
    using Base = Streamed<C, PLAIN>;
    using Base::p, Base::ask, Base::stage_at, Base::has;
    using typename Base::P, typename Base::S, typename Base::T;
    static constexpr int U = P::U;
    // Two rows that have fp32 are more than registers hold, beside sums of weight and bias.
    static constexpr bool LAGS = bytes_of_element(C) <= (C.layer ? 4 : 6);
    static_assert(P::ROWS == 1);

    struct Held {
        Unit<S> x[U];
        Unit<T> dy[U];
    };
    Exchange<C.layer, true, entries_of_lane(MAX_LANES)> exchange;
    Unit<S> added[U];  // to the gradient of the row that is finished

    __device__ __forceinline__ Divided(const BackwardParams& params, uint32_t first)
        : Base(params, first), exchange(params.forward, params.forward.lanes, U) {}

    __device__ __forceinline__ void take(Held& held, uint32_t stage) const {
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const uint32_t from = stage + static_cast<uint32_t>(u) * this->pitch;
            Base::take(held.x[u], from, 0);
            Base::take(held.dy[u], from, P::OF_X);
        }
    }
    // Those of a warp.
    __device__ __forceinline__ Moments moments(const Held& held) const {
        Moments m;
        if constexpr (C.layer) {
            float sum = 0;
#pragma unroll
            for (int u = 0; u < U; ++u) {
#pragma unroll
                for (int i = 0; i < UNIT; ++i) sum += held.x[u].value(i);
            }
            m.mean = exchange.mean_of(sum);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            this->load_weights_of(w, u);
            const float centre = has(u) ? m.mean : 0.0f;
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                float v = held.x[u].value(i);
                if constexpr (C.layer) v -= centre;
                const float g = held.dy[u].value(i) * w[i];
                m.squares = fmaf(v, v, m.squares);
                m.product = fmaf(g, v, m.product);
                if constexpr (C.layer) m.grad += g;
            }
        }
        m.squares = warp_sum(m.squares), m.product = warp_sum(m.product);
        if constexpr (C.layer) m.grad = warp_sum(m.grad);
        return m;
    }
    __device__ __forceinline__ void load_added() {
        if constexpr (!PLAIN) {
#pragma unroll
            for (int u = 0; u < U; ++u) added[u] = this->load_grad_sum(0, u);
        }
    }
    __device__ __forceinline__ void finish_row(const Held& held, const Moments& m,
                                               float reciprocal) {
        const auto factors =
            this->factors_of(m.mean, m.squares, m.product, m.grad * reciprocal, 0, reciprocal);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float w[UNIT];
            this->load_weights_of(w, u);
            this->finish(held.x[u], held.dy[u], w, factors, 0, u, [&] { return added[u]; });
        }
        this->advance();
    }
    __device__ __forceinline__ Moments exchanged(int step, float width) const {
        arch::cluster_wait();
        return exchange.take(step % 2, width);
    }

    __device__ __forceinline__ void run() {
        const int steps = static_cast<int>(p.steps);
        const float width = static_cast<float>(p.forward.width), reciprocal = 1.0f / width;
#pragma unroll
        for (int i = 0; i < P::STAGES; ++i) ask(stage_at(i), i);
        this->begin_sums();
        arch::cluster_wait();  // all blocks are there
        Held before;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            arch::cp_async_wait<P::STAGES - 1>();
            const uint32_t stage = stage_at(step);
            Held now;
            take(now, stage);
            load_added();
            const Moments own = moments(now);
            ask(stage, P::STAGES + (LAGS && step > 0 ? 1 : 0));
            Moments all;
            if (LAGS && step > 0) all = exchanged(step - 1, width);
            exchange.give(p.forward, step % 2, own);
            arch::cluster_arrive();
            if constexpr (LAGS) {
                if (step > 0) finish_row(before, all, reciprocal);
                before = now;
            } else {
                finish_row(now, exchanged(step, width), reciprocal);
            }
        }
        if constexpr (LAGS) {
            load_added();
            finish_row(before, exchanged(steps - 1, width), reciprocal);
        }
        arch::cp_async_wait<0>();
    }
};

template <Config C>
__device__ __forceinline__ void divide_gradients(const BackwardParams& p) {
    begin_cluster();
    const Reducer reducer(p.forward.lanes, blockIdx.x / static_cast<uint32_t>(p.forward.slices),
                          threadIdx.x);
    const auto run = [&]<bool PLAIN>() {
        Divided<C, PLAIN> divided(p, static_cast<uint32_t>(row_at(p, 0, reducer)));
        divided.run();
        if (p.partials != nullptr) divided.store_partials();
    };
    if (is_plain(p))
        run.template operator()<true>();
    else
        run.template operator()<false>();
}

}  // namespace sm90
}  // namespace thunderkittens::norm
