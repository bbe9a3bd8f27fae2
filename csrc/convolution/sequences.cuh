// Which sequence a token is in, and the states at a sequence's ends.
#pragma once

#include "csrc/convolution/vectors.cuh"

namespace thunderkittens::convolution {

// Tokens [begin, end). Tokens of a packed batch that are in no sequence have index -1.
struct Sequence {
    int64_t index, begin, end;

    __device__ __forceinline__ bool exists() const { return index >= 0; }
};

// Of packed sequences, the one of a token: the last that begins at or before it and is not empty.
// Whatever the edges are, the token is in what this returns.
__device__ __forceinline__ Sequence sequence_of(const Sequences& s, int64_t length, int64_t token) {
    int64_t low = -1, high = s.count + 1;  // edges that are at or before the token, and after it
    int64_t begin = 0, end = length;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        const int64_t edge = arch::load_global_readonly(s.edges + middle);
        if (edge <= token) {
            low = middle;
            begin = edge;
        } else {
            high = middle;
            end = edge;
        }
    }
    return {low < s.count ? low : -1, max(begin, int64_t{0}), min(end, length)};
}
__device__ __forceinline__ Sequence sequence_of(const Params& p, int64_t batch, int64_t token) {
    if (p.sequences.edges == nullptr) return {batch, 0, p.length};
    return sequence_of(p.sequences, p.length, token);
}
// The sequence of a number, which may be empty.
__device__ __forceinline__ Sequence sequence_at(const Params& p, int64_t index) {
    if (p.sequences.edges == nullptr) return {index, 0, p.length};
    const auto edge = [&](int64_t i) {
        const int64_t token = arch::load_global_readonly(p.sequences.edges + i);
        return min(max(token, int64_t{0}), p.length);
    };
    return {index, edge(index), edge(index + 1)};
}

// An element of a state, or zero where there is none.
template <class T>
__device__ __forceinline__ float state_element(const Operand& state, const Sequence& s,
                                               int64_t channel, int64_t place) {
    if (state.data == nullptr || !s.exists()) return 0.0f;
    return load_element<T>(
        state.data,
        s.index * state.batch_stride + channel * state.channel_stride + place * state.token_stride);
}

// An input of a sequence, which may be one of its initial state. Its channel begins at `from`.
template <class T, int WIDTH>
__device__ __forceinline__ float input_element(const Params& p, const Sequence& s, int64_t from,
                                               int64_t channel, int64_t token) {
    if (token >= s.begin) return load_element<T>(p.x.data, from + token * p.x.token_stride);
    return state_element<T>(p.initial, s, channel, token - s.begin + (WIDTH - 1));
}

// V channels of the initial state, of the token that is `place` - (width - 1) after the begin.
template <class T, int V>
__device__ __forceinline__ Neighbours<T, V> state_vector(const Operand& state, const Sequence& s,
                                                         int64_t channel, int64_t place) {
    Neighbours<T, V> vector;
    vector.clear();
    if (state.data == nullptr || !s.exists()) return vector;
    float values[V];
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = state_element<T>(state, s, channel + v, place);
    return rounded<T, V>(values);
}

// Zeros of V channels of the tokens [begin, end), which are of no sequence.
template <class T, int V>
__device__ __forceinline__ void clear_run(const Operand& x, int64_t batch, int64_t channel,
                                          int64_t begin, int64_t end) {
    T* const to = static_cast<T*>(x.data) + (batch * x.batch_stride + channel * x.channel_stride);
    Neighbours<T, V> zero;
    zero.clear();
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t) zero.store(to + t * x.token_stride);
}

// The final state of one channel of a sequence: its last inputs, with those of the initial state
// before them where it is short.
template <class T, int WIDTH>
__device__ __forceinline__ void write_final_state(const Params& p, int64_t item) {
    const int64_t channel = item % p.channels, index = item / p.channels;
    if (index >= p.sequences.count) return;
    const Sequence s = sequence_at(p, index);
    const int64_t batch = p.sequences.edges == nullptr ? index : 0;
    const int64_t length = max(s.end - s.begin, int64_t{0});
    const int64_t from = batch * p.x.batch_stride + channel * p.x.channel_stride;
    const int64_t to = index * p.final.batch_stride + channel * p.final.channel_stride;
#pragma unroll
    for (int i = 0; i < WIDTH - 1; ++i) {
        const int64_t token = length - (WIDTH - 1) + i;
        const float value =
            token >= 0 ? load_element<T>(p.x.data, from + (s.begin + token) * p.x.token_stride)
                       : state_element<T>(p.initial, s, channel, token + (WIDTH - 1));
        store_element<T>(p.final.data, to + i * p.final.token_stride, value);
    }
}
// The gradient of the initial state of a sequence without tokens: that of the final one.
template <class T, int WIDTH>
__device__ __forceinline__ void pass_state_gradient(const Params& p, const Operand& dinitial,
                                                    int64_t item) {
    const int64_t channel = item % p.channels, index = item / p.channels;
    if (index >= p.sequences.count) return;
    const Sequence s = sequence_at(p, index);
    if (s.end > s.begin) return;
    const int64_t to = index * dinitial.batch_stride + channel * dinitial.channel_stride;
#pragma unroll
    for (int i = 0; i < WIDTH - 1; ++i) {
        store_element<T>(dinitial.data, to + i * dinitial.token_stride,
                         state_element<T>(p.final, s, channel, i));
    }
}

}  // namespace thunderkittens::convolution
