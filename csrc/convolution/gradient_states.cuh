// The gradients that have to do with states: of the initial one, and what the final one adds to
// those of the last inputs. Element by element from memory, as they are of a few tokens of a
// sequence.
#pragma once

#include "csrc/convolution/forward_sm90.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

// dz of any token, from memory.
template <class T, int WIDTH>
__device__ __forceinline__ float dz_of(const Params& f, const Sequence& s, int64_t batch,
                                       int64_t channel, int64_t token) {
    if (token < s.begin || token >= s.end) return 0.0f;
    Taps<T, 1, WIDTH> taps;
    taps.load(f.weight, f.bias, channel);
    const int64_t from = batch * f.x.batch_stride + channel * f.x.channel_stride;
    float z = taps.bias[0];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        const int64_t at = token - (WIDTH - 1) + w;
        z = fmaf(taps.tap(0, w), input_element<T, WIDTH>(f, s, from, channel, at), z);
    }
    const int64_t at = batch * f.out.batch_stride + channel * f.out.channel_stride;
    const float gradient = load_element<T>(f.out.data, at + token * f.out.token_stride);
    return f.silu ? through_silu<T>(z, gradient) : gradient;
}
// The gradient of an input of a sequence or its initial state, from memory, with what the gradient
// of the final state adds.
template <class T, int WIDTH>
__device__ __forceinline__ float input_gradient(const Params& f, const Sequence& s, int64_t batch,
                                                int64_t channel, int64_t token) {
    const int64_t to_end = s.end - token;
    float sum = to_end < WIDTH ? state_element<T>(f.final, s, channel, WIDTH - 1 - to_end) : 0.0f;
#pragma unroll 1
    for (int w = WIDTH - 1; w >= 0; --w) {
        float tap[1];
        load_coefficients<T>(f.weight, channel * WIDTH + w, tap);
        sum = fmaf(tap[0], dz_of<T, WIDTH>(f, s, batch, channel, token + (WIDTH - 1) - w), sum);
    }
    return sum;
}
// What states have to do with: the gradient of the initial state, and dx of those of the tokens
// [begin, end) that are in the final state.
template <class T, int WIDTH>
__device__ __forceinline__ void state_gradients(const BackwardParams& p, const Sequence& s,
                                                int64_t batch, int64_t channel, int64_t begin,
                                                int64_t end) {
    constexpr int BEFORE = WIDTH - 1;
    const Params& f = p.forward;
    if (p.dinitial.data != nullptr && begin == s.begin) {
        const int64_t to = s.index * p.dinitial.batch_stride + channel * p.dinitial.channel_stride;
#pragma unroll 1
        for (int i = 0; i < BEFORE; ++i) {
            store_element<T>(p.dinitial.data, to + i * p.dinitial.token_stride,
                             input_gradient<T, WIDTH>(f, s, batch, channel, begin - BEFORE + i));
        }
    }
    if (p.dx.data == nullptr || f.final.data == nullptr || end + BEFORE <= s.end) return;
    const int64_t to = batch * p.dx.batch_stride + channel * p.dx.channel_stride;
#pragma unroll 1
    for (int64_t token = max(begin, s.end - BEFORE); token < end; ++token) {
        store_element<T>(p.dx.data, to + token * p.dx.token_stride,
                         input_gradient<T, WIDTH>(f, s, batch, channel, token));
    }
}

}  // namespace sm90
}  // namespace thunderkittens::convolution
