// The gradient where tokens are adjacent. A thread has vectors of 16 bytes of one channel, a row of
// lanes apart, and goes along them from the last to the first, with the next ones on their way.
#pragma once

#include "csrc/convolution/gradient_states.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

// A vector of tokens of one channel: the inputs before them and theirs, and their dz, behind which
// are those of the tokens behind them.
template <class T, int WIDTH>
struct TokensGradient {
    static constexpr int BEFORE = WIDTH - 1, V = 16 / sizeof(T);
    const Params& f;
    const int64_t batch, channel;
    Taps<T, 1, WIDTH> taps;
    float sums[WIDTH + 1];
    float in[BEFORE + V], dz[V + BEFORE];

    // dz of the tokens [begin, end), which are all where they are whole.
    template <bool whole>
    __device__ __forceinline__ void activate(const Neighbours<T, V>& gradient, int begin, int end) {
        float z[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            z[i] = taps.bias[0];
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) z[i] = fmaf(taps.tap(0, w), in[i + w], z[i]);
            if (whole || (i >= begin && i < end)) dz[i] = gradient.value(i);
        }
        if (f.silu) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (whole || (i >= begin && i < end)) dz[i] = through_silu<T>(z[i], dz[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (!whole && (i < begin || i >= end)) continue;
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) sums[w] = fmaf(dz[i], in[i + w], sums[w]);
            sums[WIDTH] += dz[i];
        }
    }
    // dz of each sequence's tokens from their own inputs. Returns which tokens, from `at` on, are
    // the last ones of a sequence.
    __device__ __forceinline__ uint32_t activate_apart(const Neighbours<T, V>& gradient, int64_t at,
                                                       Sequence& s) {
        uint32_t last = 0;
#pragma unroll 1
        for (int64_t token = at; token < at + V; token = s.end) {
            if (token < s.begin || token >= s.end) s = sequence_of(f, batch, token);
            if (!s.exists()) continue;
            if (s.begin > at - BEFORE) {
                float state[BEFORE];
#pragma unroll
                for (int k = 0; k < BEFORE; ++k) {
                    state[k] = state_element<T>(f.initial, s, channel, k);
                }
                const int to_begin = static_cast<int>(s.begin - (at - BEFORE));
#pragma unroll
                for (int i = 0; i < BEFORE + V; ++i) {
                    if (i >= to_begin) continue;
                    in[i] = 0.0f;
#pragma unroll
                    for (int k = 0; k < BEFORE; ++k) {
                        if (to_begin - i == BEFORE - k) in[i] = state[k];
                    }
                }
            }
            const int begin = static_cast<int>(token - at);
            const int end = static_cast<int>(min(s.end - at, int64_t{V + BEFORE}));
            if (end < V + BEFORE) last |= 1u << (end - 1);
            if (begin == 0 && end >= V)
                activate<true>(gradient, 0, V);
            else
                activate<false>(gradient, begin, end);
        }
        return last;
    }
    // dx, to which the dz behind the end of a sequence add nothing.
    template <bool apart>
    __device__ __forceinline__ Neighbours<T, V> finish(uint32_t last) const {
        float results[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            results[i] = 0.0f;
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const uint32_t between = ((1u << (BEFORE - w)) - 1) << i;
                if (apart && (last & between) != 0) continue;
                results[i] = fmaf(taps.tap(0, w), dz[i + BEFORE - w], results[i]);
            }
        }
        return rounded<T, V>(results);
    }
};

// From the last vector of a run to its first: the dz behind a vector are those of the lane beside
// it, of the last lane's the first lane's of the vector before, and the inputs before it come from
// the other lane beside it, or from the vector that is next. Where vectors may have several
// sequences or a state (APART), all of that in a loop that is not unrolled, and the inputs from
// memory.
template <class T, int WIDTH, bool APART>
__device__ __forceinline__ void gradient_of_run(const BackwardParams& p, const Place& place,
                                                TokensGradient<T, WIDTH>& g, int64_t first,
                                                int steps, int count) {
    constexpr int BEFORE = WIDTH - 1, V = 16 / sizeof(T), AHEAD = APART ? 1 : BACKWARD_VECTORS;
    using Vector = Neighbours<T, V>;
    const Params& f = p.forward;
    const int step = f.grid.lanes * V;
    const bool is_first = place.lane == 0, is_last = place.lane == f.grid.lanes - 1;
    const int before = lane_beside(place.lane, f.grid.lanes, -1),
              behind = lane_beside(place.lane, f.grid.lanes, 1);
    const auto from_last = [&](const Operand& x) {
        return static_cast<T*>(x.data) +
               (place.batch * x.batch_stride + g.channel * x.channel_stride + first +
                (steps - 1) * int64_t{step});
    };
    const T* x = from_last(f.x);
    const T* gradients = from_last(f.out);
    T* dx = from_last(p.dx);
    // Of the vector before the run, the last lane has the inputs that its first lane needs.
    const int least = is_last && first >= step ? -1 : 0;
    Vector inputs[AHEAD], outputs[AHEAD], others;
    const auto load = [&](int vector, int slot) {
        if (vector < count && vector >= (APART ? 0 : least)) inputs[slot].load(x);
        if (vector < count && vector >= 0) outputs[slot].load(gradients);
        if (APART && vector < count && vector >= 0 && (vector > 0 || first > 0)) others.load(x - V);
        x -= step;
        gradients -= step;
    };
    others.clear();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        inputs[i].clear();
        outputs[i].clear();
        load(steps - 1 - i, i);
    }
    float carried[BEFORE];  // the first lane's dz
#pragma unroll
    for (int k = 0; k < BEFORE; ++k) carried[k] = 0.0f;
    const int64_t end = first + steps * int64_t{step};
    if (is_first && count > 0 && end < f.length) {
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            if (end + k >= f.length) continue;
            const Sequence s = sequence_of(f, place.batch, end + k);
            if (s.exists()) carried[k] = dz_of<T, WIDTH>(f, s, place.batch, g.channel, end + k);
        }
    }
    Sequence s{-1, 0, 0};
#pragma unroll 1
    for (int batch = steps - 1; batch >= 0; batch -= AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int vector = batch - i;
            const Vector now = inputs[i], next = inputs[(i + 1) % AHEAD], gradient = outputs[i];
            Vector preceding = others;
            if constexpr (!APART) {
#pragma unroll
                for (int k = Preceding<T, WIDTH>::FROM; k < 4; ++k) {
                    // Of values: a choice of one of two places would put both into memory.
                    const uint32_t mine = now.words[k], from_next = next.words[k];
                    preceding.words[k] = arch::shuffle(is_last ? from_next : mine, before);
                }
            }
            load(vector - AHEAD, i);
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) g.in[k] = preceding.value(V - BEFORE + k);
#pragma unroll
            for (int k = 0; k < V; ++k) g.in[BEFORE + k] = now.value(k);
            const bool of_run = vector >= 0 && vector < count;
            uint32_t last = 0;
            if (APART || !of_run) {
#pragma unroll
                for (int k = 0; k < V; ++k) g.dz[k] = 0.0f;
            }
            if (of_run) {
                if constexpr (APART) {
                    last = g.activate_apart(gradient, first + vector * int64_t{step}, s);
                } else {
                    g.template activate<true>(gradient, 0, V);
                }
            }
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) {
                const float mine = g.dz[k], from_before = carried[k];
                g.dz[V + k] = arch::shuffle(is_first ? from_before : mine, behind);
                carried[k] = mine;
            }
            if (of_run && p.dx.data != nullptr) g.template finish<APART>(last).store(dx);
            dx -= step;
        }
    }
}

template <class T, int WIDTH>
__device__ __forceinline__ void gradient_tokens(const BackwardParams& p) {
    constexpr int V = 16 / sizeof(T);
    const Params& f = p.forward;
    const Place place(f.grid);
    const int64_t own = place.channel_block * f.grid.groups + place.group;
    const bool there = own < f.channels;
    const int64_t channel = there ? own : 0;
    const int64_t step = f.grid.lanes * V;
    const int64_t begin = place.token_block * f.steps * step, first = begin + place.lane * V;
    // Vectors of the row, and of this thread, which may have one fewer.
    const auto vectors = [&](int64_t elements) {
        return static_cast<int>(min(int64_t{f.steps}, (elements + (step - 1)) / step));
    };
    const int steps = vectors(f.length - begin);
    const int count = there ? vectors(max(f.length - first, int64_t{0})) : 0;
    TokensGradient<T, WIDTH> g{f, place.batch, channel};
    g.taps.load(f.weight, f.bias, channel);
#pragma unroll
    for (int i = 0; i <= WIDTH; ++i) g.sums[i] = 0.0f;
    if (f.sequences.edges != nullptr || f.initial.data != nullptr)
        gradient_of_run<T, WIDTH, true>(p, place, g, first, steps, count);
    else
        gradient_of_run<T, WIDTH, false>(p, place, g, first, steps, count);
    if (p.dinitial.data != nullptr || f.final.data != nullptr) {
        Sequence s{-1, 0, 0};
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
            const int64_t at = first + j * step;
#pragma unroll 1
            for (int64_t token = at; token < at + V; token = s.end) {
                s = sequence_of(f, place.batch, token);
                if (!s.exists()) continue;
                state_gradients<T, WIDTH>(p, s, place.batch, channel, token, min(s.end, at + V));
            }
        }
    }
    if (p.sums == nullptr) return;
    for (int distance = 1; distance < f.grid.lanes; distance *= 2) {
#pragma unroll
        for (int i = 0; i <= WIDTH; ++i) g.sums[i] += arch::shuffle_xor(g.sums[i], distance);
    }
    if (place.lane != 0 || !there) return;
    const int64_t line = place.batch * f.grid.token_blocks + place.token_block;
#pragma unroll
    for (int i = 0; i <= WIDTH; ++i) {
        arch::store_global(p.sums + (line * f.channels + channel) * (WIDTH + 1) + i, g.sums[i]);
    }
}

}  // namespace sm90
}  // namespace thunderkittens::convolution
