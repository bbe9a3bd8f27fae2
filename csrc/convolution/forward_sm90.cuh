// The convolution of all tokens, and the final states, in one pass over memory.
//
// A block of 256 threads has no roles. By channels, a thread has 16 bytes of neighbouring channels
// (or one channel, where memory does not allow that) of eight tokens, and loads them and the width
// - 1 tokens before them at once: with two blocks on a multiprocessor, 64 KiB and more are on their
// way. Its neighbours along the tokens are in the same block, and find those tokens in L1. By
// tokens, a thread has eight times 16 bytes of tokens of one channel, whose predecessors it loads
// as vectors of four, from lines that its neighbour loads.
//
// Blocks behind those of the tiles write the final states. Where a tile has the begin of a further
// sequence, the tokens from there on are made once more, one by one. The portable kernels do the
// same.
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

// Those of the tokens [begin, end) of V channels that depend on a state, or are in a later sequence
// than s, in which the first of them is: the others are there already.
template <class T, int V, int WIDTH>
__device__ __forceinline__ void convolve_ends(const Params& p, const Sequence& s, int64_t batch,
                                              int64_t channel, int64_t begin, int64_t end) {
    const int64_t after_state = p.initial.data == nullptr ? begin : s.begin + (WIDTH - 1);
    int64_t from = begin, to = min(after_state, min(s.end, end));
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
#pragma unroll 1
        for (int v = 0; v < V; ++v) convolve_elements<T, WIDTH>(p, batch, channel + v, from, to);
        from = s.end, to = end;
    }
}

template <class T, int V, int WIDTH>
__device__ __forceinline__ void convolve_channels(const Params& p) {
    constexpr int BEFORE = WIDTH - 1, ROWS = TILE_TOKENS + BEFORE, PER = PER_WORD<T, V>;
    const Place place(p.grid);
    const int64_t channel = (place.channel_block * p.grid.lanes + place.lane) * V;
    const int64_t first = (place.token_block * p.grid.groups + place.group) * int64_t{TILE_TOKENS};
    if (channel >= p.channels || first >= p.length) return;
    const int count = static_cast<int>(min(int64_t{TILE_TOKENS}, p.length - first));
    Neighbours<T, V> rows[ROWS];
    const T* from = static_cast<const T*>(p.x.data) +
                    (place.batch * p.x.batch_stride + channel * p.x.channel_stride +
                     (first - BEFORE) * p.x.token_stride);
#pragma unroll
    for (int i = 0; i < ROWS; ++i, from += p.x.token_stride) {
        rows[i].clear();
        if ((i >= BEFORE || first > 0) && i < BEFORE + count) rows[i].load(from);
    }
    const Sequence s = sequence_of(p, place.batch, first);
    const bool begins = first - s.begin < BEFORE;
    if (begins) {
        const int preceding = static_cast<int>(first - s.begin);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            if (i < BEFORE - preceding) rows[i].clear();
        }
    }
    Neighbours<T, V> results[TILE_TOKENS];
    // By the channels of a word, whose inputs are converted once.
#pragma unroll
    for (int word = 0; word < Neighbours<T, V>::WORDS; ++word) {
        Taps<T, PER, WIDTH> taps;
        taps.load(p.weight, p.bias, channel + word * PER);
        float sums[PER][TILE_TOKENS];
#pragma unroll
        for (int j = 0; j < PER; ++j) {
#pragma unroll
            for (int i = 0; i < TILE_TOKENS; ++i) sums[j][i] = taps.bias[j];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float value = rows[i].value(word * PER + j);
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) {
                    const int to = i - w;
                    if (to >= 0 && to < TILE_TOKENS) {
                        sums[j][to] = fmaf(taps.tap(j, w), value, sums[j][to]);
                    }
                }
            }
        }
        if (p.silu) {
#pragma unroll
            for (int j = 0; j < PER; ++j) {
#pragma unroll
                for (int i = 0; i < TILE_TOKENS; ++i) sums[j][i] = silu<T>(sums[j][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) {
            results[i].set_word(word, sums[0][i], sums[PER - 1][i]);
        }
    }
    T* to =
        static_cast<T*>(p.out.data) + (place.batch * p.out.batch_stride +
                                       channel * p.out.channel_stride + first * p.out.token_stride);
#pragma unroll
    for (int i = 0; i < TILE_TOKENS; ++i, to += p.out.token_stride) {
        if (!s.exists()) results[i].clear();
        if (i < count) results[i].store(to);
    }
    if (begins || s.end < first + count) {
        convolve_ends<T, V, WIDTH>(p, s, place.batch, channel, first, first + count);
    }
}

template <class T, int WIDTH>
__device__ __forceinline__ void convolve_tokens(const Params& p) {
    constexpr int BEFORE = WIDTH - 1, V = 16 / sizeof(T), NEAR = 4;
    const Place place(p.grid);
    const int64_t channel = place.channel_block * p.grid.groups + place.group;
    if (channel >= p.channels) return;
    const int64_t first =
        (place.token_block * (p.grid.lanes * TILE_VECTORS) + place.lane) * int64_t{V};
    const int step = p.grid.lanes * V;
    const T* const x = static_cast<const T*>(p.x.data) +
                       (place.batch * p.x.batch_stride + channel * p.x.channel_stride + first);
    T* const out = static_cast<T*>(p.out.data) +
                   (place.batch * p.out.batch_stride + channel * p.out.channel_stride + first);
    Neighbours<T, V> vectors[TILE_VECTORS];
    Neighbours<T, NEAR> before[TILE_VECTORS];
#pragma unroll
    for (int j = 0; j < TILE_VECTORS; ++j) {
        before[j].clear();
        vectors[j].clear();
        if (first + j * step < p.length) {
            vectors[j].load(x + j * step);
            if (first + j * step > 0) before[j].load(x + j * step - NEAR);
        }
    }
    Taps<T, 1, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
    Sequence s{-1, 0, 0};
    uint32_t with_ends = 0;  // vectors in which a sequence begins or ends
#pragma unroll
    for (int j = 0; j < TILE_VECTORS; ++j) {
        const int64_t at = first + j * step;
        if (at >= p.length) break;
        if (at >= s.end) s = sequence_of(p, place.batch, at);
        const int64_t preceding = at - s.begin;
        if (preceding < BEFORE || s.end < at + V) with_ends |= 1u << j;
        float in[BEFORE + V], results[V];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            in[i] = i < BEFORE - preceding ? 0.0f : before[j].value(NEAR - BEFORE + i);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) in[BEFORE + i] = vectors[j].value(i);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            results[i] = taps.bias[0];
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                results[i] = fmaf(taps.tap(0, w), in[i + w], results[i]);
            }
        }
        if (p.silu) {
#pragma unroll
            for (int i = 0; i < V; ++i) results[i] = silu<T>(results[i]);
        }
        auto vector = rounded<T, V>(results);
        if (!s.exists()) vector.clear();
        vector.store(out + j * step);
    }
#pragma unroll 1
    for (int j = 0; with_ends != 0; ++j, with_ends >>= 1) {
        if (with_ends % 2 == 0) continue;
        const int64_t at = first + j * step;
        s = sequence_of(p, place.batch, at);
        convolve_ends<T, 1, WIDTH>(p, s, place.batch, channel, at, at + V);
    }
}

// Channels of a thread.
template <int DTYPE, Layout LAYOUT>
constexpr int FORWARD_CHANNELS = forward_channels(DType(DTYPE), LAYOUT);

template <int DTYPE, Layout LAYOUT, int WIDTH, bool PORTABLE>
__global__ __launch_bounds__(THREADS,
                             2) void causal_conv1d_kernel(const __grid_constant__ Params p) {
    using T = element_of<DTYPE>;
    const int64_t tiles = p.grid.channel_blocks * p.grid.token_blocks * p.batch;
    if (static_cast<int64_t>(blockIdx.x) >= tiles) {
        const int64_t block = static_cast<int64_t>(blockIdx.x) - tiles;
        write_final_state<T, WIDTH>(p, block * THREADS + static_cast<int64_t>(threadIdx.x));
    } else if constexpr (LAYOUT == Layout::tokens) {
        convolve_tokens<T, WIDTH>(p);
    } else {
        convolve_channels<T, FORWARD_CHANNELS<DTYPE, LAYOUT>, WIDTH>(p);
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
