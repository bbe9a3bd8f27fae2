// The gradient through a gate, in one pass over memory. A thread has eight gates of a row, their
// values and their gradients, which it reads 16 bytes at a time where they lie so, and computes in
// fp32; results are rounded once. The portable kernel does the same.
#pragma once

#include "csrc/gemm/backward/gemm_backward.h"
#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/chunk_sm90.cuh"

namespace thunderkittens::gemm_backward {
namespace sm90 {

namespace arch = kittens::arch;
using block_scaled::sm90::Chunk, block_scaled::sm90::element_of;
static_assert(CHUNK == block_scaled::sm90::CHUNK);

// An activation and its derivative at x.
struct WithDerivative {
    float value, derivative;
};
__device__ __forceinline__ WithDerivative silu(float x) {
    const gemm::sm90::Sigmoid sigmoid = gemm::sm90::sigmoid(x);
    const float value = x * sigmoid.value;
    return {value, fmaf(value, sigmoid.rest, sigmoid.value)};
}
// x * Phi(x); the derivative is Phi(x) + x * phi(x), Phi the normal distribution, phi its density.
__device__ __forceinline__ WithDerivative gelu(float x) {
    const float distribution = gemm::sm90::normal(x);
    const float density = 0.39894228f * arch::exp2_approx(-0.72134752f * x * x);
    return {x * distribution, distribution + x * density};
}

template <int DTYPE, int GATE>
__device__ __forceinline__ void gate_gradient(const Params& p) {
    using T = element_of<DTYPE>;
    constexpr bool BLOCKED = GATE == int(Gate::blocked);
    const int64_t chunk = int64_t{blockIdx.x} * THREADS + threadIdx.x;
    const int64_t row = chunk / p.chunks, column = (chunk - row * p.chunks) * CHUNK;
    if (row >= p.rows) return;
    const auto gradient = [&](float grad, float gate, float value) -> float2 {
        const WithDerivative a = p.activation == Activation::silu ? silu(gate) : gelu(gate);
        return {grad * value * a.derivative, grad * a.value};
    };
    const T* grad = static_cast<const T*>(p.grad) + row * p.grad_stride + column;
    // The first gate, and the first value or the ninth of gates and values that alternate.
    const int64_t first = row * 2 * p.columns + (BLOCKED ? column : 2 * column);
    const int64_t second = first + (BLOCKED ? p.columns : CHUNK);
    const T* z = static_cast<const T*>(p.z);
    T* out = static_cast<T*>(p.out);
    if (p.aligned) {
        namespace chunks = block_scaled::sm90;
        const Chunk<T> g = chunks::load_whole_chunk(grad);
        const Chunk<T> low = chunks::load_whole_chunk(z + first);
        const Chunk<T> high = chunks::load_whole_chunk(z + second);
        float results[2][CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if constexpr (BLOCKED) {
                const float2 pair = gradient(g.value(i), low.value(i), high.value(i));
                results[0][i] = pair.x, results[1][i] = pair.y;
            } else {
                const int half = 2 * i / CHUNK, at = 2 * i % CHUNK;
                const Chunk<T>& from = half == 0 ? low : high;
                const float2 pair = gradient(g.value(i), from.value(at), from.value(at + 1));
                results[half][at] = pair.x, results[half][at + 1] = pair.y;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto words = chunks::rounded<T>(results[half]);
            auto* to = reinterpret_cast<uint4*>(out + (half == 0 ? first : second));
#pragma unroll
            for (int w = 0; w < int(sizeof(words) / 16); ++w) {
                arch::store_global(to + w, words.words[w]);
            }
        }
        return;
    }
    const int count = static_cast<int>(min(int64_t{CHUNK}, p.columns - column));
    for (int i = 0; i < count; ++i) {
        const int64_t gate = first + (BLOCKED ? i : 2 * i);
        const int64_t value = BLOCKED ? second + i : gate + 1;
        const auto load = [](const T* at) {
            return kittens::convert<float>(arch::load_global_readonly(at));
        };
        const float2 pair = gradient(load(grad + i), load(z + gate), load(z + value));
        arch::store_global(out + gate, kittens::convert<T>(pair.x));
        arch::store_global(out + value, kittens::convert<T>(pair.y));
    }
}

template <int DTYPE, int GATE>
__global__ void __launch_bounds__(THREADS) gate_gradient_kernel(Params p) {
    gate_gradient<DTYPE, GATE>(p);
}

}  // namespace sm90

inline void launch_gradient(void (*kernel)(Params), const Params& params, Stream stream) {
    kittens::launch(kernel, dim3(static_cast<unsigned>(blocks_of(params.rows, params.columns))),
                    dim3(THREADS), dim3(1), 0, stream, params);
}
template <Config C>
void launch(const Params& params, Stream stream) {
    launch_gradient(sm90::gate_gradient_kernel<int(C.dtype), int(C.gate)>, params, stream);
}

}  // namespace thunderkittens::gemm_backward
