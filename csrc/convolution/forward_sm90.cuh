// The convolution of all tokens, and the final states, in one pass over memory.
//
// A block of 256 threads has no roles. A thread goes along the tokens, and has the next few vectors
// of it on their way all the time: as it takes one, it asks for the one that is as many behind it.
// By channels, these are four neighbouring channels (or one channel, where memory does not allow
// that) of a token, and the width - 1 inputs before it stay in registers. By tokens, they are 16
// bytes of tokens of one channel, a row of lanes apart, and the inputs before them come from the
// lane beside it by shuffles; the first lane's are the last one's of the vector before.
//
// Blocks behind those of the tiles write the final states. By tokens, the tokens of a vector that
// depend on a state, or are in a later sequence than its first one, are made once more, one by one;
// by channels, a thread goes from sequence to sequence. The portable kernels do the same.
#pragma once

#include "csrc/convolution/sequences.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

// The tile of a block, and the thread's place in it.
struct Place {
    int64_t batch, channel_block, token_block;
    int lane, group;

    __device__ __forceinline__ explicit Place(const Grid& grid) {
        // In 32 bits, of which a division takes a fraction of the instructions.
        const auto block = static_cast<uint32_t>(blockIdx.x);
        const auto across = static_cast<uint32_t>(grid.channel_blocks);
        const auto along = static_cast<uint32_t>(grid.token_blocks);
        const uint32_t row = block / across;
        channel_block = block - row * across;
        batch = row / along;
        token_block = row % along;
        const auto thread = static_cast<int>(threadIdx.x);
        lane = thread & (grid.lanes - 1);
        group = thread >> grid.lane_bits;
    }
};

// Tokens [begin, end) of a channel one by one.
template <class T, int WIDTH>
__device__ __forceinline__ void convolve_elements(const Params& p, int64_t batch, int64_t channel,
                                                  int64_t begin, int64_t end) {
    constexpr int BEFORE = WIDTH - 1;
    Taps<T, 1, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
    const int64_t from = batch * p.x.batch_stride + channel * p.x.channel_stride;
    const int64_t to = batch * p.out.batch_stride + channel * p.out.channel_stride;
    Sequence s{-1, 0, 0};
#pragma unroll 1
    for (int64_t token = begin; token < end; ++token) {
        if (token >= s.end) s = sequence_of(p, batch, token);
        float sum = taps.bias[0];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const float value = input_element<T, WIDTH>(p, s, from, channel, token - BEFORE + w);
            sum = fmaf(taps.tap(0, w), value, sum);
        }
        if (p.silu) sum = silu<T>(sum);
        store_element<T>(p.out.data, to + token * p.out.token_stride, s.exists() ? sum : 0.0f);
    }
}

// Those of the tokens [begin, end) that have not all of their inputs in s, in which the first of
// them is: the others are there already.
template <class T, int WIDTH>
__device__ __forceinline__ void convolve_ends(const Params& p, const Sequence& s, int64_t batch,
                                              int64_t channel, int64_t begin, int64_t end) {
    int64_t from = begin, to = min(s.exists() ? s.begin + (WIDTH - 1) : s.end, min(s.end, end));
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        convolve_elements<T, WIDTH>(p, batch, channel, from, to);
        from = s.end, to = end;
    }
}

template <class T, int V>
constexpr int ROWS_AHEAD = rows_ahead(V * sizeof(T));
template <Layout LAYOUT>
constexpr int FORWARD_CHANNELS = forward_channels(LAYOUT);

// Tokens [begin, begin + count) of V channels, which are all that the thread has of a sequence.
template <class T, int V, int WIDTH>
__device__ __forceinline__ void convolve_run(const Params& p, const Taps<T, V, WIDTH>& taps,
                                             const Sequence& s, int64_t batch, int64_t channel,
                                             int64_t begin, int count) {
    constexpr int BEFORE = WIDTH - 1, AHEAD = ROWS_AHEAD<T, V>;
    using Vector = Neighbours<T, V>;
    const T* from =
        static_cast<const T*>(p.x.data) +
        (batch * p.x.batch_stride + channel * p.x.channel_stride + begin * p.x.token_stride);
    T* to =
        static_cast<T*>(p.out.data) +
        (batch * p.out.batch_stride + channel * p.out.channel_stride + begin * p.out.token_stride);
    Vector before[BEFORE], ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) {
        const int64_t from_begin = begin - s.begin - BEFORE + i;
        if (from_begin >= 0)
            before[i].load(from + (i - BEFORE) * p.x.token_stride);
        else
            before[i] = state_vector<T, V>(p.initial, s, channel, from_begin + BEFORE);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        ahead[i].clear();
        if (i < count) ahead[i].load(from);
        from += p.x.token_stride;
    }
    float in[WIDTH][V];  // of the token, behind those before it
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) {
#pragma unroll
        for (int v = 0; v < V; ++v) in[i][v] = before[i].value(v);
    }
#pragma unroll 1
    for (int left = count; left > 0; left -= AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            float sums[V];
#pragma unroll
            for (int v = 0; v < V; ++v) in[BEFORE][v] = ahead[i].value(v);
            if (left > i + AHEAD) ahead[i].load(from);
            from += p.x.token_stride;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                sums[v] = taps.bias[v];
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) sums[v] = fmaf(taps.tap(v, w), in[w][v], sums[v]);
#pragma unroll
                for (int w = 0; w < BEFORE; ++w) in[w][v] = in[w + 1][v];
            }
            if (p.silu) {
#pragma unroll
                for (int v = 0; v < V; ++v) sums[v] = silu<T>(sums[v]);
            }
            if (left > i) rounded<T, V>(sums).store(to);
            to += p.out.token_stride;
        }
    }
}

template <class T, int V, int WIDTH>
__device__ __forceinline__ void convolve_channels(const Params& p) {
    constexpr int TOKENS = ROWS_AHEAD<T, V>;
    const Place place(p.grid);
    const int64_t channel = (place.channel_block * p.grid.lanes + place.lane) * V;
    const int64_t tokens = p.steps * int64_t{TOKENS};
    const int64_t first = (place.token_block * p.grid.groups + place.group) * tokens;
    const int64_t last = min(first + tokens, p.length);
    if (channel >= p.channels) return;
    Taps<T, V, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
#pragma unroll 1
    for (int64_t token = first; token < last;) {
        const Sequence s = sequence_of(p, place.batch, token);
        const int64_t end = min(s.end, last);
        if (s.exists()) {
            convolve_run<T, V, WIDTH>(p, taps, s, place.batch, channel, token,
                                      static_cast<int>(end - token));
        } else {
            clear_run<T, V>(p.out, place.batch, channel, token, end);
        }
        token = end;
    }
}

template <class T, int WIDTH>
__device__ __forceinline__ void convolve_tokens(const Params& p) {
    constexpr int BEFORE = WIDTH - 1, V = 16 / sizeof(T), AHEAD = FORWARD_VECTORS;
    using Vector = Neighbours<T, V>;
    const Place place(p.grid);
    const int64_t own = place.channel_block * p.grid.groups + place.group;
    const bool there = own < p.channels;
    const int64_t channel = there ? own : 0;
    const int step = p.grid.lanes * V;
    const int64_t begin = place.token_block * p.steps * step, first = begin + place.lane * V;
    // Vectors of this thread: all lanes go along with the one that has most of them.
    const int steps =
        static_cast<int>(min(int64_t{p.steps}, (p.length - begin + (step - 1)) / step));
    int count = static_cast<int>(min(int64_t{steps}, (p.length - first + (step - V)) / step));
    if (!there) count = 0;
    const T* from = static_cast<const T*>(p.x.data) +
                    (place.batch * p.x.batch_stride + channel * p.x.channel_stride + first);
    T* to = static_cast<T*>(p.out.data) +
            (place.batch * p.out.batch_stride + channel * p.out.channel_stride + first);
    Preceding<T, WIDTH> preceding(place.lane, p.grid.lanes);
    if (there && begin > 0 && preceding.is_last) preceding.carried.load(from - step);
    Vector ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        ahead[i].clear();
        if (i < count) ahead[i].load(from);
        from += step;
    }
    Taps<T, 1, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
#pragma unroll 1
    for (int batch = 0; batch < steps; batch += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Vector now = ahead[i], before = preceding.before(now);
            if (batch + i + AHEAD < count) ahead[i].load(from);
            from += step;
            float in[BEFORE + V], results[V];
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) in[k] = before.value(V - BEFORE + k);
#pragma unroll
            for (int k = 0; k < V; ++k) in[BEFORE + k] = now.value(k);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                results[k] = taps.bias[0];
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) {
                    results[k] = fmaf(taps.tap(0, w), in[k + w], results[k]);
                }
            }
            if (p.silu) {
#pragma unroll
                for (int k = 0; k < V; ++k) results[k] = silu<T>(results[k]);
            }
            if (batch + i < count) rounded<T, V>(results).store(to);
            to += step;
        }
    }
    if (p.sequences.edges == nullptr) {
        const Sequence s{place.batch, 0, p.length};
        if (p.initial.data == nullptr || first != 0 || count == 0) return;
        return convolve_ends<T, WIDTH>(p, s, place.batch, channel, 0, V);
    }
    Sequence s{-1, 0, 0};
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
        const int64_t at = first + j * int64_t{step};
        if (at >= s.end) s = sequence_of(p, place.batch, at);
        if (at - s.begin < BEFORE || s.end < at + V || !s.exists()) {
            convolve_ends<T, WIDTH>(p, s, place.batch, channel, at, at + V);
        }
    }
}

template <int DTYPE, Layout LAYOUT, int WIDTH, bool PORTABLE>
__global__ __launch_bounds__(
    THREADS, forward_blocks(DType(DTYPE),
                            LAYOUT)) void causal_conv1d_kernel(const __grid_constant__ Params p) {
    using T = element_of<DTYPE>;
    const int64_t tiles = p.grid.channel_blocks * p.grid.token_blocks * p.batch;
    if (static_cast<int64_t>(blockIdx.x) >= tiles) {
        const int64_t block = static_cast<int64_t>(blockIdx.x) - tiles;
        write_final_state<T, WIDTH>(p, block * THREADS + static_cast<int64_t>(threadIdx.x));
    } else if constexpr (LAYOUT == Layout::tokens) {
        convolve_tokens<T, WIDTH>(p);
    } else {
        convolve_channels<T, FORWARD_CHANNELS<LAYOUT>, WIDTH>(p);
    }
}

}  // namespace sm90

// Blocks of threads that each have a channel of a sequence's state.
inline int64_t state_blocks(const Params& p, bool wanted) {
    return wanted ? (p.sequences.count * p.channels + THREADS - 1) / THREADS : 0;
}

template <DType dtype, Layout layout, int width, bool portable>
void convolve(const Params& params, Stream stream) {
    const Grid& grid = params.grid;
    const int64_t blocks = grid.channel_blocks * grid.token_blocks * params.batch +
                           state_blocks(params, params.final.data != nullptr);
    kittens::launch(sm90::causal_conv1d_kernel<int(dtype), layout, width, portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1), 0, stream, params);
}

}  // namespace thunderkittens::convolution
