// One or a few tokens of each of a batch of sequences, whose states are changed in place: each
// output, and the state moved on by as many inputs.
//
// A thread has CHANNELS channels, so many threads apart that neighbours access neighbouring
// elements whatever the strides are. Of one token and a state of width - 1 inputs, it loads all of
// its states, tokens and taps before it writes: some 40 KiB of a multiprocessor are on their way
// although each access is of one element. Other calls go channel by channel and token by token. The
// portable kernels do the same.
#pragma once

#include "csrc/convolution/vectors.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

constexpr int UPDATE_CHANNELS = 4;

template <class T>
__device__ __forceinline__ T* row_of(const Operand& x, int64_t row, int64_t channel) {
    return static_cast<T*>(x.data) + (row * x.batch_stride + channel * x.channel_stride);
}
template <class T>
__device__ __forceinline__ float read(const T* from) {
    return kittens::convert<float>(arch::load_global(from));
}
template <class T>
__device__ __forceinline__ void write(T* to, float value) {
    arch::store_global(to, kittens::convert<T>(value));
}

template <class T, int WIDTH>
__device__ __forceinline__ float next_output(const UpdateParams& p, const Taps<T, 1, WIDTH>& taps,
                                             const float (&in)[WIDTH]) {
    float sum = taps.bias[0];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) sum = fmaf(taps.tap(0, w), in[w], sum);
    return p.silu ? silu<T>(sum) : sum;
}

// One token, and a state of the last WIDTH - 1 inputs.
template <class T, int WIDTH>
__device__ __forceinline__ void one_token(const UpdateParams& p, int64_t batch, int64_t slot,
                                          int64_t first) {
    constexpr int BEFORE = WIDTH - 1, CHANNELS = UPDATE_CHANNELS;
    Taps<T, 1, WIDTH> taps[CHANNELS];
    float in[CHANNELS][WIDTH];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int64_t channel = first + c * THREADS;
        if (channel >= p.channels) break;
        const T* const state = row_of<T>(p.state, slot, channel);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) in[c][i] = read(state + i * p.state.token_stride);
        in[c][BEFORE] = read(row_of<T>(p.x, batch, channel));
        taps[c].load(p.weight, p.bias, channel);
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int64_t channel = first + c * THREADS;
        if (channel >= p.channels) break;
        write(row_of<T>(p.out, batch, channel), next_output<T, WIDTH>(p, taps[c], in[c]));
        T* const state = row_of<T>(p.state, slot, channel);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) write(state + i * p.state.token_stride, in[c][i + 1]);
    }
}

// Any number of tokens of one channel, and a state that may be longer.
template <class T, int WIDTH>
__device__ __forceinline__ void several_tokens(const UpdateParams& p, int64_t batch, int64_t slot,
                                               int64_t channel) {
    constexpr int BEFORE = WIDTH - 1;
    const int64_t length = p.length, kept = p.state_length;
    Taps<T, 1, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
    const T* const x = row_of<T>(p.x, batch, channel);
    T* const out = row_of<T>(p.out, batch, channel);
    T* const state = row_of<T>(p.state, slot, channel);
    float in[WIDTH];
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
        in[i] = read(state + (kept - BEFORE + i) * p.state.token_stride);
        // Of a longer state, what stays and is not among the last inputs.
#pragma unroll 1
    for (int64_t i = 0; i < kept - BEFORE && i < kept - length; ++i) {
        write(state + i * p.state.token_stride, read(state + (i + length) * p.state.token_stride));
    }
#pragma unroll 1
    for (int64_t t = 0; t < length; ++t) {
        in[BEFORE] = read(x + t * p.x.token_stride);
        write(out + t * p.out.token_stride, next_output<T, WIDTH>(p, taps, in));
        // Of a longer state, tokens that leave the last inputs.
        const int64_t to = kept - length + t;
        if (to >= 0 && to < kept - BEFORE) write(state + to * p.state.token_stride, in[BEFORE]);
#pragma unroll
        for (int w = 0; w < BEFORE; ++w) in[w] = in[w + 1];
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
        write(state + (kept - BEFORE + i) * p.state.token_stride, in[i]);
}

template <int DTYPE, int WIDTH, bool PORTABLE>
__global__ __launch_bounds__(THREADS, 4) void causal_conv1d_update_kernel(
    const __grid_constant__ UpdateParams p) {
    using T = element_of<DTYPE>;
    constexpr int64_t PER_BLOCK = THREADS * UPDATE_CHANNELS;
    const int64_t blocks = (p.channels + PER_BLOCK - 1) / PER_BLOCK;
    const int64_t batch = static_cast<int64_t>(blockIdx.x) / blocks;
    const int64_t first =
        static_cast<int64_t>(blockIdx.x) % blocks * PER_BLOCK + static_cast<int64_t>(threadIdx.x);
    int64_t slot = batch;
    if (p.slots != nullptr) slot = arch::load_global_readonly(p.slots + batch);
    const bool exists = slot >= 0 && slot < p.state_count;
    if (exists && p.length == 1 && p.state_length == WIDTH - 1) {
        return one_token<T, WIDTH>(p, batch, slot, first);
    }
#pragma unroll 1
    for (int64_t channel = first; channel < min(first + PER_BLOCK, p.channels);
         channel += THREADS) {
        if (exists) {
            several_tokens<T, WIDTH>(p, batch, slot, channel);
        } else {
            T* const out = row_of<T>(p.out, batch, channel);
            for (int64_t t = 0; t < p.length; ++t) write(out + t * p.out.token_stride, 0.0f);
        }
    }
}

}  // namespace sm90

template <DType dtype, int width, bool portable>
void update(const UpdateParams& params, Stream stream) {
    constexpr int64_t PER_BLOCK = THREADS * sm90::UPDATE_CHANNELS;
    const int64_t blocks = (params.channels + PER_BLOCK - 1) / PER_BLOCK * params.batch;
    kittens::launch(sm90::causal_conv1d_update_kernel<int(dtype), width, portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1), 0, stream, params);
}

}  // namespace thunderkittens::convolution
