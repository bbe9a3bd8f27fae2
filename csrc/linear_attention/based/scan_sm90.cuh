// Turns the sums of segments into the state before each of them (after each, when backwards), in
// place, and gives the state at the end. One thread per four values. The portable kernel does the
// same.
#pragma once

#include "csrc/linear_attention/based/segments.cuh"

namespace thunderkittens::linear_attention {

constexpr int SCAN_THREADS = 128;

struct ScanGlobals {
    float *states, *initial,
        *final;  // (batch_heads, segments, size), (batch_heads, size) twice, or null
    int size, segments;
    bool backwards;
};

template <class Word>
struct ScanWord {
    static __device__ __forceinline__ Word zero() {
        Word x;
        __builtin_memset(&x, 0, sizeof(x));
        return x;
    }
    static __device__ __forceinline__ Word sum(const Word& a, const Word& b) {
        if constexpr (std::is_same_v<Word, float4>)
            return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        else
            return a + b;
    }
};

template <class Word>
__device__ __forceinline__ void scan_states(const ScanGlobals& g) {
    constexpr int width = sizeof(Word) / sizeof(float), ahead = 8;
    const int at = width * (int(blockIdx.y) * SCAN_THREADS + int(threadIdx.x));
    const int64_t batch_head = blockIdx.x;
    if (at >= g.size) return;
    const auto word = [](float* p) { return reinterpret_cast<Word*>(p); };
    float* states = g.states + batch_head * g.segments * g.size + at;
    const auto place = [&](int i) {
        return word(states + int64_t(g.backwards ? g.segments - 1 - i : i) * g.size);
    };
    Word sum = ScanWord<Word>::zero();
    if (g.initial != nullptr) sum = arch::load_global(word(g.initial + batch_head * g.size + at));
    for (int first = 0; first < g.segments; first += ahead) {
        Word added[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i)
            if (first + i < g.segments) added[i] = arch::load_global(place(first + i));
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if (first + i >= g.segments) break;
            arch::store_global(place(first + i), sum);
            sum = ScanWord<Word>::sum(sum, added[i]);
        }
    }
    if (g.final != nullptr) arch::store_global(word(g.final + batch_head * g.size + at), sum);
}

template <class Word>
__global__ __launch_bounds__(SCAN_THREADS) void based_scan_kernel(
    const __grid_constant__ ScanGlobals g) {
    arch::launch_dependents();
    arch::wait_for_dependencies();
    scan_states<Word>(g);
}

// Of states of `batch_heads`. These come first in the grid: its other dimensions end at 65535, and
// a state has a few hundred parts.
template <class Word>
void launch_scan(const kittens::LaunchOptions& options, void (*kernel)(ScanGlobals),
                 const ScanGlobals& globals, int64_t batch_heads, Stream stream) {
    constexpr int block = int(sizeof(Word) / sizeof(float)) * SCAN_THREADS;
    kittens::launch(options, kernel,
                    dim3(unsigned(batch_heads), unsigned((globals.size + block - 1) / block)),
                    dim3(SCAN_THREADS), dim3(1), 0, stream, globals);
}

template <class Word>
void launch_scan(const ScanGlobals& globals, int64_t batch_heads, Stream stream) {
    launch_scan<Word>({.dependent = true}, based_scan_kernel<Word>, globals, batch_heads, stream);
}

// Of numerators or denominators.
template <bool denominator>
using scan_word = std::conditional_t<denominator, float, float4>;
template <bool denominator>
ScanGlobals scan_globals(const BasedParams& params, const ScanParams& scan) {
    const BasedProblem& p = params.problem;
    const int size = denominator ? FEATURES : FEATURES * int(p.value_dim);
    const auto part = [](const StatePointers& s) {
        return denominator ? s.denominator : s.numerator;
    };
    return {part(scan.states), part(scan.initial), part(scan.final), size,
            params.segments,   scan.backwards};
}
template <bool denominator>
void launch_based_scan(const BasedParams& params, const ScanParams& scan, Stream stream) {
    launch_scan<scan_word<denominator>>(scan_globals<denominator>(params, scan),
                                        params.problem.batch * params.problem.heads, stream);
}

}  // namespace thunderkittens::linear_attention
